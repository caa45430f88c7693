"""The one installed state of AMP in this process: what is on, since when, and what it did."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from graph_passes import PrecisionConfig, list_notes
from tf_amp.compiled import CompiledFunctions
from tf_amp.cost_tables import TableChoice, choose_table
from tf_amp.env_config import EnvConfigError, Settings
from tf_amp.graph_log import GraphLog
from tf_amp.hardware import Target, choose_target
from tf_amp.hosts import function, session
from tf_amp.hosts.dumps import Dumps, Proto
from tf_amp.loss_scale import auto_wrap, counters
from tf_amp.tally import NodeCounts, Tally
from tf_amp.visible_log import ensure_visible

if TYPE_CHECKING:
    from graph_passes import RewriteResult
    from graph_passes.config import Level

_log = logging.getLogger("tf_amp")

ENVIRONMENT = "environment"
"""The `source` of an installation that environment variables asked for."""

# What fails once tends to fail for every graph; `status` counts them all.
_FAILURES_SAID = 3


class Installation:
    """AMP as it is switched on. Hosts read the configuration from it and report to it.

    Attributes:
        settings: what was asked for.
        source: who asked: `ENVIRONMENT`, or the name of the function that was called.
        target: the dtype and device chosen, and why.
        costs: the cost table in force, and where it comes from.
        config: what graphs are rewritten with; None if nothing is rewritten.
        compiled: how functions that XLA compiles are rewritten; None if nothing is rewritten.
        loss_scaling: whether optimizers are wrapped without being asked to one by one.
        loss_scaling_reason: why it is on or off.
        graph_log: says what was done to single graphs.
        refusals: host name -> why it could not hook this TensorFlow.
    """

    def __init__(self, settings: Settings, source: str) -> None:
        self.settings = settings
        self.source = source
        self.target = choose_target(settings) if settings.graph_rewrite else _NO_REWRITE
        self.costs = choose_table(settings, self.target)
        self.config = _precision_config(settings, self.target, self.costs)
        self.compiled = (
            CompiledFunctions(settings, self.target, self.config) if self.config else None
        )
        self.loss_scaling, self.loss_scaling_reason = _decide_loss_scaling(
            settings, self.target, source
        )
        self.refusals: dict[str, str] = {}
        self._tally = Tally()
        self._dumps = Dumps(settings.log_path, self.config) if self.config else None
        self.graph_log = GraphLog(str(self.target.target_dtype))

    @property
    def rewritten(self) -> int:
        """How many graphs were changed so far."""
        return self._tally.rewritten

    def record(
        self,
        host: str,
        name: str,
        result: RewriteResult,
        *,
        original: Proto | None = None,
        parts: Iterable[NodeCounts] = (),
        announce: bool = True,
    ) -> NodeCounts:
        """Counts what was done to a graph, dumps it where asked, and says it.

        A failed rewrite is one ERROR line that names the files written.

        Args:
            host: the host that handed the graph to the pass: "function" or "session".
            name: the graph's name, for people.
            result: what the pass returned.
            original: the graph before the rewrite, for the dumps.
            parts: counts of the functions that the graph calls; its line adds them up.
            announce: whether this is a top-level graph. False for a function inside another.

        Returns:
            The counts of this graph and its parts.
        """
        counts = self._tally.add(name, result)
        parts = tuple(parts)
        directory = self._dumps.write(name, result, original) if self._dumps else None
        if result.failure is not None:
            _log.log(
                logging.ERROR if self._tally.failed <= _FAILURES_SAID else logging.DEBUG,
                "The rewrite of %r (%s host) was dropped and the graph runs in float32: %s. %s",
                name,
                host,
                result.failure,
                f"Both graphs are in {directory}." if directory else "No graph could be written.",
            )
        else:
            self.graph_log.say(name, counts, parts, announce=announce)
        return sum(parts, counts)

    def record_fault(self, host: str, name: str, error: Exception) -> None:
        """Counts a graph that stays in float32 because the host failed, and says so once.

        Args:
            host: the host that failed.
            name: the graph's name.
            error: what was raised; call this while it is being handled.
        """
        first = self._tally.add_fault(name, f"{type(error).__name__}: {error}")
        _log.log(
            logging.ERROR if first else logging.DEBUG,
            "%r stays in float32: the %s host failed on it. This is a fault of tf_amp, please "
            "report it with the traceback. Further ones are logged at DEBUG.",
            name,
            host,
            exc_info=error,
        )

    def status(self) -> dict[str, Any]:
        """Returns the state as plain values; `tf_amp.status` documents the keys."""
        settings = self.settings
        hosts = dict.fromkeys(("function", "session") if self.config else (), "hooked")
        return {
            "enabled": True,
            "why": f"switched on by {self.source}",
            "decided_by": dict(settings.decided_by),
            "graph_rewrite": self.config is not None,
            "target_dtype": self.target.target_dtype,
            "device": self.target.device,
            "reason": self.target.reason,
            "level": settings.level,
            "cost_table": self.costs.reason,
            "cost_table_xla": self.compiled.costs.reason if self.compiled else self.costs.reason,
            "list_edits": [
                f"{edit.list_name} {edit.action} {edit.op}" for edit in settings.list_edits
            ],
            "loss_scaling": self.loss_scaling,
            "loss_scaling_reason": self.loss_scaling_reason,
            "log_path": settings.log_path,
            "hosts": hosts | self.refusals,
            **self._tally.as_dict(),
            "loss_scale": counters(),
        }

    def announce(self) -> None:
        """Says once what is on and who decided it."""
        settings = self.settings
        if not settings.graph_rewrite:
            what = "graph rewrite off"
        elif self.config is None:
            what = "no graph is rewritten"
        else:
            what = self.target.reason
        deciding = sorted(set(settings.decided_by.values())) or [self.source]
        _log.info(
            "AMP on: %s; level %s; %d list edits; loss scaling %s (%s); decided by %s.",
            what,
            settings.level or "default",
            len(settings.list_edits),
            "on" if self.loss_scaling else "off",
            self.loss_scaling_reason,
            ", ".join(deciding),
        )
        if settings.graph_rewrite and self.config is None:
            _log.warning(
                "AMP was asked for, but every graph stays in float32: %s", self.target.reason
            )
        for note in (*settings.notes, *(list_notes(self.config) if self.config else ())):
            _log.warning("%s", note)

    def say_if_nothing_happened(self) -> None:
        """Warns, at the end of the process, that AMP was on and converted no graph."""
        if self.config is not None and not self._tally.rewritten:
            _log.warning(
                "AMP was on, but no graph was converted: %s",
                self._tally.why_nothing(),
            )


_HOST_NAMES = {
    "loss scaling": "loss scaling of optimizers that are not passed in",
    "function": "the functions of TensorFlow 2 (tf.function, Keras, XLA)",
    "session": "the graphs of tf.compat.v1.Session",
}
_NO_REWRITE = Target(None, "CPU", "the graph rewrite was not asked for")
_lock = threading.RLock()
_installed: Installation | None = None


def current() -> Installation | None:
    """Returns what is installed, None if AMP is off."""
    return _installed


def install(settings: Settings, *, source: str) -> Installation | None:
    """Switches AMP on for everything traced from now on.

    With AMP on already, equal settings change nothing and other settings replace the old ones.

    Args:
        settings: what to switch on.
        source: who asks, for messages: `ENVIRONMENT` or the name of the called function.

    Returns:
        The installation; None if the settings ask for neither rewrite nor loss scaling.

    Raises:
        tf_amp.env_config.EnvConfigError: settings that are legal one by one do not go together.
    """
    global _installed
    with _lock:
        if _installed is not None and _installed.settings == settings:
            return _installed
        if not (settings.graph_rewrite or settings.loss_scaling):
            uninstall()
            return None
        ensure_visible()
        installation = Installation(settings, source)
        uninstall()
        _installed = installation
        hooks: list[tuple[str, Any]] = [("loss scaling", auto_wrap)]
        if installation.config is not None:
            hooks += [("function", function), ("session", session)]
        for name, host in hooks:
            refusal = host.install(installation)
            if refusal is not None:
                installation.refusals[name] = refusal
        installation.announce()
        for name, refusal in installation.refusals.items():
            _log.warning("AMP is on without %s: %s", _HOST_NAMES[name], refusal)
        atexit.register(installation.say_if_nothing_happened)
        return installation


def uninstall() -> bool:
    """Switches AMP off: what is traced from now on is what TensorFlow alone would make.

    Returns:
        Whether AMP was on.
    """
    global _installed
    with _lock:
        if _installed is None:
            return False
        atexit.unregister(_installed.say_if_nothing_happened)
        for host in (session, function, auto_wrap):
            host.uninstall()
        _installed = None
        return True


def _precision_config(
    settings: Settings, target: Target, costs: TableChoice
) -> PrecisionConfig | None:
    if target.target_dtype is None:
        return None
    try:
        return PrecisionConfig(
            target_dtype=target.target_dtype,
            device=target.device,
            level=cast("Level", settings.level),
            list_edits=settings.list_edits,
            disabled_rules=settings.disabled_rules,
            cost_table=costs.table,
        )
    except ValueError as error:
        variables = ", ".join(sorted(set(settings.decided_by.values())))
        raise EnvConfigError(
            f"The settings do not go together: {error} Settings came from: {variables}."
        ) from error


def _decide_loss_scaling(settings: Settings, target: Target, source: str) -> tuple[bool, str]:
    """Decides whether optimizers are wrapped without being passed in, and says why."""
    if not settings.loss_scaling:
        by_call = source != ENVIRONMENT
        return False, "but for optimizers that are passed in" if by_call else "not asked for"
    if settings.loss_scaling_asked or not settings.graph_rewrite:
        return True, "asked for"
    if target.target_dtype is None:
        return False, "no graph is rewritten"
    if target.target_dtype == "bfloat16":
        return False, "bfloat16 has the range of float32 and needs none"
    return True, "float16 needs it"
