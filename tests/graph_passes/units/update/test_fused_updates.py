"""Optimizers' updates become one op each, which leaves in all variables what they would hold."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from programs import Program, trace
from rewrite_checks import rewrite_graph
from tensorflow.core.framework import types_pb2

from graph_passes import PrecisionConfig, RewriteResult, rewrite_function_def, rewrite_graph_def
from graph_passes.units.update import expression
from tf_amp.hosts.function_shapes import traced_shapes

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
GPU = PrecisionConfig(target_dtype="float16", device="GPU")
ADAM, DESCENT = "ResourceApplyAdam", "ResourceApplyGradientDescent"
MOMENTUM = "ResourceApplyKerasMomentum"
RMSPROP, CENTRED = "ResourceApplyRMSProp", "ResourceApplyCenteredRMSProp"
SHAPES = ((6, 5), (5,))


def updates(result: RewriteResult) -> Counter[str]:
    """How many nodes update variables by one op, functions included."""
    graph_def = result.graph_def
    bodies = [graph_def.node, *(f.node_def for f in graph_def.library.function)]
    ops = (node.op for body in bodies for node in body)
    return Counter(op for op in ops if op.startswith("ResourceApply"))


def rewritten(program: Program, config: PrecisionConfig = CPU) -> RewriteResult:
    result = rewrite_graph_def(
        program.graph_def,
        config,
        preserve=program.preserve,
        shapes=program.shapes,
        function_shapes=program.function_shapes,
    )
    assert result.failure is None
    return result


def reasons(result: RewriteResult) -> list[str]:
    return [miss.why for miss in result.report.near_misses]


def variables(library: Any, shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    make = keras.Variable if library is keras else tf.Variable
    return [make(rng.standard_normal(shape, np.float32)) for shape in shapes]


def traced(step: Callable[..., Any], *arguments: Any) -> Program:
    """A program whose one fetched tensor waits for all effects."""
    return dataclasses.replace(trace(step, *arguments), targets=())


def update(
    library: Any,
    name: str,
    seed: int = 0,
    scale: float = 1.0,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    **options: Any,
) -> Program:
    """The update of some variables by an optimizer, with the gradients fed."""
    held = variables(library, shapes, seed)
    optimizer = getattr(library.optimizers, name)(**options)
    optimizer.build(held)
    rng = np.random.default_rng(seed + 1)

    def step(*gradients: tf.Tensor) -> tf.Tensor:
        optimizer.apply_gradients(zip(gradients, held, strict=True))
        return tf.constant(0.0)

    return traced(step, *(scale * rng.standard_normal(shape, np.float32) for shape in shapes))


FUSED = [
    ("Adam", {}, {ADAM: 2}),
    ("AdamW", {}, {ADAM: 2, DESCENT: 2}),
    ("AdamW", {"use_ema": True, "global_clipnorm": 1.0}, {ADAM: 2, DESCENT: 2}),
    ("SGD", {"momentum": 0.9}, {MOMENTUM: 2}),
    ("SGD", {"momentum": 0.9, "nesterov": True}, {MOMENTUM: 2}),
    ("RMSprop", {"momentum": 0.9}, {RMSPROP: 2}),
    ("RMSprop", {"momentum": 0.9, "centered": True}, {CENTRED: 2}),
]


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize(("name", "options", "ops"), FUSED, ids=str)
def test_an_update_becomes_one_op(library, name, options, ops):
    program = update(library, name, **options)
    result = rewritten(program)
    assert updates(result) == ops
    assert result.report.fused["fused-update"] == sum(ops.values())
    assert not reasons(result)
    off = dataclasses.replace(CPU, disabled_rules=frozenset(("fused-update",)))
    assert not rewritten(program, off).changed


@pytest.mark.parametrize("between", ["nothing", "a control input", "a feed"])
def test_gradients_are_read_from_before_they_are_handed_on_together(between):
    """As Keras does; what a node waits for, the updates wait for, and what is fed they read."""
    program = update(keras, "Adam")
    (together,) = (node for node in program.graph_def.node if node.op == "IdentityN")
    gradients = set(together.input)
    if between == "a control input":
        together.input.append("^gradients_0")
    elif between == "a feed":
        fed = {f"{together.name}:0": np.ones(SHAPES[0], np.float32)}
        program = dataclasses.replace(program, feeds={**program.feeds, **fed})
    result = rewritten(program)
    read = {node.input[9] for node in result.graph_def.node if node.op == ADAM}
    assert (read == gradients) is (between == "nothing")
    left = [node.name for node in result.graph_def.node if node.op == "IdentityN"]
    assert bool(left) is (between != "nothing")


@pytest.mark.parametrize("updated", [True, False])
def test_all_that_is_done_where_nothing_is_converted(updated):
    """No op but the update changes, and a graph without any is not looked through."""
    w, x = tf.Variable(tf.ones([64, 512])), tf.Variable(tf.ones([512]))
    optimizer = keras.optimizers.Adam()
    held = [keras.Variable(np.ones((64, 512), np.float32))]
    optimizer.build(held)

    def step(images: tf.Tensor) -> tf.Tensor:
        y = tf.nn.bias_add(images @ w, x)
        if updated:
            optimizer.apply_gradients([(tf.linalg.matmul(images, y, transpose_a=True), held[0])])
        return tf.nn.softmax(y)

    program = traced(step, np.ones((8, 64), np.float32))
    result = rewritten(program, dataclasses.replace(CPU, converts=False))
    assert updates(result) == ({ADAM: 1} if updated else {})
    assert result.changed is updated
    assert not result.report.converted_nodes
    assert not result.report.products
    low = types_pb2.DT_BFLOAT16
    assert not any(low in (a.type for a in node.attr.values()) for node in result.graph_def.node)


def test_descent_without_slots():
    assert updates(rewritten(update(keras, "SGD"))) == {DESCENT: 2}
    # With a momentum of 0, tf_keras keeps a slot all the same.
    assert updates(rewritten(update(tf_keras, "SGD"))) == {MOMENTUM: 2}


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("Adagrad", {}, "no update that one op computes"),  # its epsilon is inside the root
        ("RMSprop", {}, "no update that one op computes"),  # the op has a slot more
        # The maximum of its op drops a NaN.
        ("Adam", {"amsgrad": True}, "no update that one op computes"),
        ("Adam", {"beta_2": 0.9999}, "no float32 beta gives the rate 0.0001"),
    ],
)
def test_what_no_op_computes_is_left_and_said(library, name, options, why):
    result = rewritten(update(library, name, **options))
    assert set(updates(result)) <= {DESCENT}
    assert why in reasons(result)[0]


@pytest.mark.parametrize(
    ("shape", "is_one_op"),
    [
        ((7, 8), True),
        ((57,), False),
        ((56, 8), True),
        ((57, 8), False),
        ((127, 128), False),
        ((128, 128), True),
    ],
)
def test_adam_that_would_wake_threads_for_few_numbers_is_left(shape, is_one_op):
    result = rewritten(update(keras, "Adam", shapes=(shape, (5,))))
    assert updates(result)[ADAM] == 1 + is_one_op
    assert [why for why in reasons(result) if "few numbers" in why] == [
        "the op would wake threads for few numbers"
    ] * (not is_one_op)


def test_the_op_for_amsgrad_still_drops_a_nan():
    """Why it is left alone; once this fails, the op could be used."""
    var, m, v, largest = (tf.Variable([1.0]) for _ in range(4))
    v.assign([np.nan])
    handles = (one.handle for one in (var, m, v, largest))
    tf.raw_ops.ResourceApplyAdamWithAmsgrad(
        **dict(zip(("var", "m", "v", "vhat"), handles, strict=True)),
        beta1_power=0.0,
        beta2_power=0.0,
        lr=0.5,
        beta1=0.5,
        beta2=0.5,
        epsilon=0.0,
        grad=[1.0],
    )
    assert np.isnan(v.numpy()).all()
    assert np.isfinite([largest.numpy(), var.numpy()]).all()


def values(program: Program, result: RewriteResult, steps: int) -> list[tuple[str, Any, Any]]:
    before, after = program.run(program.graph_def, steps), program.run(result.graph_def, steps)
    held = [name for name in before if name.startswith("variable") and before[name].ndim]
    assert len(held) >= 2
    return [(name, before[name], after[name]) for name in held]


def units_off(old: np.ndarray, new: np.ndarray) -> float:
    """The largest difference in units in the last place of the larger of the two."""
    return float(np.max(np.abs(old - new) / np.spacing(np.maximum(np.abs(old), np.abs(new)))))


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize(("name", "options", "ops"), FUSED, ids=str)
@pytest.mark.parametrize("steps", [1, 13])
def test_variables_hold_the_same(library, name, options, ops, steps):
    program = update(library, name, seed=3, scale=0.1, **options)
    for _, old, new in values(program, rewritten(program), steps):
        np.testing.assert_allclose(new, old, rtol=2e-5, atol=1e-6 * np.abs(old).max())


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "nesterov": True}])
def test_momentum_is_the_same_to_the_last_place(library, options):
    program = update(library, "SGD", seed=5, **options)
    for name, old, new in values(program, rewritten(program), 5):
        assert units_off(old, new) <= 2, name


@pytest.mark.parametrize("library", [keras, tf_keras], ids=["keras", "tf_keras"])
@pytest.mark.parametrize("seed", range(3))
def test_adam_from_a_state_in_training(library, seed):
    """From slots as they are in training, one update is off by two units in the last place."""
    program = update(library, "Adam", seed=seed)
    rng = np.random.default_rng(seed + 7)
    slots = {name for name in program.state if "ub_" in name.split("/")[1]}
    assert len(slots) == 4
    state = {
        name: rng.uniform(0.5, 1.0, value.shape).astype("f") if name in slots else value
        for name, value in program.state.items()
    }
    program = dataclasses.replace(program, state=state)
    for name, old, new in values(program, rewritten(program), 1):
        # What adds up to less than its parts has their rounding.
        off = np.abs(old - new) / np.spacing(np.maximum(np.abs(old), np.float32(0.5)))
        assert np.max(off) <= 2, name


def test_an_update_in_a_branch_and_two_in_a_row():
    held = variables(keras)
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(held)

    def apply(scale: float, gradients: Sequence[tf.Tensor]) -> tf.Tensor:
        optimizer.apply_gradients(zip([scale * g for g in gradients], held, strict=True))
        return tf.constant(True)

    def step(*gradients: tf.Tensor) -> tf.Tensor:
        apply(1.0, gradients)
        apply(-0.5, gradients)
        return tf.cond(
            gradients[0][0, 0] < 100.0,
            lambda: apply(2.0, gradients),
            lambda: tf.constant(False),
        )

    rng = np.random.default_rng(2)
    program = traced(step, *(rng.standard_normal(shape, np.float32) for shape in SHAPES))
    result = rewritten(program)
    assert updates(result) == {ADAM: 6}
    for _, old, new in values(program, result, 2):
        np.testing.assert_allclose(new, old, rtol=2e-5, atol=1e-6)


def test_accumulated_gradients_are_applied_by_one_op():
    program = update(keras, "Adam", gradient_accumulation_steps=2)
    result = rewritten(program)
    assert updates(result) == {ADAM: 2}
    for _, old, new in values(program, result, 4):
        np.testing.assert_allclose(new, old, rtol=2e-5, atol=1e-6)


def adam(
    held: Any,
    m: Any,
    v: Any,
    between: Callable[[Any, Any], Any] = lambda m, v: None,
    late: bool = False,
) -> Callable[[tf.Tensor], tf.Tensor]:
    """An update by hand; `between` runs between its parts, or behind it."""

    def step(gradient: tf.Tensor) -> tf.Tensor:
        m.assign_add((gradient - m) * 0.1)
        seen = None if late else between(m, v)
        v.assign_add((tf.square(gradient) - v) * 0.001)
        held.assign_sub(m * 0.01 / (tf.sqrt(v) + 1e-7))
        seen = between(m, v) if late else seen
        return tf.identity(seen) if tf.is_tensor(seen) else tf.constant(0.0)

    return step


def by_hand(**options: Any) -> Program:
    held, m, v = (tf.Variable(np.ones((4, 3), np.float32)) for _ in range(3))
    return traced(adam(held, m, v, **options), np.full((4, 3), 0.5, np.float32))


@pytest.mark.parametrize(
    "between",
    [
        lambda m, v: m.assign(m * 2.0),
        lambda m, v: v.assign(m + v),
        lambda m, v: v.assign(tf.where(tf.reduce_sum(m) > 1.0, v, 3.0 * v)),
    ],
)
def test_what_comes_between_the_parts_keeps_them_apart(between):
    program = by_hand(between=between)
    result = rewritten(program)
    assert ADAM not in updates(result)
    for _, old, new in values(program, result, 3):
        assert units_off(old, new) <= 2


def test_who_reads_between_the_parts_may_read_behind_them():
    program = by_hand(between=lambda m, v: tf.reduce_sum(m))
    result = rewritten(program)
    assert updates(result)[ADAM] == 1
    before, after = program.run(program.graph_def, 3), program.run(result.graph_def, 3)
    for name, old in before.items():
        np.testing.assert_allclose(after[name], old, rtol=2e-5)


@pytest.mark.parametrize(
    "between",
    [lambda m, v: tf.reduce_sum(m + v), lambda m, v: m.assign(m * 2.0)],
    ids=["reads", "writes"],
)
def test_what_comes_behind_waits_for_the_whole(between):
    program = by_hand(between=between, late=True)
    result = rewritten(program)
    assert updates(result)[ADAM] == 1
    before, after = program.run(program.graph_def, 3), program.run(result.graph_def, 3)
    for name, old in before.items():
        np.testing.assert_allclose(after[name], old, rtol=2e-5)


def test_a_read_before_the_update_keeps_its_value():
    """The op writes in place: what was read before must not change with it."""
    held, m, v = (tf.Variable(np.ones((4, 3), np.float32)) for _ in range(3))
    update_of = adam(held, m, v)

    def step(gradient: tf.Tensor) -> list[tf.Tensor]:
        before = [held.read_value(), m.read_value(), v.read_value()]
        with tf.control_dependencies([update_of(gradient)]):
            return [tf.identity(each) + 0.0 for each in before]

    program = traced(step, np.full((4, 3), 0.5, np.float32))
    result = rewritten(program)
    assert updates(result) == {ADAM: 1}
    after = program.run(result.graph_def, 1)
    for name in program.fetches:
        np.testing.assert_array_equal(after[name], np.ones((4, 3)))


@pytest.mark.parametrize("dtype", [tf.float64, tf.float16, tf.bfloat16])
def test_other_dtypes_are_left(dtype):
    held, m, v = (tf.Variable(tf.ones((4, 3), dtype)) for _ in range(3))
    program = trace(adam(held, m, v), tf.ones((4, 3), dtype).numpy())
    assert not updates(rewritten(program))


@pytest.mark.parametrize("shape", [(3,), (4, 1), (1, 3)])
def test_a_gradient_that_is_broadcast_is_left(shape):
    result = broadcast(shape, shape)
    assert ADAM not in updates(result)


@pytest.mark.parametrize(
    ("known", "shape"),
    [((4, None), (4, 3)), ((4, None), (4, 1)), ((None,), (3,)), (None, (4, 3)), (None, ())],
)
def test_a_gradient_that_may_be_broadcast_is_brought_to_the_shape_of_the_slots(known, shape):
    result = broadcast(known, shape)
    assert updates(result)[ADAM] == 1
    (repeated,) = [node for node in result.graph_def.node if node.op == "BroadcastTo"]
    (update,) = [node for node in result.graph_def.node if node.op == ADAM]
    assert update.input[-1] == repeated.name


def broadcast(known: Any, shape: tuple[int, ...]) -> RewriteResult:
    """The rewrite of an update by a gradient of which little is known; the values are checked."""
    held, m, v = (tf.Variable(np.ones((4, 3), np.float32)) for _ in range(3))
    gradient = np.linspace(0.3, 0.5, math.prod(shape), dtype=np.float32).reshape(shape)
    program = traced(adam(held, m, v), tf.TensorSpec(known), gradient)
    result = rewritten(program)
    for _, old, new in values(program, result, 2):
        assert units_off(old, new) <= 2
    return result


def test_what_scales_a_step_is_one_number_or_part_of_the_gradient():
    held, m = (tf.Variable(np.ones((4, 3), np.float32)) for _ in range(2))

    def step(gradient: tf.Tensor, rate: tf.Tensor) -> tf.Tensor:
        m.assign(m * 0.9 - gradient * rate)
        held.assign_add(m)
        return tf.constant(0.0)

    gradient = np.ones((4, 3), np.float32)
    for rate, factors in ((np.float32(0.5), 0), (np.full(3, 0.5, "f"), 1), (gradient / 2, 1)):
        program = traced(step, gradient, rate)
        result = rewritten(program)
        assert updates(result) == {MOMENTUM: 1}
        assert sum(node.op == "Mul" for node in result.graph_def.node) == factors
        for _, old, new in values(program, result, 3):
            assert units_off(old, new) <= 2


def test_numbers_of_a_variable_without_axes_are_left():
    held, m, v = (tf.Variable(1.0) for _ in range(3))
    assert not updates(rewritten(traced(adam(held, m, v), np.float32(0.5))))


def test_a_step_without_slots_takes_a_gradient_of_any_shape():
    (held,) = variables(tf, ((4, 3),))

    def step(gradient: tf.Tensor) -> tf.Tensor:
        held.assign_sub(0.1 * gradient)
        return tf.constant(0.0)

    program = traced(step, tf.TensorSpec(None), np.ones((4, 3), np.float32))
    result = rewritten(program)
    assert updates(result) == {DESCENT: 1}
    assert not any(node.op == "BroadcastTo" for node in result.graph_def.node)


def test_slots_of_shapes_that_are_not_known_are_left():
    held, m, v = (
        tf.Variable(np.ones(shape, np.float32), shape=tf.TensorShape(None))
        for shape in ((4, 3), (4, 3), (3,))
    )
    program = traced(adam(held, m, v), tf.TensorSpec(None), np.ones(3, np.float32))
    assert ADAM not in updates(rewritten(program))


def test_a_compiler_that_fuses_has_no_use_for_it():
    program = update(keras, "Adam")
    config = PrecisionConfig(target_dtype="bfloat16", device="CPU", fused=True)
    assert not updates(rewritten(program, config))


def test_on_a_gpu_variables_must_be_known_to_be_in_one_place():
    result = rewritten(by_hand(), GPU)
    assert ADAM not in updates(result)
    assert "one device" in reasons(result)[0]
    program = by_hand()
    nodes = list(program.graph_def.node)
    for node in nodes:
        if node.op.startswith("Assign"):
            node.device = "/device:GPU:0"
    placed = program.with_nodes(nodes)
    assert updates(rewritten(placed, GPU)) == {ADAM: 1}
    next(n for n in nodes if n.op.startswith("AssignSub")).device = "/device:GPU:1"
    result = rewritten(program.with_nodes(nodes), GPU)
    assert ADAM not in updates(result)


@pytest.mark.parametrize("op", ["VarHandleOp", "AssignAddVariableOp"])
def test_variables_on_several_devices_are_left(op):
    program = by_hand()
    nodes = list(program.graph_def.node)
    next(node for node in nodes if node.op == op).device = "/device:CPU:1"
    result = rewritten(program.with_nodes(nodes))
    assert ADAM not in updates(result)
    assert "its variables are on several devices" in reasons(result)


@pytest.mark.parametrize("config", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize(
    ("places", "fused"),
    [
        (("", "", ""), {"CPU"}),
        (("/device:GPU:0",) * 3, {"CPU", "GPU"}),
        (("/device:GPU:0", "/device:GPU:0", "/device:GPU:1"), set()),
    ],
    ids=["not known", "one", "two"],
)
def test_the_caller_may_know_where_the_variables_of_a_function_are(config, places, fused):
    held, m, v = (tf.Variable(np.ones((4, 3), np.float32)) for _ in range(3))
    step = tf.function(adam(held, m, v), autograph=False)
    concrete = step.get_concrete_function(tf.TensorSpec((4, 3)))
    definition = concrete.function_def
    arguments = [a.name for a in definition.signature.input_arg if a.type == types_pb2.DT_RESOURCE]
    devices = dict(zip(arguments, places, strict=True))
    result = rewrite_function_def(
        definition,
        config,
        shapes=traced_shapes(concrete.graph, definition),
        devices=lambda function, argument: devices[argument],
    )
    assert result.failure is None
    assert result.report.fused["fused-update"] >= 1
    found = any(node.op == ADAM for node in result.proto.node_def)
    assert found == (config.device in fused)


def test_what_nobody_reads_may_wait_for_another_assignment():
    """It goes; that the updates still happen is seen in the ops that stand for them."""
    held, counter = variables(tf_keras), tf.Variable(0.0)
    optimizer = tf_keras.optimizers.SGD(momentum=0.9)
    optimizer.build(held)

    def step(weight: tf.Tensor, bias: tf.Tensor, by: tf.Tensor) -> None:
        with tf.control_dependencies([counter.assign_add(1.0, read_value=False)]):
            tf.identity(bias)
        optimizer.apply_gradients(zip((weight @ by, bias), held, strict=True))

    concrete = tf.function(step, autograph=False).get_concrete_function(
        *map(tf.TensorSpec, (*SHAPES, (5, 5)))
    )
    definition = concrete.function_def
    shapes = traced_shapes(concrete.graph, definition)
    result = rewrite_function_def(definition, CPU, shapes=shapes)
    assert result.failure is None
    assert result.report.fused["fused-update"] == 2


def test_the_order_of_nodes_does_not_matter():
    program = update(keras, "AdamW", global_clipnorm=1.0)
    left = rewrite_graph(program, CPU).graph_def
    right = rewrite_graph(program.with_nodes(program.graph_def.node[::-1]), CPU).graph_def
    nodes = [{node.name: node for node in each.node} for each in (left, right)]
    assert nodes[0] == nodes[1]


def steps_between(count: int, step: Callable[[tf.Tensor], tf.Tensor]) -> Program:
    """An update of one variable by the value of another, which some steps have changed."""
    state, read = variables(tf, ((3,), (3,)))

    def run(x: tf.Tensor) -> tf.Tensor:
        state.assign(0.9 * state + x)
        value = state * 1.0
        for _ in range(count):
            value = step(value)
        read.assign_add(value)
        return tf.identity(x)

    return traced(run, np.ones(3, np.float32))


def test_what_steps_read_twice_is_expanded_once(monkeypatch):
    seen = []
    combined = expression.combined
    monkeypatch.setattr(expression, "combined", lambda *a: seen.append(a) or combined(*a))
    rewritten(steps_between(10, lambda value: value + value))
    assert 10 <= len(seen) < 40


def test_steps_of_many_terms_are_left_and_said():
    program = steps_between(6, lambda value: value * (1.0 - value))
    assert "what it computes has too many terms" in reasons(rewritten(program))


def test_a_gradient_may_be_scaled_any_number_of_times():
    (held,) = variables(tf, ((3,),))

    def run(x: tf.Tensor) -> tf.Tensor:
        gradient = tf.tanh(x)
        for _ in range(1100):
            gradient = gradient * 0.999
        held.assign_sub(gradient)
        return tf.identity(x)

    assert updates(rewritten(traced(run, np.ones(3, np.float32)))) == {DESCENT: 1}
