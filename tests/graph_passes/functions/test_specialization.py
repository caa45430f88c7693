"""Functions planned with their callers."""

from __future__ import annotations

import dataclasses

import call_graphs
import graph_checks
import numpy as np
import pytest
import tensorflow as tf
from call_graphs import (
    BFLOAT16,
    FLOAT,
    SHAPES,
    build,
    dtypes_of,
    function_named,
    loops,
    nodes_named,
)
from cpu_units import bfloat16_errors_behind_products
from tensorflow.core.framework import function_pb2, graph_pb2
from traced_steps import Step, traced

from graph_passes import (
    PrecisionConfig,
    pipeline,
    rewrite_function_def,
    rewrite_graph_def,
    tree_rewrite,
)
from graph_passes.functions.call_tree import CallTrees
from graph_passes.policy.cost_table import CostTable, Curve, OpCost

CONFIG = PrecisionConfig(target_dtype="bfloat16", device="CPU")
ALONE = PrecisionConfig(
    target_dtype="bfloat16",
    device="CPU",
    disabled_rules=frozenset(("function-signatures", "loop-hoisting")),
)
KEPT = ("x", "out", "gradient", "init")


def rewrite(graph_def: graph_pb2.GraphDef, config: PrecisionConfig = CONFIG) -> graph_pb2.GraphDef:
    before = graph_def.SerializeToString(deterministic=True)
    result = rewrite_graph_def(graph_def, config, preserve=KEPT)
    assert result.failure is None
    assert result.changed
    assert graph_def.SerializeToString(deterministic=True) == before
    return result.graph_def


def library_of(graph_def: graph_pb2.GraphDef) -> dict[str, function_pb2.FunctionDef]:
    return {function.signature.name: function for function in graph_def.library.function}


def is_matmul(op: str) -> bool:
    return op in ("MatMul", "BatchMatMulV2")


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_values_are_close_and_the_graph_is_valid(shape: str) -> None:
    graph = build(SHAPES[shape])
    new = rewrite(graph.graph_def)
    graph_checks.assert_calls_agree(new)
    wanted = graph.run()
    for lower in (True, False):
        for one, other in zip(wanted, graph.run(new, lower=lower), strict=True):
            scale = np.abs(one).max()
            assert np.abs(one - other).max() < 0.05 * scale * bfloat16_errors_behind_products()


def test_loop_state_is_in_the_target_dtype() -> None:
    new = rewrite(build(call_graphs.loop).graph_def)
    for loop, body in loops(new):
        taken = [arg.type for arg in body.signature.input_arg]
        assert list(loop.attr["T"].list.type) == taken
        assert BFLOAT16 in taken
        assert dtypes_of(body.node_def, "MatMul").keys() == {BFLOAT16}
    forward = next(body for loop, body in loops(new) if "grad" not in body.signature.name)
    assert not [node.name for node in forward.node_def if node.op == "Cast"]


def test_elements_of_lists_cross_from_the_loop_to_its_gradient() -> None:
    new = rewrite(build(call_graphs.loop).graph_def)
    elements = {
        node.attr["element_dtype"].type
        for _, body in loops(new)
        for node in body.node_def
        if node.op in ("TensorListPushBack", "TensorListPopBack")
    }
    assert BFLOAT16 in elements
    assert FLOAT not in elements


def test_sum_of_weight_gradients_stays_float32() -> None:
    """What a variable's update is computed from accumulates in float32, over all rounds."""

    def shape(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
        out = call_graphs.loop(x, weight)
        (gradient,) = tf.gradients(tf.reduce_sum(out), [weight])
        return tf.reduce_sum(weight.assign_sub(0.1 * gradient))

    off = frozenset(("loop-gradient-sums",))
    config = PrecisionConfig(target_dtype="bfloat16", device="CPU", disabled_rules=off)
    new = rewrite(build(shape, gradient=False).graph_def, config)
    gradient = next(body for _, body in loops(new) if "grad" in body.signature.name)
    sums = [node for node in gradient.node_def if node.op in ("AddN", "AddV2")]
    assert FLOAT in {node.attr["T"].type for node in sums}
    assert dtypes_of(gradient.node_def, "MatMul").keys() == {BFLOAT16}


def test_callers_of_different_colour_get_functions_of_their_own() -> None:
    graph_def = build(call_graphs.calls, gradient=False).graph_def
    new = rewrite(graph_def)
    called = [n for n in new.node if n.op in ("PartitionedCall", "StatefulPartitionedCall")]
    dtypes = {n.attr["f"].func.name: n.attr["Tin"].list.type[0] for n in called}
    assert sorted(dtypes.values()) == [FLOAT, BFLOAT16]
    originals = library_of(graph_def)
    (low,) = [name for name, dtype in dtypes.items() if dtype == BFLOAT16]
    (high,) = [name for name, dtype in dtypes.items() if dtype == FLOAT]
    assert low not in originals
    assert function_named(new, high) == originals[high]


def test_callers_of_one_colour_share_a_function() -> None:
    new = rewrite(build(call_graphs.cells, gradient=False).graph_def)
    called = [n.attr["f"].func.name for n in new.node if n.op.endswith("PartitionedCall")]
    assert len(called) == 3
    # The first takes the float32 input, or all three take the target dtype.
    assert len(set(called)) <= 2
    last = function_named(new, called[-1])
    assert {arg.type for arg in last.signature.input_arg} == {BFLOAT16}


@pytest.mark.parametrize("shape", ["branch", "case"])
def test_branches_take_and_give_the_target_dtype(shape: str) -> None:
    new = rewrite(build(SHAPES[shape], gradient=False).graph_def)
    (node,) = [n for n in new.node if n.op in ("If", "StatelessIf", "Case", "StatelessCase")]
    assert list(node.attr["Tout"].list.type) == [BFLOAT16]
    functions = [v.func.name for v in node.attr.values() if v.WhichOneof("value") == "func"]
    functions += [f.name for v in node.attr.values() for f in v.list.func]
    assert len(functions) >= 2
    for name in functions:
        assert [a.type for a in function_named(new, name).signature.output_arg] == [BFLOAT16]


def test_float32_signature_of_the_top_function_stays() -> None:
    @tf.function(autograph=False)
    def step(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < 3, lambda i, h: (i + 1, tf.tanh(h @ w)), (0, x))[1]

    spec = tf.TensorSpec([8, 8], tf.float32)
    graph_def = step.get_concrete_function(spec, spec).graph.as_graph_def()
    original = step.get_concrete_function(spec, spec).function_def
    result = rewrite_function_def(original, CONFIG, library=library_of(graph_def).get)
    assert result.failure is None
    assert result.proto.signature == original.signature
    new = {function.signature.name for function in result.extra_functions}
    assert new
    assert not new & library_of(graph_def).keys()
    called = {
        v.func.name
        for function in (result.proto, *result.extra_functions)
        for node in function.node_def
        for v in node.attr.values()
        if v.WhichOneof("value") == "func"
    }
    assert called == new
    body = next(f for f in result.extra_functions if "body" in f.signature.name)
    assert not [node for node in body.node_def if node.op == "Cast"]


def test_gradient_function_takes_activations_in_the_target_dtype() -> None:
    """The tape is outside of the layers, inside of the step: both halves are in view."""

    @tf.function(autograph=False)
    def layer(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(x @ w) @ w

    @tf.function(autograph=False)
    def step(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_sum(layer(layer(x, w), w))
        return tape.gradient(loss, w)

    spec = tf.TensorSpec([8, 8], tf.float32)
    concrete = step.get_concrete_function(spec, spec)
    library = library_of(concrete.graph.as_graph_def())
    result = rewrite_function_def(concrete.function_def, CONFIG, library=library.get)
    assert result.failure is None
    backward = [f for f in result.extra_functions if "backward" in f.signature.name]
    assert backward
    for function in backward:
        taken = [arg.type for arg in function.signature.input_arg]
        assert taken.count(BFLOAT16) > taken.count(FLOAT)


def test_wrapper_of_one_call_is_left_alone() -> None:
    inner = tf.function(lambda x: x @ x @ x, autograph=False)
    outer = tf.function(lambda x: inner(x) + 1.0, autograph=False)
    concrete = outer.get_concrete_function(tf.TensorSpec([8, 8], tf.float32))
    library = library_of(concrete.graph.as_graph_def())
    result = rewrite_function_def(concrete.function_def, CONFIG, library=library.get)
    assert not result.changed
    assert result.extra_functions == ()


def test_recursive_function_is_rewritten_alone() -> None:
    function = tf.function(lambda x: tf.identity(x @ x) @ x, autograph=False)
    spec = tf.TensorSpec([8, 8], tf.float32)
    definition = function.get_concrete_function(spec).function_def
    name = definition.signature.name
    call = definition.node_def.add(name="again", op="PartitionedCall", input=["x"])
    call.attr["Tin"].list.type.append(FLOAT)
    call.attr["Tout"].list.type.append(FLOAT)
    call.attr["f"].func.name = name
    result = rewrite_function_def(definition, CONFIG, library={name: definition}.get)
    assert result.failure is None
    assert result.changed
    (again,) = [node for node in result.proto.node_def if node.name == "again"]
    assert again.attr["f"].func.name not in {f.signature.name for f in result.extra_functions} or (
        list(again.attr["Tin"].list.type)
        == [a.type for a in result.extra_functions[-1].signature.input_arg]
    )


def test_fault_in_a_tree_gives_the_original_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no second algorithm behind the first that could hide it."""

    def fault(*_: object) -> None:
        raise RuntimeError("injected")

    graph_def = build(call_graphs.loop).graph_def
    monkeypatch.setattr(tree_rewrite, "convert_tree", fault)
    result = rewrite_graph_def(graph_def, CONFIG, preserve=KEPT)
    assert result.proto is graph_def
    assert (result.changed, result.failure) == (False, "RuntimeError: injected")


def test_invalid_graph_with_a_call_is_told_as_one() -> None:
    graph_def = build(call_graphs.loop).graph_def
    (product,) = nodes_named(graph_def.node, "AddN")[:1] or nodes_named(graph_def.node, "Sum")[:1]
    product.input[0] = "nobody"
    result = rewrite_graph_def(graph_def, CONFIG, preserve=KEPT)
    assert result.proto is graph_def
    assert result.failure == "InvalidGraphError: no node makes the tensor 'nobody'"


def branch_with_a_bias(rows: int) -> Step:
    """The gradient of a layer with a bias that one of two branches has."""
    weight, bias = tf.Variable(tf.ones((64, 128))), tf.Variable(tf.ones(128))

    def gradients(x: tf.Tensor, taken: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            layer = lambda: tf.nn.relu(tf.nn.bias_add(tf.matmul(x, weight), bias))  # noqa: E731
            y = tf.cond(taken, layer, lambda: tf.zeros((rows, 128)))
            loss = tf.reduce_sum(tf.matmul(y, weight, transpose_b=True) ** 2)
        return tape.gradient(loss, (weight, bias))

    return traced(gradients, tf.TensorSpec((rows, 64)), tf.TensorSpec((), tf.bool))


def test_units_in_a_body_are_found_by_its_own_shapes() -> None:
    step = branch_with_a_bias(rows=512)
    report = step.result(CONFIG).report
    (unit,) = [unit for unit in report.fused_units if unit.startswith("ones-product: ")]
    assert unit.startswith("ones-product: cond_true_")
    (function,) = [
        function
        for function in step.rewritten(CONFIG).functions.values()
        if any("ones_product/MatMul" in node.name for node in function.node_def)
    ]
    assert "BiasAddGrad" not in {node.op for node in function.node_def}
    product = next(n for n in function.node_def if n.name.endswith("ones_product/MatMul"))
    assert product.attr["T"].type == BFLOAT16


def test_costs_in_a_body_are_those_of_its_own_shapes() -> None:
    fast = OpCost(
        "flops", Curve((1 << 20, 1 << 24), (1.0, 9.0)), Curve((1 << 20, 1 << 24), (2.0, 1.0))
    )
    cast = Curve((1,), (1e-6,))
    rows = (("MatMul", fast),)
    table = CostTable("made up", "CPU", "bfloat16", "nothing", cast, cast, rows)
    config = dataclasses.replace(CONFIG, cost_table=table)
    for size, low in ((4, False), (2048, True)):
        functions = branch_with_a_bias(rows=size).rewritten(config).functions
        dtypes = {
            node.attr["T"].type
            for name, function in functions.items()
            for node in function.node_def
            if node.op == "MatMul" and "cond" in name
        }
        assert (BFLOAT16 in dtypes) == low


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_parity_mode_keeps_functions(shape: str) -> None:
    graph_def = build(SHAPES[shape]).graph_def
    config = PrecisionConfig(target_dtype="bfloat16", device="CPU", parity=True)
    result = rewrite_graph_def(graph_def, config, preserve=KEPT)
    assert library_of(result.graph_def).keys() == library_of(graph_def).keys()
    for name, function in library_of(result.graph_def).items():
        assert function.signature == library_of(graph_def)[name].signature


def test_body_of_two_calls_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph_def = build(call_graphs.cells).graph_def
    tree = CallTrees(library_of(graph_def).get, is_matmul, graph_def).build(graph_def)
    searched: list[object] = []

    def prepare(proto: object, *others: object) -> object:
        searched.append(proto)
        return pipeline.prepare(proto, *others)

    monkeypatch.setattr(tree_rewrite, "prepare", prepare)
    rewrite(graph_def)
    functions = {id(region.proto) for region in tree.walk()}
    assert len(searched) == len(functions) < len(list(tree.walk()))


@pytest.mark.parametrize(("gives_float32", "works"), [(False, False), (True, False), (False, True)])
def test_branch_that_only_sets_a_variable_is_left_to_itself(
    gives_float32: bool, works: bool
) -> None:
    def branches(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
        low = x @ weight
        state = tf.Variable(np.ones((4, 8), np.float32), name="state")

        def update() -> tf.Tensor:
            state.assign(low @ weight if works else low * 2.0)
            return low if gives_float32 else tf.constant(True)

        rest = tf.zeros([4, 8]) if gives_float32 else tf.constant(False)
        given = tf.cond(tf.size(x) > 0, update, lambda: rest)
        return low + tf.cast(given, tf.float32)

    graph_def = build(branches, gradient=False).graph_def
    tree = CallTrees(library_of(graph_def).get, is_matmul, graph_def).build(graph_def)
    assert bool(tree.calls) == (gives_float32 or works)
    rewrite(graph_def)
