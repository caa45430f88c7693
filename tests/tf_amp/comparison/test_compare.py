"""Two models side by side."""

from __future__ import annotations

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from environments import RunPython

import tf_amp
from tf_amp.comparison import steps
from tf_amp.comparison.callables import load_signatures
from tf_amp.comparison.compare import Comparison, compare
from tf_amp.comparison.output_figures import OutputFigures, Sums
from tf_amp.model_files import ModelError

MAIN = "import sys; from tf_amp.cli.main import main; sys.exit(main())"


def save(path: Path, add: float = 0.0, scale: float = 1.0, key: str = "serving_default") -> Path:
    spec = tf.TensorSpec([None, 6], name="x")

    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        y = tf.where(tf.abs(x) > 1.5, x * scale, x) + add
        return {"y": y, "label": tf.argmax(y, -1)}

    module = tf.Module()
    module.call = tf.function(call, input_signature=[spec])
    tf.saved_model.save(module, str(path), signatures={key: module.call})
    return path


def of(found: Comparison) -> dict[str, OutputFigures]:
    return {output.name: output for output in found.outputs}


X = np.array([[1, 2, 3, 0, 0.5, -4], [5, 1, 0, 0, 0, 0]], np.float32)


def test_figures(tmp_path: Path) -> None:
    one = save(tmp_path / "one")
    figures = of(tf_amp.compare_models(one, save(tmp_path / "two", add=0.5), [{"x": X}]))
    y, label = figures["y"], figures["label"]
    assert (y.values, y.max_abs, y.max_relative) == (12, 0.5, 0.1)
    a, b = X.ravel(), X.ravel() + 0.5
    assert y.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
    assert (y.overflowed, y.flushed, y.top_1, y.top_k) == (0, 0, 1, 1)
    assert (label.top_1, label.is_float) == (1, False)
    assert y.within(0.11) and not y.within(0.09) and label.within(0)


@pytest.mark.parametrize(("scale", "overflowed", "flushed"), [(np.inf, 4 / 12, 0), (0, 0, 4 / 12)])
def test_what_overflows_or_vanishes(
    tmp_path: Path, scale: float, overflowed: float, flushed: float
) -> None:
    one, two = save(tmp_path / "one"), save(tmp_path / "two", scale=scale)
    y = of(tf_amp.compare_models(one, two, [{"x": X}]))["y"]
    assert (y.overflowed, y.flushed) == (overflowed, flushed)
    assert not y.within(0.1)


def test_agreement_of_ranks(tmp_path: Path) -> None:
    one, two = save(tmp_path / "one"), save(tmp_path / "two", scale=-1)
    found = of(tf_amp.compare_models(one, two, [{"x": X}]))
    # -4 becomes the largest of the first row, and 5 the smallest of the second.
    assert found["y"].top_1 == 0
    assert found["label"].top_1 == 0
    assert found["y"].top_k == 4 / 5


def test_integers_of_which_there_are_none_and_those_of_batches_of_several_sizes() -> None:
    empty, sums = Sums(), Sums()
    empty.add(np.zeros([0, 2], np.int64), np.zeros([0, 2], np.int64))
    assert empty.figures("", "").top_1 is None
    assert empty.figures("", "").within(0)
    sums.add(np.zeros(9, np.int64), np.zeros(9, np.int64))
    sums.add(np.zeros(1, np.int64), np.ones(1, np.int64))
    assert sums.figures("", "").top_1 == 0.9


@pytest.mark.parametrize("seed", [0, 1])
def test_a_model_that_draws_random_numbers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    said: list[str] = []
    monkeypatch.setattr(steps._log, "warning", lambda text, *rest: said.append(text))
    module = tf.Module()
    module.call = tf.function(
        lambda x: {"y": x + tf.raw_ops.RandomUniform(shape=[6], dtype=tf.float32, seed=seed)},
        input_signature=[tf.TensorSpec([None, 6], name="x")],
    )
    tf.saved_model.save(module, str(tmp_path / "model"), signatures=module.call)
    tf_amp.compare_models(tmp_path / "model", tmp_path / "model", [{"x": X}])
    assert any("draws random numbers anew" in text for text in said) == (not seed)


def test_random_samples_are_the_same_for_a_seed(tmp_path: Path) -> None:
    one, two = save(tmp_path / "one"), save(tmp_path / "two", scale=1.1)
    first, again, other = (tf_amp.compare_models(one, two, seed=seed).outputs for seed in (1, 1, 2))
    assert repr(first) == repr(again) != repr(other)


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([], "no samples"),
        ([{"x": X[:0]}], "no rows"),
        ([{"z": X}], "lack the input 'x'"),
        ([{"x": X[:, :2]}], "do not fit the input 'x'"),
    ],
)
def test_samples_that_do_not_fit(tmp_path: Path, samples: list, said: str) -> None:
    one = save(tmp_path / "one")
    with pytest.raises(ModelError, match=said):
        tf_amp.compare_models(one, one, samples)


@pytest.mark.parametrize(
    ("tags", "scale"),
    [([["serve"], ["train"]], 1.0), ([["train"], ["serve"]], 2.0), ([[], ["t"]], 1.0)],
)
def test_of_several_graphs_the_one_to_serve_is_compared(
    tmp_path: Path, tags: list[list[str]], scale: float
) -> None:
    """As modules of TF Hub have them."""
    v1 = tf.compat.v1
    builder = v1.saved_model.Builder(str(tmp_path / "several"))
    for number, those in enumerate(tags, 1):
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [None, 6], name="x")
            w = v1.get_variable("w", [], initializer=v1.ones_initializer())
            y = {"y": number * w * x}
            called = {"serving_default": v1.saved_model.predict_signature_def({"x": x}, y)}
            session.run(w.initializer)
            if number == 1:
                builder.add_meta_graph_and_variables(session, those, signature_def_map=called)
            else:
                builder.add_meta_graph(those, signature_def_map=called)
    builder.save()
    y = of(tf_amp.compare_models(tmp_path / "several", tmp_path / "several", [{"x": X}]))["y"]
    assert (y.values, y.max_abs) == (12, 0)
    signature = load_signatures(tmp_path / "several")["serving_default"]
    assert np.array_equal(signature.call(signature.feed({"x": X}))["y"], scale * X)


def test_models_without_a_common_signature(tmp_path: Path) -> None:
    one, two = save(tmp_path / "one"), save(tmp_path / "two", key="other")
    with pytest.raises(ModelError, match=r"lacks the signature .serving_default.\. It has: other"):
        tf_amp.compare_models(one, two)


@pytest.mark.slow
def test_command(run_python: RunPython, tmp_path: Path) -> None:
    one, two = save(tmp_path / "one"), save(tmp_path / "two", add=0.5)
    np.savez(tmp_path / "x.npz", x=X)
    (tmp_path / "loader.py").write_text(
        "import numpy as np\ndef samples():\n    yield {'x': np.eye(6, dtype=np.float32)}\n"
    )
    arguments = ("compare", str(one), str(two), "--tolerance", "0.2")
    fed = ("--inputs", str(tmp_path / "x.npz"), "--rounds", "0")
    done = run_python(MAIN, args=(*arguments, *fed, "--json"))
    y = {o["name"]: o for o in json.loads(done.stdout)["outputs"]}["y"]
    assert y["max_relative"] == pytest.approx(0.1)
    env = {"PYTHONPATH": f"{Path(tf_amp.__file__).parent.parent}:{tmp_path}"}
    done = run_python(MAIN, env, args=(*arguments, "--inputs", "loader:samples"), check=False)
    assert done.returncode == 1  # 0.5 beside a largest of 1
    assert "serving_default/y is beyond the tolerance of 0.2" in done.stderr
    assert "times as fast" in done.stdout and "memory, loaded and called" in done.stdout
    assert "nan" not in done.stdout  # of integers, whose difference means nothing


def save_function(path: Path, function: object) -> Path:
    module = tf.Module()
    module.call = tf.function(function, input_signature=[tf.TensorSpec([None, 4], name="x")])
    tf.saved_model.save(module, str(path), signatures=module.call)
    return path


def test_what_is_not_finite_in_float32_passes_no_gate(tmp_path: Path) -> None:
    model = save_function(tmp_path / "model", lambda x: {"y": tf.math.log(-1.0 - tf.abs(x))})
    found = compare(model, model, rounds=0)
    assert found.outputs[0].compared == 0
    assert found.beyond(1.0)


def test_complex_outputs_have_a_distance(tmp_path: Path) -> None:
    model = save_function(tmp_path / "one", lambda x: {"y": tf.signal.rfft(x)})
    other = save_function(tmp_path / "other", lambda x: {"y": tf.signal.rfft(x * 1.001)})
    found = compare(model, other, rounds=0)
    assert 0.0005 < found.outputs[0].max_relative < 0.002


def test_ragged_outputs_are_compared(tmp_path: Path) -> None:
    model = save_function(
        tmp_path / "model", lambda x: {"y": tf.RaggedTensor.from_tensor(x, lengths=tf.range(8) % 4)}
    )
    assert compare(model, model, rounds=1).outputs[0].max_abs == 0


def test_a_model_that_fails_says_so(tmp_path: Path) -> None:
    model = save_function(tmp_path / "model", lambda x: {"y": tf.reshape(x, (3, -1))})
    with pytest.raises(ModelError, match=r"fails with inputs of the shapes x: \(8, 4\)"):
        compare(model, model, rounds=0)


@pytest.mark.parametrize("named", [True, False])
def test_a_keras_file_has_the_names_of_what_is_made_of_it(tmp_path: Path, named: bool) -> None:
    given = keras.Input((4,))  # which has another name once it is loaded
    made = [keras.layers.Dense(size)(given) for size in (3, 2)]
    model = keras.Model(given, dict(zip(("logits", "value"), made, strict=True)) if named else made)
    model.save(tmp_path / "model.keras")
    model.export(str(tmp_path / "exported"))
    found = of(compare(tmp_path / "model.keras", tmp_path / "exported", rounds=0))
    assert found.keys() == ({"logits", "value"} if named else {"output_0", "output_1"})
    assert max(output.max_abs for output in found.values()) < 1e-5
