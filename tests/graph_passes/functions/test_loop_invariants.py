"""Casts of what a loop does not change leave the loop, where that is certain to be right."""

from __future__ import annotations

import copy

import call_graphs
import pytest
from call_graphs import BFLOAT16, FLOAT, build, casts_of_weights, loops, nodes_named
from graph_text import graph
from tensorflow.core.framework import graph_pb2, types_pb2

from graph_passes import PrecisionConfig, rewrite_graph_def
from graph_passes.functions.call_tree import CallTrees, Region
from graph_passes.functions.loop_invariants import hoist_casts

HALF = types_pb2.DT_HALF

CONFIG = PrecisionConfig(target_dtype="bfloat16", device="CPU")
OFF = PrecisionConfig(
    target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("loop-hoisting",))
)
KEPT = ("x", "out", "gradient", "init")


def rewrite(graph_def: graph_pb2.GraphDef, config: PrecisionConfig) -> graph_pb2.GraphDef:
    result = rewrite_graph_def(graph_def, config, preserve=KEPT)
    assert result.failure is None
    assert result.changed
    return result.graph_def


def test_weight_is_cast_once_outside() -> None:
    graph = build(call_graphs.loop, gradient=False)
    new = rewrite(graph.graph_def, CONFIG)
    ((loop, body),) = loops(new)
    assert casts_of_weights(body) == []
    reads = {node.name for node in nodes_named(new.node, "ReadVariableOp")}
    outside = [n for n in nodes_named(new.node, "Cast") if n.input[0] in reads]
    assert [node.name in loop.input for node in outside] == [True]
    assert loop.attr["T"].list.type[-1] == BFLOAT16
    assert len(loop.attr["output_shapes"].list.shape) == len(loop.attr["T"].list.type)


@pytest.mark.parametrize("gradient", [False, True])
def test_a_later_gradient_finds_the_variables_of_the_loop(gradient: bool) -> None:
    """TensorFlow takes none of what is behind as many outputs as this attribute says."""
    graph = build(call_graphs.loop, gradient=gradient)
    counts = {loop.name: len(loop.attr["T"].list.type) for loop, _ in loops(graph.graph_def)}
    new = {loop.name: loop.attr for loop, _ in loops(rewrite(graph.graph_def, CONFIG))}
    assert any(len(attr["T"].list.type) > counts[name] for name, attr in new.items())
    for attr in new.values():
        assert attr["_num_original_outputs"].i == len(attr["T"].list.type)


def test_rule_can_be_switched_off() -> None:
    new = rewrite(build(call_graphs.loop, gradient=False).graph_def, OFF)
    ((_, body),) = loops(new)
    assert len(casts_of_weights(body)) == 1


def test_weight_leaves_nested_loops() -> None:
    new = rewrite(build(call_graphs.nested_loop, gradient=False).graph_def, CONFIG)
    ((_, outer),) = loops(new)
    assert casts_of_weights(outer) == []
    assert nodes_named(outer.node_def, "Cast") == []
    (inner,) = nodes_named(outer.node_def, "While") + nodes_named(outer.node_def, "StatelessWhile")
    assert inner.attr["T"].list.type[-1] == BFLOAT16


@pytest.mark.parametrize(
    "shape", [call_graphs.assigning_loop, call_graphs.indirectly_assigning_loop]
)
def test_weight_that_the_loop_writes_is_read_in_every_round(shape: object) -> None:
    graph = build(shape, gradient=False)  # type: ignore[arg-type]
    new = rewrite(graph.graph_def, CONFIG)
    ((_, body),) = loops(new)
    assert len(casts_of_weights(body)) == 1
    (wanted,), (got,) = graph.run(), graph.run(new)
    assert abs(wanted - got).max() < 0.02


def test_float32_argument_enters_twice_where_both_dtypes_are_read() -> None:
    new = rewrite(build(call_graphs.mixed_loop, gradient=False).graph_def, CONFIG)
    ((loop, body),) = loops(new)
    arguments = {a.name: a.type for a in body.signature.input_arg}
    cast = [n for n in nodes_named(body.node_def, "Cast") if n.input[0] in arguments]
    constant = {
        arg.name
        for arg, out in zip(body.signature.input_arg, body.signature.output_arg, strict=True)
        if body.ret[out.name] == arg.name
    }
    assert not [node.name for node in cast if node.input[0] in constant]
    assert loop.attr["T"].list.type[-1] == BFLOAT16
    assert FLOAT in arguments.values()


def test_read_waits_for_what_the_loop_waits_for() -> None:
    def shape(x: object, weight: object) -> object:
        with call_graphs.tf.control_dependencies([weight.assign_add(weight * 0.0)]):  # type: ignore[attr-defined]
            return call_graphs.loop(x, weight)  # type: ignore[arg-type]

    new = rewrite(build(shape, gradient=False).graph_def, CONFIG)  # type: ignore[arg-type]
    ((loop, _),) = loops(new)
    makers = {node.name: node for node in new.node}
    cast = makers[list(loop.input)[len(loop.attr["T"].list.type) - 1]]
    behind, pending = set(), [cast.input[0]]
    while pending:
        name = pending.pop().lstrip("^").partition(":")[0]
        if name not in behind:
            behind.add(name)
            pending.extend(makers[name].input)
    assert "AssignAddVariableOp" in {makers[name].op for name in behind}


def test_a_loop_with_casts_of_its_own_is_converted_beside_them() -> None:
    """A layer of Keras' policy, say, beside one in float32."""
    tf = call_graphs.tf

    def shape(x: object, weight: object) -> object:
        def body(i: int, y: object) -> object:
            low = tf.matmul(tf.cast(y, tf.bfloat16), tf.cast(weight, tf.bfloat16))
            return i + 1, tf.tanh(tf.matmul(tf.cast(low, tf.float32), weight))

        return tf.while_loop(lambda i, _: i < 2, body, (0, x))[1]

    graph = build(shape, gradient=False)  # type: ignore[arg-type]
    new = rewrite(graph.graph_def, CONFIG)
    ((_, body),) = loops(new)
    assert {n.attr["T"].type for n in nodes_named(body.node_def, "MatMul")} == {BFLOAT16}
    read = {name.partition(":")[0] for node in body.node_def for name in node.input}
    assert read.isdisjoint(casts_of_weights(body))
    (wanted,), (got,) = graph.run(), graph.run(new)
    assert abs(wanted - got).max() < 0.02


def test_hoisting_is_off_in_parity_mode() -> None:
    config = PrecisionConfig(target_dtype="bfloat16", device="CPU", parity=True)
    graph_def = build(call_graphs.loop, gradient=False).graph_def
    result = rewrite_graph_def(graph_def, config, preserve=KEPT)
    names = {function.signature.name for function in result.graph_def.library.function}
    assert names == {function.signature.name for function in graph_def.library.function}


LOOP = """
def size(a: float32):
    b = Size(a)
    return b

def test(i: int32, x: float32, w: float32, v: resource):
    go = Less(i, 3)
    {test}
    return go

def body(i: int32, x: float32, w: float32, v: resource):
    {body}
    high = Cast(low, DstT=float32)
    product = MatMul(high, high)
    i2 = AddV2(i, 1)
    return i2, product, w, v

i = Const(0)
x = Const(0.5, [8, 8])
v = VarHandleOp(dtype=float32, shape=[8, 8])
y = While(i, x, x, v, cond=test, body=body)
"""
HANDLE = "VarHandleOp(dtype=float32, shape=[8, 8])"
READ = "read = ReadVariableOp(v, dtype=float32{after}); low = Cast(read, DstT=float16)"


def tree_of(graph_def: graph_pb2.GraphDef) -> Region:
    """A call tree whose bodies are private copies."""
    library = {function.signature.name: function for function in graph_def.library.function}
    tree = CallTrees(library.get, lambda op: op == "MatMul", graph_def).build(graph_def)
    return tree.with_bodies(lambda region: copy.deepcopy(region.proto))


def hoisted(body: str, test: str = "") -> int:
    """How many Casts leave a loop."""
    return hoist_casts(tree_of(graph(LOOP.format(body=body, test=test))), HALF)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("low = Cast(w, DstT=float16)", 1),
        ("same = Identity(w); low = Cast(same, DstT=float16)", 1),
        ("again = Cast(w, DstT=float16); low = Cast(w, DstT=float16)", 2),
        # Every round changes it.
        ("low = Cast(x, DstT=float16)", 0),
        ("more = Relu(w); low = Cast(more, DstT=float16)", 0),
        # Not between these dtypes, or not before something else.
        ("low = Cast(w, DstT=bfloat16)", 0),
        ("low = Cast(i, DstT=float16)", 0),
        ("low = Cast(w, DstT=float16, after=[x])", 0),
        # A variable that nothing in the loop may write.
        (READ.format(after=""), 1),
        (READ.format(after=", after=[x]"), 0),
        (READ.format(after="") + "; is_set = VarIsInitializedOp(v)", 1),
        (READ.format(after="") + "; write = AssignVariableOp(v, x)", 0),
        (READ.format(after="") + "; same = Identity(v); write = AssignVariableOp(same, x)", 0),
        (f"{READ.format(after='')}; u = {HANDLE}; write = AssignVariableOp(u, x)", 0),
        (READ.format(after="") + "; said = EagerPyFunc(x, Tout=[float32], token='a')", 0),
        (READ.format(after="") + "; said = size(x)", 0),
        (f"u = {HANDLE}; {READ.format(after='').replace('v,', 'u,')}", 0),
        (READ.format(after="") + "; same = Identity(x); other = Relu(same)", 1),
        (READ.format(after="") + "; n = PartitionedCall(x, Tout=[int32], f=size)", 0),
        ("low = Cast(w, DstT=float16); write = AssignVariableOp(v, x)", 1),
    ],
)
def test_casts_that_leave_a_loop(body: str, count: int) -> None:
    assert hoisted(body.replace("; ", "\n    ")) == count


def test_a_weight_that_is_read_twice_is_cast_once_where_it_was_read() -> None:
    lines = (
        'read = ReadVariableOp(v, dtype=float32) @ "/device:CPU:0"',
        "low = Cast(read, DstT=float16)",
        'again = ReadVariableOp(v, dtype=float32) @ "/device:CPU:0"',
        "other = Cast(again, DstT=float16)",
    )
    tree = tree_of(graph(LOOP.format(body="\n    ".join(lines), test="")))
    nodes = {node.name: node for node in tree.nodes}
    nodes["y"].input.append("^x")
    assert hoist_casts(tree, HALF) == 2
    (cast,) = (node for node in tree.nodes if node.op == "Cast")
    (read,) = (node for node in tree.nodes if node.op == "ReadVariableOp")
    assert list(nodes["y"].input)[4:] == [cast.name, "^x"]
    assert cast.input == [read.name]
    assert (read.device, list(read.input)) == ("/device:CPU:0", ["v", "^x"])


def test_nothing_waits_for_a_cast_that_has_left() -> None:
    graph_def = graph(LOOP.format(body="low = Cast(w, DstT=float16)", test=""))
    (body,) = (f for f in graph_def.library.function if f.signature.name == "body")
    high = next(node for node in body.node_def if node.name == "high")
    high.input.append("^low")
    high.attr["_class"].list.s.append(b"loc:@low")
    tree = tree_of(graph_def)
    assert hoist_casts(tree, HALF) == 1
    nodes = {node.name: node for node in tree.calls[0].callee("body").nodes}
    assert [name for name in nodes["high"].input if name[0] == "^"] == []
    assert "_class" not in nodes["high"].attr


def test_a_cast_of_the_program_stays_but_nothing_reads_it() -> None:
    tree = tree_of(graph(LOOP.format(body="low = Cast(w, DstT=float16)", test="")))
    assert hoist_casts(tree, HALF, lambda _: {"low"}) == 1
    body = tree.calls[0].callee("body").proto
    assert [node.name for node in body.node_def if node.op == "Cast"] == ["low", "high"]
    assert not [node for node in body.node_def if "low:y:0" in node.input]


@pytest.mark.parametrize("source", ["float16", "bfloat16"])
def test_what_was_raised_before_the_loop_enters_as_it_was(source: str) -> None:
    text = LOOP.format(body="low = Cast(w, DstT=float16)", test="").replace(
        "y = While(i, x, x, v",
        f"z = Const(0.5, [8, 8], dtype={source})\nraised = Cast(z, DstT=float32)\n"
        "y = While(i, x, raised, v",
    )
    tree = tree_of(graph(text))
    assert hoist_casts(tree, HALF) == 1
    (loop,) = (node for node in tree.nodes if node.name == "y")
    assert loop.input[-1] == ("z" if source == "float16" else "y/hoisted/Cast")


def test_a_condition_may_write_a_variable_too() -> None:
    body = READ.format(after="").replace("; ", "\n    ")
    assert hoisted(body, "write = AssignVariableOp(v, x)") == 0


def test_casts_in_branches_stay() -> None:
    graph_def = graph("""
        def layer(a: float32):
            low = Cast(a, DstT=float16)
            b = MatMul(low, low)
            high = Cast(b, DstT=float32)
            return high

        go = Const(True)
        x = Const(0.5, [8, 8])
        work = MatMul(x, x)
        y = If(go, x, Tout=[float32], then_branch=layer, else_branch=layer)
    """)
    tree = tree_of(graph_def)
    assert tree.calls
    assert hoist_casts(tree, HALF) == 0


def test_a_loop_in_a_function_reads_tensors_by_the_names_of_a_function() -> None:
    body = READ.format(after="").replace("; ", "\n    ")
    functions, _, main = LOOP.format(body=body, test="").partition("\ni = ")
    main = f"i = {main.rstrip()}".replace("\n", "\n    ")
    text = f"{functions}\ndef main(a: float32):\n    {main}\n    return y[1]"
    *library, function = graph(text).library.function
    named = {function.signature.name: function for function in library}
    tree = CallTrees(named.get, lambda op: op == "MatMul", function).build(function)
    tree = tree.with_bodies(lambda region: copy.deepcopy(region.proto))
    assert hoist_casts(tree, HALF) == 1
    nodes = {node.name: node for node in tree.nodes}
    assert list(nodes["y/hoisted/read"].input) == ["v:resource:0"]
    assert list(nodes["y/hoisted/Cast"].input) == ["y/hoisted/read:value:0"]
    assert nodes["y"].input[-1] == "y/hoisted/Cast:y:0"


def test_a_result_that_was_a_hoisted_cast_is_the_new_argument() -> None:
    text = LOOP.format(body="low = Cast(w, DstT=float16)", test="")
    text = text.replace("x: float32", "x: float16").replace("product, w, v", "low, w, v")
    text = text.replace("While(i, x, x, v", "While(i, z, x, v")
    text = text.replace("y = While", "z = Cast(x, DstT=float16)\ny = While")
    tree = tree_of(graph(text))
    assert hoist_casts(tree, HALF) == 1
    body = tree.calls[0].callee("body").proto
    assert body.ret[body.signature.output_arg[1].name] == body.signature.input_arg[-1].name


def test_readers_of_a_hoisted_cast_read_the_new_argument() -> None:
    tree = tree_of(graph(LOOP.format(body="low = Cast(w, DstT=float16)", test="")))
    assert hoist_casts(tree, HALF) == 1
    body = tree.calls[0].callee("body").proto
    assert "low" not in {node.name for node in body.node_def}
    new = body.signature.input_arg[-1]
    assert new.type == HALF
    assert body.ret[body.signature.output_arg[-1].name] == new.name
    assert next(node for node in body.node_def if node.name == "high").input == [new.name]
    (cast,) = nodes_named(tree.nodes, "Cast")
    assert list(cast.input) == ["x"]
    loop = next(node for node in tree.nodes if node.name == "y")
    assert list(loop.input) == ["i", "x", "x", "v", cast.name]
