"""Small models of every kind that can be converted, and what plain TensorFlow makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
FEATURES, CLASSES = 24, 8


def images_model() -> keras.Model:
    """Convolutions with batch normalization, and dense layers behind them."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input([8, 8, 3], name="image")
    x = keras.layers.Conv2D(8, 3, use_bias=False)(inputs)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    x = keras.layers.Dense(32, "relu")(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="logits")(x))


class TwoSignatures(tf.Module):
    """A module with a loop, a vocabulary in an asset, two signatures and a training step."""

    def __init__(self, vocabulary: Path) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.vocabulary = tf.saved_model.Asset(str(vocabulary))
        self.kernel = tf.Variable(0.3 * rng.standard_normal((FEATURES, FEATURES), np.float32))
        self.head = tf.Variable(0.3 * rng.standard_normal((FEATURES, CLASSES), np.float32))
        self.trained = tf.Variable(0.3 * rng.standard_normal((FEATURES, CLASSES), np.float32))
        self.steps = tf.Variable(3)

    @tf.function(input_signature=[tf.TensorSpec([None, FEATURES], name="x")])
    def classify(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        for _ in tf.range(self.steps):
            x = tf.nn.relu(tf.matmul(x, self.kernel))
        logits = tf.matmul(x, self.head)
        return {"logits": logits, "label": tf.argmax(logits, -1)}

    @tf.function(input_signature=[tf.TensorSpec([None, FEATURES], name="x")])
    def embed(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"embedding": tf.nn.relu(tf.matmul(x, self.kernel))}

    @tf.function(input_signature=[tf.TensorSpec([None, FEATURES])])
    def train(self, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, self.trained) ** 2)
        self.trained.assign_sub(0.1 * tape.gradient(loss, self.trained))
        return loss


def v1_graph() -> tuple[Any, Any]:
    """A perceptron of TensorFlow 1 with resource variables, in the default graph."""
    x = v1.placeholder(tf.float32, [None, FEATURES], name="x")
    init = v1.glorot_uniform_initializer(seed=1)
    for number, width in enumerate((32, CLASSES)):
        last = x if not number else y  # noqa: F821
        w = v1.get_variable(f"w{number}", [last.shape[-1], width], initializer=init)
        b = v1.get_variable(f"b{number}", [width], initializer=v1.zeros_initializer())
        y = tf.nn.bias_add(tf.matmul(last, w), b)
        y = y if number else tf.nn.relu(y)
    return x, tf.identity(y, name="y")


def save_all(folder: Path) -> None:
    """Writes one model of each kind."""
    model = images_model()
    model.save(folder / "image.keras")
    model.export(folder / "exported")
    tf.saved_model.save(model, str(folder / "saved"))
    (folder / "vocabulary.txt").write_text("a\nb\n")
    module = TwoSignatures(folder / "vocabulary.txt")
    signatures = {"classify": module.classify, "embed": module.embed}
    tf.saved_model.save(module, str(folder / "module"), signatures=signatures)
    for name, resources in (("v1", True), ("v1_ref", False)):
        with tf.Graph().as_default() as graph, v1.Session() as session:
            with v1.variable_scope("", use_resource=resources):
                x, y = v1_graph()
            session.run(v1.global_variables_initializer())
            v1.saved_model.simple_save(session, str(folder / name), {"x": x}, {"y": y})
            frozen = v1.graph_util.convert_variables_to_constants(
                session, graph.as_graph_def(), ["y"]
            )
            if resources:
                (folder / "frozen.pb").write_bytes(frozen.SerializeToString())
                v1.train.export_meta_graph(str(folder / "graph.meta"))


def sample(shape: tuple[int | None, ...]) -> np.ndarray:
    """Values for an input; 16 rows where their number is free."""
    rng = np.random.default_rng(5)
    return rng.standard_normal([16 if n is None else n for n in shape]).astype(np.float32)


def serve(path: Path) -> dict[str, np.ndarray]:
    """All outputs of all signatures, loaded by TensorFlow 2, as float32."""
    results = {}
    loaded = tf.saved_model.load(str(path))
    for key, function in loaded.signatures.items():
        specs = function.structured_input_signature[1]
        fed = {n: tf.cast(sample(tuple(s.shape)), s.dtype) for n, s in specs.items()}
        for name, value in function(**fed).items():
            results[f"{key}/{name}"] = tf.cast(value, tf.float32).numpy()
    return results


def serve_v1(path: Path) -> dict[str, np.ndarray]:
    """The same, loaded as TensorFlow Serving does."""
    results = {}
    with tf.Graph().as_default(), v1.Session() as session:
        meta = v1.saved_model.load(session, ["serve"], str(path))
        for key, signature in meta.signature_def.items():
            if not signature.outputs or key.startswith("__"):
                continue
            feeds = {}
            for info in signature.inputs.values():
                shape = tuple(None if d.size < 0 else d.size for d in info.tensor_shape.dim)
                feeds[info.name] = sample(shape).astype(tf.as_dtype(info.dtype).as_numpy_dtype)
            names = {name: info.name for name, info in signature.outputs.items()}
            for name, value in session.run(names, feeds).items():
                results[f"{key}/{name}"] = value.astype(np.float32)
    return results


def run_frozen(path: Path) -> np.ndarray:
    """The output of the frozen graph."""
    graph_def = v1.GraphDef.FromString(path.read_bytes())
    with tf.Graph().as_default() as graph, v1.Session() as session:
        tf.import_graph_def(graph_def, name="")
        given = graph.get_tensor_by_name("x:0")
        fed = sample((16, FEATURES)).astype(given.dtype.as_numpy_dtype)
        return session.run("y:0", {given: fed})


def interface(path: Path) -> dict[str, Any]:
    """All that others know of a SavedModel, apart from values: text that must not change."""
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    saved = SavedModel.FromString((path / "saved_model.pb").read_bytes())
    found: dict[str, Any] = {}
    for meta in saved.meta_graphs:
        objects = meta.object_graph_def
        found[" ".join(meta.meta_info_def.tags)] = {
            "signatures": {k: str(v) for k, v in meta.signature_def.items()},
            "objects": [str(node) for node in objects.nodes],
            "functions": {k: str(v) for k, v in objects.concrete_functions.items()},
            "saver": str(meta.saver_def),
            "collections": {k: str(v) for k, v in meta.collection_def.items()},
            "assets": str(meta.asset_file_def),
            "variables": [n.name for n in meta.graph_def.node if "Var" in n.op],
            "bodies": {
                f.signature.name: str(f.signature)
                for f in meta.graph_def.library.function
                if f.signature.name in objects.concrete_functions
            },
        }
    return found
