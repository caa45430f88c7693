"""The events of loss scales: which there are, and that they are in the trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tf_amp.loss_scale import DynamicLossScale, LossScaleManager
from tf_amp.loss_scale.floor import SkippedStep
from tf_amp.loss_scale.history import History, listen
from tf_amp.loss_scale.rule import LossScaleState

RULE = DynamicLossScale(initial=8.0, growth_interval=2)


@pytest.fixture
def events() -> Iterator[list[dict[str, Any]]]:
    found: list[dict[str, Any]] = []
    listen(found.append)
    yield found
    listen(None)


def brief(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(e[k] for k in ("event", "step", "from", "to", "steps")) for e in events]


def run(steps: list[bool], looks: set[int], events: list[dict[str, Any]]) -> LossScaleState:
    """Steps as the host sees them: the skipped ones, and the state where it looks."""
    history, state = History("loss_scale", RULE.initial_state()), RULE.initial_state()
    for number, finite in enumerate(steps):
        before = state.scale
        state = RULE.update(state, finite)
        if not finite:
            history.note_skip(SkippedStep(number, before, state, None))
        if number in looks:
            history.note(number, state)
    history.note(len(steps), state)
    return state


def test_what_is_told(events: list[dict[str, Any]]) -> None:
    run([True, True, True, False, True, True, True], {4}, events)
    assert brief(events) == [
        # It grew at step 1, and nobody looked before a step was skipped.
        ("moved", 3, 8.0, 16.0, None),
        ("skipped", 3, 16.0, 8.0, 1),
        ("moved", 7, 8.0, 16.0, None),
    ]
    assert events[1]["skipped_steps"] == events[1]["skipped_in_a_row"] == 1


def test_skips_that_nobody_saw_are_one_event(events: list[dict[str, Any]]) -> None:
    """As in steps that XLA compiled; the same look twice tells nothing new."""
    history = History("loss_scale", RULE.initial_state())
    for _ in range(2):
        history.note_skip(
            SkippedStep(9, None, LossScaleState(2.0, 0, 2, 1), ("dense/kernel", "inf"))
        )
    assert brief(events) == [("skipped", 9, 8.0, 2.0, 2)]
    assert (events[0]["gradient"], events[0]["kind"]) == ("dense/kernel", "inf")


def test_after_a_restore_of_fewer_skipped_steps_one_is_one(events: list[dict[str, Any]]) -> None:
    history = History("loss_scale", RULE.initial_state())
    for step, before, skipped in ((7, 8.0, 3), (2, 8.0, 1), (3, 4.0, 2)):
        history.note_skip(SkippedStep(step, before, LossScaleState(before / 2, 0, skipped), None))
    assert [event["steps"] for event in events if event["event"] == "skipped"] == [3, 1, 1]


@given(steps=st.lists(st.booleans(), max_size=40), looks=st.sets(st.integers(0, 40)))
def test_events_lead_from_one_to_the_next(steps: list[bool], looks: set[int]) -> None:
    events: list[dict[str, Any]] = []
    listen(events.append)
    state = run(steps, looks, events)
    listen(None)
    scales = [RULE.initial, *(event["to"] for event in events)]
    assert [event["from"] for event in events] == scales[:-1]
    assert scales[-1] == state.scale
    assert sum(event["steps"] or 0 for event in events) == state.skipped_steps == steps.count(False)
    assert all(e["from"] != e["to"] or e["event"] == "skipped" for e in events)


def test_a_manager_tells(events: list[dict[str, Any]]) -> None:
    manager = LossScaleManager(RULE, name="mine")
    for finite in (True, True, False):
        manager.assign(manager.plan(tf.constant(finite)))
        manager.check(step=5)
    assert brief(events) == [("moved", 5, 8.0, 16.0, None), ("skipped", 5, 16.0, 8.0, 1)]
    assert {event["name"] for event in events} == {"mine"}


def test_a_trace_has_them(run_forked, tmp_path: Path) -> None:
    run_forked(
        """
        import numpy as np, sys
        import tensorflow as tf, keras
        import tf_amp
        tf_amp.enable_mixed_precision_graph_rewrite()
        keras.utils.set_random_seed(0)
        x = np.ones((40, 4), np.float32)
        x[21] = np.inf
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(x, x[:, :2] * 0, batch_size=8, verbose=0, shuffle=False)
        tf_amp.disable_mixed_precision_graph_rewrite()
        """,
        {
            "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LOG_PATH": str(tmp_path),
            "TF_ENABLE_AUTO_MIXED_PRECISION_LOSS_SCALING": "1",
            "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_IGNORE_PERFORMANCE": "1",
        },
    )
    (file,) = tmp_path.glob("*/loss_scale.jsonl")
    (event,) = map(json.loads, file.read_text().splitlines())
    assert brief([event]) == [("skipped", 2, 32768.0, 16384.0, 1)]
    assert event["gradient"].endswith("dense/kernel")
    status = json.loads(file.with_name("status.json").read_text())
    assert status["loss_scale"]["skipped_steps"] == 1
