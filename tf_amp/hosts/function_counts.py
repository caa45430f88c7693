"""What is counted, traced and said of functions: each node once, by the plan by which it runs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from graph_passes.plan_remarks import lines_within
from graph_passes.policy.config import UNKNOWN_DIMENSION
from tf_amp.hosts.dumps import Origin
from tf_amp.hosts.function_names import SIZES_NEAR, readable_name
from tf_amp.hosts.function_redirects import called_apart
from tf_amp.tally import NodeCounts

if TYPE_CHECKING:
    from graph_passes import Report, RewriteResult
    from tf_amp.hosts.function_calls import TracedFunction
    from tf_amp.installation import Installation


class _PlanCounts(NamedTuple):
    """What is kept of a plan: its counts, and the functions that were planned with it."""

    counts: NodeCounts
    planned_with: frozenset[str]

    @classmethod
    def of(cls, report: Report) -> _PlanCounts:
        return cls(NodeCounts.of(report), report.planned_with)


class FunctionCounts:
    """The functions of one installation.

    Attributes:
        installation: counts, traces and says.
    """

    def __init__(self, installation: Installation) -> None:
        self.installation = installation
        self._counts: weakref.WeakKeyDictionary[Any, NodeCounts] = weakref.WeakKeyDictionary()
        # Of each function, by which plans it runs with all that it calls.
        self._plans: weakref.WeakKeyDictionary[Any, dict[str, _PlanCounts]]
        self._plans = weakref.WeakKeyDictionary()
        # Those whose counts are in no other function's, and those not rewritten whose are.
        self._uncovered: weakref.WeakSet[Any] = weakref.WeakSet()
        self._covered: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(
        self,
        function: Any,
        traced: TracedFunction,
        result: RewriteResult,
        callees: Iterable[RewriteResult],
        waits: Callable[[str], bool],
        *,
        of_callees: str,
        announce: bool,
        size: int = UNKNOWN_DIMENSION,
    ) -> CountedFunction:
        """Counts a function that was rewritten.

        Args:
            function: the AtomicFunction.
            traced: the function as it was traced.
            result: what became of it.
            callees: functions that were rewritten once more for it.
            waits: whether a function that it calls is yet to be rewritten.
            of_callees: what is said behind the names of `callees`.
            announce: whether what is said of it is for INFO.
            size: the size that it was planned for.

        Returns:
            What is to be told of later plans of it, and asked to say what it counts.
        """
        known = traced.graph._functions
        called = [callee for callee in known.values() if callee in self._uncovered]
        record = functools.partial(
            self.installation.record,
            "function",
            original=traced.definition,
            origin=Origin(traced.find, traced.shapes, traced.function_shapes, traced.lines),
            is_top=announce,
        )
        plans = self.plans_of_callees(traced, result, callees)
        if result.failure is None:
            plan = _PlanCounts.of(result.report)
            self._plans[function] = {**plans, traced.definition.signature.name: plan}
        title = traced.title + (f"{SIZES_NEAR}{size}" if size != UNKNOWN_DIMENSION else "")
        counts = self._counts[function] = record(
            title,
            result,
            parts=_counts_of(plans, result),
            covered=[self._counts[callee] for callee in called],
            is_part=function in self._covered,
        )
        self._uncovered.difference_update(called)
        self._covered.update(callee for name, callee in known.items() if waits(name))
        if function not in self._covered:
            self._uncovered.add(function)
        replace = functools.partial(self._replace, weakref.ref(function))
        counted = CountedFunction(
            self,
            traced,
            record,
            counts,
            result=result,
            replace=replace,
            announce=announce,
            title=title,
            size=size,
        )
        counted.trace(callees, of_callees)
        return counted

    def _replace(self, of: weakref.ref[Any], counts: NodeCounts) -> None:
        function = of()
        if function is not None:
            self._counts[function] = counts

    def plans_of_callees(
        self, traced: TracedFunction, result: RewriteResult, anew: Iterable[RewriteResult]
    ) -> dict[str, _PlanCounts]:
        """The plans by which a rewritten function runs what it still calls by the traced names.

        Args:
            traced: the function as it was traced.
            result: the function after its rewrite.
            anew: functions that were rewritten once more for it.

        Returns:
            Function name -> the counts of its plan, also of what is called further down.
        """
        known = traced.graph._functions
        if not known and not anew:
            return {}
        found: dict[str, _PlanCounts] = {}
        for name in known.keys() & called_apart(result, traced.find):
            found.update(self._plans.get(known[name], {}))
        found.update((one.proto.signature.name, _PlanCounts.of(one.report)) for one in anew)  # type: ignore[union-attr]
        return found


class CountedFunction:
    """What was counted of one function, by the sizes for which it was planned.

    Args:
        of: the functions of the installation.
        traced: the function as it was traced.
        record: counts a plan of it, as `Installation.record`.
        counts: what was counted when it was planned first.
        result: what became of it then.
        replace: takes other counts for those that functions that call it cover.
        announce: whether what is said of it is for INFO.
        title: its name there.
        size: the size that it was planned for.

    Attributes:
        counts: what counts now: that of the last plan, or of the original that runs in its place.
        is_announced: whether what is said of it is for INFO.
    """

    def __init__(
        self,
        of: FunctionCounts,
        traced: TracedFunction,
        record: Callable[..., NodeCounts],
        counts: NodeCounts,
        *,
        result: RewriteResult,
        replace: Callable[[NodeCounts], None],
        announce: bool,
        title: str,
        size: int,
    ) -> None:
        self._of, self._traced, self._record, self._replace = of, traced, record, replace
        self.counts, self._in_force = counts, size
        self._recorded = {size: (counts, result.changed)}
        # A rewrite that failed was said where it was recorded.
        self._title = None if result.failure else title
        self.is_announced, self._said = announce, False

    def has_plan(self, name: str) -> bool:
        """Whether a function that it calls was rewritten by itself, or looked at for that."""
        return self._traced.graph._functions.get(name) in self._of._plans

    def say(self) -> None:
        """Logs what counts, once."""
        if self._said or self._title is None:
            return
        self._said = True
        self._of.installation.graph_log.say(self._title, self.counts, announce=self.is_announced)

    def record_again(self, planned: RewriteResult, callees: list[RewriteResult], size: int) -> None:
        """Counts what was planned for a size, in place of what counted before.

        `say` then logs it: at DEBUG where something was said before.

        Args:
            planned: the function.
            callees: the functions that it calls and that were planned for the size too.
            size: the size.
        """
        near = f"{SIZES_NEAR}{size}"
        plans = self._of.plans_of_callees(self._traced, planned, callees)
        self.trace(callees, near)
        failed = planned.failure is not None  # then what counted before still runs
        counts = self._record(
            self._traced.title + near,
            planned,
            parts=_counts_of(plans, planned),
            covered=[] if failed else [self.counts],
        )
        if failed:
            return
        self.counts = counts
        self._replace(counts)
        self._in_force, self._recorded[size] = size, (counts, planned.changed)
        self._title = self._traced.title + near
        if self._said:
            self._said = self.is_announced = False

    def converts(self, size: int) -> bool:
        """Whether anything was converted for a size, 0 if for none."""
        return bool(self._recorded[size or UNKNOWN_DIMENSION][0].converted)

    def lose(self, size: int) -> None:
        """Takes back what was counted for a size, 0 if for none, as float32 proved faster."""
        size = size or UNKNOWN_DIMENSION
        low, changed = self._recorded[size]
        counted = size == self._in_force
        lost = self._of.installation.tally.take_back(
            self._traced.title, low, changed=changed, counted=counted
        )
        if counted:
            self.counts = lost
            self._replace(lost)

    def trace(self, callees: Iterable[RewriteResult], suffix: str) -> None:
        """Traces functions that were rewritten once more for this one."""
        traced = self._traced
        _, within, step = traced.title.partition(" (")  # as of "(fit)", which they run in too
        for callee in callees:
            name: str = callee.proto.signature.name  # type: ignore[union-attr]
            shapes = traced.function_shapes
            self._of.installation.trace(
                readable_name(name) + within + step + suffix,
                callee,
                traced.find(name),
                Origin(traced.find, shapes(name), shapes, lines_within(traced.lines, name)),
            )


def _counts_of(plans: Mapping[str, _PlanCounts], result: RewriteResult) -> Iterator[NodeCounts]:
    """Yields the counts of plans beside that of `result`, each node once."""
    together = result.report.planned_with.union(*(plan.planned_with for plan in plans.values()))
    for name, plan in plans.items():
        # A function that was planned together with what it calls reports all those nodes itself;
        # what was converted in a callee that kept its name is in the callee's report alone.
        yield plan.counts.converted_alone() if name in together else plan.counts
