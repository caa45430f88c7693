"""The one installed state of AMP in this process: what is on, since when, and what it did."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING

import tensorflow
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager import context as context_lib

from tf_amp.compatibility import unsupported
from tf_amp.compiled import CompiledFunctions
from tf_amp.env_config import Settings
from tf_amp.graph_log import GraphLog
from tf_amp.hosts import function, function_names, session
from tf_amp.hosts.conversion_numbers import ConversionNumbers
from tf_amp.hosts.dumps import Dumps, Origin, Proto
from tf_amp.hosts.process_record import describe
from tf_amp.keras_policy import mixed_policy
from tf_amp.loss_scale import auto_wrap, counters, history
from tf_amp.loss_scale.unscaled_notice import UnscaledNotice
from tf_amp.plan import ENVIRONMENT, Plan, make_plan
from tf_amp.state import Status
from tf_amp.tally import NodeCounts, Tally
from tf_amp.tracebacks import TracebackFilters
from tf_amp.visible_log import ensure_visible

if TYPE_CHECKING:
    from pathlib import Path

    from graph_passes import RewriteResult, Rule

__all__ = ["ENVIRONMENT", "Installation", "current", "install", "refusal", "uninstall"]

_log = logging.getLogger("tf_amp")

# What fails once tends to fail for every graph; `status` counts them all.
_FAILURES_SAID = 3
_NAMES_SHOWN = 5


class Installation:
    """AMP as it is switched on. Hosts read the configuration from it and report to it.

    Attributes:
        plan: what is on, and why.
        settings: what was asked for.
        config: what graphs are rewritten with; None if nothing is rewritten.
        compiled: how functions that XLA compiles are rewritten; None if nothing is rewritten.
        tally: counts what was done, from what `record` is told and what was left out.
        numbers: rewrites graphs up to the bisect limit.
        graph_log: says what was done to single graphs.
        unscaled: says which of them train without a loss scale.
        refusals: host name -> why it could not hook this TensorFlow.
        traced_before: names of the functions that had been traced before.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.settings = plan.settings
        self.config = plan.config
        self.compiled = CompiledFunctions(plan.compiled_costs, plan.config) if plan.config else None
        self.numbers = ConversionNumbers(plan.settings.bisect_limit)
        self.refusals: dict[str, str] = {}
        self.traced_before = function_names.traced_function_names() if plan.config else []
        self._said_policy = False
        self.tally = Tally()
        self._tracebacks = TracebackFilters()
        self._dumps = (
            Dumps(plan.settings.log_path, lambda: describe(plan)) if plan.converts else None
        )
        self.graph_log = GraphLog(plan.target.target_dtype)
        self.unscaled = UnscaledNotice(active=plan.misses_loss_scale)

    @property
    def loss_scaling(self) -> bool:
        """Whether optimizers are wrapped without being asked to one by one."""
        return self.plan.loss_scaling

    @property
    def _hosts(self) -> dict[str, ModuleType]:
        """What graphs are rewritten by."""
        if self.config is None:
            return {}
        return {"function": function, "session": session}

    def start(self) -> None:
        """Hooks TensorFlow and the optimizers, completely or, on an exception, not at all."""
        hooks: dict[str, Callable[[Installation], str | None]] = {
            "loss scaling": lambda _: auto_wrap.install(
                wraps=self.loss_scaling, waits=self.plan.converts
            )
        }
        hooks |= {name: host.install for name, host in self._hosts.items()}
        hooks["tracebacks"] = lambda _: self._tracebacks.install()
        try:
            for name, hook in hooks.items():
                if (why := hook(self)) is not None:
                    self.refusals[name] = why
            if self._dumps is not None:
                history.listen(functools.partial(self._dumps.append, history.LOSS_SCALE_EVENTS))
            self._announce()
        except BaseException:
            self.stop()
            raise
        atexit.register(self.say_if_nothing_happened)
        atexit.register(self._write_status)

    def stop(self) -> None:
        """Takes all hooks off."""
        atexit.unregister(self.say_if_nothing_happened)
        atexit.unregister(self._write_status)
        self._write_status()
        history.listen(None)
        for host in (session, function, auto_wrap):
            host.uninstall()
        self._tracebacks.uninstall()

    def record(
        self,
        host: str,
        name: str,
        result: RewriteResult,
        *,
        original: Proto,
        origin: Origin,
        parts: Iterable[NodeCounts] = (),
        covered: Iterable[NodeCounts] = (),
        is_part: bool = False,
        is_top: bool = True,
    ) -> NodeCounts:
        """Counts what was done to a graph, and traces it where asked; the host says it.

        A failed rewrite is one ERROR line that names the files written.

        Args:
            host: the host that handed the graph to the pass: "function" or "session".
            name: the graph's name, for people.
            result: what the pass returned.
            original: the graph before the rewrite, for the trace.
            origin: what else is known of it, for the trace.
            parts: counts of the functions that the graph calls; its line adds them up.
            covered: counts that were returned before, of graphs that are part of this one.
            is_part: whether the nodes of this graph were counted before, as part of another.
            is_top: whether this is a top-level graph. False for a function inside another.

        Returns:
            The counts of this graph and its parts.
        """
        own = NodeCounts() if result.failure else NodeCounts.of(result.report)
        counts = sum(parts, own)
        self.tally.add(
            name,
            result,
            counts,
            (*covered, counts) if is_part else covered,
            is_top=is_top and not is_part,
        )
        directory = self.trace(name, result, original, origin)
        if result.failure is not None:
            written = "The graph is" if result.rejected is None else "Both graphs are"
            _log.log(
                logging.ERROR if self.tally.failed <= _FAILURES_SAID else logging.DEBUG,
                "The rewrite of %r (%s host) was dropped and the graph runs as it was: %s. %s",
                name,
                host,
                result.failure,
                f"{written} in {directory}." if directory else "No graph could be written.",
            )
        else:
            self._say_policy()
        return counts

    def _say_policy(self) -> None:
        """Warns, once, of a Keras policy by which layers cast before the rewrite sees them."""
        policy = None if self._said_policy else mixed_policy()
        if policy is not None:
            self._said_policy = True
            _log.warning(
                "The %s dtype policy is %r: layers cast by themselves, and the rewrite finds "
                "little left to do. One of the two is enough; %s takes the policy back.",
                policy.library,
                policy.name,
                policy.remedy,
            )

    def trace(
        self, name: str, result: RewriteResult, original: Proto | None, origin: Origin
    ) -> Path | None:
        """Writes a rewrite to the trace, where one is asked for; it is counted nowhere.

        Args:
            name: the graph's name, for people.
            result: what the pass returned.
            original: the graph before the rewrite.
            origin: what else is known of it.

        Returns:
            The directory written to, None if nothing was.
        """
        return self._dumps.write(name, result, original, origin=origin) if self._dumps else None

    def record_fault(self, host: str, name: str, error: Exception) -> None:
        """Counts a graph that stays as it was because the host failed, and says so once.

        It may be low by then: what failed may be the plan for another size, or a trial.

        Args:
            host: the host that failed.
            name: the graph's name.
            error: what was raised; call this while it is being handled.
        """
        first = self.tally.add_fault(name, f"{type(error).__name__}: {error}")
        _log.log(
            logging.ERROR if first else logging.DEBUG,
            "%r stays as it was: the %s host failed on it. This is a fault of tf_amp, please "
            "report it with the traceback. Further ones are logged at DEBUG.",
            name,
            host,
            exc_info=error,
        )

    # A program may ask while it traces a function: AutoGraph would convert all that is called here.
    @autograph.do_not_convert
    def status(self) -> Status:
        """Returns the state; `tf_amp.status` documents it."""
        hosts = dict.fromkeys(self._hosts, "hooked")
        return dataclasses.replace(
            self.plan.status(),
            hosts=hosts | self.refusals,
            loss_scale=counters(),
            trained_unscaled=self.unscaled.names,
            traced_before=tuple(self.traced_before),
            rules={f"{r} ({r.action})": n for r, n in self._matches().items()},
            fused=self.tally.fused(self.plan.float32_rules),
            **self.tally.as_dict(),
        )

    def _matches(self) -> dict[Rule, int]:
        """Rules in force -> how many nodes met their criteria."""
        return self.tally.matches(self.settings.rules)

    def _write_status(self) -> None:
        """Leaves the final counters and loss scales in the trace, if there is one."""
        if self._dumps is not None:
            self._dumps.finish(lambda: self.status().as_dict())

    def _announce(self) -> None:
        """Says once what is on and who decided it."""
        _log.info("AMP on: %s.", self.plan.summary)
        if self.settings.graph_rewrite and not self.plan.converts:
            trace = self.settings.log_path
            rules = ", ".join(self.plan.float32_rules)
            done = (
                f" What pays in float32 too is done: {rules}. What else XLA compiles is untouched."
            )
            _log.warning(
                "AMP was asked for, but every graph stays in float32: %s%s%s",
                self.plan.target.reason,
                done if rules else "",
                f" No trace is written to {trace}." if trace else "",
            )
        for note in self.plan.notes:
            _log.warning("%s", note)

    def say_if_nothing_happened(self) -> None:
        """Warns, at the end of the process, that AMP was on and converted no graph."""
        if not self.plan.converts:
            return
        if not self.tally.converted:
            died, worked = hasattr(sys, "last_type"), self.tally.knows_why or _ran_eagerly()
            if self.tally.seen or (worked and not died):
                _log.warning("AMP was on, but %s", self.tally.why_nothing())
        elif unmet := [str(rule) for rule, count in self._matches().items() if not count]:
            _log.warning(
                "No node met the criteria of %d of %d rules, so they did nothing: %s. `tf-amp "
                "explain --node` shows the names that nodes have.",
                len(unmet),
                len(self.settings.rules),
                "; ".join(unmet[:_NAMES_SHOWN]) + ("; ..." if len(unmet) > _NAMES_SHOWN else ""),
            )


def _ran_eagerly() -> bool:
    """Whether an op ran: a process that only imports TensorFlow, or asks for devices, runs none."""
    context = context_lib.context_safe()
    return context is not None and getattr(context, "_initialized", True)


_lock = threading.RLock()
_installed: Installation | None = None
_refusal: str | None = None
_named: frozenset[str] = frozenset()


def current() -> Installation | None:
    """Returns what is installed, None if AMP is off."""
    return _installed


def refusal() -> str | None:
    """Returns why AMP is off although it was asked for, None if it was not or is on."""
    return _refusal


def install(settings: Settings, *, source: str) -> Installation | None:
    """Switches AMP on for everything traced from now on.

    With AMP on already, equal settings change nothing and other settings replace the old ones.

    Args:
        settings: what to switch on.
        source: who asks, for messages: `ENVIRONMENT` or the name of the called function.

    Returns:
        The installation; None if the settings ask for neither rewrite nor loss scaling, or if
        this TensorFlow is not supported, which a warning says.

    Raises:
        tf_amp.env_config.EnvConfigError: settings that are legal one by one do not go together.
    """
    global _installed, _refusal, _named
    with _lock:
        if _installed is not None and _installed.settings == settings:
            return _installed
        if not (settings.graph_rewrite or settings.loss_scaling):
            uninstall()
            return None
        ensure_visible()
        _refusal = unsupported(tensorflow.__version__)
        if _refusal is not None:
            uninstall()
            _log.warning("AMP stays off, and everything runs in float32: %s", _refusal)
            return None
        _refusal = "switching it on failed"
        installation = Installation(make_plan(settings, source))
        uninstall(_refusal)
        installation.start()
        _installed, _refusal = installation, None
        _say_traced_before([name for name in installation.traced_before if name not in _named])
        _named = _named.union(installation.traced_before)
        return installation


def _say_traced_before(names: list[str]) -> None:
    if names:
        _log.warning(
            "AMP was switched on after functions had been traced: %s. They stay in float32 until "
            "they are traced anew; switch it on before the first call of a tf.function.",
            ", ".join(names[:_NAMES_SHOWN]) + (", ..." if names[_NAMES_SHOWN:] else ""),
        )


def uninstall(why: str | None = None) -> bool:
    """Switches AMP off: what is traced from now on is what TensorFlow alone would make.

    Args:
        why: what `refusal` says from now on.

    Returns:
        Whether AMP was on.
    """
    global _installed, _refusal
    with _lock:
        if _installed is None:
            return False
        installation, _installed = _installed, None
        _refusal = why
        installation.stop()
        return True
