"""Rules on single nodes: what a node is to be, whatever list its op is on; and files of rules."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from graph_passes.policy.toml import tomllib

RuleAction = Literal["keep_float32", "allow", "deny", "infer", "clear"]
RuleLevel = Literal["file", "environment", "call", "scope"]
Value: TypeAlias = "str | int | float | bool | tuple[Value, ...]"

ACTIONS: tuple[RuleAction, ...] = get_args(RuleAction)
LEVELS: tuple[RuleLevel, ...] = get_args(RuleLevel)
"""Who made a rule, the weakest first. Edits of the op lists are of the level "environment"."""
CRITERIA = ("node", "op", "attr", "value", "function", "source", "layer")
_TABLE = "rule"
_KEYS = ("action", "why", *CRITERIA)
_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")
_HEADER = re.compile(rf"^[ \t]*\[\[\s*{_TABLE}\s*\]\]", re.MULTILINE)


class RulesError(ValueError):
    """A rule, or a file of rules, is not a legal one."""


class RuleConflictError(ValueError):
    """Two rules of one level decide one node differently."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """What becomes of the nodes that meet all of its criteria; an empty criterion is met by all.

    Attributes:
        action: "keep_float32" (the node stays as it is), or the list that the node counts as
            being on: "allow", "deny", "infer" or "clear". Only "keep_float32" and "deny" hold for
            what brings values into the graph or has a state, and for what only hands values on
            unless `op` is given.
        node: a regular expression that matches the whole name of a node. That of "enc/att/.*"
            matches the gradient "gradient_tape/enc/att/MatMul/MatMul" too: before, the part of the
            name that says that it is a gradient is left out.
        op: an op type.
        attr: an attribute of the node, `T` or `data_format`; goes with `value`.
        value: what the attribute must be: a dtype by its name, a string, a number, a truth value,
            or a tuple of these.
        function: a regular expression that matches the whole name of the function that the node
            is in, or of the one that is planned with it; also without the number at the end and
            the "__inference_" before it.
        source: the Python file, or file and line, that made the node: "model.py", "model.py:42".
            Where no Python code of this process made the graph, none is met.
        layer: a part of the node's name between slashes, or several: "encoder/attention". A number
            behind each does not count: Keras traces the layer "head" as "head", "head_1" and so on.
        why: the reason, for people.
        origin: who made it, for people: a file, or a line of Python.
        level: how strong it is: a rule beats those of the levels before it in `LEVELS`.

    Raises:
        RulesError: a value is not a legal one, or there is no criterion.
    """

    action: RuleAction
    node: str = ""
    op: str = ""
    attr: str = ""
    value: Value = ""
    function: str = ""
    source: str = ""
    layer: str = ""
    why: str = ""
    origin: str = ""
    level: RuleLevel = "call"

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", _frozen(self.value))
        for name, legal in (("action", ACTIONS), ("level", LEVELS)):
            if getattr(self, name) not in legal:
                raise RulesError(f"`{name}` {_must_be_one_of(legal, getattr(self, name))}")
        for name in self.__dataclass_fields__.keys() - {"value"}:
            if not isinstance(getattr(self, name), str):
                raise RulesError(
                    f"`{name}` must be a string. Received: {name}={getattr(self, name)!r}."
                )
        for name in ("node", "function"):
            _require_pattern(name, getattr(self, name))
        if bool(self.attr) != (self.value != ""):
            raise RulesError(
                "`attr` and `value` go together. "
                f"Received: attr={self.attr!r}, value={self.value!r}."
            )
        if self.level != "scope" and not any(getattr(self, name) for name in CRITERIA):
            raise RulesError(
                "A rule without a criterion would hold for every node. Give at least one of "
                f"{', '.join(CRITERIA)}; node='.*' is all nodes."
            )

    def __str__(self) -> str:
        return f"{self.origin or 'a rule'}: {repr(self.why) if self.why else self.criteria}"

    @property
    def criteria(self) -> str:
        """Which nodes it is about, for people."""
        given = (name for name in CRITERIA if getattr(self, name) != "")
        return ", ".join(f"{name} = {getattr(self, name)!r}" for name in given)

    @property
    def keeps(self) -> bool:
        """Whether its nodes stay float32, so that no unit may replace them."""
        return self.action in ("keep_float32", "deny")

    @property
    def literal(self) -> str | None:
        """The one name that `node` matches; None for none or where it is a proper expression."""
        return self.node if self.node and not _SPECIAL.search(self.node) else None

    @functools.cached_property
    def node_pattern(self) -> re.Pattern[str]:
        """`node`, compiled."""
        return re.compile(self.node)

    @functools.cached_property
    def layer_pattern(self) -> re.Pattern[str]:
        """What is found in the names of a layer's nodes."""
        parts = "/".join(
            rf"{re.escape(part)}(?:_\d+)?" for part in self.layer.strip("/").split("/")
        )
        return re.compile(f"(?:^|/){parts}(?:/|$)")

    @functools.cached_property
    def function_pattern(self) -> re.Pattern[str]:
        """`function`, compiled."""
        return re.compile(self.function)

    def to_dict(self) -> dict[str, Any]:
        """The fields that are not empty, as JSON-ready values that the class takes again."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value != ""}


def load_rules(path: str | Path, level: RuleLevel = "file") -> tuple[Rule, ...]:
    """Reads a TOML file of rules, one table `[[rule]]` each.

        [[rule]]
        why = "the softmax overflows"
        action = "keep_float32"
        node = "encoder/attention/.*"

    Args:
        path: the file.
        level: the level of its rules.

    Returns:
        The rules, in order. Their `origin` is the file's name and the number of the table.

    Raises:
        RulesError: it cannot be read, or is no such file; the message names file, table, key,
            value and the legal values.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RulesError(f"The rules file {str(path)!r} cannot be read: {error}.") from error
    unknown = sorted(content.keys() - {_TABLE})
    tables = content.get(_TABLE, [])
    if unknown or not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise RulesError(
            f"The rules file {str(path)!r} must have tables [[{_TABLE}]] and nothing else. "
            f"Received the keys: {', '.join(content) or 'none'}."
        )
    headers = [1 + text.count("\n", 0, found.start()) for found in _HEADER.finditer(text)]
    known_lines = headers if len(headers) == len(tables) else []
    rules = []
    for number, table in enumerate(tables, 1):
        line = f", line {known_lines[number - 1]}" if known_lines else ""
        try:
            rules.append(_rule_of(table, f"{path.name} [{number}]", level))
        except RulesError as error:
            raise RulesError(
                f"{str(path)!r}{line}, table [[{_TABLE}]] number {number}: {error}"
            ) from error
    return tuple(rules)


def format_rules(rules: Iterable[Rule]) -> str:
    """The text of a file that `load_rules` reads as these rules, but for origins and levels."""
    return "\n".join(f"[[{_TABLE}]]\n" + "".join(_lines_of(rule)) for rule in rules)


def _lines_of(rule: Rule) -> Iterator[str]:
    for key in _KEYS:
        value = getattr(rule, key)
        if value != "":
            # What JSON makes of strings, numbers and lists, TOML reads as well, but for escapes in
            # two halves.
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}\n"


def _rule_of(table: Mapping[str, Any], origin: str, level: RuleLevel) -> Rule:
    for key, value in table.items():
        if key not in _KEYS:
            near = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise RulesError(f"the key {_must_be_one_of(_KEYS, key)}{hint}")
        if value == "" and key != "value":
            raise RulesError(f"`{key}` is empty. Leave the key out, or give it a value.")
    if "action" not in table:
        raise RulesError(f"`action` {_must_be_one_of(ACTIONS, None)}")
    return Rule(**table, origin=origin, level=level)


def _require_pattern(name: str, text: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        raise RulesError(
            f"`{name}` must be a regular expression, and {error}. Received: {name}={text!r}."
        ) from error


def _must_be_one_of(legal: Iterable[str], received: object) -> str:
    choices = ", ".join(map(repr, legal))
    return f"must be one of {choices}. Received: {received!r}."


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if not isinstance(value, (str, int, float, bool)):
        raise RulesError(
            "`value` must be a string, a number, a truth value or a list of these. "
            f"Received: value={value!r}."
        )
    return value
