"""Exact comparisons: what has one origin is compared as rounded as either operand was."""

from __future__ import annotations

import pytest
from graph_text import graph
from parity import converted

from graph_passes import PrecisionConfig, rewrite_graph_def

CONFIG = PrecisionConfig(device="CPU", disabled_rules=frozenset(("cast-cut",)))
# The maximum goes low with the products; what is kept of it, and what it was picked from, do not.
KEPT = """
    x = Placeholder(dtype=float32)
    product = MatMul(x, x)
    exp = Exp(product)
    axes = Const([0])
    most = Max(exp, axes, keep_dims=True)
    again = MatMul(most, product)
    read = Identity(again)
    some = OptionalFromValue(most)
    branches = _SwitchN(exp, 0, num_outs=2)
    got = OptionalGetValue(some, output_types=[float32], output_shapes=[None])
"""


@pytest.mark.parametrize(
    ("comparison", "goes_low"),
    [
        ("Equal(got, exp)", True),
        ("NotEqual(exp, got)", True),
        ("GreaterEqual(exp, got)", True),
        ("LessEqual(got, exp)", True),
        ("Equal(got, branches[1])", True),  # a Case that TensorFlow has lowered
        ("Greater(exp, got)", True),  # none is beyond the maximum
        ("Less(exp, got)", True),  # as what is masked that is not among the first
        ("Equal(got, x)", False),  # of another origin
        ("Equal(exp, x)", False),
        ("Equal(exp, exp)", False),  # never rounded
    ],
)
def test_a_maximum_is_looked_for_in_what_it_was_picked_from(
    comparison: str, goes_low: bool
) -> None:
    before = graph(KEPT + f"    found = {comparison}\n    seen = Identity(found)\n")
    result = rewrite_graph_def(before, CONFIG, preserve=("read", "seen"))
    assert result.failure is None
    assert "most" in converted(before, result.graph_def)
    assert ("found" in converted(before, result.graph_def)) == goes_low
    off = CONFIG.disabled_rules | {"comparison"}
    without = rewrite_graph_def(
        before, PrecisionConfig(device="CPU", disabled_rules=off), preserve=("read", "seen")
    )
    assert "found" not in converted(before, without.graph_def)
