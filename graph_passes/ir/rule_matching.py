"""Which rule decides which node of a graph."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tensorflow.core.framework import attr_value_pb2, node_def_pb2, types_pb2

from graph_passes.ops.node_types import GRADIENT_SCOPE, MARK
from graph_passes.policy.config import PrecisionConfig
from graph_passes.policy.rules import ACTIONS, LEVELS, Rule, RuleConflictError, Value

_LOGGER = logging.getLogger(__name__)

_GRADIENT_OF = "_grad"
_MADE_BY_TRACING = re.compile(r"^__(?:inference|forward|backward)_|_\d+$")


@dataclasses.dataclass(frozen=True)
class Decisions:
    """What rules say of one graph.

    Attributes:
        rules: name of a node -> the rule that decides it.
        matched: rule -> how many nodes meet its criteria, whichever rule decides them.
    """

    rules: Mapping[str, Rule]
    matched: Mapping[Rule, int]

    @property
    def kept(self) -> list[str]:
        """The names of the nodes that are to stay float32, which no unit may replace."""
        return [name for name, rule in self.rules.items() if rule.keeps]

    @property
    def allows(self) -> bool:
        """Whether a node is to be converted for its own sake."""
        return any(rule.action == "allow" for rule in self.rules.values())


NO_DECISIONS = Decisions({}, {})


def decide(
    nodes: Sequence[node_def_pb2.NodeDef],
    config: PrecisionConfig,
    functions: Sequence[str] = (),
    lines: Callable[[str], Sequence[str]] = lambda _: (),
) -> Decisions:
    """Finds for each node the rule that decides it, if any does.

    The rule of the highest level counts. An edit of an op's list by a variable beats the rules of
    files for nodes of that op.

    Args:
        nodes: the nodes.
        config: has the rules.
        functions: the names of the function that has the nodes.
        lines: gives the Python lines that made a node, as `Remark.lines`.

    Raises:
        RuleConflictError: two rules of one level decide a node differently.
    """
    marks = [(node.name, node.attr[MARK].s) for node in nodes if MARK in node.attr]
    known_as = [n for name in functions for n in {name, _MADE_BY_TRACING.sub("", name)}]
    index = _Index(config.rules, known_as)
    if not marks and index.is_empty:
        return NO_DECISIONS
    edited = {edit.op for edit in config.list_edits}
    names = {node.name for node in nodes}
    found: dict[str, Rule] = {}
    matched: collections.Counter[Rule] = collections.Counter()
    for node in nodes:
        rules = [
            rule
            for rule in index.candidates(node, names)
            if not rule.source or any(is_at(line, rule.source) for line in lines(node.name))
        ]
        matched.update(rules)
        if node.op in edited:
            rules = [rule for rule in rules if rule.level != "file"]
        if rules:
            found[node.name] = _strongest(rules, node.name)
    for name, mark in marks:
        rule = read_mark(mark)
        if rule is not None:
            found[name] = rule
            matched[rule] += 1
    return Decisions(found, matched)


def write_mark(action: str, where: str, why: str) -> bytes:
    """The value of `MARK` for a node: one of `policy.rules.ACTIONS`, who asks for it, and why."""
    return ";".join((action, where.replace(";", ","), why)).encode()


@functools.lru_cache(maxsize=1024)
def read_mark(mark: bytes) -> Rule | None:
    """The rule that a mark stands for; None for what this release does not know, which is said."""
    action, _, rest = mark.decode(errors="replace").partition(";")
    where, _, why = rest.partition(";")
    if action not in ACTIONS:
        _LOGGER.warning(
            "A scope at %s asks for %r, which this release does not know (it knows %s): what it "
            "marked is decided as if there were no scope. Use the release that made the graph, or "
            "write a rule.",
            where or "an unknown place",
            action,
            ", ".join(ACTIONS),
        )
        return None
    return Rule(action=action, why=why, origin=where, level="scope")  # type: ignore[arg-type]


def is_at(line: str, asked: str) -> bool:
    """Whether "a/model.py:42" is at "model.py:42" or in "model.py"."""
    here = line if asked.rpartition(":")[2].isdigit() else line.rpartition(":")[0]
    return here == asked or here.endswith("/" + asked)


class _Index:
    """The rules that may hold for nodes of a function, by what makes them quick to find."""

    def __init__(self, rules: Sequence[Rule], functions: Sequence[str]) -> None:
        self._by_name: dict[str, list[Rule]] = {}
        self._others: list[Rule] = []
        for rule in rules:
            if rule.function and not any(map(rule.function_pattern.fullmatch, functions)):
                continue
            if rule.literal is None:
                self._others.append(rule)
            else:
                self._by_name.setdefault(rule.literal, []).append(rule)

    @property
    def is_empty(self) -> bool:
        """Whether there is none."""
        return not (self._by_name or self._others)

    def candidates(self, node: node_def_pb2.NodeDef, known: set[str]) -> Iterator[Rule]:
        """The rules whose criteria hold for a node, but for its function and its source."""
        names = list(_names_of(node.name, known))
        near = [rule for name in names for rule in self._by_name.get(name, ())]
        for rule in (*dict.fromkeys(near), *self._others):
            if (
                (not rule.op or rule.op == node.op)
                and (not rule.layer or rule.layer_pattern.search(node.name))
                and (not rule.node or any(map(rule.node_pattern.fullmatch, names)))
                and (not rule.attr or _has_value(node, rule))
            ):
                yield rule


def _names_of(name: str, known: set[str]) -> Iterator[str]:
    """The name of a node, and those of what it is the gradient of.

    The gradient of "a/MatMul" is "gradient_tape/a/MatMul/MatMul" or "gradients/a/MatMul_grad/x",
    that of "a/Softmax" may be "gradient_tape/a/mul", which tells the scope alone.
    """
    yield name
    for found in GRADIENT_SCOPE.finditer(name):
        forward = name[found.end() :]
        yield forward
        above = forward.rpartition("/")[0]
        if above.endswith(_GRADIENT_OF):
            yield above.removesuffix(_GRADIENT_OF)
        elif above in known:
            yield above


def _has_value(node: node_def_pb2.NodeDef, rule: Rule) -> bool:
    if rule.attr not in node.attr:  # to read it would add it
        return False
    attr = node.attr[rule.attr]
    if attr.WhichOneof("value") == "type":
        return isinstance(rule.value, str) and _dtype_name(rule.value) == _dtype(attr.type)
    value, wanted = _plain(attr), _as_stored(rule.value)
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def _as_stored(value: Value) -> Value:
    """A value of a rule as an attribute has it, whose floats are float32."""
    if isinstance(value, tuple):
        return tuple(map(_as_stored, value))
    return attr_value_pb2.AttrValue(f=value).f if isinstance(value, float) else value


def _plain(value: attr_value_pb2.AttrValue) -> Any:
    """The value of an attribute as a rule has it, None for a tensor, a function or a dtype."""
    kind = value.WhichOneof("value")
    if kind == "s":
        return value.s.decode(errors="replace")
    if kind in ("i", "f", "b"):
        return getattr(value, kind)
    if kind == "shape":
        return tuple(dim.size for dim in value.shape.dim)
    if kind == "list":
        of = value.list
        texts = [each.decode(errors="replace") for each in of.s]
        return (*texts, *of.i, *of.f, *of.b, *map(_dtype, of.type))
    return None


def _dtype(dtype: int) -> str:
    return _dtype_name(types_pb2.DataType.Name(dtype))  # type: ignore[arg-type]


def _dtype_name(name: str) -> str:
    """What people call a dtype: "float32" for "DT_FLOAT"."""
    short = name.lower().removeprefix("dt_")
    return {"float": "float32", "half": "float16", "double": "float64"}.get(short, short)


def _strongest(rules: Sequence[Rule], node: str) -> Rule:
    level = max(LEVELS.index(rule.level) for rule in rules)
    first, *others = (rule for rule in rules if LEVELS.index(rule.level) == level)
    for other in others:
        if other.action != first.action:
            raise RuleConflictError(
                f"two rules contradict each other on the node {node!r}: {first} says "
                f"{first.action}, {other} says {other.action}. Take one of them out, or make one "
                "narrower."
            )
    return first
