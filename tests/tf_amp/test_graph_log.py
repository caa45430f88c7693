"""Which lines are INFO."""

from __future__ import annotations

import gc
import logging
from collections import Counter

import pytest

from graph_passes import Reason
from tf_amp.graph_log import GraphLog
from tf_amp.tally import NodeCounts

MATMUL = Counter({("MatMul", Reason.ALLOW_LIST): 1})
COUNTS = NodeCounts(total=10, converted=4, casts=2, products=MATMUL)


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "tf_amp")


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == level]


def test_top_level_graph_is_one_info_line(caplog: pytest.LogCaptureFixture) -> None:
    log = GraphLog("bfloat16")
    log.say("body", COUNTS, announce=False)
    log.say("step", COUNTS, announce=True)
    assert lines(caplog, logging.INFO) == ["step: MatMul 1 of 1 in bfloat16, 2 casts"]
    assert len(lines(caplog, logging.DEBUG)) == 1


def test_graph_without_products_is_debug(caplog: pytest.LogCaptureFixture) -> None:
    GraphLog("bfloat16").say("step", NodeCounts(total=10), announce=True)
    assert not lines(caplog, logging.INFO)


def test_products_that_stay_float32_are_said_whatever_was_converted_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = GraphLog("bfloat16")
    log.say("step", COUNTS, announce=True)
    log.say(
        "other", NodeCounts(products=Counter({("MatMul", Reason.SLOWER_HERE): 2})), announce=True
    )
    assert lines(caplog, logging.INFO)[1:] == [
        "other: MatMul 0 of 2 in bfloat16, 0 casts; 2 MatMul stay float32: slower here"
    ]


def test_the_same_line_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    log = GraphLog("bfloat16")
    for _ in range(3):
        log.say("step", COUNTS, announce=True)
    assert len(lines(caplog, logging.INFO)) == 1


def test_a_function_traced_over_and_over_is_capped(caplog: pytest.LogCaptureFixture) -> None:
    log = GraphLog("bfloat16")
    for total in range(100):
        name = f"step, sizes near {total}" if total % 2 else "step"
        log.say(name, NodeCounts(converted=total + 1), announce=True)
    said = lines(caplog, logging.INFO)
    assert len(said) == 11
    assert "DEBUG" in said[-1]
    log.say("other", COUNTS, announce=True)
    assert lines(caplog, logging.INFO)[-1].startswith("other: ")


def test_what_is_not_said_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "tf_amp")  # what is logged is kept by the test
    log = GraphLog("bfloat16")
    log.say("step", COUNTS, announce=False)
    gc.collect()
    known = len(gc.get_objects())
    for number in range(100):
        log.say(f"part_{number}", COUNTS, announce=False)
    gc.collect()
    assert len(gc.get_objects()) < known + 50
