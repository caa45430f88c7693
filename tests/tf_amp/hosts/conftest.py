"""Costs by which the number of rows decides where a product runs."""

from __future__ import annotations

import dataclasses

import pytest

from graph_passes.policy.cost_table import Curve, OpCost
from graph_passes.policy.cost_table_files import format_table, shipped_table

# Of products 64 wide: bfloat16 takes four times as long for 32 rows, and a quarter for 2,048.
FLOPS = (2 * 32 * 64 * 64, 2 * 2048 * 64 * 64)
PRODUCT = OpCost("flops", Curve(FLOPS, (1e-4, 4e-2)), Curve(FLOPS, (4e-4, 1e-2)))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    shipped = shipped_table("cpu-avx512_bf16", "bfloat16")
    assert shipped is not None
    path = tmp_path_factory.mktemp("costs") / "costs.toml"
    path.write_text(format_table(dataclasses.replace(shipped, rows=(("MatMul", PRODUCT),))))
    return str(path)
