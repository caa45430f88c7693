"""Whether two machines computed the same: short digests of arrays, and how far results differ."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

Digest = dict[str, Any]

_SAMPLES = 64
OUTPUT_TOLERANCE = {"float32": 2**-6, "float16": 2**-5, "bfloat16": 2**-4}
"""Relative error of an output between two devices, by the dtype of the products. A GPU may multiply
float32 in TF32, which has the 10 bits of float16."""
UPDATE_TOLERANCE = {"float32": 2**-4, "float16": 2**-3, "bfloat16": 2**-2}
"""The same for what a step adds to the variables: the median over the variables. Single ones may
differ without bound, where the true gradient is 0, as that of a bias before a normalization."""


def digest(array: np.ndarray) -> Digest:
    """A few hundred bytes that stand for an array: its norm and elements at fixed places."""
    wide = array.astype(np.float64).reshape(-1)
    places = np.linspace(0, max(0, wide.size - 1), min(wide.size, _SAMPLES)).astype(int)
    norm = float(np.linalg.norm(wide)) if wide.size else 0.0
    return {
        "shape": list(array.shape),
        "norm": norm,
        "sample": [float(f"{value:.7g}") for value in wide[places]],
    }


def error(reference: Digest, found: Digest) -> float:
    """The relative error of an array by its digest; infinite where it is not finite or not alike.

    The sample is judged by the typical size of the array's elements: one that is all but zero at
    the places looked at has no error of its own.
    """
    if reference["shape"] != found["shape"] or not np.isfinite(found["norm"]):
        return float("inf")
    wanted, given = np.array(reference["sample"]), np.array(found["sample"])
    if not wanted.size:
        return 0.0
    elements = max(1, int(np.prod(reference["shape"])))
    typical = reference["norm"] / np.sqrt(elements) * np.sqrt(wanted.size)
    scale = max(float(np.linalg.norm(wanted)), typical)
    difference = float(np.linalg.norm(given - wanted))
    norms = abs(found["norm"] - reference["norm"])
    if not scale:
        return float("inf") if difference or norms else 0.0
    return max(difference / scale, norms / reference["norm"])


def first_step(
    before: dict[str, np.ndarray], outputs: list[np.ndarray], after: dict[str, np.ndarray]
) -> dict[str, Any]:
    """What a first step gave, in the form that `differences` compares.

    Args:
        before: variable -> its value before the step.
        outputs: the results of the step.
        after: variable -> its new value, of those that the step assigned.
    """
    updates, exact = {}, {}
    for name, new in after.items():
        if new.dtype.kind in "iub":
            exact[name] = new.reshape(-1)[:8].tolist()
        elif new.size:
            updates[name] = digest(new.astype(np.float64) - before[name].astype(np.float64))
    return {
        "outputs": [digest(np.asarray(output)) for output in outputs],
        "updates": updates,
        "exact": exact,
    }


def differences(reference: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """How far the first step of a program is from a reference.

    Args:
        reference: `outputs` (digests, in order), `updates` (variable -> digest of what the step
            added) and `exact` (variable -> the new integers); see `first_step`.
        found: the same, of the run to judge. Variables that only one of them has do not count.

    Returns:
        `output` (the largest error), `update` (the median error; None without variables in
        common), `worst` (the five variables that differ most) and `unequal` (names of integers that
        differ).
    """
    pairs = zip(reference["outputs"], found["outputs"], strict=True)
    common = reference["updates"].keys() & found["updates"].keys()
    errors = {
        name: error(reference["updates"][name], found["updates"][name]) for name in sorted(common)
    }
    worst = sorted(errors, key=errors.__getitem__, reverse=True)[:5]
    exact = reference["exact"]
    return {
        "output": max((error(*pair) for pair in pairs), default=0.0),
        "update": statistics.median(errors.values()) if errors else None,
        "worst": {name: errors[name] for name in worst},
        "unequal": [n for n in sorted(exact) if found["exact"].get(n, exact[n]) != exact[n]],
    }


def complaint(
    difference: Mapping[str, Any],
    dtype: str,
    factor: float = 1.0,
    inherent: Mapping[str, Any] | None = None,
) -> str | None:
    """What is wrong with a run by its `differences`, None for nothing.

    Args:
        difference: made by `differences`.
        dtype: that of the products: "float32", "float16" or "bfloat16".
        factor: how many times the tolerances hold.
        inherent: the differences between the reference and that of float32. Two devices may be as
            far from each other as the dtype is from float32: in bfloat16 the gradients of an
            untrained ResNet50 on four images are all noise.
    """
    output, update = OUTPUT_TOLERANCE[dtype], UPDATE_TOLERANCE[dtype]
    if inherent is not None:
        output, update = max(output, inherent["output"]), max(update, inherent["update"] or 0.0)
    output, update = output * factor, update * factor
    if not difference["output"] <= output:
        return f"an output differs by {difference['output']:.2g}, more than {output:.2g}"
    if difference["update"] is not None and not difference["update"] <= update:
        return f"updates differ by {difference['update']:.2g} (median), more than {update:.2g}"
    if difference["unequal"]:
        return f"integers differ: {', '.join(difference['unequal'][:3])}"
    return None
