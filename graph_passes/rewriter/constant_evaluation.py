"""The values of what few ops make of constants, before the graph runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tensorflow.python.framework import dtypes

from graph_passes.rewriter.matcher import Matcher

_Values = Sequence[np.ndarray]


def _of_values(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    return lambda _, __, values: function(*values)


_FUNCTIONS: dict[str, Callable[[Matcher, int, _Values], np.ndarray]] = {
    "Const": lambda m, number, _: m.constant(m.output(number)),
    "Identity": _of_values(lambda value: value),
    "Reshape": _of_values(lambda value, sizes: value.reshape(sizes.ravel().tolist())),
    "ExpandDims": _of_values(lambda value, axis: np.expand_dims(value, int(axis.item()))),
    "Squeeze": lambda m, number, values: np.squeeze(
        values[0], tuple(m.attr(number, "squeeze_dims").list.i) or None
    ),
    "Pack": lambda m, number, values: np.stack(values, m.attr(number, "axis").i),
    "Cast": lambda m, number, values: values[0].astype(
        dtypes.as_dtype(m.attr(number, "DstT").type).as_numpy_dtype
    ),
    "AddV2": _of_values(np.add),
    "Add": _of_values(np.add),
    "Sub": _of_values(np.subtract),
    "Mul": _of_values(np.multiply),
    "Neg": _of_values(np.negative),
    "Rsqrt": _of_values(lambda value: (1 / np.sqrt(value)).astype(value.dtype)),
}


def evaluated(m: Matcher, tensor: str) -> np.ndarray | None:
    """The value of a tensor; None where other ops or no constants make it, or it has none."""
    values: dict[int, np.ndarray] = {}
    pending = [m.maker(tensor)]
    while pending:
        number = pending[-1]
        function = _FUNCTIONS.get(m.op(number))
        if function is None:
            return None
        makers = m.makers(number)
        missing = [maker for maker in makers if maker not in values]
        if missing:
            pending.extend(missing)
            continue
        try:
            with np.errstate(all="ignore"):
                values[number] = function(m, number, [values[maker] for maker in makers])
        except ValueError:
            return None
        pending.pop()
    return values[m.maker(tensor)]
