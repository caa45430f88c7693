from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from graph_checks import check
from graph_diff import added
from graph_text import graph
from parity import converted
from tensorflow.core.framework import function_pb2, graph_pb2, types_pb2

from graph_passes import (
    PrecisionConfig,
    Reason,
    RewriteResult,
    rewrite_function_def,
    rewrite_graph_def,
    stages,
)
from graph_passes.view import GraphView

SIMPLE = "x = Const(0.5, [8, 8])\nallow1 = MatMul(x, x)\nout = Identity(allow1)"
CONFIG = PrecisionConfig()


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
    view_graph = stages.view_graph

    def counted(*arguments: Any) -> GraphView:
        read.append(arguments)
        return view_graph(*arguments)

    monkeypatch.setattr(stages, "view_graph", counted)
    before = graph("x = Const(0.5, [8, 8])\ny = Tanh(x)\nz = Identity(y)\nn = Rank(z)")
    report = rewrite_graph_def(before, CONFIG).report
    assert report.total_nodes == 4
    assert "converted 0/4 nodes" in report.summary()
    assert not read
    assert (report.eligible_nodes, report.listed_nodes) == (4, 3)
    assert report.reasons["y"] == Reason.NO_ALLOW_NEAR.text
    assert "Tanh x1" in report.first_reason()
    assert len(read) == 1


def test_bad_graph_with_nothing_to_convert_is_given_back() -> None:
    before = graph("x = Const(0.5, [8, 8])\ny = Tanh(x)")
    before.node[1].input[0] = "nobody"
    result = rewrite_graph_def(before, CONFIG)
    assert (result.changed, result.failure) == (False, None)
    assert result.report.decisions == ()
    assert result.report.eligible_nodes == 0


def test_collector_runs_again_after_a_rewrite() -> None:
    seen: list[bool] = []
    bad = graph(SIMPLE)
    bad.node[1].input[0] = "nobody"
    for before in (graph(SIMPLE), bad):
        rewrite_graph_def(before, CONFIG, preserve=_Watched(seen))
        assert gc.isenabled()
    assert seen
    assert not any(seen)


class _Watched(Sequence[str]):
    """Nothing to preserve; notes whether the collector is on while the pass reads it."""

    def __init__(self, seen: list[bool]) -> None:
        self._seen = seen

    def __len__(self) -> int:
        return 0

    def __getitem__(self, position: Any) -> Any:
        self._seen.append(gc.isenabled())
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
