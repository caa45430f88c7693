"""Conditions on figures, such as ``casts>200 or product_share<0.9``, for gates in CI."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LEGAL = "names of figures, numbers, + - * /, comparisons, and, or, not, and parentheses"
_LONGEST = 1000


class ConditionError(ValueError):
    """A condition is none."""


class Condition:
    """A condition that was read, of names of figures and numbers alone; nothing else is run.

    Args:
        text: what is written, in Python's syntax.
        names: the figures that it may name.

    Raises:
        ConditionError: it is no such condition.
    """

    def __init__(self, text: str, names: tuple[str, ...]) -> None:
        self._text, self._names = text, names
        try:
            if len(text) > _LONGEST:
                raise SyntaxError(f"it has more than {_LONGEST} characters")
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self._error(f"it cannot be read ({error})") from error
        if not self._is_condition(self._tree):
            raise self._error("it compares nothing")
        self.holds(dict.fromkeys(names, 1))

    def holds(self, figures: Mapping[str, float]) -> bool:
        """Whether it holds for figures, given by name; dividing by 0 gives 0."""
        return bool(self._value(self._tree, figures))

    def _is_condition(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BoolOp):
            return all(map(self._is_condition, node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._is_condition(node.operand)
        return isinstance(node, ast.Compare)

    def _value(self, node: ast.expr, figures: Mapping[str, float]) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return node.value
        if isinstance(node, ast.Name) and node.id in figures:
            return figures[node.id]
        if isinstance(node, ast.BoolOp):
            values = [self._value(value, figures) for value in node.values]
            return all(values) if isinstance(node.op, ast.And) else any(values)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not self._value(node.operand, figures)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._value(node.operand, figures)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self._value(node.left, figures), self._value(node.right, figures)
            is_undefined = isinstance(node.op, ast.Div) and not right
            return 0 if is_undefined else _OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.Compare) and all(type(op) in _OPERATORS for op in node.ops):
            values = [self._value(value, figures) for value in (node.left, *node.comparators)]
            pairs = zip(node.ops, values, values[1:], strict=False)
            return all(_OPERATORS[type(op)](left, right) for op, left, right in pairs)
        raise self._error(f"{ast.unparse(node)!r} is none of these")

    def _error(self, why: str) -> ConditionError:
        return ConditionError(
            f"{self._text!r} is no condition: {why}. Legal: {_LEGAL}; "
            f"the figures are {', '.join(self._names)}."
        )
