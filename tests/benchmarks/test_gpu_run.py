"""A function exported with TensorFlow and run with jaxlib alone, and what the runner must find."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.program import Program, read_programs
from jaxlib_process import needs_jaxlib, run_command


def _training_step(kernel: Any, count: Any, offset: Any, dtype: Any) -> Any:
    import tensorflow as tf

    @tf.function(jit_compile=True, autograph=False)
    def step(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            y = tf.cast(tf.cast(x, dtype) @ tf.cast(kernel, dtype), tf.float32) + offset
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, y))
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
        count.assign_add(1)
        return loss

    return step


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training step of a linear model, in float32 and with a product in bfloat16."""
    import tensorflow as tf
    from gpu.export_worker import export_function

    folder = tmp_path_factory.mktemp("programs")
    random = np.random.default_rng(0)
    x = tf.constant(random.standard_normal((8, 32)), tf.float32)
    labels = tf.constant(random.integers(4, size=8), tf.int32)
    offset = tf.constant(random.standard_normal((8, 16)), tf.float32)  # no variable: captured
    weights = random.standard_normal((32, 16)).astype(np.float32)
    for variant, dtype in (("float32", tf.float32), ("keras_policy_bfloat16", tf.bfloat16)):
        kernel = tf.Variable(weights)
        count = tf.Variable(3, dtype=tf.int64)

        step = _training_step(kernel, count, offset, dtype)
        known = {"kernel": kernel, "count": count}
        fields, hlo = export_function(step, [x, labels], known, runs=True)
        Program("linear", "training", variant, **fields).write(folder, hlo)
    return folder


def _run(folder: Path, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    rounds = ("--rounds", "3", "--turn-s", "0.001")
    return run_command("run", folder, "--output", output, *rounds, *more)


def test_a_program_is_what_was_written(exported: Path) -> None:
    float32, low = read_programs(exported)
    assert (float32.name, low.dtype) == ("linear.training.float32", "bfloat16")
    assert {p.name for p in float32.parameters} == {
        "input0",
        "input1",
        "kernel",
        "count",
        "constant0",
    }
    assert float32.reference is not None
    assert float32.reference["updates"].keys() == {"kernel"}
    assert float32.reference["exact"] == {"count": [4]}
    assert float32.hlo(exported)


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"python -m gpu.export"):
        read_programs(tmp_path)


@needs_jaxlib
def test_what_was_exported_computes_the_same(exported: Path, tmp_path: Path) -> None:
    done = _run(exported, tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    variants = results["cases"]["linear training"]["variants"]
    assert variants.keys() == {"float32", "keras_policy_bfloat16"}
    for entry in variants.values():
        assert entry["check"] == "ok"
        assert entry["difference"]["output"] < 2**-8
        assert entry["difference"]["update"] < 2**-6
        assert len(entry["values_s"]) == 3
        assert entry["memory"]["peak"] >= 4 * 32 * 16
        assert entry["memory"]["aliased"] >= 4 * 32 * 16  # the kernel is updated in place
    assert "| linear training | float32 |" in done.stdout
    # What is there is not run again, and still judged.
    again = _run(exported, tmp_path / "out.json", "--rounds", "5")
    assert again.returncode == 0
    assert json.loads((tmp_path / "out.json").read_text())["cases"] == results["cases"]
    # Times of two devices do not belong into one table.
    results["facts"]["device"] = "another"
    (tmp_path / "out.json").write_text(json.dumps(results))
    refused = _run(exported, tmp_path / "out.json")
    assert refused.returncode == 1
    assert "was measured with another device" in refused.stderr


@needs_jaxlib
@pytest.mark.parametrize(
    ("part", "said"),
    [("outputs", "an output differs"), ("updates", "updates differ"), ("exact", "integers differ")],
)
def test_a_planted_mismatch_is_an_error(
    exported: Path, tmp_path: Path, part: str, said: str
) -> None:
    program, _ = read_programs(exported)
    assert program.reference is not None
    reference = json.loads(json.dumps(program.reference))
    if part == "exact":
        reference["exact"]["count"] = [5]
    else:
        planted = reference["outputs"][0] if part == "outputs" else reference["updates"]["kernel"]
        planted["sample"] = [2 * value for value in planted["sample"]]
    dataclasses.replace(program, reference=reference).write(tmp_path, program.hlo(exported))
    done = _run(tmp_path, tmp_path / "results" / "out.json", "--rounds", "0")
    assert done.returncode == 1
    assert f"WRONG:\nlinear training float32: {said}" in done.stderr


@needs_jaxlib
def test_a_program_that_cannot_be_compiled_is_an_error(exported: Path, tmp_path: Path) -> None:
    program, low = read_programs(exported)
    low.write(tmp_path, low.hlo(exported))
    program.write(tmp_path, b"no module")
    done = _run(tmp_path, tmp_path / "results" / "out.json", "--rounds", "0")
    assert done.returncode == 1
    assert "linear training float32: failed: " in done.stderr
    assert "keras_policy_bfloat16" not in done.stderr.partition("WRONG")[2]


@needs_jaxlib
def test_without_a_reference_float32_on_the_device_is_the_measure(
    exported: Path, tmp_path: Path
) -> None:
    for program in read_programs(exported):
        bare = dataclasses.replace(program, reference=None)
        bare.write(tmp_path, program.hlo(exported))
    done = _run(tmp_path, tmp_path / "results" / "out.json", "--rounds", "0")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results" / "out.json").read_text())
    checks = {
        name: entry["check"]
        for name, entry in found["cases"]["linear training"]["variants"].items()
    }
    assert checks == {"float32": "no reference", "keras_policy_bfloat16": "ok"}
