"""Parity mode equals the oracle on random graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from oracle import Oracle
from parity import assert_parity
from random_graphs import RandomGraph, random_graphs

on_random_graphs = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@on_random_graphs
@given(random_graphs(free_casts=True))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_random_graph(
    start_oracle: Callable[[str], Oracle], dtype: str, example: RandomGraph
) -> None:
    assert_parity(start_oracle(dtype), example.graph_def, example.preserve)
