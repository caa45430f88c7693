"""The command line: `tf-amp diagnose`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from environments import RunPython

MAIN = "import sys; from tf_amp.cli.main import main; sys.exit(main())"
CASES = Path(__file__).with_name("diagnosis") / "diagnosis_cases.py"
FLOAT16 = ("--dtype", "float16", "--device", "GPU")


def diagnose(
    run_forked: RunPython, *arguments: str, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": f"{CASES.parents[3]}:{path or CASES.parent}"}
    return run_forked(MAIN, env, args=("diagnose", *arguments), check=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model whose second product is over 65,504 for inputs of 1e3."""
    weight = tf.Variable(np.eye(16, dtype=np.float32))

    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        x = tf.nn.relu(tf.matmul(x, weight))
        with tf.name_scope("planted"):
            x = tf.matmul(x * 100.0, weight)
        return {"y": tf.matmul(x * 0.01, weight)}

    module = tf.Module()
    module.weight = weight
    module.call = tf.function(call, input_signature=[tf.TensorSpec([None, 16], name="x")])
    tf.saved_model.save(module, str(tmp_path / "model"), signatures=module.call)
    return tmp_path / "model"


def test_a_model(run_forked: RunPython, model: Path) -> None:
    done = diagnose(run_forked, str(model), *FLOAT16)
    assert (done.returncode, "Nothing amiss" in done.stdout) == (0, True), done.stderr
    inputs = model.with_name("x.npz")
    np.savez(inputs, x=np.full((4, 16), 1e3, np.float32))
    done = diagnose(run_forked, str(model), *FLOAT16, "--inputs", str(inputs), "--json")
    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)["serving_default"]
    first = found["findings"][0]
    assert (first["node"], first["op"]) == ("planted/mul", "Mul")
    assert (first["largest"], first["non_finite"]) == (pytest.approx(1e5), 64)
    assert found["finite"] and "gradients" not in found
    # The rules that it gives are all that it takes.
    rules = model.with_name("rules.toml")
    rules.write_text(found["rules"])
    done = diagnose(
        run_forked, str(model), *FLOAT16, "--inputs", str(inputs), "--rules", str(rules)
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_training_step(run_forked: RunPython) -> None:
    done = diagnose(run_forked, "diagnosis_cases:flushed", *FLOAT16, "--json")
    assert done.returncode == 3, done.stderr  # all of a gradient is flushed to 0
    (found,) = json.loads(done.stdout).values()
    assert found["findings"][0]["node"].startswith("gradient_tape/")
    assert found["findings"][0]["lines"][0].split(":")[0].endswith("diagnosis_cases.py")
    gradients = found["gradients"]
    shares = {one["variable"]: one["share"] for one in gradients["of_variables"]}
    assert shares == {"w": 1, "v": 0}
    assert gradients["best_loss_scale"] > gradients["loss_scale"] == 1
    scale = ("--loss-scale", str(gradients["best_loss_scale"]))
    text = diagnose(run_forked, "diagnosis_cases:flushed", *FLOAT16, *scale).stdout
    assert "Rules to paste" in text and "0.0% of what is not 0 is flushed to 0" in text


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("nothing_there",), 1, "There is no file 'nothing_there'"),
        (("no_such_module:f",), 1, "'no_such_module:f' cannot be loaded"),
        (("json:JSONDecoder",), 1, "must give a function and the list of its arguments"),
        (("json:JSONDecoder", "--inputs", "x.npz"), 2, "are for models"),
        (("nothing_there", "--inputs", "x.npz"), 1, "There is no file 'nothing_there'"),
        ((".", "--loss-scale", "8"), 2, "is for a training step"),
        (("json:JSONDecoder", "--loss-scale", "0"), 2, "--loss-scale is over 0"),
        ((), 2, "usage: tf-amp diagnose"),
    ],
)
def test_what_cannot_be_diagnosed(
    run_forked: RunPython, arguments: tuple[str, ...], status: int, said: str
) -> None:
    done = diagnose(run_forked, *arguments)
    assert done.returncode == status
    assert said in done.stderr
