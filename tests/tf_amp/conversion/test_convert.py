"""Converted models in plain TensorFlow: what they take and give, hold and compute."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import converted_models as models
import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from environments import RunPython
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

import tf_amp
from graph_passes.ops.op_types import FILTER_AND_BIAS
from graph_passes.policy.cost_table_files import shipped_table
from tf_amp.conversion.convert import Conversion, size_on_disk
from tf_amp.model_files import ModelError, read_graph

CONFIG = tf_amp.PrecisionConfig(target_dtype="bfloat16", device="CPU")
MAIN = "import sys; from tf_amp.cli.main import main; sys.exit(main())"
SAVED = ("exported", "saved", "module", "v1", "v1_ref")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models")
    models.save_all(made)
    return made


def convert(source: Path, target: Path, **options: object) -> Conversion:
    return tf_amp.convert_saved_model(source, target, config=CONFIG, **options)  # type: ignore[arg-type]


def low_nodes(path: Path) -> int:
    saved = SavedModel.FromString((path / "saved_model.pb").read_bytes())
    graph = saved.meta_graphs[0].graph_def
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    return sum(n.op in ("MatMul", "Conv2D") and n.attr["T"].type == 14 for n in nodes)


def assert_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        if name.endswith("label"):
            assert np.mean(got[name] == value) > 0.8
        else:
            np.testing.assert_allclose(got[name], value, atol=0.05 * np.abs(value).max())
    assert any(not np.array_equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("name", SAVED)
def test_signatures_objects_and_values_stay(folder: Path, tmp_path: Path, name: str) -> None:
    done = convert(folder / name, tmp_path / "out")
    low, products = done.products
    assert low == products > 0
    assert low_nodes(tmp_path / "out") == low
    assert models.interface(tmp_path / "out") == models.interface(folder / name)
    files = {p.relative_to(folder / name) for p in (folder / name).rglob("*")}
    assert files == {p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*")}
    assert_close(models.serve(tmp_path / "out"), models.serve(folder / name))
    if name != "saved":  # of a Keras model, TensorFlow 1 cannot load what `save` alone writes
        assert_close(models.serve_v1(tmp_path / "out"), models.serve_v1(folder / name))


@pytest.mark.parametrize("name", SAVED[:-1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_in_the_target_dtype(folder: Path, tmp_path: Path, name: str, dtype: str) -> None:
    source, out = folder / name, tmp_path / "out"
    config = tf_amp.PrecisionConfig(target_dtype=dtype, device="CPU")
    done = tf_amp.convert_saved_model(source, out, config=config, weights=True)
    assert_close(models.serve(out), models.serve(source))
    if name != "saved":
        assert_close(models.serve_v1(out), models.serve_v1(source))
    reader = tf.train.load_checkpoint(str(out / "variables" / "variables"))
    dtypes = {k: v.name for k, v in reader.get_variable_to_dtype_map().items()}
    stored = {key for key, why in done.weights.items() if not why}
    assert stored == {key for key, found in dtypes.items() if found == dtype}
    assert stored
    assert size_on_disk(out / "variables") < 0.7 * size_on_disk(source / "variables")
    saved = SavedModel.FromString((out / "saved_model.pb").read_bytes())
    for meta in saved.meta_graphs:  # nothing is cast that is stored so already
        graph = meta.graph_def
        for nodes in (graph.node, *(f.node_def for f in graph.library.function)):
            # TensorFlow's C++ importer takes no attr without a value.
            assert all(v.WhichOneof("value") for n in nodes for v in n.attr.values())
            low = {n.name for n in nodes if n.op == "ReadVariableOp" and n.attr["dtype"].type != 1}
            casts = [n for n in nodes if n.op == "Cast" and n.input[0].split(":")[0] in low]
            assert all(n.attr["DstT"].type == 1 for n in casts)


def test_what_a_function_trains_stays_float32(folder: Path, tmp_path: Path) -> None:
    done = convert(folder / "module", tmp_path / "out", weights=True)
    why = {key.split("/")[0]: why for key, why in done.weights.items()}
    assert why.pop("trained").endswith("works on it")
    assert why == {"kernel": "", "head": ""}
    loaded = tf.saved_model.load(str(tmp_path / "out"))
    before = loaded.trained.numpy()
    x = tf.constant(models.sample((16, models.FEATURES)))
    first = loaded.train(x)
    assert loaded.train(x) < first
    assert not np.array_equal(loaded.trained.numpy(), before)


def test_a_training_step_is_stored_without_kernels_of_one_kind_of_cpu(tmp_path: Path) -> None:
    module = tf.Module()
    rng = np.random.default_rng(0)
    module.kernel = tf.Variable(rng.normal(size=[3, 3, 32, 32]).astype("float32"))
    module.bias = tf.Variable(tf.zeros(32))

    @tf.function(input_signature=[tf.TensorSpec([8, 64, 64, 32])])
    def train(images: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            y = tf.nn.bias_add(tf.nn.conv2d(images, module.kernel, 1, "SAME"), module.bias)
            y = tf.nn.conv2d(tf.nn.relu(y), module.kernel, 1, "SAME")
            loss = tf.reduce_mean(y**2)
        gradients = tape.gradient(loss, [module.kernel, module.bias])
        module.kernel.assign_sub(1e-6 * gradients[0])
        module.bias.assign_sub(1e-6 * gradients[1])
        return loss

    module.train = train
    tf.saved_model.save(module, str(tmp_path / "in"))
    timed = dataclasses.replace(CONFIG, cost_table=shipped_table("cpu-avx512_bf16", "bfloat16"))
    tf_amp.convert_saved_model(tmp_path / "in", tmp_path / "out", config=timed)
    saved = SavedModel.FromString((tmp_path / "out" / "saved_model.pb").read_bytes())
    functions = saved.meta_graphs[0].graph_def.library.function
    low = [n.op for f in functions for n in f.node_def if n.attr["T"].type == tf.bfloat16]
    assert "Conv2DBackpropFilter" in low
    assert FILTER_AND_BIAS not in low
    images = tf.constant(rng.normal(size=[8, 64, 64, 32]).astype("float32"))
    loaded = tf.saved_model.load(str(tmp_path / "out"))
    assert loaded.train(images) > 0
    assert np.any(loaded.bias.numpy())


def test_a_function_set_variable_stays_float32(tmp_path: Path) -> None:
    module = tf.Module()
    module.w = tf.Variable(tf.ones([16, 16]))
    spec = tf.TensorSpec([None, 16], name="x")
    module.call = tf.function(lambda x: tf.matmul(x, module.w), input_signature=[spec])
    module.set = tf.function(
        lambda x: module.w.assign(x), input_signature=[tf.TensorSpec([16, 16])]
    )
    tf.saved_model.save(module, str(tmp_path / "in"), signatures=module.call)
    with pytest.raises(ModelError, match=r"No variable can be stored.*a function sets it"):
        convert(tmp_path / "in", tmp_path / "out", weights=True)
    assert not (tmp_path / "out").exists()


def test_rows_that_a_function_writes_stay_float32(tmp_path: Path) -> None:
    """As the cache of keys of a decoder; its other weights are stored in the target dtype."""
    module = tf.Module()
    module.cache = tf.Variable(tf.zeros([8, 16]), trainable=False, name="cache")
    module.w = tf.Variable(models.sample((16, 16)), name="w")

    def call(x: tf.Tensor) -> tf.Tensor:
        module.cache.scatter_nd_update([[2]], x @ module.w)
        return tf.matmul(x @ module.w, module.cache, transpose_b=True)

    spec = tf.TensorSpec([1, 16], name="x")
    module.call = tf.function(call, input_signature=[spec])
    tf.saved_model.save(module, str(tmp_path / "in"), signatures=module.call)
    done = convert(tmp_path / "in", tmp_path / "out", weights=True)
    why = {key.split("/")[0]: why for key, why in done.weights.items()}
    assert why == {"cache": "ResourceScatterNdUpdate works on it", "w": ""}
    assert_close(models.serve(tmp_path / "out"), models.serve(tmp_path / "in"))


@pytest.mark.parametrize(
    ("sliced", "said"), [(True, "4: it is stored in slices"), (False, "no resource variable")]
)
def test_variables_of_tensorflow_1_that_stay_float32(
    tmp_path: Path, sliced: bool, said: str
) -> None:
    v1 = tf.compat.v1
    parts = v1.fixed_size_partitioner(4) if sliced else None
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 16], name="x")
        w = v1.get_variable("w", [16, 16], use_resource=sliced, partitioner=parts)
        y = tf.nn.relu(x @ tf.convert_to_tensor(w))
        session.run(v1.global_variables_initializer())
        v1.saved_model.simple_save(session, str(tmp_path / "in"), {"x": x}, {"y": y})
    with pytest.raises(ModelError, match=rf"No variable can be stored.*{said}"):
        convert(tmp_path / "in", tmp_path / "out", weights=True)


def test_a_variable_in_a_ragged_output_stays_float32(tmp_path: Path) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [None, 16], name="x")
        w = tf.compat.v1.get_variable("w", [16, 16], use_resource=True)
        y = tf.sin(tf.nn.relu(tf.matmul(x, w)))
        rows = tf.RaggedTensor.from_row_splits(w.read_value(), np.int64([0, 2, 16]), validate=False)
        session.run(w.initializer)
        outputs = {"y": y, "rows": rows}
        tf.compat.v1.saved_model.simple_save(session, str(tmp_path / "in"), {"x": x}, outputs)
    with pytest.raises(ModelError, match=r"No variable can be stored.*its value is an output"):
        convert(tmp_path / "in", tmp_path / "out", weights=True)


class Tables(tf.Module):
    """Rows of one table go to a product at once, those of others are used in float32 too."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.direct = tf.Variable(rng.standard_normal((50, 16), np.float32), name="direct")
        self.added = tf.Variable(rng.standard_normal((50, 16), np.float32), name="added")
        self.read = tf.Variable(rng.standard_normal((50, 16), np.float32), name="read")
        self.tied = tf.Variable(rng.standard_normal((50, 16), np.float32), name="tied")
        self.kernel = tf.Variable(0.3 * rng.standard_normal((16, 16), np.float32), name="kernel")

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32, "ids")])
    def call(self, ids: tf.Tensor) -> dict[str, tf.Tensor]:
        def rows(table: tf.Variable) -> tf.Tensor:
            return tf.raw_ops.ResourceGather(resource=table.handle, indices=ids, dtype=tf.float32)

        x = tf.matmul(rows(self.direct), self.kernel)
        used = rows(self.added) + tf.gather(self.read.read_value(), ids) + rows(self.tied)
        x = tf.nn.relu(tf.matmul(tf.math.log1p(tf.abs(used)), self.kernel)) + x
        return {"y": tf.matmul(x, self.tied, transpose_b=True), "rows": rows(self.added)}


@pytest.mark.parametrize("embeddings", [False, True])
def test_tables_in_the_target_dtype(tmp_path: Path, embeddings: bool) -> None:
    module = Tables()
    tf.saved_model.save(module, str(tmp_path / "in"), signatures=module.call)
    done = convert(tmp_path / "in", tmp_path / "out", weights=True, embeddings=embeddings)
    why = {key.split("/")[0]: why for key, why in done.weights.items()}
    every = {"direct", "kernel", "added", "read", "tied"}
    assert {key for key in why if not why[key]} == (every if embeddings else {"direct", "kernel"})
    assert embeddings or all("--embeddings" in why[key] for key in ("added", "read", "tied"))
    ids = tf.constant([0, 7, 49, 7])
    before, after = (
        tf.saved_model.load(str(tmp_path / name)).signatures["serving_default"](ids=ids)
        for name in ("in", "out")
    )
    assert after["rows"].dtype == tf.float32
    assert_close({"y": after["y"].numpy()}, {"y": before["y"].numpy()})
    rounded = tf.cast(tf.cast(before["rows"], tf.bfloat16), tf.float32)
    assert np.array_equal(after["rows"], rounded if embeddings else before["rows"])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:  # as TensorFlow Serving
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "out"))
        called = meta.signature_def["serving_default"]
        names = {key: info.name for key, info in called.outputs.items()}
        found = session.run(names, {called.inputs["ids"].name: ids.numpy()})
    assert np.array_equal(found["rows"], after["rows"])


def test_embeddings_go_with_weights(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ask for both"):
        convert(folder / "exported", tmp_path / "out", embeddings=True)


def test_what_no_signature_needs_reads_weights_by_a_cast(tmp_path: Path) -> None:
    """As in modules of TF Hub, whose collections have the losses of regularization."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, 16], name="x")
        w = v1.get_variable("w", [16, 16], use_resource=True)
        y = tf.nn.relu(tf.matmul(x, w))
        v1.add_to_collection("regularization_losses", tf.nn.l2_loss(w, name="loss"))
        session.run(w.initializer)
        v1.saved_model.simple_save(session, str(tmp_path / "in"), {"x": x}, {"y": y})
    done = convert(tmp_path / "in", tmp_path / "out", weights=True)
    assert done.weights == {"w": ""}
    losses = []
    for path in (tmp_path / "in", tmp_path / "out"):
        with tf.Graph().as_default() as graph, v1.Session() as session:
            v1.saved_model.load(session, ["serve"], str(path))
            losses.append(session.run(graph.get_tensor_by_name("loss:0")))
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert_close(models.serve(tmp_path / "out"), models.serve(tmp_path / "in"))


def test_weights_out_of_range_stay_float32(tmp_path: Path) -> None:
    module = tf.Module()
    module.large = tf.Variable(tf.fill([16, 16], 1e5))
    module.small = tf.Variable(tf.ones([16, 16]))
    spec = tf.TensorSpec([None, 16], name="x")
    module.call = tf.function(
        lambda x: tf.matmul(tf.matmul(x, module.small), module.large), input_signature=[spec]
    )
    tf.saved_model.save(module, str(tmp_path / "in"), signatures=module.call)
    config = tf_amp.PrecisionConfig(target_dtype="float16", device="GPU")
    done = tf_amp.convert_saved_model(tmp_path / "in", tmp_path / "o", config=config, weights=True)
    why = {key.split("/")[0]: why for key, why in done.weights.items()}
    assert why == {"small": "", "large": "it has values that float16 cannot hold"}


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("weights", [False, True])
def test_signatures_in_the_target_dtype(
    folder: Path, tmp_path: Path, name: str, weights: bool
) -> None:
    if weights and name == "v1_ref":
        pytest.skip("reference variables stay float32")
    convert(folder / name, tmp_path / "out", io="target", weights=weights)
    saved = SavedModel.FromString((tmp_path / "out" / "saved_model.pb").read_bytes())
    original = SavedModel.FromString((folder / name / "saved_model.pb").read_bytes())
    after, before = saved.meta_graphs[0].signature_def, original.meta_graphs[0].signature_def
    for key, signature in before.items():
        for old, new in (
            (signature.inputs, after[key].inputs),
            (signature.outputs, after[key].outputs),
        ):
            assert {k: 14 if i.dtype == 1 else i.dtype for k, i in old.items()} == {
                k: i.dtype for k, i in new.items()
            }
            assert {k: i.name for k, i in old.items()} == {k: i.name for k, i in new.items()}
    assert_close(models.serve(tmp_path / "out"), models.serve(folder / name))
    if name != "saved":  # of a Keras model, TensorFlow 1 cannot load what `save` alone writes
        assert_close(models.serve_v1(tmp_path / "out"), models.serve_v1(folder / name))


@pytest.mark.parametrize("io", ["float32", "target"])
def test_frozen_graph(folder: Path, tmp_path: Path, io: str) -> None:
    done = convert(folder / "frozen.pb", tmp_path / "out.pb", io=io)
    got, want = models.run_frozen(tmp_path / "out.pb"), models.run_frozen(folder / "frozen.pb")
    assert got.dtype.name == ("float32" if io == "float32" else "bfloat16")
    np.testing.assert_allclose(got.astype(np.float32), want, atol=0.05 * np.abs(want).max())
    assert done.bytes_after < 0.8 * done.bytes_before


@pytest.mark.parametrize("name", ["frozen.pb", "graph.meta"])
def test_outputs_are_named_as_nodes_or_as_tensors(folder: Path, tmp_path: Path, name: str) -> None:
    graph = read_graph(folder / name)
    relu = next(n.name for n in getattr(graph, "graph_def", graph).node if n.op == "Relu")
    convert(folder / name, tmp_path / f"all_{name}")
    convert(folder / name, tmp_path / name, outputs=[f"{relu}:0", " y"])
    for made, dtype in ((f"all_{name}", tf.bfloat16), (name, tf.float32)):
        graph = read_graph(tmp_path / made)
        nodes = {node.name: node for node in getattr(graph, "graph_def", graph).node}
        assert nodes[relu].attr["T"].type == dtype.as_datatype_enum


def test_meta_graph(folder: Path, tmp_path: Path) -> None:
    convert(folder / "graph.meta", tmp_path / "out.meta")
    with tf.Graph().as_default() as graph, tf.compat.v1.Session() as session:
        saver = tf.compat.v1.train.import_meta_graph(str(tmp_path / "out.meta"))
        saver.restore(session, str(folder / "v1" / "variables" / "variables"))
        given = {"x:0": models.sample((16, models.FEATURES))}
        value = session.run("y:0", given)
        assert any(op.type == "Cast" for op in graph.get_operations())
    np.testing.assert_allclose(value, models.run_frozen(folder / "frozen.pb"), atol=0.05)


def _save_with_default(path: Path, *, v1: bool) -> None:
    kernel = models.sample((16, 16))
    if v1:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.compat.v1.placeholder(tf.float32, [None, 16], name="x")
            keep = tf.compat.v1.placeholder_with_default(2.0, [], name="keep")
            outputs = {"y": tf.nn.relu(x @ kernel) * keep}
            tf.compat.v1.saved_model.simple_save(
                session, str(path), {"x": x, "keep": keep}, outputs
            )
        return
    module = tf.Module()
    specs = [tf.TensorSpec([None, 16], name="x"), tf.TensorSpec([], name="keep")]
    two = tf.constant(2.0)

    @tf.function(input_signature=specs)
    def call(x: tf.Tensor, keep: tf.Tensor = two) -> dict[str, tf.Tensor]:
        return {"y": tf.nn.relu(x @ kernel) * keep}

    module.call = call
    tf.saved_model.save(module, str(path), signatures=call)


@pytest.mark.parametrize("v1", [False, True])
def test_inputs_with_a_default_are_taken_in_the_target_dtype(tmp_path: Path, v1: bool) -> None:
    _save_with_default(tmp_path / "in", v1=v1)
    convert(tmp_path / "in", tmp_path / "out", io="target")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "out"))
        signature = meta.signature_def["serving_default"]
        x, keep = (signature.inputs[name] for name in ("x", "keep"))
        assert {x.dtype, keep.dtype} == {14}
        assert v1 or signature.defaults["keep"].dtype == 14
        y, fed = signature.outputs["y"].name, {x.name: models.sample((4, 16))}
        once, twice = session.run(y, fed), session.run(y, {**fed, keep.name: 4.0})
    assert np.any(once) and np.array_equal(2 * once, twice)


def test_what_builds_layers_anew_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layers = [tf_keras.layers.InputLayer((16,)), tf_keras.layers.Dense(16)]
    tf_keras.Sequential(layers).save(tmp_path / "in", save_format="tf")
    convert(tmp_path / "in", tmp_path / "out", weights=True)
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected dtype float"):
        tf_keras.models.load_model(tmp_path / "out")
    (said,) = (r.getMessage() for r in caplog.records if "load_model" in r.getMessage())
    assert "fails on weights of another dtype" in said


def test_keras_file_becomes_a_saved_model(folder: Path, tmp_path: Path) -> None:
    convert(folder / "image.keras", tmp_path / "out")
    assert_close(models.serve(tmp_path / "out"), models.serve(folder / "exported"))


def test_lambda_layers_are_refused_unless_allowed(tmp_path: Path) -> None:
    inputs = keras.Input([16])
    x = keras.layers.Lambda(lambda x: 2 * x)(keras.layers.Dense(16)(inputs))
    keras.Model(inputs, x).save(tmp_path / "lambda.keras")
    with pytest.raises(ModelError, match=r"cannot load.*[Ll]ambda"):
        convert(tmp_path / "lambda.keras", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["lambda.keras"]
    convert(tmp_path / "lambda.keras", tmp_path / "out", allow_lambda=True)
    assert models.serve(tmp_path / "out")


PLAIN = """
import sys
import numpy as np
import tensorflow as tf
import keras
for name in [*sys.modules]:
    if name.startswith(("graph_passes", "tf_amp")):
        sys.modules[name] = None  # as where they are not installed
x = np.ones([4, 8, 8, 3], np.float32)
layer = keras.layers.TFSMLayer(sys.argv[1], call_endpoint="serving_default")
print(layer(x)["output_0"].shape if isinstance(layer(x), dict) else layer(x).shape)
loaded = tf.saved_model.load(sys.argv[1])
with tf.GradientTape() as tape:
    given = tf.constant(x)
    tape.watch(given)
    value = loaded.serve(given)
print(bool(np.all(np.isfinite(tape.gradient(value, given)))))
"""


def test_plain_tensorflow_runs_the_result(
    run_forked: RunPython, folder: Path, tmp_path: Path
) -> None:
    convert(folder / "exported", tmp_path / "out", weights=True)
    printed = run_forked(PLAIN, args=(str(tmp_path / "out"),)).stdout
    assert printed.split("\n")[:2] == ["(4, 8)", "True"]


@tf.custom_gradient
def normalized(x: tf.Tensor) -> Any:
    mean = tf.reduce_mean(x, -1, keepdims=True)
    variance = tf.reduce_mean(tf.math.squared_difference(x, mean), -1, keepdims=True)
    slope = tf.math.rsqrt(variance + 1e-3)
    return (x - mean) * slope, lambda dy: dy * slope + 0.0 * mean


class Repeated(tf.Module):
    """Products in a loop and in a branch, before an activation."""

    def __init__(self, activation: Callable[[tf.Tensor], tf.Tensor]) -> None:
        super().__init__()
        values = np.random.default_rng(0).normal(0, 0.2, (2, 32, 32)).astype(np.float32)
        self.kernels = [tf.Variable(value) for value in values]
        self.activation = activation

    @tf.function(input_signature=[tf.TensorSpec([16, 32], name="x")])
    def serve(self, x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x = self.activation(x @ self.kernels[0])
        if tf.reduce_sum(x) < 1e9:
            x = self.activation(x @ self.kernels[1])
        return x @ self.kernels[0]


@pytest.mark.parametrize("target", [("CPU", "bfloat16"), ("GPU", "float16")])
@pytest.mark.parametrize("activation", [tf.nn.silu, normalized])
def test_what_a_gradient_of_its_own_takes_is_found(
    tmp_path: Path, activation: Callable[[tf.Tensor], tf.Tensor], target: tuple[str, Any]
) -> None:
    """In functions that got copies, and in those where a unit is in its place."""
    module = Repeated(activation)
    tf.saved_model.save(module, tmp_path / "saved")
    device, dtype = target
    config = dataclasses.replace(CONFIG, device=device, target_dtype=dtype)
    tf_amp.convert_saved_model(tmp_path / "saved", tmp_path / "out", config=config, weights=True)
    x = tf.random.stateless_normal([16, 32], [1, 2])
    loaded = tf.saved_model.load(tmp_path / "out")
    np.testing.assert_allclose(loaded.serve(x), module.serve(x), atol=0.05)


def test_gradients_of_what_a_loop_multiplies_by(tmp_path: Path) -> None:
    tf.saved_model.save(Repeated(tf.nn.relu), tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "out")
    found = []
    for name in ("saved", "out"):
        loaded = tf.saved_model.load(tmp_path / name)
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(loaded.serve(tf.random.stateless_normal([16, 32], [1, 2])) ** 2)
        found.append(tape.gradient(value, [*loaded.kernels]))
    for old, new in zip(*found, strict=True):
        np.testing.assert_allclose(new, old, atol=0.05 * np.abs(old).max())


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("none", {}, "no file or directory"),
        ("module", {"outputs": ["x"]}, "names its outputs in its signatures"),
        ("frozen.pb", {"outputs": ["x9"]}, "no node 'x9'"),
        ("graph.meta", {"weights": True}, "Convert a SavedModel"),
        ("v1_ref", {"weights": True}, "No variable can be stored"),
        ("vocabulary.txt", {}, "neither a GraphDef"),
    ],
)
def test_what_cannot_be_done_is_an_error(
    folder: Path, tmp_path: Path, name: str, options: dict[str, object], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        convert(folder / name, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_convert(tmp_path: Path) -> None:
    module = tf.Module()
    spec = tf.TensorSpec([None], tf.string, name="text")
    module.call = tf.function(tf.strings.lower, input_signature=[spec])
    tf.saved_model.save(module, str(tmp_path / "strings"), signatures=module.call)
    with pytest.raises(ModelError, match="Nothing to convert: the model has no matrix product"):
        convert(tmp_path / "strings", tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["strings"]


@pytest.mark.parametrize("edit", [("deny", "add"), ("infer", "add"), ("allow", "remove")])
def test_products_that_an_edit_keeps_in_float32_are_not_denied(
    tmp_path: Path, edit: tuple[str, str]
) -> None:
    module = tf.Module()
    module.w = tf.Variable(tf.ones([8, 8]))
    spec = tf.TensorSpec([None, 8])
    module.call = tf.function(lambda x: x @ module.w @ module.w, input_signature=[spec])
    tf.saved_model.save(module, str(tmp_path / "layers"))
    list_name, action = edit
    change = tf_amp.ListEdit(list_name=list_name, action=action, op="MatMul")  # type: ignore[arg-type]
    config = dataclasses.replace(CONFIG, list_edits=(change,))
    with pytest.raises(ModelError, match="all 2 products stay float32"):
        tf_amp.convert_saved_model(tmp_path / "layers", tmp_path / "out", config=config)


def test_a_truncated_checkpoint_is_an_error(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder / "exported", tmp_path / "in")
    data = tmp_path / "in" / "variables" / "variables.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(ModelError, match="cannot be read"):
        convert(tmp_path / "in", tmp_path / "out", weights=True)
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


def test_what_links_lead_to_is_copied(folder: Path, tmp_path: Path) -> None:
    source, extra = tmp_path / "in", tmp_path / "extra"
    shutil.copytree(folder / "module", source)
    extra.mkdir()
    (extra / "file").write_text("content")
    (source / "assets.extra").symlink_to(extra)
    convert(source, tmp_path / "out")
    assert not (tmp_path / "out" / "assets.extra").is_symlink()
    assert (tmp_path / "out" / "assets.extra" / "file").read_text() == "content"

    (extra / "back").symlink_to(source)
    with pytest.raises(ModelError, match=r"back' is a link to a directory that it is in"):
        convert(source, tmp_path / "endless")
    assert not (tmp_path / "endless").exists()


def test_a_rule_keeps_products_float32(folder: Path, tmp_path: Path) -> None:
    rules = [tf_amp.Rule(action="keep_float32", op="MatMul")]
    model, out = folder / "frozen.pb", tmp_path / "out.pb"
    with pytest.raises(ModelError, match="kept by a rule"):
        tf_amp.convert_saved_model(model, out, target_dtype="bfloat16", device="CPU", rules=rules)
    with pytest.raises(ValueError, match="give only one"):
        convert(model, out, rules=rules)


def test_a_rule_that_meets_nothing_is_said(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = [tf_amp.Rule(action="keep_float32", node=name) for name in ("nothing", ".*MatMul_1")]
    model = folder / "frozen.pb"
    config = {"target_dtype": "bfloat16", "device": "GPU"}
    tf_amp.convert_saved_model(model, tmp_path / "out.pb", rules=rules, **config)  # type: ignore[arg-type]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["No node of the model meets the criteria of a rule: node = 'nothing'"]


@pytest.mark.parametrize(
    ("options", "error"),
    [({"io": "int8"}, ValueError), ({"outputs": "y"}, TypeError), ({"device": "CPU"}, ValueError)],
)
def test_illegal_arguments(
    folder: Path, tmp_path: Path, options: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        convert(folder / "exported", tmp_path / "out", **options)


def test_command(run_forked: RunPython, folder: Path, tmp_path: Path) -> None:
    env = {"TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_COST_TABLE": "off"}
    target = ("--device", "CPU", "--dtype", "bfloat16")
    arguments = ("convert", str(folder / "exported"), str(tmp_path / "out"), *target)
    printed = run_forked(MAIN, env, args=arguments).stdout
    assert "3 of 3 products in bfloat16" in printed
    again = run_forked(MAIN, env, args=arguments, check=False)
    assert (again.returncode, again.stdout) == (1, "")
    assert "exists" in again.stderr
    printed = run_forked(MAIN, env, args=(*arguments, "--force", "--weights")).stdout
    assert "float32 variables are stored so" in printed
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_model_inside_of_the_destination_stays(tmp_path: Path) -> None:
    source = tmp_path / "models" / "one"
    source.mkdir(parents=True)
    (source / "saved_model.pb").write_bytes(b"")
    with pytest.raises(ModelError, match="is inside the destination"):
        tf_amp.convert_saved_model(source, tmp_path / "models", force=True)
    assert source.exists()


def test_the_name_of_a_file_says_whether_it_is_text(tmp_path: Path) -> None:
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, (8, 8), name="x")
        tf.nn.softmax(x @ tf.ones((8, 8)), name="out")
    tf.io.write_graph(graph, str(tmp_path), "one.pbtxt")
    for source, made in (("one.pbtxt", "low.pb"), ("one.pb", "low.pbtxt")):
        tf.io.write_graph(graph, str(tmp_path), "one.pb", as_text=False)
        tf_amp.convert_saved_model(tmp_path / source, tmp_path / made)
        assert len(read_graph(tmp_path / made).node) > 3
