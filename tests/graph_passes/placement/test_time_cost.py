"""The stage that keeps float32 what the target dtype makes slower, on small graphs."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import call_graphs
import graph_checks
import numpy as np
import pytest
import tensorflow as tf
import v1_graphs
from cpu_units import HAS_ONEDNN, NO_ONEDNN
from decisions import decisions_of, reasons_of
from graph_diff import retyped
from graph_text import graph, inferred_shapes
from tensorflow.core.framework import graph_pb2

from graph_passes import PrecisionConfig, rewrite_graph_def
from graph_passes.ops.reasons import Reason
from graph_passes.placement import min_cut
from graph_passes.policy.config import ListEdit
from graph_passes.policy.cost_table import (
    BROADCAST,
    CHANNELS_FIRST,
    STRIDED,
    CostTable,
    Curve,
    OpCost,
)
from graph_passes.policy.cost_table_files import shipped_table
from graph_passes.report import Report

MICRO = 1e-6
SIDE = 64
SQUARE = (SIDE, SIDE)
ELEMENTS = SIDE * SIDE


def flat(time: float) -> Curve:
    """A time in microseconds at every size up to a million."""
    return Curve((1, 1 << 20), (time * MICRO, time * MICRO))


def table(cast: float = 10.0, **times: tuple[float, float]) -> CostTable:
    """A table with (float32, low) microseconds for each op; MatMul gains a lot by default.

    A variant is written with two underscores: `AddV2__broadcast`.
    """
    given = {"MatMul": (200.0, 100.0), **times}
    return CostTable(
        device_class="cpu-test",
        device="CPU",
        target_dtype="bfloat16",
        measured_on="nothing",
        to_low=flat(cast),
        to_float32=flat(cast),
        rows=tuple(
            (
                op.replace("__", "/"),
                OpCost("flops" if "MatMul" in op else "elements", flat(full), flat(low)),
            )
            for op, (full, low) in sorted(given.items())
        ),
    )


def config(costs: CostTable | None, **changes: Any) -> PrecisionConfig:
    return PrecisionConfig(target_dtype="bfloat16", device="CPU", cost_table=costs, **changes)


def converted(
    graph_def: graph_pb2.GraphDef,
    settings: PrecisionConfig,
    *,
    known_shapes: bool = True,
    preserve: tuple[str, ...] = (),
) -> tuple[set[str], Report]:
    """Rewrites, checks the outcome, and gives the names of the converted nodes."""
    shapes = inferred_shapes(graph_def) if known_shapes else None
    result = rewrite_graph_def(graph_def, settings, shapes=shapes, preserve=preserve)
    assert result.failure is None
    graph_checks.check(graph_def, result.graph_def, device="CPU", preserve=preserve)
    return {found.node for found in retyped(graph_def, result.graph_def)}, result.report


CHAIN = graph(f"""
    x = Placeholder(dtype=float32, shape={list(SQUARE)})
    a = MatMul(x, x)
    b = Sigmoid(a)
    c = Tanh(b)
    d = MatMul(c, c)
    out = Identity(d)
""")


def test_without_a_product_nothing_is_converted() -> None:
    """However fast the ops between them would be."""
    times = {"MatMul": (100.0, 400.0), "Sigmoid": (300.0, 1.0), "Tanh": (300.0, 1.0)}
    low, report = converted(CHAIN, config(table(**times)))
    assert low == set()
    assert report.casts_to_low + report.casts_to_float32 == 0
    assert reasons_of(report)["c"] == Reason.SLOWER_HERE.text
    times["MatMul"] = (100.0, 99.0)
    low, _ = converted(CHAIN, config(table(**times)))
    assert low >= {"a", "b", "c", "d"}


@pytest.mark.parametrize(
    ("times", "low"),
    [
        # No row, no opinion: the op follows the matrix products around it.
        ({}, {"a", "b", "c", "d"}),
        # Two Casts of 10 cost more than the 18 that a slow op loses ...
        ({"Sigmoid": (10.0, 28.0)}, {"a", "b", "c", "d"}),
        # ... and less than the 36 that two in a row lose: they go together.
        ({"Sigmoid": (10.0, 28.0), "Tanh": (10.0, 28.0)}, {"a", "d"}),
        ({"Sigmoid": (10.0, 90.0)}, {"a", "c", "d"}),
        # A matrix product that gains less than its Casts cost stays float32 as well.
        ({"MatMul": (10.0, 9.0)}, set()),
        ({"MatMul": (10.0, 50.0)}, set()),
    ],
)
def test_kernels_and_casts_decide(times: Mapping[str, tuple[float, float]], low: set[str]) -> None:
    names, report = converted(CHAIN, config(table(**times)), preserve=("out",))
    assert names - {"out"} == low
    slower = {d.node for d in decisions_of(report) if d.reason is Reason.SLOWER_HERE}
    assert slower == {"a", "b", "c", "d"} - low
    for name in slower:
        assert reasons_of(report)[name].startswith("slower in the target dtype on this device")


def _product(op: str, small: bool) -> graph_pb2.GraphDef:
    """A product of two float32 tensors, of hardly any work or of about 10^9 operations."""
    side, deep = (4, 4) if small else (16, 32)
    volumes = {"strides": [1] * 5, "padding": "SAME"}
    x, weights = (4, side, side, side, deep), (3, 3, 3, deep, deep)
    rows, depth = (2, 64) if small else (512, 1024)
    shapes, arguments, attrs = {
        "MatMul": ([(rows, depth), (depth, depth)], ("a", "b"), {}),
        "BatchMatMulV2": ([(2, rows, depth), (2, depth, depth)], ("x", "y"), {}),
        "Conv2D": (
            [(4 * side, side, side, deep), (3, 3, deep, deep)],
            ("input", "filter"),
            {"strides": [1] * 4, "padding": "SAME"},
        ),
        "Conv3D": ([x, weights], ("input", "filter"), volumes),
        "Conv3DBackpropInputV2": (
            [weights, x],
            ("filter", "out_backprop"),
            {"input_sizes": x, **volumes},
        ),
        "Conv3DBackpropFilterV2": (
            [x, x],
            ("input", "out_backprop"),
            {"filter_sizes": weights, **volumes},
        ),
        "Einsum": ([(2, rows, depth), (depth, 8, depth // 8)], (), {"equation": "bqh,hnd->bqnd"}),
    }[op]
    with tf.Graph().as_default() as made:
        given = [tf.compat.v1.placeholder(tf.float32, shape) for shape in shapes]
        factors = dict(zip(arguments, given, strict=True)) if arguments else {"inputs": given}
        getattr(tf.raw_ops, op)(**factors, **attrs, name="product")
    return made.as_graph_def()


@pytest.mark.parametrize(
    "op",
    [
        *("MatMul", "BatchMatMulV2", "Conv2D", "Einsum"),
        *("Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"),
    ],
)
def test_the_shipped_table_prices_products_of_every_kind(op: str) -> None:
    """A step that decodes one token has an Einsum of hardly any work, and Casts around it."""
    settings = config(shipped_table("cpu-avx512_bf16", "bfloat16"))
    low, report = converted(_product(op, small=True), settings)
    assert low == set()
    assert reasons_of(report)["product"] == Reason.SLOWER_HERE.text
    assert converted(_product(op, small=False), settings)[0] == {"product"}


def test_without_a_table_in_parity_and_switched_off_nothing_is_judged() -> None:
    slow = table(MatMul=(10.0, 90.0))
    for settings in (
        config(None),
        config(slow, parity=True),
        config(slow, disabled_rules=frozenset(("cost",))),
    ):
        names, _ = converted(CHAIN, settings, preserve=("out",))
        assert {"a", "d"} <= names
    assert converted(CHAIN, config(slow), preserve=("out",))[0] == set()


@pytest.mark.parametrize(("side", "low"), [(256, {"a", "d"}), (512, {"a", "b", "c", "d"})])
def test_a_loss_that_smaller_tensors_may_make_up_for_counts_in_a_cache(
    side: int, low: set[str]
) -> None:
    chain = graph(f"""
        x = Placeholder(dtype=float32, shape=[{side}, {side}])
        a = MatMul(x, x)
        b = Sigmoid(a)
        c = Tanh(b)
        d = MatMul(c, c)
        out = Identity(d)
    """)
    slow = table(Sigmoid=(100.0, 120.0), Tanh=(100.0, 120.0))
    assert converted(chain, config(slow), preserve=("out",))[0] - {"out"} == low


def test_a_compiler_that_fuses_leaves_only_matrix_products_a_price() -> None:
    slow = table(Sigmoid=(10.0, 900.0))
    assert "b" not in converted(CHAIN, config(slow), preserve=("out",))[0]
    assert "b" in converted(CHAIN, config(slow, fused=True), preserve=("out",))[0]
    costly = table(MatMul=(10.0, 900.0))
    assert converted(CHAIN, config(costly, fused=True), preserve=("out",))[0] == set()


@pytest.mark.parametrize(
    ("low", "stays_low"),
    # Nothing is beyond doubt but a clear gain: a loss of 5 % counts, and a gain of 5 % does not.
    [(100.0, True), (190.0, False), (210.0, False), (900.0, False)],
)
@pytest.mark.parametrize("known_shapes", [True, False])
def test_under_xla_a_product_must_gain_clearly(
    low: float, stays_low: bool, known_shapes: bool
) -> None:
    compiled = dataclasses.replace(table(cast=1.0, MatMul=(200.0, low)), compiled=True)
    settings = config(compiled, fused=True)
    names, report = converted(CHAIN, settings, known_shapes=known_shapes, preserve=("out",))
    assert names - {"out"} == ({"a", "b", "c", "d"} if stays_low else set())
    reasons = {d.reason for d in decisions_of(report) if d.node in "abcd"}
    assert (Reason.SLOWER_UNDER_XLA in reasons) is not stays_low
    assert Reason.SLOWER_HERE not in reasons


def test_a_cast_is_made_where_fewer_bytes_pass() -> None:
    # Casts grow with size here: the row vector is cast before it is spread out, not after.
    graph_def = graph("""
        x = Placeholder(dtype=float32, shape=[512, 512])
        r = Placeholder(dtype=float32, shape=[1, 512])
        a = MatMul(x, x)
        s = Tile(r, [512, 1])
        b = AddV2(a, s)
        c = MatMul(b, b)
        t = Slice(c, [0, 0], [1, 512])
        out = Neg(t)
    """)
    grows = Curve((1, 1 << 20), (0.1 * MICRO, 1000 * MICRO))
    costs = dataclasses.replace(table(), to_low=grows, to_float32=grows)
    result = rewrite_graph_def(
        graph_def, config(costs), shapes=inferred_shapes(graph_def), preserve=("out",)
    )
    reads = {n.input[0] for n in result.graph_def.node if n.op == "Cast"}
    assert reads == {"x", "r", "t"}


BROADCASTING = """
    x = Placeholder(dtype=float32, shape=[64, 64])
    v = Placeholder(dtype=float32, shape={shape})
    a = MatMul(x, x)
    b = AddV2(a, v)
    c = MatMul(b, b)
    out = Identity(c)
"""


@pytest.mark.parametrize(("shape", "low"), [([64, 64], True), ([64], False)])
def test_broadcasting_has_a_price_of_its_own(shape: list[int], low: bool) -> None:
    costs = table(AddV2=(50.0, 40.0), **{f"AddV2__{BROADCAST}": (50.0, 500.0)})
    names, _ = converted(graph(BROADCASTING.format(shape=shape)), config(costs), preserve=("out",))
    assert ("b" in names) is low


def test_a_variant_without_a_price_has_that_of_its_op() -> None:
    graph_def = graph(BROADCASTING.format(shape=[64]))
    costs = table(AddV2=(50.0, 500.0), **{f"AddV2__{STRIDED}": (50.0, 40.0)})
    names, _ = converted(graph_def, config(costs), preserve=("out",))
    assert "b" not in names


@pytest.mark.parametrize(("stride", "low"), [(1, True), (2, False)])
def test_strided_convolutions_have_a_price_of_their_own(stride: int, low: bool) -> None:
    graph_def = graph(f"""
        dy = Placeholder(dtype=float32, shape=[2, {8 // stride}, {8 // stride}, 16])
        w = Placeholder(dtype=float32, shape=[3, 3, 16, 1])
        dx = DepthwiseConv2dNativeBackpropInput([2, 8, 8, 16], w, dy,
                 strides=[1, {stride}, {stride}, 1], padding="SAME")
        out = Identity(dx)
    """)
    op = "DepthwiseConv2dNativeBackpropInput"
    costs = table(cast=1.0, **{op: (90.0, 50.0), f"{op}__{STRIDED}": (50.0, 900.0)})
    costs = dataclasses.replace(
        costs, rows=tuple((k, dataclasses.replace(c, measure="flops")) for k, c in costs.rows)
    )
    names, _ = converted(graph_def, config(costs), preserve=("out",))
    assert ("dx" in names) is low


def _convolution(data_format: str) -> graph_pb2.GraphDef:
    image = [2, 8, 8, 16] if data_format == "NHWC" else [2, 16, 8, 8]
    return graph(f"""
        x = Placeholder(dtype=float32, shape={image})
        w = Placeholder(dtype=float32, shape=[3, 3, 16, 16])
        y = Conv2D(x, w, strides=[1, 1, 1, 1], padding="SAME", data_format="{data_format}")
        out = Identity(y)
    """)


@pytest.mark.parametrize(
    ("data_format", "rows", "low"),
    [
        ("NHWC", {}, True),
        ("NCHW", {}, False),
        # No doubt about a loss: nothing beside the convolution makes up for it.
        ("NCHW", {f"Conv2D__{CHANNELS_FIRST}": (50.0, 51.0)}, False),
        ("NCHW", {f"Conv2D__{CHANNELS_FIRST}": (90.0, 50.0)}, True),
        ("NHWC", {f"Conv2D__{CHANNELS_FIRST}": (50.0, 90.0)}, True),
    ],
)
def test_channels_first_have_a_price_of_their_own(
    data_format: str, rows: Mapping[str, tuple[float, float]], low: bool
) -> None:
    costs = table(cast=1.0, Conv2D=(90.0, 50.0), **rows)
    names, report = converted(_convolution(data_format), config(costs), preserve=("out",))
    assert ("y" in names) is low
    assert low or reasons_of(report)["y"] == Reason.SLOWER_HERE.text


@pytest.mark.parametrize("changes", [{"device": "GPU"}, {"compiled": True}])
def test_only_kernels_of_a_cpu_have_prices_by_layout(changes: Mapping[str, Any]) -> None:
    costs = dataclasses.replace(table(cast=1.0, Conv2D=(90.0, 50.0)), **changes)
    settings = dataclasses.replace(config(None), cost_table=costs, device=costs.device)
    names, _ = converted(_convolution("NCHW"), settings, preserve=("out",))
    assert "y" in names


@pytest.mark.parametrize(
    ("shape", "weights", "low"),
    [
        ([16, 64, 32, 32], [3, 3, 64, 64], False),
        ([16, 128, 32, 32], [3, 3, 128, 128], True),
        ([16, 256, 14, 14], [1, 1, 256, 256], True),
        (None, [3, 3, 64, 64], False),
    ],
)
def test_the_shipped_table_keeps_few_channels_that_come_first_in_float32(
    shape: list[int] | None, weights: list[int], low: bool
) -> None:
    with tf.Graph().as_default() as made:
        x, w = (tf.compat.v1.placeholder(tf.float32, each) for each in (shape, weights))
        for _ in range(2):
            x = tf.nn.relu(tf.nn.conv2d(x, w, 1, "SAME", data_format="NCHW"))
    names, _ = converted(made.as_graph_def(), config(shipped_table("cpu-avx512_bf16", "bfloat16")))
    assert ("Conv2D_1" in names) is low


def test_what_tensorflow_fuses_into_its_producer_follows_it() -> None:
    text = """
        x = Placeholder(dtype=float32, shape=[64, 64])
        v = Placeholder(dtype=float32, shape=[64])
        a = MatMul(x, x)
        b = BiasAdd(a, v)
        r = Relu(b)
        c = MatMul(r, r)
        out = Identity(c)
    """
    costs = table(BiasAdd=(10.0, 500.0), Relu=(10.0, 500.0))
    names, _ = converted(graph(text), config(costs), preserve=("out",))
    assert {"a", "b", "r", "c"} <= names
    seen_twice = graph(text + "    again = Neg(b)\n")
    names, _ = converted(seen_twice, config(costs), preserve=("out", "again"))
    assert "b" in names
    assert "r" not in names


_Multiply = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
PRODUCTS: dict[str, tuple[list[int], list[int], _Multiply]] = {
    "MatMul": ([64, 64], [64, 64], tf.matmul),
    "Conv2D": ([2, 8, 8, 64], [1, 1, 64, 64], lambda x, w: tf.nn.conv2d(x, w, 1, "SAME")),
    "Conv3D": (
        [2, 4, 4, 4, 64],
        [1, 1, 1, 64, 64],
        lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"),
    ),
    "DepthwiseConv2dNative": (
        [2, 8, 8, 64],
        [3, 3, 64, 1],
        lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"),
    ),
}
ACTIVATIONS = ("Relu", "Relu6", "Elu", "LeakyRelu", "Tanh", "Sigmoid", "Selu")


def layer(product: str, activation: str, dtype: tf.DType) -> tf.Graph:
    """An activation of a product with a bias, read by another product."""
    *shapes, multiply = PRODUCTS[product]
    with tf.Graph().as_default() as made:
        x, w, b = (tf.compat.v1.placeholder(dtype, each) for each in (*shapes, [64]))
        bias = tf.nn.bias_add(multiply(x, w), b)
        act = getattr(tf.raw_ops, activation)
        value = act(**{"x" if activation in ("Tanh", "Sigmoid") else "features": bias}, name="act")
        tf.identity(multiply(value, w), name="out")
    return made


@pytest.mark.skipif(not HAS_ONEDNN, reason=f"{NO_ONEDNN}, and fuses nothing in bfloat16")
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("product", PRODUCTS)
def test_an_activation_follows_the_product_that_tensorflow_fuses_it_into(
    product: str, activation: str
) -> None:
    run = tf.compat.v1.RunMetadata()
    made = layer(product, activation, tf.bfloat16)
    with tf.compat.v1.Session(graph=made) as session:
        traced = tf.compat.v1.RunOptions(output_partition_graphs=True)
        inputs = [op.outputs[0] for op in made.get_operations() if op.type == "Placeholder"]
        session.run("out:0", {x: np.ones(x.shape) for x in inputs}, traced, run)
    ops = {node.op for part in run.partition_graphs for node in part.node}
    is_fused = not any(op.endswith(activation) for op in ops)

    graph_def = layer(product, activation, tf.float32).as_graph_def()
    costs = table(**{product: (200.0, 100.0), activation: (10.0, 900.0)})
    names, _ = converted(graph_def, config(costs), preserve=("out",))
    assert ("act" in names) is is_fused


@pytest.mark.parametrize(
    "text",
    [
        # TensorFlow fuses no Relu into a product, no BiasAdd into what stays float32.
        "a = MatMul(x, x)\nb = Relu(a)",
        "m = MatMul(x, x)\nv = Reshape(m, [4096])\nkept = MatMul(y, y)\nb = BiasAdd(kept, v)",
    ],
)
def test_what_tensorflow_does_not_fuse_has_its_own_price(text: str) -> None:
    inputs = (
        "x = Placeholder(dtype=float32, shape=[64, 64])\n"
        "y = Placeholder(dtype=float32, shape=[4096, 4096])\n"
    )
    graph_def = graph(f"{inputs}{text}\nc = MatMul(b, b)\nout = Identity(c)")
    preserve = ("kept", "out")
    assert "b" in converted(graph_def, config(table(cast=0.1)), preserve=preserve)[0]
    slow = table(cast=0.1, BiasAdd=(10.0, 500.0), Relu=(10.0, 500.0))
    names, _ = converted(graph_def, config(slow), preserve=preserve)
    assert "c" in names
    assert "b" not in names


@pytest.mark.parametrize(
    ("pooling", "gradient", "low"),
    [
        ((10.0, 10.0), (10.0, 10.0), {"p", "g"}),
        # More is lost by the gradient than by three Casts, but less than is gained ...
        ((900.0, 10.0), (10.0, 500.0), {"p", "g"}),
        # ... and the other way round.
        ((10.0, 500.0), (10.0, 10.0), set()),
    ],
)
def test_a_pooling_and_its_gradient_have_one_dtype(
    pooling: tuple[float, float], gradient: tuple[float, float], low: set[str]
) -> None:
    """With a Cast between them TensorFlow's own kernel makes the gradient, not oneDNN's."""
    graph_def = graph("""
        x = Placeholder(dtype=float32, shape=[64, 64])
        a = MatMul(x, x)
        four = Reshape(a, [4, 8, 8, 16])
        p = MaxPool(four, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")
        two = Reshape(p, [16, 64])
        c = MatMul(two, x)
        back = Reshape(c, [4, 4, 4, 16])
        g = MaxPoolGrad(four, p, back, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")
        flat = Reshape(g, [64, 64])
        d = MatMul(flat, flat)
        out = Identity(d)
    """)
    costs = table(MaxPool=pooling, MaxPoolGrad=gradient)
    names, _ = converted(graph_def, config(costs), preserve=("out",))
    assert names & {"p", "g"} == low


def test_an_op_that_stays_float32_does_not_follow_what_it_is_fused_into() -> None:
    graph_def = graph("""
        x = Placeholder(dtype=float32, shape=[64, 64])
        v = Placeholder(dtype=float32, shape=[64])
        a = MatMul(x, x)
        out = BiasAdd(a, v)
    """)
    assert converted(graph_def, config(table()), preserve=("out",))[0] == {"a"}
    slow = table(MatMul=(100.0, 900.0))
    assert converted(graph_def, config(slow), preserve=("out",))[0] == set()


def test_a_cast_of_a_constant_costs_nothing() -> None:
    graph_def = graph("""
        x = Placeholder(dtype=float32, shape=[64, 64])
        w = Const(0.5, [64, 64])
        a = MatMul(x, w)
        out = Identity(a)
    """)
    # Going down and up costs 20 and the product gains 25; a third Cast would be too much.
    costs = table(cast=10.0, MatMul=(50.0, 25.0))
    assert "a" in converted(graph_def, config(costs), preserve=("out",))[0]
    weight = graph_def.node[1]
    weight.op = "Placeholder"
    del weight.attr["value"]
    weight.attr["shape"].shape.CopyFrom(tf.TensorShape([64, 64]).as_proto())
    assert "a" not in converted(graph_def, config(costs), preserve=("out",))[0]


def test_without_shapes_only_the_clear_cases_are_judged() -> None:
    # Slow at every size by more than the margin, against slow at the assumed size alone.
    clear, unclear = flat(900.0), Curve((1, 1 << 18), (1 * MICRO, 900 * MICRO))
    base = table()
    for low, stays in ((clear, True), (unclear, False)):
        full = dataclasses.replace(low, seconds=tuple(10 * MICRO for _ in low.sizes))
        costs = dataclasses.replace(
            base, rows=(*base.rows, ("Sigmoid", OpCost("elements", full, low)))
        )
        names, _ = converted(CHAIN, config(costs), known_shapes=False, preserve=("out",))
        assert ("b" not in names) is stays
        assert {"a", "d"} <= names
    # What the lists allow is not taken back on a guess.
    mixed = OpCost("flops", Curve((1, 2), (MICRO, MICRO)), Curve((1, 2), (MICRO, 2 * MICRO)))
    costs = dataclasses.replace(base, rows=(("MatMul", mixed),))
    assert {"a", "d"} <= converted(CHAIN, config(costs), known_shapes=False, preserve=("out",))[0]


def test_under_xla_sizes_that_are_not_known_are_assumed() -> None:
    # Small products lose, and those of 2^26 operations, which count for unknown ones, gain.
    sizes = (1 << 20, 1 << 26)
    cost = OpCost("flops", Curve(sizes, (1e-4, 1e-2)), Curve(sizes, (1e-3, 1e-3)))
    costs = dataclasses.replace(table(cast=1.0), rows=(("MatMul", cost),), compiled=True)
    settings = config(costs, fused=True)
    for known_shapes, low in ((False, {"a", "b", "c", "d"}), (True, set())):
        assert converted(CHAIN, settings, known_shapes=known_shapes, preserve=("out",))[0] == low


def test_an_allowed_op_without_a_row_is_not_judged() -> None:
    costs = dataclasses.replace(table(), rows=())
    assert {"a", "d"} <= converted(CHAIN, config(costs), preserve=("out",))[0]


def test_the_order_of_nodes_does_not_matter_and_attrs_stay_as_they_are() -> None:
    costs = table(Sigmoid=(10.0, 30.0), Tanh=(10.0, 30.0))
    before = CHAIN.SerializeToString(deterministic=True)
    expected, _ = converted(CHAIN, config(costs), preserve=("out",))
    assert CHAIN.SerializeToString(deterministic=True) == before
    for seed in range(5):
        nodes = list(CHAIN.node)
        random.Random(seed).shuffle(nodes)
        shuffled = graph_pb2.GraphDef(node=nodes, versions=CHAIN.versions)
        assert converted(shuffled, config(costs), preserve=("out",))[0] == expected


@pytest.mark.parametrize("functional", [False, True])
def test_loops_and_tensor_lists_keep_one_dtype_and_their_values(functional: bool) -> None:
    """Everything element-wise is said to be slow, so that the rule cuts wherever it may."""
    slow = dict.fromkeys(("Sigmoid", "Tanh", "Mul", "AddV2", "Sub", "Relu"), (1.0, 100000.0))
    with v1_graphs.v1_graph(functional_loops=functional) as imported:
        x = tf.constant(np.linspace(-1, 1, 5 * 8 * 8, dtype=np.float32).reshape(5, 8, 8))
        w = tf.constant(np.eye(8, dtype=np.float32))

        def body(step: tf.Tensor, state: tf.Tensor, seen: Any) -> Any:
            state = tf.tanh(tf.matmul(state, w) + x[step])
            return step + 1, state, seen.write(step, tf.matmul(state, w))

        seen = tf.TensorArray(tf.float32, 5)
        start = (tf.constant(0), tf.zeros((8, 8)), seen)
        _, last, seen = tf.while_loop(lambda step, *_: step < 5, body, start)
        result = tf.add_n([tf.reduce_sum(seen.stack()), tf.reduce_sum(last)], name="result")
        graph_def = imported.as_graph_def()
        with tf.compat.v1.Session() as session:
            expected = session.run(result)
    settings = config(table(cast=0.1, **slow))
    done = rewrite_graph_def(graph_def, settings, preserve=("result",))
    assert done.failure is None
    assert done.changed
    # Functions of a library may get other signatures, so not every check of `check` applies.
    graph_checks.assert_importable(done.graph_def)
    graph_checks.assert_calls_agree(done.graph_def)
    assert any(d.reason is Reason.SLOWER_HERE for d in decisions_of(done.report))
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(done.graph_def, name="")
        with tf.compat.v1.Session() as session:
            assert session.run("result:0") == pytest.approx(expected, rel=0.05, abs=0.1)


@pytest.mark.parametrize(("hoisting", "low"), [(True, True), (False, False)])
@pytest.mark.parametrize("build", [call_graphs.loop, call_graphs.nested_loop])
def test_a_weight_that_a_loop_does_not_change_has_no_price_in_it(
    build: Any, hoisting: bool, low: bool
) -> None:
    """The Cast leaves the loop; what a round gains must pay for those of its own values alone."""
    # Sizes are not known here, and such a product counts as one that gains 6,400.
    costs = table(cast=7000.0, MatMul=(200.0, 100.0))
    disabled = frozenset(() if hoisting else ("loop-hoisting",))
    graph_def = call_graphs.build(build, gradient=False).graph_def
    result = rewrite_graph_def(graph_def, config(costs, disabled_rules=disabled), preserve=("x",))
    assert result.failure is None
    functions = result.graph_def.library.function
    products = [call_graphs.dtypes_of(f.node_def, "MatMul") for f in functions]
    assert any(dtypes[call_graphs.BFLOAT16] for dtypes in products) == low
    assert not any(call_graphs.casts_of_weights(function) for function in functions)


def test_what_is_too_hard_to_weigh_is_left_as_painted_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(min_cut, "_WAVES", 0)
    times = {"MatMul": (100.0, 90.0), "Sigmoid": (10.0, 25.0), "Tanh": (10.0, 9.0)}
    names, _ = converted(CHAIN, config(table(**times)), preserve=("out",))
    assert names == {"a", "b", "c", "d"}
    assert "Costs are left out of account for 4 ops of a graph of 6 nodes" in caplog.text


def test_costs_are_named_before_a_kernel_that_is_missing_elsewhere() -> None:
    text = "x = Const(0.5, [8, 8])\np = MatMul(x, x)\nc = Zeta(p, p)\nd = MatMul(c, c)"
    edit = ListEdit(list_name="allow", action="add", op="Zeta")
    settings = config(table(MatMul=(100.0, 200.0)), list_edits=(edit,))
    low, report = converted(graph(text), settings)
    assert not low
    assert Reason.NO_KERNEL in {decision.reason for decision in decisions_of(report)}
    assert report.first_reason().endswith("is slower here for MatMul x2")
    compiled = dataclasses.replace(table(MatMul=(100.0, 200.0)), compiled=True)
    _, report = converted(graph(text), config(compiled, list_edits=(edit,), fused=True))
    assert report.first_reason().endswith("is slower under XLA here for MatMul x2")


def test_costs_name_the_product_and_not_the_ops_beside_it() -> None:
    text = "x = Const(0.5, [64, 64])\ns = Shape(x)\nx2 = Reshape(x, s)\nx3 = Reshape(x2, s)\n"
    settings = config(table(MatMul=(100.0, 200.0)))
    low, report = converted(graph(f"{text}p = MatMul(x3, x3)"), settings)
    assert not low
    counts = Counter(d.op for d in decisions_of(report) if d.reason is Reason.SLOWER_HERE)
    assert counts["Reshape"] > counts["MatMul"]
    assert report.first_reason().endswith("is slower here for MatMul x1")


def test_casts_of_stored_weights_have_no_price() -> None:
    with tf.Graph().as_default() as made:
        x = tf.compat.v1.placeholder(tf.float32, SQUARE, name="x")
        for number in range(3):
            variable = tf.compat.v1.get_variable(f"w{number}", SQUARE, use_resource=True)
            x = tf.matmul(x, variable.read_value(), name=f"p{number}")
    products = {"p0", "p1", "p2"}
    # Five Casts of 100 cost more than three products gain, two of them less.
    settings = config(table(cast=100.0))
    names, _ = converted(made.as_graph_def(), settings)
    assert not names & products
    stored = dataclasses.replace(settings, stores_weights=True)
    names, _ = converted(made.as_graph_def(), stored)
    assert names >= products
