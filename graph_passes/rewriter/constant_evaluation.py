"""The values of what few ops make of constants, before the graph runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tensorflow.core.framework import node_def_pb2

from graph_passes.rewriter.matcher import Matcher, NoMatchError

_Values = Sequence[np.ndarray]


def _squeeze(node: node_def_pb2.NodeDef, values: _Values) -> np.ndarray:
    axes = tuple(node.attr["squeeze_dims"].list.i)
    return np.squeeze(values[0], axes or None)


def _elementwise(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda _, values: function(*values)


_FUNCTIONS: dict[str, Callable[[node_def_pb2.NodeDef, _Values], np.ndarray]] = {
    "Identity": lambda _, values: values[0],
    "Reshape": lambda _, values: values[0].reshape(values[1].ravel().tolist()),
    "ExpandDims": lambda _, values: np.expand_dims(values[0], int(values[1].item())),
    "Squeeze": _squeeze,
    "AddV2": _elementwise(np.add),
    "Add": _elementwise(np.add),
    "Sub": _elementwise(np.subtract),
    "Mul": _elementwise(np.multiply),
    "Neg": _elementwise(np.negative),
    "Rsqrt": _elementwise(lambda value: (1 / np.sqrt(value)).astype(value.dtype)),
}


class ConstantEvaluator:
    """Evaluates subgraphs of constants, each node once."""

    def __init__(self, matcher: Matcher) -> None:
        self._m = matcher
        self._values: dict[int, np.ndarray] = {}

    def value(self, tensor: str) -> np.ndarray:
        """The value of a tensor.

        Raises:
            NoMatchError: it is made of something other than constants, or cannot be computed.
        """
        m, values = self._m, self._values
        pending = [m.maker(tensor)]
        while pending:
            number = pending[-1]
            if number in values:
                pending.pop()
                continue
            op = m.op(number)
            if op == "Const":
                values[number] = m.constant(m.output(number))
                continue
            name = m.node(number).name
            if op not in _FUNCTIONS:
                raise NoMatchError(f"{name!r} is {op}, whose value is not known")
            makers = m.makers(number)
            missing = [maker for maker in makers if maker not in values]
            if missing:
                pending.extend(missing)
                continue
            try:
                with np.errstate(all="ignore"):
                    read = [values[maker] for maker in makers]
                    values[number] = _FUNCTIONS[op](m.node(number), read)
            except ValueError as error:
                raise NoMatchError(f"{name!r} cannot be evaluated: {error}") from None
        return values[m.maker(tensor)]
