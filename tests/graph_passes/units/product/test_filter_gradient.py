"""Gradients of a convolution's filter and bias: one kernel, and where there must be two."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import numpy as np
import pytest
import tensorflow as tf
from cpu_units import HAS_BFLOAT16_UNITS, NO_BFLOAT16_UNITS
from traced_graphs import Traced, node_types, of_op, trace

from graph_passes import PrecisionConfig
from graph_passes.ops.op_types import FILTER_AND_BIAS
from graph_passes.policy.config import ListEdit
from graph_passes.policy.cost_table_files import shipped_table
from graph_passes.policy.rules import Rule
from graph_passes.units.product.filter_gradient import RULE

BFLOAT16 = tf.bfloat16.as_datatype_enum
CPU = PrecisionConfig(
    target_dtype="bfloat16",
    device="CPU",
    cost_table=shipped_table("cpu-avx512_bf16", "bfloat16"),
)
PAINTED = frozenset(("cost", "cast-cut"))
LOW = dataclasses.replace(CPU, disabled_rules=PAINTED)
WITHOUT = dataclasses.replace(CPU, disabled_rules=PAINTED | {RULE})
IMAGES, CHANNELS = (8, 64, 64, 32), 32
Step = Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, ...]]


def filter_gradient(x: tf.Tensor, dy: tf.Tensor, **attrs: object) -> tf.Tensor:
    chosen = {"strides": [1, 1, 1, 1], "padding": "SAME", **attrs}
    sizes = [3, 3, IMAGES[-1], CHANNELS]
    return tf.raw_ops.Conv2DBackpropFilter(
        input=x, filter_sizes=sizes, out_backprop=dy, name="filter", **chosen
    )


def bias_gradient(dy: tf.Tensor, **attrs: object) -> tf.Tensor:
    return tf.raw_ops.BiasAddGrad(out_backprop=dy, name="bias", **attrs)


def gradients(x: tf.Tensor, dy: tf.Tensor, **attrs: object) -> tuple[tf.Tensor, tf.Tensor]:
    """What a layer makes of its gradient."""
    return filter_gradient(x, dy, **attrs) * 1.0, bias_gradient(dy) * 1.0


def traced_step(step: Step, batch: int | None = None, made: int = 64, channels: int = 32) -> Traced:
    image = tf.TensorSpec((batch, *IMAGES[1:]))
    return trace(step, image, tf.TensorSpec((batch, made, made, channels)))


def is_merged(traced: Traced, config: PrecisionConfig, preserve: Collection[str] = ()) -> bool:
    after = traced.rewrite(config, preserve).graph_def
    merged = of_op(after, FILTER_AND_BIAS)
    assert len(merged) + len(of_op(after, "Conv2DBackpropFilter")) >= 1
    return bool(merged)


@pytest.mark.parametrize(
    ("attrs", "made"),
    [
        pytest.param({}, 64, id="SAME"),
        pytest.param({"padding": "VALID"}, 62, id="VALID"),
        pytest.param({"strides": [1, 2, 2, 1]}, 32, id="strides"),
        pytest.param({"dilations": [1, 2, 2, 1]}, 64, id="dilations"),
    ],
)
@pytest.mark.parametrize("batch", [None, IMAGES[0]])
def test_one_op_makes_both(attrs, made, batch):
    traced = traced_step(lambda x, dy: gradients(x, dy, **attrs), batch, made)
    assert node_types(traced.find(LOW)) == [RULE]
    result = traced.rewrite(LOW)
    after = result.graph_def
    assert [node.attr["T"].type for node in of_op(after, FILTER_AND_BIAS)] == [BFLOAT16]
    assert not of_op(after, "BiasAddGrad") + of_op(after, "Conv2DBackpropFilter")
    assert len(of_op(after, "Cast")) == 4
    # For people it is what they have written.
    assert [op for op, _ in result.report.products] == ["Conv2DBackpropFilter"]
    (remark,) = [remark for remark in result.remarks().remarks if remark.is_product]
    assert (remark.op, remark.flops) == (
        "Conv2DBackpropFilter",
        2 * (batch or CPU.unknown_dimension) * made**2 * CHANNELS * 9 * IMAGES[-1],
    )
    if not HAS_BFLOAT16_UNITS:
        pytest.skip(NO_BFLOAT16_UNITS)
    random = np.random.default_rng(0)
    x = random.normal(size=IMAGES).astype(np.float32)
    dy = random.normal(0.1, 1.0, (IMAGES[0], made, made, CHANNELS)).astype(np.float32)
    of_filter, of_bias = traced.run(after, x, dy)
    by_two, _ = traced.run(traced.rewrite(WITHOUT).graph_def, x, dy)
    np.testing.assert_array_equal(of_filter, by_two)
    rounded = tf.cast(tf.cast(dy, tf.bfloat16), tf.float64).numpy()
    np.testing.assert_allclose(of_bias, rounded.sum((0, 1, 2)), rtol=2**-8)


def test_a_bias_goes_to_one_of_two_filters():
    """As behind a sum of two convolutions, whose gradient is one tensor."""

    def step(x, dy):
        return *gradients(x, dy), filter_gradient(tf.nn.relu(x), dy) * 1.0

    after = traced_step(step).rewrite(CPU).graph_def
    counts = [len(of_op(after, op)) for op in (FILTER_AND_BIAS, "Conv2DBackpropFilter")]
    assert counts == [1, 1]


def test_the_second_of_two_biases_is_a_product_with_ones():
    traced = traced_step(lambda x, dy: (*gradients(x, dy), bias_gradient(dy) * 2.0))
    assert node_types(traced.find(CPU)) == [RULE, "ones-product"]


def of_other_gradient(x: tf.Tensor, dy: tf.Tensor) -> tuple[tf.Tensor, ...]:
    return filter_gradient(x, dy) * 1.0, bias_gradient(dy * 2.0) * 1.0


def of_an_image(x: tf.Tensor, dy: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """The bias' gradient reads what the filter's takes for its images."""
    return filter_gradient(dy, x) * 1.0, bias_gradient(dy) * 1.0


def behind_the_bias(x: tf.Tensor, dy: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """One op of both would read what is made of itself."""
    return (filter_gradient(x + bias_gradient(dy), dy) * 1.0,)


def waiting(x: tf.Tensor, dy: tf.Tensor) -> tuple[tf.Tensor, ...]:
    bias = bias_gradient(dy)
    with tf.control_dependencies([bias]):
        return filter_gradient(x, dy) * 1.0, bias * 1.0


def explicitly_padded(x: tf.Tensor, dy: tf.Tensor) -> tuple[tf.Tensor, ...]:
    pads = [0, 0, 1, 1, 1, 1, 0, 0]
    return gradients(x, dy, padding="EXPLICIT", explicit_paddings=pads)


def on_other_devices(x: tf.Tensor, dy: tf.Tensor) -> tuple[tf.Tensor, ...]:
    with tf.device("CPU:0"):
        bias = bias_gradient(dy)
    return filter_gradient(x, dy) * 1.0, bias * 1.0


@pytest.mark.parametrize(
    "step",
    [of_other_gradient, of_an_image, behind_the_bias, waiting, explicitly_padded, on_other_devices],
)
def test_what_is_not_one_kernel_stays_two(step):
    assert not is_merged(traced_step(step), CPU)


def channels_first(x: tf.Tensor, dy: tf.Tensor) -> tuple[tf.Tensor, ...]:
    last = filter_gradient(x, dy, data_format="NCHW") * 1.0
    return last, bias_gradient(dy, data_format="NCHW") * 1.0


@pytest.mark.parametrize("channels", [8, None])
def test_other_numbers_of_channels_stay_two(channels):
    """The op's own shape function would give the bias the channels of the images."""
    image = tf.TensorSpec((None, *IMAGES[1:]))
    dy = tf.TensorSpec((None, 64, 64, channels))

    def step(x, dy):
        sizes = [3, 3, IMAGES[-1], channels or CHANNELS]
        of_filter = tf.raw_ops.Conv2DBackpropFilter(
            input=x, filter_sizes=sizes, out_backprop=dy, strides=[1, 1, 1, 1], padding="SAME"
        )
        return of_filter * 1.0, bias_gradient(dy) * 1.0

    assert not is_merged(trace(step, image, dy), LOW)


def test_channels_first_stay_two():
    spec = tf.TensorSpec((8, 32, 32, 32))
    assert not is_merged(trace(channels_first, spec, spec), CPU)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"cost_table": None}, id="no kernels known"),
        pytest.param({"fused": True}, id="XLA"),
        pytest.param({"device": "GPU", "cost_table": None}, id="GPU"),
        pytest.param({"target_dtype": "float16", "cost_table": None}, id="float16"),
        pytest.param({"disabled_rules": frozenset((RULE,))}, id="switched off"),
        pytest.param(
            {"list_edits": (ListEdit(list_name="infer", action="add", op="BiasAddGrad"),)},
            id="infer",
        ),
        pytest.param(
            {"list_edits": (ListEdit(list_name="deny", action="add", op="BiasAddGrad"),)},
            id="denied sum",
        ),
        pytest.param(
            {"list_edits": (ListEdit(list_name="deny", action="add", op="Conv2DBackpropFilter"),)},
            id="denied product",
        ),
        pytest.param({"rules": (Rule(action="keep_float32", node="filter"),)}, id="kept product"),
        pytest.param({"rules": (Rule(action="keep_float32", node="bias"),)}, id="kept sum"),
    ],
)
def test_a_configuration_keeps_two(changes):
    assert not is_merged(traced_step(gradients), dataclasses.replace(CPU, **changes))


@pytest.mark.parametrize("name", ["filter", "bias", "bias:0"])
def test_what_is_fetched_stays(name):
    assert not is_merged(traced_step(gradients), CPU, preserve=[name])


def test_both_stay_float32_where_that_is_faster():
    """TensorFlow would make one op of them too."""

    def step(x, dy, w):
        return *gradients(x, dy), tf.matmul(w, w)

    tiny = tf.TensorSpec((1, 4, 4, 32))
    traced = trace(step, tiny, tiny, tf.TensorSpec((1024, 1024)))
    after = traced.rewrite(CPU).graph_def
    (merged,) = of_op(after, FILTER_AND_BIAS)
    assert merged.attr["T"].type == tf.float32.as_datatype_enum
    assert {cast.name.partition("-")[0] for cast in of_op(after, "Cast")} == {"w", "MatMul"}
    random = np.random.default_rng(0)
    given = [random.normal(size=spec.shape).astype(np.float32) for spec in (tiny, tiny)]
    given.append(np.zeros((1024, 1024), np.float32))
    for found, wanted in zip(
        traced.run(after, *given), traced.run(traced.graph_def, *given), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
