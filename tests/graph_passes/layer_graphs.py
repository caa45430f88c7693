"""One layer between two matrix products, forward and backward, as a graph to rewrite and run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, types_pb2

from graph_passes import PrecisionConfig, RewriteResult, rewrite_graph_def
from graph_passes.ir.graph_view import Shape
from graph_passes.ir.view import view_body
from graph_passes.policy.op_lists import FLOAT32
from graph_passes.units.fusion import Fusion, find_units
from tf_amp.hosts.function_shapes import static_shapes

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
GPU = PrecisionConfig(target_dtype="float16", device="GPU")
STATISTICS = frozenset(
    ("Mean", "Sum", "Square", "SquaredDifference", "Rsqrt", "RsqrtGrad", "DivNoNan", "Exp", "Log")
)
"""Ops that must not compute in the target dtype."""
OF_PRODUCTS = 4
"""Wide casts of what the two products read and of what they give to the caller."""
OF_UNIT = 4
"""Those of a unit in float32: x and dy up, y and dx down."""


@dataclasses.dataclass
class LayerGraph:
    """A traced layer.

    Attributes:
        graph_def: its graph.
        shapes: static shapes of the graph.
        preserve: the nodes that running it fetches.
    """

    graph_def: graph_pb2.GraphDef
    shapes: Callable[[str], tuple[Shape | None, ...]]
    preserve: frozenset[str]
    _traced: object
    _state: list[tuple[object, np.ndarray]]

    def find(self, config: PrecisionConfig) -> Fusion:
        """The units of the graph."""
        view = view_body(self.graph_def, self.shapes)
        return find_units(self.graph_def, view, config, self.preserve)

    def rewrite(self, config: PrecisionConfig) -> RewriteResult:
        """The rewritten graph; a rewrite that was given up fails the test."""
        result = rewrite_graph_def(
            self.graph_def, config, preserve=self.preserve, shapes=self.shapes
        )
        assert result.failure is None
        return result

    def run(self, graph_def: graph_pb2.GraphDef, *values: np.ndarray) -> list[np.ndarray]:
        """The results of a graph made from this one, and the variables of the layer behind it."""
        for variable, value in self._state:
            variable.assign(value)
        traced = self._traced
        internal = [tensor.op.name for tensor in traced.graph.internal_captures]
        arguments = [t.op.name for t in traced.inputs if t.op.name not in internal]
        effects = [op.name for op in traced.graph.control_outputs]
        outputs = [tensor.name for tensor in traced.outputs]

        @tf.function(autograph=False)
        def imported(*given):
            graph = tf.compat.v1.get_default_graph()
            captured = [graph.capture(tensor) for tensor in traced.captured_inputs]
            feeds = dict(zip(internal + arguments, captured + list(given), strict=True))
            made = tf.graph_util.import_graph_def(
                graph_def,
                input_map={f"{name}:0": tensor for name, tensor in feeds.items()},
                return_elements=[*outputs, *effects],
                name="",
            )
            with tf.control_dependencies(made[len(outputs) :]):
                return [tf.identity(tensor) for tensor in made[: len(outputs)]]

        results = [tensor.numpy() for tensor in imported(*values)]
        return results + [variable.numpy() for variable, _ in self._state]


def trace_layer(
    layer: keras.layers.Layer,
    shape: tuple[int | None, ...],
    *,
    training: bool = True,
    stored: tuple[float, ...] = (),
    is_data: bool = False,
    flows_back: bool = True,
    mask: np.ndarray | None = None,
) -> LayerGraph:
    """Traces `product(layer(product(x)))` and its gradients, with dy fed.

    Args:
        layer: a layer of Keras 3 or tf_keras.
        shape: of x, batch included; the last size is known.
        training: the layer's mode.
        stored: what its variables that are not trained hold: the mean and variance.
        is_data: whether the layer reads x itself, not a product of it.
        flows_back: whether the gradient of x is asked for.
        mask: what the layer is given as its mask.
    """
    given = {} if mask is None else {"mask": tf.constant(mask)}
    layer.build((None, *shape[1:]))
    for number, weight in enumerate(layer.trainable_variables):
        row = 0.5 + 0.25 * number + np.arange(weight.shape[-1]) % 4 * 0.25
        weight.assign(np.broadcast_to(row, weight.shape))
    for weight, value in zip(layer.non_trainable_variables, stored, strict=False):
        weight.assign(value + np.arange(weight.shape[0]) % 3)
    variables = [v.value if isinstance(layer, keras.layers.Layer) else v for v in layer.variables]
    trainable = layer.trainable_variables
    weights = [v.value if isinstance(layer, keras.layers.Layer) else v for v in trainable]
    eye = np.eye(shape[-1], dtype=np.float32)
    options = {"training": training} if layer.non_trainable_variables else {}

    @tf.function(autograph=False)
    def step(x, dy):
        with tf.GradientTape() as tape:
            if flows_back:
                tape.watch(x)
            made = x if is_data else tf.matmul(x, eye)
            y = tf.matmul(layer(made, **given, **options), eye)
        sources = [x, *weights] if flows_back else weights
        return [y, *tape.gradient(y, sources, output_gradients=tf.matmul(dy, eye))]

    traced = step.get_concrete_function(tf.TensorSpec(shape), tf.TensorSpec(shape))
    fetched = {op.name for op in traced.graph.control_outputs} | {t.op.name for t in traced.outputs}
    return LayerGraph(
        graph_def=traced.graph.as_graph_def(),
        shapes=static_shapes(traced.graph),
        preserve=frozenset(fetched),
        _traced=traced,
        _state=[(variable, variable.numpy()) for variable in variables],
    )


def whole_numbers(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """x far from 0, whose sums no low precision can hold, and dy; both exact in either dtype."""
    rng = np.random.default_rng(0)
    x = rng.integers(116, 141, shape) + np.arange(shape[-1]) % 3
    return x.astype(np.float32), rng.integers(-3, 4, shape).astype(np.float32)


def assert_near(found: list[np.ndarray], wanted: list[np.ndarray], rounding: float) -> None:
    """Asserts that each array is within a part of the largest value wanted."""
    for new, old in zip(found, wanted, strict=True):
        assert np.isfinite(new).all()
        np.testing.assert_allclose(new, old, rtol=0, atol=rounding * np.abs(old).max())


def low_statistics(graph_def: graph_pb2.GraphDef) -> list[str]:
    """The nodes that compute statistics in low precision."""
    low = (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16)
    return [n.name for n in graph_def.node if n.op in STATISTICS and n.attr["T"].type in low]


def wide_casts(graph: LayerGraph, result: RewriteResult) -> int:
    """How many Casts are between the products of a rewritten graph: those of whole activations."""
    casts = [n for n in result.graph_def.node if n.op == "Cast" and "AutoMixed" in n.name]
    shapes = [graph.shapes(n.input[0].partition(":")[0]) for n in casts]
    return sum(not shape or shape[0] is None or len(shape[0]) > 1 for shape in shapes)


def inside(graph: LayerGraph, config: PrecisionConfig) -> list[str]:
    """The nodes that are float32 inside units."""
    return [name for name, place in graph.find(config).node_lists.items() if place == FLOAT32]
