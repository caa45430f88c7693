"""A planted fault is named first, on copies of all variables."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from environments import BFLOAT16, FLOAT16, RunPython

from tf_amp.diagnosis.recording import Record

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CASES = Path(__file__).with_name("diagnosis_cases.py")
CODE = f"""
import runpy
from tf_amp import autoload
autoload.activate()
runpy.run_path({str(CASES)!r}, run_name="__main__")
"""


@pytest.fixture(params=[FLOAT16, {}], ids=["on", "off"])
def case(request: pytest.FixtureRequest, run_forked: RunPython) -> Callable[..., dict[str, Any]]:
    def run(name: str, *arguments: str) -> dict[str, Any]:
        done = run_forked(CODE, request.param, args=(name, *arguments))
        return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]

    return run


def test_planted_fault(case: Callable[..., dict[str, Any]]) -> None:
    found = case("large", "12")
    assert re.fullmatch("block8/planted/MatMul(_[0-9]+)?", found["found"][0])
    line = 1 + next(
        n for n, text in enumerate(CASES.read_text().splitlines()) if "1e5 * tf.eye" in text
    )
    assert found["lines"][0].endswith(f"diagnosis_cases.py:{line}")
    assert found["finite"] and found["kept"]
    names = [rule["node"] for rule in tomllib.loads(found["rules"])["rule"]]
    assert all(map(re.fullmatch, names, found["found"]))


def test_one_of_several_workers_is_told_to_run_alone(case: Callable[..., dict[str, Any]]) -> None:
    assert "without TF_CONFIG" in case("worker")["told"]


def test_gradients_that_float16_flushes(case: Callable[..., dict[str, Any]]) -> None:
    found = case("gradients", "1024", "32768")
    assert found["scales"] == [1, 1024, 32768]
    # Of one variable the gradients are about 1e-10, of the other one 1e-1.
    assert [shares["w"] for shares in found["shares"]] == [1, 0, 0]
    assert [shares["v"] for shares in found["shares"]] == [0, 0, 0]
    assert len(set(found["best"])) == 1 and found["best"][0] > 2.0**10
    assert found["at_best"] == 0
    assert all(node.startswith("gradient_tape/MatMul") for node in found["nodes"])
    assert "w: 100.0% of 256 flushed to 0" in found["text"]
    assert "50.0% of what is not 0" in found["text"]


@pytest.mark.parametrize("library", ["keras", "tf_keras"])
def test_gradients_at_the_loss_scale_of_an_optimizer(
    case: Callable[..., dict[str, Any]], library: str
) -> None:
    if library == "tf_keras":
        pytest.importorskip("tf_keras")
    found = case("scaled", library)
    assert found["scale"] == 2.0**12
    assert len(found["variables"]) == 4
    assert all(v.startswith(("hidden/", "head/")) for v in found["variables"])
    assert found["largest"] == pytest.approx(found["right"], rel=1e-3)


@pytest.mark.parametrize(
    "name", ["sound", "drawn", "looped", "shared", "cancelled", "cancelled_sum"]
)
def test_sound_function(case: Callable[..., dict[str, Any]], name: str) -> None:
    found = case(name)
    assert found["found"] == 0
    assert found["tensors"] > 5
    assert "Nothing amiss" in found["text"]


def test_function_without_a_product(case: Callable[..., dict[str, Any]]) -> None:
    assert "Nothing is converted in it." in case("nothing")["text"]


def test_error_of_values_whose_squares_float32_does_not_hold() -> None:
    mask, right = (
        Record(("f", "node", 0), ("", 0), 0, size, size, np.full(4, size, np.float32))
        for size in (1.5e38, 3e38)
    )
    assert mask.error(right) == pytest.approx(0.5)


def test_error_that_jumps(case: Callable[..., dict[str, Any]]) -> None:
    assert case("jump")["error"] > 0.05


@pytest.mark.parametrize("name", ["not_ours", "not_of_a_unit"])
def test_what_no_conversion_made(case: Callable[..., dict[str, Any]], name: str) -> None:
    found = case(name)
    assert found["found"] == 0
    assert "in float32 too" in found["text"]


def test_iterators_are_not_moved(case: Callable[..., dict[str, Any]]) -> None:
    assert "takes its data from an iterator" in case("iterator")["said"]


def test_callback_in_fit(run_forked: RunPython) -> None:
    done = run_forked(CODE, FLOAT16, args=("fit",))
    found = json.loads(done.stdout.splitlines()[-1])
    assert done.stderr.count("skipped so far") == 1  # that of training
    assert found["told"] == 1
    assert "planted" in found["nodes"][0]
    assert found["epochs"] == 1
    assert found["released"]
    # Before the step that was skipped, it was the first of the dynamic loss scale.
    assert found["scale"] == 2.0**15
    assert {"dense/kernel", "planted/variable", "dense_1/bias"} <= set(found["gradients"])


def test_callback_where_a_gradient_broke_the_weights(run_forked: RunPython) -> None:
    done = run_forked(CODE, BFLOAT16, args=("fit_gradient",))
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["nodes"] and all("gradient_tape" in node for node in found["nodes"])
    assert found["exact"]
    assert "no conversion" not in found["again"]
    assert re.search("which an earlier step made: .*kernel", found["again"])
