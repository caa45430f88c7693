"""GELUs and their gradients where times are known: how they are written, and how exact they are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from activation_graphs import CPU, UNIT, WIDTH, Activation, numbers, traced_activation
from traced_graphs import node_types, of_op

from graph_passes.units.activation.local_derivative import RULE

FLOAT = tf.float32.as_datatype_enum
ROOT = np.float32(np.sqrt(0.5))

GELUS: dict[str, Activation] = {
    "tf.nn.gelu": lambda x: tf.nn.gelu(x, approximate=False),
    # As TensorFlow 2.21 writes it; 2.17 has an Erf.
    "Erfc": lambda x: 0.5 * x * tf.math.erfc(-x * ROOT),
    "by hand": lambda x: 0.5 * x * (1.0 + tf.math.erf(x / np.float32(np.sqrt(2.0)))),
    "product last": lambda x: x * (0.5 * (1.0 + tf.math.erf(x * ROOT))),
    "other side": lambda x: x * (1.0 - 0.5 * tf.math.erfc(x * ROOT)),
}
OTHERS: dict[str, Activation] = {
    "another factor": lambda x: 0.5 * x * (1.0 + tf.math.erf(x * 0.7)),
    "another half": lambda x: 0.4 * x * (1.0 + tf.math.erf(x * ROOT)),
    "another sign": lambda x: 0.5 * x * (1.0 - tf.math.erf(x * ROOT)),
    "of a square": lambda x: x * tf.math.erfc(-tf.square(x) * ROOT),
}


def exact(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Value and gradient in float64."""
    variable = tf.constant(np.float64(x))
    with tf.GradientTape() as tape:
        tape.watch(variable)
        value = variable * 0.5 * tf.math.erfc(-variable / np.sqrt(2.0))
    return value.numpy(), tape.gradient(value, variable).numpy()


@pytest.mark.parametrize("form", GELUS)
@pytest.mark.parametrize("rows", [2048, None])
def test_inside_is_float32_and_one_cast_goes_in_and_two_come_out(
    form: str, rows: int | None
) -> None:
    traced = traced_activation(GELUS[form], rows)
    results = [name.partition(":")[0] for name in traced.results]
    after = tf.compat.v1.graph_util.extract_sub_graph(traced.rewrite(CPU).graph_def, results)
    assert not of_op(after, "Erfc")
    for op in ("Erf", "Square", "Exp", "Sub"):
        assert [node.attr["T"].type for node in of_op(after, op)] == [FLOAT]
    (dx,) = [node for node in of_op(after, "Mul") if node.name.endswith("/dx")]
    assert dx.attr["T"].type == CPU.target
    makers = {node.name: node for node in after.node}
    casts = [(makers[cast.input[0]].name, cast.attr["DstT"].type) for cast in of_op(after, "Cast")]
    inside = [(name.rpartition("/")[2], dtype) for name, dtype in casts if "local_deriv" in name]
    assert sorted(inside) == [("derivative", CPU.target), ("gelu", CPU.target)]
    assert [dtype for _, dtype in casts].count(FLOAT) == 3  # two results, and x


@pytest.mark.parametrize("form", GELUS)
def test_value_and_gradient_are_rounded_once(form: str) -> None:
    traced, x = traced_activation(GELUS[form]), numbers(12)
    value, gradient = traced.run(traced.rewrite(CPU).graph_def, x)
    true_value, true_gradient = exact(x)
    scale = np.maximum(np.abs(true_value), 1e-3)
    assert (np.abs(value - true_value) / scale).max() < 2.1 * UNIT
    assert np.abs(gradient - true_gradient).max() < 2.1 * UNIT


@pytest.mark.parametrize("form", GELUS)
def test_in_float32_it_is_as_before(form: str) -> None:
    traced, x = traced_activation(GELUS[form]), numbers(12)
    fusion = traced.find(CPU)
    assert RULE in node_types(fusion)
    before, after = (traced.run(graph, x) for graph in (traced.graph_def, fusion.proto))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old, atol=2e-6)


def test_large_numbers_give_no_nan() -> None:
    traced = traced_activation(GELUS["tf.nn.gelu"], rows=None)
    sizes = np.geomspace(15, 3e38, WIDTH).astype(np.float32)
    x = tf.cast(tf.cast(np.stack([sizes, -sizes]), tf.bfloat16), tf.float32).numpy()
    value, gradient = traced.run(traced.rewrite(CPU).graph_def, x)
    np.testing.assert_array_equal(value, np.maximum(x, 0))
    np.testing.assert_array_equal(gradient, np.float32(x > 0))


@pytest.mark.parametrize("form", OTHERS)
def test_what_is_no_gelu_is_not_taken_for_one(form: str) -> None:
    traced, x = traced_activation(OTHERS[form]), numbers(12)
    fusion = traced.find(CPU)
    assert not [node for node in fusion.proto.node if node.name.endswith("/pdf")]
    before, after = (traced.run(graph, x) for graph in (traced.graph_def, fusion.proto))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old, atol=2e-6 * max(1, np.abs(old).max()))


def test_what_is_preserved_inside_leaves_the_general_derivative() -> None:
    traced = traced_activation(GELUS["Erfc"])
    (erfc,) = of_op(traced.graph_def, "Erfc")
    fusion = traced.find(CPU, preserve=[erfc.name])
    assert RULE in node_types(fusion)
    assert of_op(fusion.proto, "Erfc") and not of_op(fusion.proto, "Erf")


def test_a_compiler_gets_no_other_form() -> None:
    config = dataclasses.replace(CPU, fused=True)
    assert of_op(traced_activation(GELUS["Erfc"]).find(config).proto, "Erfc")


def test_without_times_fewer_casts_count_for_more() -> None:
    config = dataclasses.replace(CPU, cost_table=None)
    assert of_op(traced_activation(GELUS["Erfc"]).find(config).proto, "Erfc")
