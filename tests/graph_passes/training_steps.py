"""Training steps of small Keras networks as GraphDefs that can be rewritten and run again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tensorflow.core.framework import function_pb2, graph_pb2

from graph_passes.ir.graph_view import Shape
from tf_amp.hosts.function_shapes import static_shapes


def residual_cnn() -> keras.Model:
    """Convolutions, batch normalizations in a row and on two branches that share a gradient."""
    inputs = keras.Input((8, 8, 4))
    x = layers.Conv2D(8, 3, padding="same")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    left = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x))
    right = layers.BatchNormalization()(layers.Conv2D(8, 1)(x))
    x = layers.Activation("relu")(layers.Add()([left, right]))
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))


def token_mlp() -> keras.Model:
    """Products of a rank-3 tensor with weights, whose gradients are sums over the batch."""
    inputs = keras.Input((6, 8))
    x = layers.EinsumDense("abc,cd->abd", (6, 16), bias_axes="d", activation="relu")(inputs)
    x = layers.LayerNormalization()(x)
    x = layers.EinsumDense("abc,cd->abd", (6, 12), bias_axes="d")(x)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


@dataclasses.dataclass
class Step:
    """A traced training step.

    Attributes:
        graph_def: its graph.
        shapes: static shapes of the graph.
        preserve: the nodes that running it fetches.
        variables: the variables that it reads and writes.
    """

    graph_def: graph_pb2.GraphDef
    shapes: Callable[[str], tuple[Shape | None, ...]]
    preserve: frozenset[str]
    variables: list[tf.Variable]
    _function: object
    _batch: tuple[np.ndarray, np.ndarray]
    _initial: list[np.ndarray]

    @property
    def function_def(self) -> function_pb2.FunctionDef:
        """The step as a function; its nodes have the names that they have in the graph."""
        return self._function.function_def

    def train(
        self, graph_def: graph_pb2.GraphDef, steps: int
    ) -> tuple[list[float], list[np.ndarray]]:
        """Runs a rewritten graph from the initial variables; gives losses and final variables."""
        for variable, value in zip(self.variables, self._initial, strict=True):
            variable.assign(value)
        traced = self._function
        internal = [tensor.op.name for tensor in traced.graph.internal_captures]
        arguments = [t.op.name for t in traced.inputs if t.op.name not in internal]
        effects = [op.name for op in traced.graph.control_outputs]

        @tf.function(autograph=False)
        def step(*batch):
            graph = tf.compat.v1.get_default_graph()
            captured = [graph.capture(tensor) for tensor in traced.captured_inputs]
            feeds = dict(zip(internal + arguments, captured + list(batch), strict=True))
            results = tf.graph_util.import_graph_def(
                graph_def,
                input_map={f"{name}:0": tensor for name, tensor in feeds.items()},
                return_elements=[traced.outputs[0].name, *effects],
                name="",
            )
            with tf.control_dependencies(results[1:]):
                return tf.identity(results[0])

        losses = [float(step(*self._batch)) for _ in range(steps)]
        return losses, [variable.numpy() for variable in self.variables]

    def updates(self, final: list[np.ndarray]) -> list[np.ndarray]:
        """What training changed in each variable, the optimizer's among them."""
        return [new - old for new, old in zip(final, self._initial, strict=True)]


def trace(build: Callable[[], keras.Model], batch: int | None) -> Step:
    """Traces a training step of a network; `batch` None leaves the batch size open."""
    keras.utils.set_random_seed(1)
    model = build()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    shape = (batch, *model.input_shape[1:])
    traced = step.get_concrete_function(tf.TensorSpec(shape), tf.TensorSpec((batch,), tf.int32))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, *shape[1:])).astype(np.float32)
    y = rng.integers(0, 3, 8).astype(np.int32)
    variables = [v.value for v in (*model.variables, *optimizer.variables)]
    fetched = {op.name for op in traced.graph.control_outputs} | {t.op.name for t in traced.outputs}
    return Step(
        graph_def=traced.graph.as_graph_def(),
        shapes=static_shapes(traced.graph),
        preserve=frozenset(fetched),
        variables=variables,
        _function=traced,
        _batch=(x, y),
        _initial=[variable.numpy() for variable in variables],
    )
