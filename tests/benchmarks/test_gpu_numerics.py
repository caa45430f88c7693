"""Training on a device from exported steps: what is recorded, and what is an error."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.program import Program
from gpu.training_data import read_run
from jaxlib_process import needs_jaxlib, run_command

_STEPS = 30


def _functions(kernel: Any, scale: Any, rate: float) -> dict[str, Any]:
    """A linear model, and a scale that is halved after its third step."""
    import tensorflow as tf

    @tf.function(jit_compile=True, autograph=False)
    def training(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x @ kernel)
            loss = tf.reduce_mean(losses)
        kernel.assign_sub(rate * tape.gradient(loss, kernel))
        if scale is not None:
            scale.assign(tf.where(scale > 4.0, scale - 1.0, 2.0))
        return loss

    @tf.function(jit_compile=True, autograph=False)
    def inference(x: Any) -> Any:
        return x @ kernel

    return {"training": training, "inference": inference}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exported tasks: one in which float16 learns, and one in which it diverges."""
    import tensorflow as tf
    from gpu.export_worker import export_function

    found = {}
    random = np.random.default_rng(0)
    inputs = random.standard_normal((_STEPS, 16, 8)).astype(np.float32)
    labels = inputs[..., :4].argmax(-1).astype(np.int32)
    weights = random.standard_normal((8, 4)).astype(np.float32)
    for name, rates in {"good": (1.0, 1.0), "bad": (1.0, -1e30)}.items():
        folder = found[name] = tmp_path_factory.mktemp(name)
        for variant, rate in zip(("float32", "tf_amp_float16"), rates, strict=True):
            kernel = tf.Variable(weights)
            scale = tf.Variable(6.0) if variant != "float32" else None
            known = {"kernel": kernel} | ({"loss_scale/scale": scale} if scale is not None else {})
            arguments = [tf.constant(inputs[0]), tf.constant(labels[0])]
            for mode, function in _functions(kernel, scale, rate).items():
                given = arguments if mode == "training" else arguments[:1]
                fields, hlo = export_function(function, given, known, runs=False)
                Program("linear", mode, variant, **fields).write(folder, hlo)
        np.savez(
            folder / "linear.seed0.npz",
            inputs=inputs,
            labels=labels,
            held_out_inputs=inputs[0],
            held_out_labels=labels[0],
            **{"variable kernel": weights},
        )
    return found


def test_a_run_is_batches_and_initial_values(folders: dict[str, Path]) -> None:
    data, initial = read_run(folders["good"] / "linear.seed0.npz")
    assert initial.keys() == {"kernel"}
    assert data["inputs"].shape == (_STEPS, 16, 8)


def _run(folder: Path, output: Path) -> subprocess.CompletedProcess[str]:
    return run_command("numerics", folder, "--output", output)


@needs_jaxlib
def test_losses_accuracy_and_every_scale_are_recorded(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    done = _run(folders["good"], tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]["linear"]
    (plain,), (low,) = runs["float32"], runs["tf_amp_float16"]
    assert len(plain["losses"]) == _STEPS
    assert plain["losses"] == low["losses"]
    assert plain["final_loss"] < 0.5 * plain["losses"][0]
    assert plain["accuracy"] > 0.7
    assert plain["scales"] == []
    assert low["scales"] == [[0, 6.0], [1, 5.0], [2, 4.0], [3, 2.0]]


@needs_jaxlib
def test_what_does_not_learn_is_an_error(folders: dict[str, Path], tmp_path: Path) -> None:
    done = _run(folders["bad"], tmp_path / "out.json")
    assert done.returncode == 1
    assert (
        "WRONG: worse than every seed of float32: linear tf_amp_float16 final_loss" in done.stderr
    )
