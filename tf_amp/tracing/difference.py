"""What changed between two traces: settings, functions, and the nodes whose dtype is another."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from graph_passes import Remark
from tf_amp.env_variables import LOG_PATH
from tf_amp.tracing.figures import Figures, why
from tf_amp.tracing.jobs import Job, JobFunction

_DESCRIBED = ("versions", "hardware", "variables", "settings", "config")


@dataclasses.dataclass(frozen=True)
class ChangedNode:
    """A type attribute that is low in one of two runs, or that one of them lacks.

    Attributes:
        function: the function as it was planned, for people.
        node: its name, after that of the inner function that has it.
        attr: the type attribute.
        op: the op type.
        before, after: the dtype and why; None where the node is not there.
        lines: the Python lines that made it.
    """

    function: str
    node: str
    attr: str
    op: str
    before: tuple[str, str] | None
    after: tuple[str, str] | None
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ChangedFunction:
    """A function whose figures are others, or that one of two runs lacks.

    Attributes:
        name: the function, for people.
        before, after: its figures; None where it is not there.
    """

    name: str
    before: Figures | None
    after: Figures | None


@dataclasses.dataclass(frozen=True)
class Difference:
    """What changed from one trace to another.

    Attributes:
        settings: what was in force, (name, before, after); None where it was not told.
        functions: those that changed.
        nodes: those that changed in functions that both have; first those that both have too.
    """

    settings: tuple[tuple[str, Any, Any], ...]
    functions: tuple[ChangedFunction, ...]
    nodes: tuple[ChangedNode, ...]

    def __bool__(self) -> bool:
        """Whether anything changed."""
        return bool(self.settings or self.functions or self.nodes)


def compare(before: Sequence[Job], after: Sequence[Job]) -> Difference:
    """Compares two traces, job by job in the order in which they began.

    Functions are matched by name, nodes by theirs; numbers at the end of a function's name, which
    are others in every run, do not count. Nor does where the traces are, or when they were made.
    """
    settings: list[tuple[str, Any, Any]] = []
    functions: list[ChangedFunction] = []
    nodes: list[ChangedNode] = []
    for old, new in itertools.zip_longest(before, after):
        settings += _settings(old, new)
        for one, other in _matched(old, new):
            was, now = one.figures if one else None, other.figures if other else None
            if was != now:
                name = (one or other).graph.remarks.name  # type: ignore[union-attr]
                functions.append(ChangedFunction(name, was, now))
            if one and other:
                nodes += _nodes(one, other)
    nodes.sort(key=lambda node: None in (node.before, node.after))
    return Difference(tuple(settings), tuple(functions), tuple(nodes))


def _settings(before: Job | None, after: Job | None) -> Iterator[tuple[str, Any, Any]]:
    told = [dict(_described(job)) if job else {} for job in (before, after)]
    for name in dict.fromkeys((*told[0], *told[1])):
        old, new = (of_job.get(name) for of_job in told)
        if old != new:
            yield name, old, new


def _described(job: Job) -> Iterator[tuple[str, Any]]:
    yield "ranks", len(job.traces)
    for part in _DESCRIBED:
        of_part: Mapping[str, Any] = job.first.process.get(part) or {}
        for name, value in of_part.items():
            known = part == "config" and name in job.first.process.get("settings", {})
            if name not in (LOG_PATH, "decided_by") and not known:
                yield f"{part}: {name}", value


def _matched(
    before: Job | None, after: Job | None
) -> Iterator[tuple[JobFunction | None, JobFunction | None]]:
    by_name: list[dict[str, list[JobFunction]]] = []
    for job in (before, after):
        found: dict[str, list[JobFunction]] = {}
        for function in job.functions if job else ():
            found.setdefault(_unnumbered(function.graph.remarks.name), []).append(function)
        by_name.append(found)
    for name in dict.fromkeys((*by_name[0], *by_name[1])):
        yield from itertools.zip_longest(*(found.get(name, ()) for found in by_name))


def _unnumbered(name: str) -> str:
    return re.sub(r"_\d+(?=$| )", "", name)


def _nodes(before: JobFunction, after: JobFunction) -> Iterator[ChangedNode]:
    old, new = _decided(before), _decided(after)
    for function, node, attr in dict.fromkeys((*old, *new)):
        key = function, node, attr
        for one, other in itertools.zip_longest(old.get(key, ()), new.get(key, ())):
            states = _state(one, before), _state(other, after)
            if states[0] is None or states[1] is None or states[0][0] != states[1][0]:
                found = one or other
                yield ChangedNode(
                    before.graph.remarks.name,
                    "/".join(filter(None, (function, node))),
                    attr,
                    found.op,
                    *states,
                    found.lines,
                )


def _decided(function: JobFunction) -> dict[tuple[str, str, str], list[Remark]]:
    """The remarks on type attributes by function, node and attribute."""
    found: dict[tuple[str, str, str], list[Remark]] = {}
    for remark in function.graph.remarks.remarks:
        if remark.kind in ("converted", "kept"):
            key = _unnumbered(remark.function), remark.node, remark.attr
            found.setdefault(key, []).append(remark)
    return found


def _state(remark: Remark | None, function: JobFunction) -> tuple[str, str] | None:
    if remark is None:
        return None
    low = remark.kind == "converted"
    return function.graph.remarks.target_dtype if low else "float32", why(remark)
