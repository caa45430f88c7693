"""What a ``tf.compat.v1.Session`` is configured with while the rewrite is on.

A session's ConfigProto decides whether TensorFlow calls graph plugins at all, and which of its
own optimizers run. While the session host is installed, each new session gets a copy of its
config in which TensorFlow's own mixed precision is off, and a config that keeps plugins from
being called is said aloud. Sessions that are made after that get what they were given.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.client import session as session_lib
from tensorflow.python.eager import context
from tensorflow.python.training import server_lib
from tensorflow.python.training.experimental import mixed_precision_global_state

from tf_amp.hosts import function_upstream
from tf_amp.hosts.remapper import runs_in_session
from tf_amp.patches import Patches

LOGGER = logging.getLogger("tf_amp.hosts.session")

_OFF = rewriter_config_pb2.RewriterConfig.OFF


def obstacles(config: config_pb2.ConfigProto) -> tuple[str, ...]:
    """Returns why a session of this config would hand no graph to a plugin.

    Args:
        config: The session's config.

    Returns:
        One text for each setting in the way, with the remedy; empty when nothing is.
    """
    options = config.graph_options
    found = []
    if options.rewrite_options.disable_meta_optimizer:
        found.append(
            "`rewrite_options.disable_meta_optimizer` is True: Grappler is off "
            "(leave the field out, and switch off single optimizers instead)"
        )
    if options.rewrite_options.use_plugin_optimizers == _OFF:
        found.append(
            "`rewrite_options.use_plugin_optimizers` is OFF: Grappler calls no plugin "
            "(leave the field out, or set it to ON)"
        )
    if options.place_pruned_graph:
        found.append(
            "`graph_options.place_pruned_graph` is True: TensorFlow optimizes no pruned graph "
            "(leave the field out)"
        )
    return tuple(found)


def upstream_options(config: config_pb2.ConfigProto) -> tuple[str, ...]:
    """Returns the names of TensorFlow's own mixed-precision options that a config asks for."""
    rewrite = config.graph_options.rewrite_options
    return tuple(
        field
        for field in function_upstream.OPTIONS
        if getattr(rewrite, field) not in (rewriter_config_pb2.RewriterConfig.DEFAULT, _OFF)
        or field in rewrite.optimizers
    )


def adjusted(config: config_pb2.ConfigProto, device: str) -> config_pb2.ConfigProto:
    """Returns the config for a session whose graphs this project rewrites.

    Args:
        config: What the program asked for; not changed.
        device: "CPU" or "GPU": the device the rewrite is for.

    Returns:
        A copy with TensorFlow's own mixed precision off. For a GPU the layout optimizer is off
        too: it runs once, on the float32 graph before any plugin, and would choose NCHW, while
        Tensor Cores want the NHWC that the program wrote.
    """
    result = config_pb2.ConfigProto()
    result.CopyFrom(config)
    rewrite = result.graph_options.rewrite_options
    for field in function_upstream.OPTIONS:
        setattr(rewrite, field, _OFF)
    if any(name in function_upstream.OPTIONS for name in rewrite.optimizers):
        kept = [name for name in rewrite.optimizers if name not in function_upstream.OPTIONS]
        # An empty list would mean all optimizers; "pruning" does what every session needs.
        rewrite.optimizers[:] = kept or ["pruning"]
    if device == "GPU":
        rewrite.layout_optimizer = _OFF
    return result


class SessionConfigHook:
    """Stands before ``BaseSession.__init__`` while the session host is installed.

    Args:
        device: "CPU" or "GPU": the device the rewrite is for.
        serve: told of each session of a server.
        leave_out: told why the graphs of a session stay as they are.

    Attributes:
        remaps: Whether TensorFlow's remapper runs on the graphs of all sessions so far.
    """

    def __init__(
        self,
        device: str,
        serve: Callable[[Any], None],
        leave_out: Callable[[str], None],
    ) -> None:
        self._device, self._served, self._leave_out = device, serve, leave_out
        self.remaps = True
        # By the id of TensorFlow's own session: a later session of that id comes by here too.
        self._graphs: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._servers: set[str] = set()
        self._said: set[str] = set()

    @property
    def graphs(self) -> list[Any]:
        """The graphs of sessions that live; other threads may make sessions meanwhile."""
        return [graph for found in self._graphs.valuerefs() if (graph := found()) is not None]

    def graph_of(self, session: Any) -> Any:
        """Returns the graph of TensorFlow's own session, None for one made before `install`."""
        return self._graphs.get(id(session))

    def install(self, patches: Patches) -> None:
        """Gives sessions made from now on an adjusted config."""

        def make(original: Callable[..., None]) -> Callable[..., None]:
            def init(session: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
                before = float32_sessions_exist()
                original(session, target, graph, self.config_for(config))
                self._graphs[id(session._session)] = session.graph
                if target:
                    self._serve(session, target)
                # TensorFlow notes a session without its own mixed precision; this one has ours.
                mixed_precision_global_state.set_non_mixed_precision_session_created(before)

            return init

        def make_server(original: Callable[..., None]) -> Callable[..., None]:
            def init(server: Any, *args: Any, **kwargs: Any) -> None:
                original(server, *args, **kwargs)
                self._servers.add(server.target)

            return init

        patches.replace(session_lib.BaseSession, "__init__", make)
        patches.replace(server_lib.Server, "__init__", make_server)

    def config_for(self, config: Any) -> Any:
        """Returns the config to make a session with, and says what keeps plugins from it.

        Args:
            config: What the program passed: a ConfigProto, or None for the global default.

        Returns:
            The adjusted copy; anything that is no ConfigProto comes back as it is, so that
            TensorFlow's own error names it.
        """
        if config is None:
            config = context.context().config
        if not isinstance(config, config_pb2.ConfigProto):
            return config
        self.remaps = self.remaps and runs_in_session(config)
        for text in obstacles(config):
            self._warn_once(f"a session stays as it is, because in its config {text}.")
        if asked := upstream_options(config):
            self._say_once(
                logging.INFO,
                f"TensorFlow's own {', '.join(asked)} is off in sessions while AMP is on: it would "
                "decide about the same graph a second time.",
            )
        return adjusted(config, self._device)

    def _serve(self, session: Any, target: str) -> None:
        """Has the graphs of a server's session rewritten if that server is in this process."""
        self._served(session._session)
        if target not in self._servers:
            self._warn_once(
                f"graphs of the session of {target} are rewritten only where that server is one of "
                "this process, which has made none of that name. Leave the target out where one "
                "process is enough, or train with tf.distribute."
            )

    def _warn_once(self, why: str) -> None:
        self._leave_out(why)
        self._say_once(logging.WARNING, f"AMP is on, but {why}")

    def _say_once(self, level: int, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            LOGGER.log(level, "%s", text)


def refuse(patches: Patches, refusal: str, leave_out: Callable[[str], None]) -> None:
    """Says, when the first session is made, why sessions stay as they are.

    Args:
        patches: Collects what is replaced.
        refusal: Why.
        leave_out: Is told of it then.
    """
    said: list[str] = []

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def init(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            if not said:
                said.append(refusal)
                leave_out(refusal)
                LOGGER.warning("AMP is on without the graphs of tf.compat.v1.Session: %s", refusal)

        return init

    patches.replace(session_lib.BaseSession, "__init__", make)


def float32_sessions_exist() -> bool:
    """Tells whether a session was made without mixed precision before now.

    Such a session keeps every graph it has already run as it is.
    """
    return bool(mixed_precision_global_state.non_mixed_precision_session_created())
