"""A cost table of three rows."""

from __future__ import annotations

from graph_passes.policy.cost_table import CostTable, Curve, OpCost

CURVE = Curve((1000, 100_000), (1e-6, 1e-4))
SMALL = CostTable(
    device_class="cpu-test",
    device="CPU",
    target_dtype="bfloat16",
    measured_on="nothing",
    to_low=CURVE,
    to_float32=Curve((1000, 100_000), (2e-6, 2e-4)),
    rows=(
        ("AddV2", OpCost("elements", CURVE, Curve((1000, 100_000), (2e-6, 5e-5)))),
        ("AddV2/broadcast", OpCost("elements", CURVE, Curve((1000, 100_000), (3e-6, 3e-4)))),
        ("MatMul", OpCost("flops", Curve((100,), (3e-6,)), Curve((100,), (1e-6,)))),
    ),
)
