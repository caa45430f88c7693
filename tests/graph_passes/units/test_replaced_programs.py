"""Programs whose units are replaced: effects, feeds, colocations, shapes and dtypes inside stay."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from traced_graphs import Traced, node_types, of_op, trace

from graph_passes import PrecisionConfig
from graph_passes.ir.view import view_body
from graph_passes.units.fusion import find_units

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
GPU = PrecisionConfig(target_dtype="float16", device="GPU")
# Graphs as small as these are not worth their Casts.
PAINTED = frozenset(("cast-cut",))
RANDOM = np.random.default_rng(0)


def spec(*shape: int, dtype: tf.DType = tf.float32) -> tf.TensorSpec:
    return tf.TensorSpec(shape, dtype)


def batch_norm(
    x: tf.Tensor, kernel: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, *, keep: bool = False
) -> list[tf.Tensor]:
    """A step of a convolution and a batch normalization."""
    gamma, beta = tf.identity(gamma), tf.identity(beta)
    with tf.GradientTape() as tape:
        tape.watch([kernel, gamma, beta])
        h = tf.nn.conv2d(x, kernel, 1, "SAME")
        mean, variance = tf.nn.moments(h, [0, 1, 2], keepdims=keep)
        y = tf.nn.batch_normalization(h, mean, variance, beta, gamma, 1e-3)
        loss = tf.reduce_mean(tf.nn.conv2d(tf.nn.relu(y), kernel, 1, "SAME") ** 2)
    return [loss, *tape.gradient(loss, [kernel, gamma, beta])]


def stored_batch_norm(
    x: tf.Tensor, kernel: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
) -> list[tf.Tensor]:
    h = tf.nn.conv2d(x, kernel, 1, "SAME")
    y = tf.nn.batch_normalization(h, tf.identity(mean), tf.identity(variance), 0.0, 1.0, 1e-3)
    return [tf.nn.conv2d(tf.nn.relu(y), kernel, 1, "SAME")]


def attention(x: tf.Tensor, w: tf.Tensor, b: tf.Tensor) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch([x, w, b])
        q = tf.nn.relu(tf.matmul(x, w) + b)
        scores = tf.matmul(q, x, transpose_b=True) / 64.0
        probabilities = tf.nn.softmax(scores)
        y = tf.matmul(tf.matmul(probabilities, q), w)
        loss = tf.reduce_mean(y * y)
    return [loss, *tape.gradient(loss, [x, w, b])]


def gelu(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        tape.watch([x, w])
        h = tf.matmul(x, w)
        cubic = h + 0.044715 * tf.pow(h, 3.0)
        y = tf.matmul(0.5 * h * (1.0 + tf.tanh(np.float32(np.sqrt(2 / np.pi)) * cubic)), w)
        loss = tf.reduce_mean(y * y)
    return [loss, *tape.gradient(loss, [x, w])]


IMAGES = (spec(4, 6, 6, 8), spec(3, 3, 8, 8))
PROGRAMS: dict[str, tuple[Callable[..., list[tf.Tensor]], tuple[tf.TensorSpec, ...]]] = {
    "batch norm": (batch_norm, (*IMAGES, spec(8), spec(8))),
    "batch norm, axes kept": (
        functools.partial(batch_norm, keep=True),
        (*IMAGES, spec(8), spec(8)),
    ),
    "stored batch norm": (stored_batch_norm, (*IMAGES, spec(8), spec(8))),
    "attention": (attention, (spec(4, 16, 64), spec(64, 64), spec(64))),
    "gelu": (gelu, (spec(64, 64), spec(64, 64))),
}
FOUND = {
    ("batch norm", GPU): {"batch-norm"},
    ("batch norm", CPU): {"batch-norm"},
    ("attention", GPU): {"weight-gradient", "softmax-gradient", "bias-gradient"},
    ("gelu", GPU): {"gelu"},
}


@pytest.fixture(scope="module", params=PROGRAMS)
def named(request: pytest.FixtureRequest) -> tuple[str, Traced]:
    function, specs = PROGRAMS[request.param]
    return request.param, trace(function, *specs)


def values(traced: Traced) -> list[np.ndarray]:
    nodes = {node.name: node for node in traced.graph_def.node}
    shapes = [
        [dim.size for dim in nodes[name.partition(":")[0]].attr["shape"].shape.dim]
        for name in traced.arguments
    ]
    return [RANDOM.uniform(0.1, 1.0, shape).astype(np.float32) for shape in shapes]


def replaced(traced: Traced, config: PrecisionConfig) -> list[str]:
    """The nodes that go because of what replaces them."""
    kept = {node.name for node in traced.find(config, traced.arguments).proto.node}
    return [node.name for node in traced.graph_def.node if node.name not in kept]


def fused(graph_def: graph_pb2.GraphDef, traced: Traced, config: PrecisionConfig, *kept: str):
    preserve = {*traced.results, *traced.arguments, *kept}
    return find_units(graph_def, view_body(graph_def, traced.shapes), config, preserve)


def assert_close(new: np.ndarray, old: np.ndarray, what: str = "") -> None:
    """Sums that nearly cancel are as exact as their terms are."""
    atol = 1e-5 * max(1.0, np.abs(old).max())
    np.testing.assert_allclose(new, old, rtol=1e-3, atol=atol, err_msg=what)


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
def test_what_is_replaced_computes_the_same(named, config):
    name, traced = named
    fusion = traced.find(config, traced.arguments)
    assert FOUND.get((name, config), set()) <= set(node_types(fusion))
    given = values(traced)
    found, wanted = (traced.run(g, *given) for g in (fusion.proto, traced.graph_def))
    for new, old in zip(found, wanted, strict=True):
        assert_close(new, old)


def with_counters(graph_def: graph_pb2.GraphDef, waiting: list[str]) -> graph_pb2.GraphDef:
    """A graph in which each of some nodes waits for a count of its own."""
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        for name in waiting:
            counter = tf.compat.v1.get_variable(
                f"counter/{name}", (), tf.int32, tf.zeros_initializer(), use_resource=True
            )
            counter.assign_add(1, name=f"count/{name}", read_value=False)
    counted = graph.as_graph_def()
    for node in counted.node:
        if node.name in waiting:
            node.input.append(f"^count/{node.name}")
    return counted


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
def test_what_a_replaced_node_waits_for_happens(named, config):
    _, traced = named
    waiting = replaced(traced, config)
    if not waiting:
        pytest.skip("nothing is replaced")
    counted = with_counters(traced.graph_def, waiting)
    after = fused(counted, traced, config).proto
    with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
        tf.import_graph_def(after, name="")
        session.run([f"counter/{name}/Assign" for name in waiting])
        for _ in range(3):
            session.run(traced.results, dict(zip(traced.arguments, values(traced), strict=True)))
        reads = [f"counter/{name}/Read/ReadVariableOp:0" for name in waiting]
        counts = dict(zip(waiting, session.run(reads), strict=True))
    assert counts == dict.fromkeys(waiting, 3)


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
def test_what_is_fed_inside_counts(named, config):
    _, traced = named
    given = dict(zip(traced.arguments, values(traced), strict=True))
    for name in replaced(traced, config)[::3]:
        after = fused(traced.graph_def, traced, config, name).proto
        results = []
        for graph_def in (traced.graph_def, after):
            with tf.Graph().as_default() as graph, tf.compat.v1.Session(graph=graph) as session:
                tf.import_graph_def(graph_def, name="")
                tensor = graph.get_tensor_by_name(f"{name}:0")
                if tensor.dtype != tf.float32:
                    break
                fed = np.full(tensor.shape.as_list(), 0.5, np.float32)
                results.append(session.run(traced.results, {**given, tensor: fed}))
        for new, old in zip(*results, strict=True) if results else ():
            assert_close(new, old, name)


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
def test_nodes_placed_with_what_is_replaced_find_a_place(named, config):
    _, traced = named
    placed = graph_pb2.GraphDef()
    placed.CopyFrom(traced.graph_def)
    gone = replaced(traced, config)
    for node, place in zip([n for n in placed.node if n.name not in gone], gone, strict=False):
        node.attr["_class"].list.s.append(f"loc:@{place}".encode())
    after = fused(placed, traced, config).proto
    given = values(traced)
    found, wanted = (traced.run(g, *given) for g in (after, traced.graph_def))
    for new, old in zip(found, wanted, strict=True):
        assert_close(new, old)


@pytest.mark.parametrize("rules", [PAINTED, frozenset()], ids=["painted", "default"])
@pytest.mark.parametrize("shape", [(8,), (1, 1, 1, 8), (1, 8), ()], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "flat"])
def test_scales_and_offsets_of_any_rank_run(keep, training, shape, rules):
    config = PrecisionConfig(target_dtype="bfloat16", device="CPU", disabled_rules=rules)

    step = functools.partial(batch_norm, keep=keep)

    def infer(x, kernel, gamma, beta):
        h = tf.nn.conv2d(x, kernel, 1, "SAME")
        mean, variance = (tf.identity(tf.constant(v, tf.float32, [8])) for v in (0.3, 2.0))
        y = tf.nn.batch_normalization(h, mean, variance, tf.identity(beta), tf.identity(gamma), 0.1)
        return [tf.nn.conv2d(y, kernel, 1, "SAME")]

    traced = trace(step if training else infer, *IMAGES, spec(*shape), spec(*shape))
    after = traced.rewrite(config).graph_def
    given = values(traced)
    found, wanted = (traced.run(g, *given) for g in (after, traced.graph_def))
    for new, old in zip(found, wanted, strict=True):
        assert new.shape == old.shape
        if training is False:
            np.testing.assert_allclose(new, old, rtol=0.1, atol=0.1 * np.abs(old).max())


@pytest.mark.parametrize("keep", [False, True])
def test_a_sum_that_a_model_takes_forward_stays_float32(keep):
    def forward(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        h = tf.matmul(x, w)
        total = tf.reshape(tf.reduce_sum(h, 0, keepdims=keep), [1, 64])
        return [tf.matmul(total * 1e-4, w), total * 1e-4]

    traced = trace(forward, spec(4096, 64), spec(64, 64))
    assert not {"bias-gradient", "ones-product"} & {
        *node_types(traced.find(GPU)),
        *node_types(traced.find(CPU)),
    }
    after = traced.rewrite(GPU).graph_def
    given = np.full((4096, 64), 0.5, np.float32), np.full((64, 64), 1.0, np.float32)
    for new, old in zip(*(traced.run(g, *given) for g in (after, traced.graph_def)), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-2)


def test_products_that_a_model_adds_up_forward_stay_apart():
    def forward(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        products = tf.matmul(x, y, transpose_a=True)
        return [tf.reshape(tf.reduce_sum(products, 0), [64, 64]) * 1e-4]

    traced = trace(forward, spec(8, 16, 64), spec(8, 16, 64))
    assert "weight-gradient" not in node_types(traced.find(GPU))


def test_a_statistic_that_leaves_the_unit_keeps_its_shape():
    def step(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        h = tf.nn.conv2d(x, w, 1, "SAME")
        mean, variance = tf.nn.moments(h, [0, 1, 2], keepdims=True)
        y = tf.nn.batch_normalization(h, mean, variance, None, None, 1e-3)
        return [tf.nn.conv2d(y, w, 1, "SAME"), tf.squeeze(mean, [0]) * 2.0]

    traced = trace(step, *IMAGES)
    for config in (CPU, GPU):
        proto, given = traced.find(config).proto, values(traced)
        found, wanted = (traced.run(g, *given) for g in (proto, traced.graph_def))
        assert [new.shape for new in found] == [old.shape for old in wanted]


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize("dtype", [tf.float64, tf.float16])
@pytest.mark.parametrize("name", ["batch norm", "attention", "gelu"])
def test_units_of_another_dtype_cost_nothing_beside(name, dtype, config):
    function, specs = PROGRAMS[name]

    def both(x: tf.Tensor, *arguments: tf.Tensor) -> list[tf.Tensor]:
        made = function(*(tf.cast(tf.identity(a), dtype) for a in arguments))
        return [tf.matmul(tf.nn.relu(tf.matmul(x, x)), x), *made]

    if name == "gelu" and dtype != tf.float32:

        def both(x: tf.Tensor, *arguments: tf.Tensor) -> list[tf.Tensor]:
            h = tf.cast(arguments[0], dtype)
            cubic = h + tf.cast(0.044715, dtype) * tf.pow(h, tf.cast(3.0, dtype))
            y = tf.tanh(tf.cast(np.sqrt(2 / np.pi), dtype) * cubic)
            return [tf.matmul(tf.nn.relu(tf.matmul(x, x)), x), y]

    traced = trace(both, spec(512, 512), *specs)
    result = traced.rewrite(config)
    target = tf.as_dtype(config.target_dtype).as_datatype_enum
    assert sum(n.attr["T"].type == target for n in of_op(result.graph_def, "MatMul")) >= 2


def test_two_tanhs_of_one_argument_are_no_fault():
    def two(x: tf.Tensor, w: tf.Tensor) -> list[tf.Tensor]:
        h = tf.matmul(x, w)
        argument = np.float32(np.sqrt(2 / np.pi)) * (h + 0.044715 * tf.pow(h, 3.0))
        return [tf.matmul(tf.tanh(argument) * h, w), tf.matmul(tf.tanh(argument) + h, w)]

    traced = trace(two, spec(64, 64), spec(64, 64))
    after, given = traced.rewrite(GPU).graph_def, values(traced)
    for new, old in zip(*(traced.run(g, *given) for g in (after, traced.graph_def)), strict=True):
        np.testing.assert_allclose(new, old, rtol=2e-2)
