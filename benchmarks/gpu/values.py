"""Values of parameters by a rule, so that a few bytes of JSON stand for them on two machines."""

from __future__ import annotations

import zlib
from typing import Any

import ml_dtypes
import numpy as np

MOST_VALUES = 64
"""From so many elements on, floats that differ are replaced by random ones of the same spread."""
_MOST_INTEGERS = 1 << 16

Rule = dict[str, Any]
"""One of ``{"fill": number}``, ``{"values": list}``, ``{"normal": [mean, deviation]}``."""


def dtype_named(name: str) -> np.dtype:
    """A dtype of numpy or of ml_dtypes, by its name."""
    return np.dtype(getattr(ml_dtypes, name, name))


def rule_for(value: np.ndarray) -> Rule:
    """The rule whose values stand for an array.

    Equal elements and short arrays come back as they are. What else is floating point comes back as
    normal random numbers of the same mean and deviation: an initializer's work, not a trained
    weight.

    Raises:
        ValueError: the array is long and holds integers that differ, which no rule can stand for.
    """
    flat = value.reshape(-1)
    if flat.size and (flat == flat[0]).all():
        return {"fill": flat[0].item()}
    is_float = value.dtype.kind not in "iub"
    if flat.size <= (MOST_VALUES if is_float else _MOST_INTEGERS):
        return {"values": flat.tolist()}
    if not is_float:
        raise ValueError(
            f"A parameter of {flat.size} different {value.dtype} values cannot be exported: at "
            f"most {_MOST_INTEGERS} travel as they are. Compute them within the function."
        )
    wide = flat.astype(np.float64)
    return {"normal": [float(wide.mean()), float(wide.std())]}


def make(name: str, shape: list[int], dtype: str, rule: Rule) -> np.ndarray:
    """Makes the values of a parameter: the same ones on every machine.

    Args:
        name: seeds the random numbers, so that a weight is the same in every program that has it.
        shape: of the array.
        dtype: its name.
        rule: made by `rule_for`.
    """
    target = dtype_named(dtype)
    if "fill" in rule:
        return np.full(shape, rule["fill"], target)
    if "values" in rule:
        return np.array(rule["values"], target).reshape(shape)
    mean, deviation = rule["normal"]
    random = np.random.default_rng(zlib.crc32(name.encode()))
    values = random.standard_normal(shape, np.float32)
    values *= np.float32(deviation)
    values += np.float32(mean)
    return values.astype(target, copy=False)
