"""Scopes for code, seen on the functions that run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from environments import RunPython

Facts = dict[str, dict[str, Any]]
FLOAT, BFLOAT16 = 1, 14


def facts_of(run_python: RunPython, call: str) -> Facts:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    done = run_python(f"{code}import scope_cases\nscope_cases.{call}")
    found = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("@@")]
    return {facts["name"]: facts for facts in found}


@pytest.fixture(scope="module")
def facts(run_forked: RunPython) -> Facts:
    return facts_of(run_forked, "main()")


@pytest.fixture(scope="module")
def off(run_forked: RunPython) -> Facts:
    return facts_of(run_forked, "off()")


@pytest.mark.parametrize(
    ("name", "marked", "others"),
    [
        ("plain", 1, 2),
        ("loop", 1, 2),
        ("branch", 2, 2),
        ("inside_a_branch", 2, 2),
        ("called", 1, 2),
        ("only_called", 2, 0),
        ("gradient of plain", 3, 4),
        ("gradient of loop", 3, 4),
        ("gradient of branch", 6, 4),
        ("gradient of inside_a_branch", 6, 4),
        ("gradient of called", 3, 4),
        ("gradient of only_called", 6, 0),
        ("gradient of defines_its_gradient", 3, 4),
        ("for_all_rows", 2, 2),
        ("gradient of for_all_rows", 4, 4),
        ("XLA", 1, 2),
        ("XLA, gradient of a loop", 3, 4),
        ("decorator", 1, 1),
        ("traced in a scope", 3, 0),
        ("threads", 0, 1),
    ],
)
def test_products_in_a_scope_stay_float32(
    facts: Facts, name: str, marked: int, others: int
) -> None:
    found = facts[name]
    assert found["marked"] == [FLOAT] * marked
    assert found["others"] == [BFLOAT16] * others
    assert found.get("error", 0) < 0.1


def test_inner_scope_wins_and_says_where_it_is(facts: Facts) -> None:
    assert facts["nested"]["types"] == {"MatMul": BFLOAT16, "Exp": BFLOAT16}
    assert facts["nested"]["marks"] == ["", "this one may"]
    for line in facts["nested"]["lines"]:
        assert "scope_cases.py:" in line


def test_layer_of_a_keras_model_keeps_itself_and_its_gradients(facts: Facts) -> None:
    assert facts["layer"]["head"] == [FLOAT]
    assert facts["layer"]["others"] == [BFLOAT16]
    assert facts["layer"]["count"] == 3


def test_scope_does_nothing_while_amp_is_off(off: Facts) -> None:
    assert off["off"]["marked"] == [FLOAT]
    assert off["off"]["others"] == [FLOAT] * 2
    assert off["off"]["error"] < 1e-5


def test_mark_travels_in_a_graph_of_tensorflow_1(off: Facts) -> None:
    found = off["offline"]
    assert found["failure"] is None
    kept = {name for name, dtype in found["types"].items() if dtype == FLOAT}
    assert kept == {
        "kept",
        "gradients/kept_grad/MatMul",
        "gradients/kept_grad/MatMul_1",
    }
    assert len(found["types"]) == 9
    assert found["reason"].startswith("kept by a rule (")
    assert "scope_cases.py:" in found["reason"]
    assert found["reason"].endswith(": 'why not')")


@pytest.mark.parametrize("model", ["once", "again"])
def test_mark_is_in_a_saved_model(off: Facts, model: str) -> None:
    assert off[model]["kinds"] == ["converted", "converted", "kept"]


def test_mark_reaches_the_pass_through_grappler(run_forked: RunPython) -> None:
    types = facts_of(run_forked, "session()")["session"]["types"]
    kept = {name for name, dtype in types.items() if dtype == "float32"}
    assert {"kept" in name for name in kept} == {True}
    assert len(kept) == 3
    assert len(types) == 8


@pytest.mark.parametrize("name", ["keep_float32", "allow"])
def test_names_are_there_without_tensorflow(run_python: RunPython, name: str) -> None:
    code = f"import sys, tf_amp; assert {name!r} in dir(tf_amp); print('tensorflow' in sys.modules)"
    assert run_python(code).stdout.strip() == "False"


def test_a_tensorflow_without_attribute_scopes_is_named_once(run_forked: RunPython) -> None:
    done = run_forked("""
        import tensorflow as tf, tf_amp
        from tensorflow.python.framework import ops

        del ops.Graph._attr_scope

        @tf.function
        def double(x):
            for _ in range(2):
                with tf_amp.keep_float32("why"):
                    x = x + x
            return x

        print(double(tf.ones(())).numpy())
    """)
    assert done.stdout.strip() == "4.0"
    assert done.stderr.count("tf_amp.keep_float32 and tf_amp.allow do nothing") == 1
