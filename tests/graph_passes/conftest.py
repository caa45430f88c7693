"""Fixtures of the tests of the pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import tensorflow as tf
from cpu_units import HAS_BFLOAT16_UNITS, NO_BFLOAT16_UNITS
from graph_diff import retyped
from graph_text import graph
from oracle import MODES, Oracle, meta_graph


@pytest.fixture(autouse=True)
def failed_searches() -> Iterator[list[str]]:
    """What was said of faults in searches for units, which cost no graph; a test that provokes one
    clears the list."""
    failed: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: failed.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("graph_passes.rewriter.editor")
    logger.addHandler(handler)
    yield failed
    logger.removeHandler(handler)
    assert not failed


@pytest.fixture(scope="session")
def start_oracle() -> Iterator[Callable[[str], Oracle]]:
    """Gives the oracle of a mode, by target dtype; one process a mode for the whole run."""
    started: dict[str, Oracle] = {}
    idle: set[str] = set()

    def start(target_dtype: str) -> Oracle:
        if not tf.__version__.startswith("2.21."):
            pytest.skip("the lists of parity mode are those of TensorFlow 2.21")
        if target_dtype not in started:
            oracle = started[target_dtype] = Oracle(MODES[target_dtype])
            probe = graph("x = Const(0.5, [8, 8])\ny = MatMul(x, x)\nz = Identity(y)")
            if not retyped(probe, oracle.rewrite(meta_graph(probe, ["z"]))):
                idle.add(target_dtype)
        if target_dtype in idle:
            message = f"TensorFlow's {target_dtype} pass converts nothing on this machine"
            if target_dtype == "bfloat16" and not HAS_BFLOAT16_UNITS:
                pytest.skip(f"{message}: {NO_BFLOAT16_UNITS}")
            pytest.fail(message)
        return started[target_dtype]

    yield start
    for oracle in started.values():
        oracle.close()


@pytest.fixture(params=sorted(MODES))
def oracle(request: pytest.FixtureRequest, start_oracle: Callable[[str], Oracle]) -> Oracle:
    """The oracle, once for each mode."""
    return start_oracle(request.param)
