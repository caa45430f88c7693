"""Models in files: `tf-amp plan`."""

from __future__ import annotations

from pathlib import Path

import keras
import pytest
import tensorflow as tf
from environments import RunPython
from google.protobuf import text_format

from graph_passes import PrecisionConfig
from tf_amp.model_files import ModelError
from tf_amp.tracing.figures import figures_of
from tf_amp.tracing.models import plan_model

CONFIG = PrecisionConfig(target_dtype="float16", device="GPU")
MAIN = "import sys; from tf_amp.cli.main import main; sys.exit(main())"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    hidden = keras.layers.Dense(32, "relu", name="dense")
    head = keras.layers.Dense(8, "softmax", name="dense_1")
    model = keras.Sequential([keras.Input([16]), hidden, head])
    model.save(folder / "dense.keras")
    model.export(folder / "saved")
    with tf.Graph().as_default() as graph:
        given = tf.compat.v1.placeholder(tf.float32, [None, 16], name="given")
        tf.matmul(tf.matmul(given, tf.ones([16, 32])), tf.ones([32, 8]), name="made")
        tf.compat.v1.train.export_meta_graph(str(folder / "graph.meta"))
    (folder / "graph.pb").write_bytes(graph.as_graph_def().SerializeToString())
    (folder / "graph.pbtxt").write_text(text_format.MessageToString(graph.as_graph_def()))
    (folder / "text.pb").write_text("no graph")
    (folder / "broken.keras").write_text("no model")
    keras.Sequential([hidden, head]).save(folder / "unbuilt.keras")
    (folder / "empty").mkdir()
    module = tf.Module()
    module.first, module.second = (
        tf.function(lambda x: tf.matmul(x, x), input_signature=[tf.TensorSpec([8, 8], tf.float32)])
        for _ in range(2)
    )
    tf.saved_model.save(module, str(folder / "uncalled"))
    model.save(folder / "dense.h5")
    keras.Sequential([keras.Input([16]), keras.layers.Lambda(lambda x: x * 2)]).save(
        folder / "code.keras"
    )
    return folder


@pytest.mark.parametrize("name", ["dense.keras", "saved", "graph.meta", "graph.pb", "graph.pbtxt"])
def test_both_products_of_a_model_are_planned(models: Path, name: str) -> None:
    trace = plan_model(models / name, CONFIG)
    figures = figures_of(graph.remarks for graph in trace.graphs)
    # A product that is fetched keeps its dtype.
    fetched = name.startswith("graph")
    assert (figures.products_low, figures.products) == (1 if fetched else 2, 2)
    assert figures.flops == 2 * 32 * (16 * 32 + 32 * 8)
    assert figures.casts > 0


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.pb", "no file"),
        ("text.pb", "neither a GraphDef"),
        ("broken.keras", "Keras cannot load"),
        ("unbuilt.keras", "Build it, or call it once, before it is saved"),
        ("empty", "no SavedModel"),
        ("uncalled", "no signature that would call one"),
        ("dense.h5", "another file of Keras"),
        ("code.keras", "classes or Python code of its own give what `model.export"),
    ],
)
def test_what_is_no_model_is_an_error(models: Path, name: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        plan_model(models / name, CONFIG)


def test_plan(run_forked: RunPython, models: Path) -> None:
    arguments = ("plan", str(models / "saved"), "--device", "GPU", "--dtype", "bfloat16")
    printed = run_forked(MAIN, args=arguments).stdout
    assert "planned for bfloat16 on GPU, not run; cost table" in printed
    assert "2 of 2" in printed
    arguments = (*arguments[:-3], "CPU", "--dtype", "float16")
    slow = run_forked(MAIN, args=arguments).stdout
    assert "not run; on this machine float16 on CPU would be slow: no GPU is visible" in slow
    done = run_forked(MAIN, args=("plan", str(models / "empty")), check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no SavedModel" in done.stderr


def test_plan_says_what_each_rule_met(run_forked: RunPython, models: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        '[[rule]]\naction = "keep_float32"\nlayer = "dense_1"\nwhy = "the head"\n'
        '[[rule]]\naction = "deny"\nnode = "nothing"\n'
    )
    args = ("plan", str(models / "dense.keras"), "--device", "GPU", "--rules", str(rules))
    printed = run_forked(MAIN, args=args).stdout
    assert "rule rules.toml [1]: 'the head' (keep_float32): meets nodes of 1 function" in printed
    assert "rule rules.toml [2]: node = 'nothing' (deny): meets no node" in printed
    kept = run_forked(MAIN, args=(*args, "--op", "MatMul", "--missed")).stdout
    assert "kept by a rule (rules.toml [1]: 'the head')" in kept


@pytest.mark.parametrize(
    ("condition", "status"),
    [("casts > 1000 or product_share < 1", 0), ("products_low == 2 and casts > 0", 3), ("x>1", 2)],
)
def test_condition_decides_the_exit_status(
    run_forked: RunPython, models: Path, condition: str, status: int
) -> None:
    args = ("plan", str(models / "dense.keras"), "--device", "GPU", "--quick")
    done = run_forked(MAIN, args=(*args, "--fail-if", condition), check=False)
    assert done.returncode == status
    said = {0: "", 3: "products_low = 2", 2: "'x' is none of these"}[status]
    assert said in done.stderr


def test_products_are_annotated_for_a_workflow(run_forked: RunPython, models: Path) -> None:
    args = ("plan", str(models / "graph.pb"), "--device", "GPU", "--format", "github")
    printed = run_forked(MAIN, args=args).stdout
    assert printed.startswith("::warning title=1 MatMul in float32::fed, fetched")
