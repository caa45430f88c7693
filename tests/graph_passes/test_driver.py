from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from call_graphs import nested_calls
from decisions import decisions_of, reasons_of
from graph_checks import check
from graph_diff import added
from graph_text import graph
from parity import converted
from tensorflow.core.framework import function_pb2, graph_pb2, types_pb2

from graph_passes import (
    PrecisionConfig,
    Reason,
    RewriteResult,
    pipeline,
    rewrite_function_def,
    rewrite_graph_def,
    tree_rewrite,
)
from graph_passes.ir.view import GraphView

SIMPLE = "x = Const(0.5, [8, 8])\nallow1 = MatMul(x, x)\nout = Identity(allow1)"
CONFIG = PrecisionConfig()
POWERS = PrecisionConfig(disabled_rules=frozenset(("recurrence",)))
"""For products of products with themselves, which are float32 as powers of a matrix."""


def test_unknown_op_keeps_its_dtypes_behind_casts() -> None:
    before = graph(
        """
        x = Const(0.5, [8, 8])
        allow1 = MatMul(x, x)
        allow2 = MatMul(allow1, allow1)
        """
    )
    custom = before.node.add(name="custom", op="OpOfSomeLibrary", input=["allow1", "allow2"])
    custom.attr["T"].type = types_pb2.DT_FLOAT
    after_it = before.node.add(name="allow3", op="MatMul", input=["custom", "custom:1"])
    after_it.attr["T"].type = types_pb2.DT_FLOAT
    result = rewrite_graph_def(before, CONFIG)
    assert result.failure is None
    assert {"allow1", "allow2"} <= converted(before, result.proto)
    nodes = {node.name: node for node in result.proto.node}
    assert nodes["custom"].attr["T"].type == types_pb2.DT_FLOAT
    casts = [nodes[name] for name in nodes["custom"].input]
    assert [cast.op for cast in casts] == ["Cast", "Cast"]
    assert {cast.attr["DstT"].type for cast in casts} == {types_pb2.DT_FLOAT}


def test_graph_without_an_allow_op_is_given_back() -> None:
    before = graph("x = Const(0.5, [8, 8])\ny = Tanh(x)")
    result = rewrite_graph_def(before, CONFIG)
    assert result.proto is before
    assert (result.changed, result.failure) == (False, None)


def test_graph_with_nothing_to_convert_is_not_read_until_someone_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[object] = []
    view_body = tree_rewrite.view_body

    def counted(*arguments: Any) -> GraphView:
        read.append(arguments)
        return view_body(*arguments)

    monkeypatch.setattr(tree_rewrite, "view_body", counted)
    before = graph("x = Const(0.5, [8, 8])\ny = Tanh(x)\nz = Identity(y)\nn = Rank(z)")
    report = rewrite_graph_def(before, CONFIG).report
    assert report.total_nodes == 4
    assert "converted 0/4 nodes" in report.summary()
    assert not read
    assert report.eligible_nodes == 4
    assert reasons_of(report)["y"] == Reason.NO_ALLOW_NEAR.text
    assert "Tanh x1" in report.first_reason()
    assert len(read) == 1


def test_bad_graph_with_nothing_to_convert_is_given_back() -> None:
    before = graph("x = Const(0.5, [8, 8])\ny = Tanh(x)")
    before.node[1].input[0] = "nobody"
    result = rewrite_graph_def(before, CONFIG)
    assert (result.changed, result.failure) == (False, None)
    assert decisions_of(result.report) == ()
    assert result.report.eligible_nodes == 0


def test_collector_runs_again_after_a_rewrite() -> None:
    seen: list[int] = []
    bad = graph(SIMPLE)
    bad.node[1].input[0] = "nobody"
    threshold = gc.get_threshold()
    for before in (graph(SIMPLE), bad):
        rewrite_graph_def(before, CONFIG, preserve=_Watched(seen))
        assert gc.get_threshold() == threshold
    assert seen
    assert min(seen) > 1_000_000


class _Watched(Sequence[str]):
    """Nothing to preserve; notes when the collector starts while the pass reads it."""

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen

    def __len__(self) -> int:
        return 0

    def __getitem__(self, position: Any) -> Any:
        self._seen.append(gc.get_threshold()[0])
        return ()[position]


BAD_GRAPHS = {
    "input that nothing makes": lambda g: g.node[1].input.__setitem__(0, "nobody"),
    "two nodes of one name": lambda g: g.node.add().CopyFrom(g.node[1]),
    "too few inputs": lambda g: g.node[1].input.pop(),
    "too many inputs": lambda g: g.node[1].input.append("x"),
    "attribute of another kind": lambda g: g.node[1].attr["T"].__setattr__("s", b"float"),
    "no type attribute": lambda g: g.node[1].attr.pop("T"),
    "port that does not exist": lambda g: g.node[1].input.__setitem__(0, "x:7"),
    "port that is no number": lambda g: g.node[1].input.__setitem__(0, "x:y:z"),
    "empty input": lambda g: g.node[1].input.__setitem__(0, ""),
    "edge between two dtypes": lambda g: g.node[1].attr["T"].__setattr__("type", 2),
    "constant without a value": lambda g: g.node[0].attr.pop("value"),
    "node without an op": lambda g: g.node[0].__setattr__("op", ""),
}


@pytest.mark.parametrize("name", BAD_GRAPHS)
def test_bad_graph_never_raises(name: str) -> None:
    before = graph(SIMPLE)
    BAD_GRAPHS[name](before)
    copy = graph_pb2.GraphDef()
    copy.CopyFrom(before)
    for config in (CONFIG, PrecisionConfig(parity=True), PrecisionConfig(level="UNSAFE_FORCE_ALL")):
        result = rewrite_graph_def(before, config)
        assert before == copy
        if result.failure is not None:
            assert result.proto is before
            assert not result.changed


@pytest.mark.parametrize(
    "name", ["input that nothing makes", "two nodes of one name", "too few inputs"]
)
def test_bad_graph_is_a_failure(name: str) -> None:
    before = graph(SIMPLE)
    BAD_GRAPHS[name](before)
    result = rewrite_graph_def(before, CONFIG)
    assert result.failure.startswith("InvalidGraphError: ")
    assert result.report.converted_nodes == 0


def test_bad_function_never_raises() -> None:
    bad = function_pb2.FunctionDef()
    bad.signature.name = "f"
    bad.signature.output_arg.add(name="y", type=types_pb2.DT_FLOAT)
    bad.ret["y"] = "nobody:y:0"
    bad.node_def.extend(graph(SIMPLE).node)
    result = rewrite_function_def(bad, CONFIG)
    assert result.proto is bad
    assert "no node makes the tensor 'nobody:y:0'" in result.failure


def test_function_that_calls_another_by_its_name() -> None:
    library = graph(
        """
        def inner(x: float32):
            y = Exp(x)
            return y

        def outer(x: float32):
            a = MatMul(x, x)
            b = inner(a)
            c = MatMul(b, b)
            return c
        """
    ).library.function
    bodies = {function.signature.name: function for function in library}
    result = rewrite_function_def(bodies["outer"], CONFIG, library=bodies.get)
    assert result.changed
    dtypes = {n.name: n.attr["T"].type for n in result.proto.node_def if n.op == "MatMul"}
    assert set(dtypes.values()) == {types_pb2.DT_HALF}
    assert result.proto.signature == bodies["outer"].signature


def test_threads_get_the_same_graph() -> None:
    text = "\n".join(
        [
            "x = Const(0.5, [8, 8])",
            *(f"x{i} = MatMul(x, x)\ny{i} = Tanh(x{i})\nz{i} = Exp(y{i})" for i in range(30)),
        ]
    )
    before = graph(text)
    expected = rewrite_graph_def(before, CONFIG)
    check(before, expected.proto, device="GPU", preserve=())
    assert added(before, expected.proto)
    results: list[RewriteResult] = []
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        results.extend(rewrite_graph_def(before, CONFIG) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 40
    assert all(result.proto == expected.proto for result in results)


@pytest.mark.parametrize("config", [POWERS, PrecisionConfig(parity=True)], ids=["", "parity"])
@pytest.mark.parametrize("body", ["MatMul", "Exp"])
@pytest.mark.parametrize("top", ["MatMul", "Tanh"])
def test_nested_functions_are_planned_once(
    monkeypatch: pytest.MonkeyPatch, top: str, body: str, config: PrecisionConfig
) -> None:
    """As often as there are functions, not once for each that is above them."""
    searched: list[object] = []

    def prepare(*arguments: Any) -> Any:
        searched.append(arguments)
        return pipeline.prepare(*arguments)

    monkeypatch.setattr(tree_rewrite, "prepare", prepare)
    depth = 60
    result = rewrite_graph_def(nested_calls(depth, top, body), config, preserve=("x", "call"))
    assert result.failure is None
    assert result.changed
    assert len(searched) < 2 * depth


def test_reports_of_functions_have_the_order_of_their_names() -> None:
    config = PrecisionConfig(parity=True)
    result = rewrite_graph_def(nested_calls(12), config, preserve=("x", "call"))
    names = list(result.function_reports)
    assert len(names) == 12
    assert names == sorted(names)


def test_calls_may_be_nested_deeper_than_python_calls() -> None:
    before = nested_calls(1_200, "Tanh")
    result = rewrite_graph_def(before, POWERS, preserve=("x", "call"))
    assert result.failure is None
    functions = {f.signature.name: f for f in result.proto.library.function}
    products, name = 0, "f0"
    while name:
        nodes = {node.op: node for node in functions[name].node_def}
        products += nodes["MatMul"].attr["T"].type == types_pb2.DT_HALF
        name = nodes["PartitionedCall"].attr["f"].func.name if "PartitionedCall" in nodes else ""
    assert products == 1_200


UNITS_EVERYWHERE = """
def layer(dy: float32):
    p = MatMul(dy, dy, transpose_a=True)
    s = BiasAddGrad(dy)
    return p, s

dy = Placeholder(dtype=float32)
p = MatMul(dy, dy, transpose_a=True)
s = BiasAddGrad(dy)
t = Mul(s, s)
call = PartitionedCall(dy, Tout=[float32, float32], f=layer)
out = MatMul(call, p)
"""


def test_units_may_be_in_every_body_of_a_tree() -> None:
    def shapes(node: str) -> list[tuple[int, ...]]:
        known = {"dy": (4096, 8), "p": (8, 8), "s": (8,), "t": (8,)}
        return [known[node]] if node in known else []

    config = PrecisionConfig(
        target_dtype="bfloat16", device="CPU", disabled_rules=frozenset(("cast-cut",))
    )
    before = graph(UNITS_EVERYWHERE)
    result = rewrite_graph_def(
        before, config, preserve=("out", "t"), shapes=shapes, function_shapes=lambda _: shapes
    )
    assert result.failure is None
    assert set(result.report.fused_units) == {"ones-product: s", "ones-product: layer/s"}


PRODUCTS = "b = MatMul(a, a)\n    c = MatMul(b, b)\n    d = MatMul(c, c)"
PIPELINE = f"""
def inner(a: float32):
    {PRODUCTS}
    return d

def shared(a: float32):
    {PRODUCTS}
    return d

def pre(a: float32):
    {PRODUCTS}
    e = PartitionedCall(d, Tout=[float32], f=inner)
    g = PartitionedCall(e, Tout=[float32], f=shared)
    return g

def step(a: float32):
    {PRODUCTS}
    return d

x = Const(0.5, [8, 8])
y = PartitionedCall(x, Tout=[float32], f=step)
z = PartitionedCall(x, Tout=[float32], f=shared)
"""


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize("is_marked", [False, True])
def test_functions_of_pipelines_are_left_alone(is_marked: bool, parity: bool) -> None:
    """Those that tracing has marked or that a Dataset op names, and what they call."""
    before = graph(PIPELINE)
    data = before.node.add(name="data", op="OpOfSomeDataset")
    data.attr["f"].func.name = "pre"
    if is_marked:
        data.op = "PartitionedCall"
        data.input.append("x")
        data.attr["Tin"].list.type.append(types_pb2.DT_FLOAT)
        data.attr["Tout"].list.type.append(types_pb2.DT_FLOAT)
        before.library.function[2].attr["_tf_data_function"].b = True
    # Planned with their caller, they would get copies.
    alone = frozenset(("function-signatures", "loop-hoisting"))
    config = PrecisionConfig(parity=parity, disabled_rules=alone)
    result = rewrite_graph_def(before, config, preserve=("x", "y", "z"))
    assert result.failure is None
    old = {f.signature.name: f for f in before.library.function}
    new = {f.signature.name: f for f in result.proto.library.function}
    assert [new[name] == old[name] for name in ("inner", "shared", "pre")] == [True] * 3
    assert new["step"] != old["step"]


def test_every_stage_tells_what_it_has_made() -> None:
    seen: list[str] = []
    before = graph(SIMPLE)

    def observe(stage: str, made: Any) -> None:
        seen.append(stage)
        if stage == "apply":
            assert {node.op for node in made.node} > {node.op for node in before.node}

    rewrite_graph_def(before, CONFIG, observe=observe)
    stages = [stage.name for stage in pipeline.STAGES if stage.applies(CONFIG)]
    assert seen == ["unread", "bounded-constant", "units", *stages, "apply"]


def test_functions_that_others_call_keep_name_and_signature() -> None:
    before = nested_calls(2)
    del before.node[:]
    named = sorted(f.signature.name for f in before.library.function)
    assert not rewrite_graph_def(before, CONFIG).changed
    result = rewrite_graph_def(before, CONFIG, roots=named)
    assert result.changed
    after = {f.signature.name: f for f in result.proto.library.function}
    for function in before.library.function:
        assert after[function.signature.name].signature == function.signature


@pytest.mark.parametrize("calls", [2, 12])
def test_a_function_is_converted_wherever_it_is_called(calls: int) -> None:
    """In the tree of its caller, in a branch that only wraps it, and beyond the bound of copies."""
    text = """
    def layer(a: float32):
        b = MatMul(a, a)
        c = Relu(b)
        d = MatMul(c, c)
        return d

    def wrapper(a: float32):
        b = PartitionedCall(a, Tout=[float32], f=layer)
        return b

    p = Const(True)
    x0 = Const(0.5, [8, 8])
    """
    for number in range(calls):
        text += f"x{number + 1} = PartitionedCall(x{number}, Tout=[float32], f=layer)\n    "
    text += f"y = If(p, x{calls}, Tout=[float32], then_branch=wrapper, else_branch=wrapper)"
    result = rewrite_graph_def(graph(text), CONFIG, preserve=("y",))
    assert result.failure is None
    made = result.proto
    assert isinstance(made, graph_pb2.GraphDef)
    nodes = [node for function in made.library.function for node in function.node_def]
    dtypes = {node.attr["T"].type for node in nodes if node.op == "MatMul"}
    assert dtypes == {types_pb2.DT_HALF}
