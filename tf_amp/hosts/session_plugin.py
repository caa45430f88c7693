"""TensorFlow's graph-optimizer plugin API, spoken from Python.

The interface is ``tensorflow/c/experimental/grappler/grappler.h``: a plugin fills a registration
structure once, and from then on Grappler hands it every graph that has a node on its device.

Two ways in, tried in this order:

1. ``tensorflow::grappler::InitGraphPlugin(function)`` of libtensorflow_cc, called through ctypes.
   It needs no compiler, and it leaves the devices alone: nothing is listed or initialized again,
   so visible devices and memory growth stay as the program set them. It is an internal symbol,
   present in every release of the supported range.
2. The documented way: a shared object that exports ``TF_InitGraph`` (``graph_plugin.c``, built
   when a C compiler was there). It is loaded by the C function beneath
   ``load_pluggable_device_library``, because the Python function resets the device settings.

Registration is for the life of the process, and TensorFlow ends the process when one device type
is registered twice. What was registered is therefore remembered on a module of TensorFlow
itself, where a second copy or a reload of this package finds it. The registered callbacks look
the handler up at each call, so a handler can be taken away and replaced.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import logging
import os
import site
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tf_amp.hosts.session_c_api import (
    ABORTED,
    CREATE_FUNCTION,
    DESTROY_FUNCTION,
    FETCH_LIST,
    INIT_FUNCTION,
    OPTIMIZE_FUNCTION,
    PRESERVE_LIST,
    AbslStatus,
    Library,
    Optimizer,
    OptimizerConfigs,
    RegistrationError,
    RegistrationParams,
    size_to_end,
)
from tf_amp.hosts.session_shapes import GraphShapes

LOGGER = logging.getLogger("tf_amp.hosts.session")

DEVICE_TYPES = ("CPU", "GPU")
OLDEST_VERSION = (2, 17)
NEWEST_VERSION = (2, 21)

_INIT_GRAPH_PLUGIN = (
    "_ZN10tensorflow8grappler15InitGraphPluginEPFvP30TP_OptimizerRegistrationParamsP10TSL_StatusE"
)
_TRAMPOLINE = Path(__file__).with_name("libtf_amp.so")
_SLOT_ATTRIBUTE = "_tf_amp_graph_plugin"
_EXIT_PATIENCE_SECONDS = 5.0


class GraphItem(NamedTuple):
    """One graph as Grappler hands it over.

    Attributes:
        device_type: "CPU" or "GPU": the registration that was called.
        graph: Serialized GraphDef.
        preserve: Names of nodes that must keep name, dtype and value: feeds, fetches, queue and
            initialization nodes.
        fetches: Names of the nodes that are fetched or run.
        shapes: Static shapes of the graph; None if there are none.
    """

    device_type: str
    graph: bytes
    preserve: tuple[str, ...]
    fetches: tuple[str, ...]
    shapes: GraphShapes | None = None


Handler = Callable[[GraphItem], "bytes | None"]
"""Returns the serialized new graph, or None for "nothing done"."""


class GraphPlugin:
    """The one plugin of a process: what is registered, and who handles the graphs.

    Holds no lock, so that a fork in the middle of a callback leaves nothing locked in the child:
    every shared step is one operation on a built-in container.

    Attributes:
        handler: Called for each graph; None while the rewrite is off.
    """

    def __init__(self, library: Library) -> None:
        self.handler: Handler | None = None
        self._library = library
        self._registered: dict[str, object] = {}
        self._items = itertools.count(1)
        self._handled: set[int] = set()
        self._running: dict[int, int] = {}
        atexit.register(self._wait_at_exit)

    @property
    def device_types(self) -> tuple[str, ...]:
        """The device types registered so far, oldest first."""
        return tuple(self._registered)

    def register(self, device_type: str) -> None:
        """Registers for one device type; does nothing when that was done before.

        Raises:
            RegistrationError: if neither way into TensorFlow's registry is there.
        """
        if device_type in self._registered:
            return
        configs = OptimizerConfigs(size_to_end(OptimizerConfigs, "toggles"))
        optimizer = Optimizer(
            size_to_end(Optimizer, "destroy_func"),
            None,
            CREATE_FUNCTION(self._create),
            OPTIMIZE_FUNCTION(self._optimizer_for(device_type)),
            DESTROY_FUNCTION(self._destroy),
        )
        name = ctypes.create_string_buffer(device_type.encode())
        filled = []

        def init(params: Any, _status: int) -> None:
            params.contents.struct_size = size_to_end(RegistrationParams, "optimizer")
            params.contents.device_type = ctypes.addressof(name)
            # Copied: TensorFlow reads its own structures, not the pointers.
            params.contents.optimizer_configs[0] = configs
            params.contents.optimizer[0] = optimizer
            filled.append(device_type)

        callback = INIT_FUNCTION(init)
        keep_alive = (configs, optimizer, name, callback)
        # TensorFlow calls these functions until the process has ended, later than the
        # interpreter frees its objects.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(keep_alive))
        self._registered[device_type] = keep_alive
        try:
            self._call_registry(callback)
        except RegistrationError:
            del self._registered[device_type]
            raise
        if not filled:
            raise RegistrationError("TensorFlow never asked the plugin for its registration")

    def _call_registry(self, callback: Any) -> None:
        try:
            init_graph_plugin = self._library.find(_INIT_GRAPH_PLUGIN, AbslStatus, INIT_FUNCTION)
        except RegistrationError:
            load_trampoline(callback)
            return
        if not init_graph_plugin(callback).ok():
            raise RegistrationError("TensorFlow refused the plugin's registration")

    def _create(self) -> int:
        return next(self._items)

    def _destroy(self, item: int | None) -> None:
        self._handled.discard(item or 0)

    def _optimizer_for(self, device_type: str) -> Callable[..., None]:
        def optimize(key: int, graph: Any, item: int, output: Any, status: int) -> None:
            rewritten = None
            call = next(self._items)
            self._running[call] = key
            shapes = GraphShapes(self._library, item)
            try:
                # Grappler makes one object for a graph and calls it in each of its rounds.
                if (handler := self.handler) is not None and key not in self._handled:
                    self._handled.add(key)
                    rewritten = handler(
                        GraphItem(
                            device_type,
                            ctypes.string_at(graph.contents.data or 0, graph.contents.length),
                            self._library.names(PRESERVE_LIST, item),
                            self._library.names(FETCH_LIST, item),
                            shapes,
                        )
                    )
                if rewritten is not None:
                    # No bytes would be read as a graph without nodes, which fails at run time.
                    if not rewritten:
                        raise ValueError("the rewritten graph is empty")
                    self._library.hand_over(output, rewritten)
            except BaseException as error:  # an exception must not leave a C callback
                rewritten = None
                LOGGER.error(
                    "session host: %s: %s; the original graph runs", type(error).__name__, error
                )
            finally:
                shapes.close()
                if not rewritten:
                    self._library.set_status(status, ABORTED, b"tf_amp: nothing done")
                del self._running[call]

        return optimize

    def _wait_at_exit(self) -> None:
        # A thread that comes back into Python after the interpreter is gone takes the process
        # down. From here on a callback returns at once; those under way get time to finish.
        self.handler = None
        deadline = time.monotonic() + _EXIT_PATIENCE_SECONDS
        while self._running and time.monotonic() < deadline:
            time.sleep(0.005)


def load_trampoline(callback: Any) -> None:
    """Registers through the compiled ``TF_InitGraph``.

    Args:
        callback: C function of the type of ``TF_InitGraph``; called once, before this returns.

    Raises:
        RegistrationError: if the shared object was not built or cannot be loaded.
    """
    from tensorflow.python.client import pywrap_tf_session

    path = _TRAMPOLINE
    if not path.exists():
        raise RegistrationError(
            f"TensorFlow exports no InitGraphPlugin, and {path.name} was not built (install "
            "tf-amp from source where a C compiler is)"
        )
    try:
        trampoline = ctypes.CDLL(str(path))
    except OSError as error:
        raise RegistrationError(f"{path} cannot be loaded: {error}") from error
    pointer = ctypes.c_void_p.in_dll(trampoline, "tf_amp_init_graph")
    pointer.value = ctypes.cast(callback, ctypes.c_void_p).value
    try:
        pywrap_tf_session.TF_LoadPluggableDeviceLibrary(str(path))
    finally:
        pointer.value = None


def check_version(version: str) -> None:
    """Checks a TensorFlow version against the range whose plugin API is known.

    Raises:
        RegistrationError: outside of 2.17 to 2.21; the text names version, range and remedy.
    """
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not OLDEST_VERSION <= numbers <= NEWEST_VERSION:
        raise RegistrationError(
            f"TensorFlow {version} is outside of the range {_dotted(OLDEST_VERSION)} to "
            f"{_dotted(NEWEST_VERSION)} whose graph plugin API is known (install a release of "
            "that range)"
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def foreign_plugins() -> list[str]:
    """Returns paths of graph-optimizer plugins of others that this process has loaded.

    TensorFlow loads what lies in ``tensorflow-plugins`` beside it and what
    ``TF_PLUGGABLE_DEVICE_LIBRARY_PATH`` names, and has no way to ask for which device types those
    have registered; registering one of them again would end the process.
    """
    folders = [Path(p) for p in (*sys.path, *site.getsitepackages()) if p]
    candidates = {
        str(path) for folder in folders for path in (folder / "tensorflow-plugins").glob("*.so")
    }
    if named := os.environ.get("TF_PLUGGABLE_DEVICE_LIBRARY_PATH"):
        candidates.add(named)
    mode = getattr(os, "RTLD_NOLOAD", 0) | getattr(os, "RTLD_NOW", ctypes.DEFAULT_MODE)
    found = []
    for path in sorted(candidates):
        try:
            library = ctypes.CDLL(path, mode=mode)
        except OSError:
            continue
        # A copy of our own library, loaded by somebody else, registers for no real device.
        if hasattr(library, "TF_InitGraph") and not hasattr(library, "tf_amp_init_graph"):
            found.append(path)
    return found


def graph_plugin(tensorflow: ModuleType) -> GraphPlugin:
    """Returns the plugin of this process, registered for every device type.

    Args:
        tensorflow: The imported TensorFlow package.

    Raises:
        RegistrationError: if this TensorFlow is outside of the supported range, another
            graph plugin is loaded, or no way into the registry exists.
    """
    from tensorflow.python.client import pywrap_tf_session

    plugin: GraphPlugin | None = getattr(pywrap_tf_session, _SLOT_ATTRIBUTE, None)
    if plugin is None:
        check_version(tensorflow.__version__)
        if others := foreign_plugins():
            raise RegistrationError(
                f"another graph plugin is loaded ({', '.join(others)}), and TensorFlow ends the "
                "process when two register for one device type (remove that plugin)"
            )
        plugin = GraphPlugin(Library(Path(str(tensorflow.__file__)).parent))
        setattr(pywrap_tf_session, _SLOT_ATTRIBUTE, plugin)
    for device_type in DEVICE_TYPES:
        plugin.register(device_type)
    return plugin
