"""GELU between matrix products: what goes low, over the whole range of the dtype, and what not."""

from __future__ import annotations

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from traced_graphs import Traced, node_types, of_op, trace

from graph_passes import PrecisionConfig
from graph_passes.policy.config import ListEdit

FLOAT = tf.float32.as_datatype_enum
CONFIGS = {
    "bfloat16": PrecisionConfig(target_dtype="bfloat16", device="CPU"),
    "float16": PrecisionConfig(target_dtype="float16", device="GPU"),
}
UNITS = {"bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Half a unit in the last place of a number in [0.5, 1)."""
WIDTH = 8
SPEC = tf.TensorSpec((4096, WIDTH))


def _paper(x: tf.Tensor) -> tf.Tensor:
    return x * (0.5 * (1.0 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * tf.pow(x, 3)))))


def _erf_with_sum(x: tf.Tensor) -> tf.Tensor:
    return 0.5 * x * (1.0 + tf.math.erf(x / np.sqrt(2.0).astype(np.float32)))


FORMS = {
    "tanh, keras": lambda x: keras.activations.gelu(x, approximate=True),
    "tanh, tf_keras": lambda x: tf_keras.activations.gelu(x, approximate=True),
    "tanh, by hand": _paper,
    "erf, keras": lambda x: keras.activations.gelu(x, approximate=False),
    "erf, tf_keras": lambda x: tf_keras.activations.gelu(x, approximate=False),
    "erf, by hand": _erf_with_sum,
}
DENIED = ("Pow", "Square", "Exp")


def between_products(form: str):
    """GELU between two products with the identity, and the gradient on its way back."""

    def step(x):
        one = tf.eye(WIDTH)
        with tf.GradientTape() as tape:
            before = tf.matmul(x, one)
            tape.watch(before)
            value = FORMS[form](before)
            after = tf.matmul(value, one)
        gradient = tape.gradient(after, before, output_gradients=tf.ones_like(after))
        return after, tf.matmul(gradient, one)

    return step


def trace_form(form: str, spec: tf.TensorSpec = SPEC) -> Traced:
    return trace(between_products(form), spec)


def exact(form: str, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value and gradient in float64."""
    variable = tf.constant(np.float64(x))
    with tf.GradientTape() as tape:
        tape.watch(variable)
        if form.startswith("tanh"):
            outer = np.sqrt(2 / np.pi)
            cubic = variable + 0.044715 * variable * variable * variable
            # 1 + tanh(u) as it is without cancellation.
            value = variable * tf.sigmoid(2 * outer * cubic)
        else:
            value = variable * 0.5 * tf.math.erfc(-variable / np.sqrt(2.0))
    return value.numpy(), tape.gradient(value, variable).numpy()


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return tf.cast(tf.cast(x.astype(np.float32), dtype), tf.float32).numpy()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", CONFIGS)
def test_nothing_between_the_products_stays_float32(form, dtype):
    config = CONFIGS[dtype]
    traced = trace_form(form)
    assert "gelu" in node_types(traced.find(config))
    after = traced.rewrite(config).graph_def
    for op in DENIED:
        assert {node.attr["T"].type for node in of_op(after, op)} <= {config.target}
    up = [cast.input[0] for cast in of_op(after, "Cast") if cast.attr["DstT"].type == FLOAT]
    makers = {node.name: node.op for node in after.node}
    assert [makers[name] for name in up] == ["MatMul", "MatMul"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", CONFIGS)
def test_values_and_gradients_are_within_a_few_roundings(form, dtype):
    traced = trace_form(form)
    x = rounded(np.linspace(-12, 12, 4096 * WIDTH).reshape(4096, WIDTH), dtype)
    value, gradient = traced.run(traced.rewrite(CONFIGS[dtype]).graph_def, x)
    true_value, true_gradient = exact(form, x)
    # 1 + tanh and the product round by a unit of x at most; slopes are between -0.13 and 1.13.
    unit = UNITS[dtype]
    scale = np.maximum(np.abs(x), 1)
    assert (np.abs(value - true_value) / scale).max() < 5 * unit
    assert np.abs(gradient - true_gradient).max() < 9 * unit
    central = np.abs(x) < 4
    assert np.sqrt(np.mean((gradient - true_gradient)[central] ** 2)) < 3 * unit


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", CONFIGS)
def test_large_arguments_give_no_nan(form, dtype):
    sizes = np.concatenate([np.geomspace(1e-7, 65504, 4000), [39, 41, 255, 257, 32768, 65504]])
    x = np.concatenate([sizes, -sizes, [0.0, -0.0]])
    x = np.pad(x, (0, 4096 * WIDTH - len(x))).reshape(4096, WIDTH)
    x = rounded(x, dtype)
    traced = trace_form(form)
    value, gradient = traced.run(traced.rewrite(CONFIGS[dtype]).graph_def, x)
    far = np.abs(x) > 12
    np.testing.assert_allclose(gradient[far], np.where(x > 0, 1, 0)[far], atol=1e-30)
    np.testing.assert_allclose(value[far], np.where(x > 0, x, 0)[far], atol=1e-30)
    assert np.isfinite(value).all()
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("form", [form for form in FORMS if form.startswith("tanh")])
def test_the_clamp_changes_nothing_in_float32(form):
    x = np.linspace(-60, 60, 4096 * WIDTH, dtype=np.float32).reshape(4096, WIDTH)
    traced = trace_form(form)
    alone = dataclasses.replace(CONFIGS["float16"], disabled_rules={"local-derivative"})
    fusion = traced.find(alone)
    assert of_op(fusion.proto, "ClipByValue")
    before, after = traced.run(traced.graph_def, x), traced.run(fusion.proto, x)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-6, atol=1e-6)


def test_the_clamp_needs_the_slope_that_the_cube_gives():
    traced = trace_form("tanh, keras")
    slopes = {node.name for node in of_op(traced.graph_def, "TanhGrad")}
    fusion = traced.find(CONFIGS["float16"], slopes)
    assert not of_op(fusion.proto, "ClipByValue")
    assert any("to be preserved" in miss.why for miss in fusion.misses)


@pytest.mark.parametrize("flows_back", [True, False])
def test_what_else_is_made_of_the_cube_is_not_clamped(flows_back):
    def network(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            before = tf.matmul(x, tf.eye(WIDTH))
            inner = 0.797884 * (before + 0.044715 * tf.pow(before, 3))
            after = tf.matmul(before * (1.0 + tf.tanh(inner)), tf.eye(WIDTH))
        return tape.gradient([after, inner], x) if flows_back else [after, tf.sqrt(tf.abs(inner))]

    traced, x = trace(network, SPEC), np.full((4096, WIDTH), 20, np.float32)
    fusion = traced.find(CONFIGS["float16"])
    assert any("more than the" in miss.why for miss in fusion.misses)
    for old, new in zip(*(traced.run(g, x) for g in (traced.graph_def, fusion.proto)), strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-6)


def test_gradients_of_constants_that_nobody_asks_for_hinder_nothing():
    """As `tf.gradients` makes them, of what the cube is multiplied by."""

    def network(x):
        before = tf.matmul(x, tf.eye(WIDTH))
        return tf.gradients(tf.matmul(_paper(before), tf.eye(WIDTH)), x)

    for config in CONFIGS.values():
        assert "gelu" in node_types(trace(network, SPEC).find(config))


def test_bfloat16_needs_no_clamp():
    fusion = trace_form("tanh, keras").find(CONFIGS["bfloat16"])
    assert "gelu" in node_types(fusion)
    assert not of_op(fusion.proto, "ClipByValue")


@pytest.mark.parametrize("form", ["tanh, keras", "erf, keras"])
@pytest.mark.parametrize("dtype", CONFIGS)
def test_a_dense_layer_of_unknown_batch(form, dtype):
    traced = trace_form(form, tf.TensorSpec((None, WIDTH)))
    after = traced.rewrite(CONFIGS[dtype]).graph_def
    for op in DENIED:
        assert {node.attr["T"].type for node in of_op(after, op)} <= {CONFIGS[dtype].target}


def _cube_read_twice(x):
    cube = tf.pow(tf.matmul(x, tf.eye(WIDTH)), 3)
    scores = tf.matmul(x, tf.eye(WIDTH))
    return tf.matmul(tf.tanh(0.797884 * (scores + 0.044715 * cube)), tf.eye(WIDTH))


def _other_base(x):
    before = tf.matmul(x, tf.eye(WIDTH))
    return tf.matmul(tf.tanh(0.797884 * (before + 0.044715 * tf.pow(x, 3))), tf.eye(WIDTH))


def _read_outside(x):
    before = tf.matmul(x, tf.eye(WIDTH))
    cube = tf.pow(before, 3)
    return tf.matmul(tf.tanh(0.797884 * (before + 0.044715 * cube)), tf.eye(WIDTH)), cube


def _square_product(x):
    before = tf.matmul(x, tf.eye(WIDTH))
    cube = before * tf.square(before)
    return tf.matmul(tf.tanh(0.797884 * (before + 0.044715 * cube)), tf.eye(WIDTH))


def _square_read_twice(x):
    before = tf.matmul(x, tf.eye(WIDTH))
    square = tf.square(before)
    bell = tf.exp(-square)
    return tf.matmul(tf.math.erf(before) * bell, tf.eye(WIDTH)), square


MISSES = {
    "another tensor cubed": (_cube_read_twice, "not the cube of what it is added to"),
    "the input cubed": (_other_base, "not the cube of what it is added to"),
    "the cube read outside": (_read_outside, "more than the tanh"),
    "another cube": (_square_product, "not by Pow"),
    "the square read outside": (_square_read_twice, "not only negated"),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_misses_are_told(name):
    function, why = MISSES[name]
    for config in CONFIGS.values():
        fusion = trace(function, SPEC).find(config)
        assert "gelu" not in node_types(fusion)
        assert any(why in miss.why for miss in fusion.misses)


def test_other_powers_and_exponentials_are_denied_still():
    def network(x):
        before = tf.matmul(x, tf.eye(WIDTH))
        return tf.matmul(tf.tanh(before) + tf.pow(before, 3) + tf.exp(before), tf.eye(WIDTH))

    traced = trace(network, SPEC)
    for config in CONFIGS.values():
        assert "gelu" not in node_types(traced.find(config))
        after = traced.rewrite(config).graph_def
        for op in ("Pow", "Exp"):
            assert [node.attr["T"].type for node in of_op(after, op)] == [FLOAT]


@pytest.mark.parametrize("dtype", CONFIGS)
def test_a_slope_is_told_though_its_exponent_is_folded(dtype):
    """As it is in sessions, where constants are folded before."""
    traced = trace_form("tanh, by hand")
    exponents = {node.input[1] for node in of_op(traced.graph_def, "Pow")}
    (exponent,) = [node for node in of_op(traced.graph_def, "Sub") if node.name in exponents]
    name = exponent.name
    exponent.Clear()
    exponent.name, exponent.op = name, "Const"
    exponent.attr["dtype"].type = FLOAT
    exponent.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(2.0))
    config = CONFIGS[dtype]
    after = traced.rewrite(config).graph_def
    assert [node.attr["T"].type for node in of_op(after, "Pow")] == [config.target] * 2


def test_a_square_of_the_same_tensor_is_not_clamped():
    def network(x):
        before = tf.matmul(x, tf.eye(WIDTH))
        return tf.matmul(_paper(before) + 0.25 * tf.pow(before, 2), tf.eye(WIDTH))

    after = trace(network, SPEC).rewrite(CONFIGS["float16"]).graph_def
    (clamped,) = of_op(after, "ClipByValue")
    readers = [node for node in after.node if clamped.name in node.input]
    assert [node.op for node in readers] == ["Pow"]


@pytest.mark.parametrize("form", ["tanh, keras", "erf, keras"])
def test_it_can_be_switched_off_and_follows_the_lists(form):
    traced = trace_form(form)
    edits = tuple(ListEdit(list_name="deny", action="add", op=op) for op in ("Tanh", "Erf", "Erfc"))
    for config in (
        PrecisionConfig(disabled_rules=frozenset(("gelu",))),
        PrecisionConfig(list_edits=edits),
        PrecisionConfig(parity=True),
    ):
        assert "gelu" not in node_types(traced.find(config))


def test_a_preserved_power_stays():
    traced = trace_form("tanh, keras")
    for power in of_op(traced.graph_def, "Pow"):
        fusion = traced.find(CONFIGS["float16"], [power.name])
        assert "gelu" not in node_types(fusion)
        assert any("preserved" in miss.why for miss in fusion.misses)
