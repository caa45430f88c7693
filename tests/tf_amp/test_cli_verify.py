"""The command line: `tf-amp verify`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tensorflow as tf
from cpu_units import HAS_BFLOAT16_UNITS, NO_BFLOAT16_UNITS
from environments import RunPython

MAIN = "import sys; from tf_amp.cli.main import main; sys.exit(main())"
BFLOAT16 = pytest.param(
    "bfloat16", marks=pytest.mark.skipif(not HAS_BFLOAT16_UNITS, reason=NO_BFLOAT16_UNITS)
)
LIST = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_ALLOWLIST_REMOVE"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [8, 8], "x")
        tf.exp(tf.nn.relu(tf.matmul(tf.nn.tanh(tf.matmul(x, x)), x)))
    (folder / "same.pb").write_bytes(graph.as_graph_def().SerializeToString())
    with tf.Graph().as_default() as graph:
        images = tf.compat.v1.placeholder(tf.float32, [2, 4, 4, 3], "images")
        made = tf.raw_ops.FusedBatchNorm(
            x=images, scale=[1.0] * 3, offset=[0.0] * 3, mean=[], variance=[]
        )
        tf.exp(made.y)
    # That pass makes another op of this one, although there is nothing to convert.
    (folder / "other.pb").write_bytes(graph.as_graph_def().SerializeToString())
    module = tf.Module()
    weight = tf.Variable(tf.ones([8, 8]))
    module.call = tf.function(
        lambda x: {"y": tf.exp(tf.matmul(tf.matmul(x, weight), weight))},
        input_signature=[tf.TensorSpec([None, 8])],
    )
    module.weight = weight
    tf.saved_model.save(module, str(folder / "saved"))
    bias = tf.Variable(tf.ones([8]))

    @tf.function(input_signature=[tf.TensorSpec([None, 8])])
    def branches(x: tf.Tensor) -> tf.Tensor:
        y = tf.matmul(tf.matmul(x, weight), weight)
        total = tf.reduce_sum(y)
        if total > 0:
            weight.assign_sub(total * weight)
            bias.assign_sub(total * bias)
        return y

    # Another optimizer of Grappler makes copies of both branches.
    definition = branches.get_concrete_function().graph.as_graph_def()
    (folder / "branches.pb").write_bytes(definition.SerializeToString())
    return folder


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16])
@pytest.mark.parametrize("name", ["same.pb", "saved", "branches.pb"])
def test_both_plans_are_the_same(
    run_forked: RunPython, models: Path, name: str, dtype: str
) -> None:
    done = run_forked(MAIN, args=("verify", str(models / name), "--dtype", dtype, "--json"))
    (found,) = json.loads(done.stdout)
    assert found["retyped"] > 0
    assert found["differences"] == []


@pytest.mark.parametrize(
    "probe",
    ["probe_cpu_flags = lambda: {'avx2'}", "probe_onednn = lambda: False"],
    ids=["units", "kernels"],
)
def test_a_cpu_on_which_the_other_pass_does_nothing(
    run_forked: RunPython, models: Path, probe: str
) -> None:
    """What differs there would say nothing of either."""
    without = f"from tf_amp.cli import verify; verify.{probe}; {MAIN}"
    args = ("verify", str(models / "same.pb"), "--dtype", "bfloat16")
    done = run_forked(without, args=args, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "AVX512_BF16" in done.stderr


def test_list_edits_hold_for_both(run_forked: RunPython, models: Path) -> None:
    args = ("verify", str(models / "same.pb"), "--dtype", "float16")
    done = run_forked(MAIN, {LIST: "MatMul"}, args=args)
    assert "0 of them in float16, 0 casts, 0 differences" in done.stdout


def test_differences_are_printed_and_decide_the_exit_status(
    run_forked: RunPython, models: Path
) -> None:
    args = ("verify", str(models / "other.pb"), "--limit", "1", "--dtype", "float16")
    done = run_forked(MAIN, args=args, check=False)
    assert done.returncode == 3, done.stderr
    assert "FusedBatchNorm U: absent, TensorFlow: float" in done.stdout


def test_what_is_no_model_is_said(run_forked: RunPython, models: Path) -> None:
    done = run_forked(MAIN, args=("verify", str(models / "none.pb")), check=False)
    assert done.returncode == 1
    assert "tf-amp verify: error: There is no file" in done.stderr
