"""Which calls are planned with their caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from graph_text import graph
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2, op_def_pb2

from graph_passes.functions import call_tree
from graph_passes.functions.call_tree import CallTrees, Region, function_names

FUNCTIONS = """
def product(a: float32):
    b = MatMul(a, a)
    return b

def plain(a: float32):
    b = Relu(a)
    return b

def twice(a: float32):
    b = PartitionedCall(a, Tout=[float32], f=product)
    c = PartitionedCall(b, Tout=[float32], f=product)
    return c

def wrapper(a: float32):
    b = PartitionedCall(a, Tout=[float32], f=product)
    return b

def test(a: float32):
    go = Const(True)
    return go

def size(a: float32):
    b = Size(a)
    return b

def product_size(a: float32):
    b = MatMul(a, a)
    c = Size(b)
    return c

def items(a: float32):
    b = EmptyTensorList([8, 8], 4, element_dtype=float32)
    return b

x = Const(0.5, [8, 8])
"""
WORK = "work = MatMul(x, x)\n"


def library_of(graph_def: graph_pb2.GraphDef) -> dict[str, function_pb2.FunctionDef]:
    return {function.signature.name: function for function in graph_def.library.function}


def tree_of(graph_def: graph_pb2.GraphDef) -> Region:
    return CallTrees(library_of(graph_def).get, lambda op: op == "MatMul", graph_def).build(
        graph_def
    )


def planned(graph_def: graph_pb2.GraphDef) -> set[str]:
    """The calls of the tree, each by the names of the calling nodes above it and its own."""

    def below(region: Region, above: str) -> Iterator[str]:
        for call in region.calls:
            yield above + call.node
            for callee in call.callees:
                yield from below(callee, f"{above}{call.node}.")

    given = graph_def.SerializeToString(deterministic=True)
    found = set(below(tree_of(graph_def), ""))
    assert graph_def.SerializeToString(deterministic=True) == given
    return found


def call(function: str, dtype: str = "float32", name: str = "call") -> str:
    return f"{name} = PartitionedCall(x, Tout=[{dtype}], f={function})\n"


LOOP = "loop = StatelessWhile(x, cond=test, body={body})\n"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # A graph that wraps one call gains nothing, even if its function calls others.
        (call("product"), set()),
        (call("plain") + call("plain", name="other"), set()),
        (call("product") + call("plain", name="other"), set()),
        (call("wrapper"), set()),
        # Work beside the call, or two calls with work.
        (WORK + call("product"), {"call"}),
        (WORK + call("plain"), {"call"}),
        (call("product") + call("product", name="other"), {"call", "other"}),
        (
            call("product") + call("product", name="other") + call("plain", name="third"),
            {"call", "other", "third"},
        ),
        (call("product") + call("wrapper", name="other"), {"call", "other"}),
        (WORK + call("wrapper"), {"call"}),
        (WORK + call("twice"), {"call", "call.b", "call.c"}),
        # A loop is its own neighbour, if there is work in it.
        (LOOP.format(body="product"), {"loop"}),
        (LOOP.format(body="plain"), set()),
        (LOOP.format(body="twice"), {"loop", "loop.b", "loop.c"}),
        # A call without work must give what may become low.
        (WORK + call("size", "int32"), set()),
        (WORK + call("items", "variant"), {"call"}),
        (WORK + call("product_size", "int32"), {"call"}),
        # Not in this library, or not of the dtypes that the call has.
        (WORK + call("size", "float32"), set()),
        (WORK + call("product", "int32"), set()),
        (WORK + "n = Shape(x)\ncall = PartitionedCall(n, Tout=[float32], f=product)\n", set()),
        (WORK + "call = PartitionedCall(x, Tout=[float32], f=nothing)\n", set()),
        # Whether a float32 condition is 0 must not depend on the dtype.
        (
            WORK + "go = Const(True)\n"
            "call = StatelessIf(go, x, Tout=[float32], then_branch=product, else_branch=plain)\n",
            {"call"},
        ),
        (
            WORK + "go = Const(1.0)\n"
            "call = StatelessIf(go, x, Tout=[float32], then_branch=product, else_branch=plain)\n",
            set(),
        ),
    ],
)
def test_calls_that_are_worth_it(text: str, calls: set[str]) -> None:
    assert planned(graph(FUNCTIONS + text)) == calls


def pin(function: function_pb2.FunctionDef) -> None:
    function.attr["api_implements"].s = b"some_api"


def generic(function: function_pb2.FunctionDef) -> None:
    function.signature.input_arg[0].CopyFrom(op_def_pb2.OpDef.ArgDef(name="a", type_attr="T"))


def share_kernels(function: function_pb2.FunctionDef) -> None:
    """The copies would draw the same random numbers; XLA keeps none of it."""
    function.attr["_noinline"].b = True
    function.attr["_XlaMustCompile"].b = False


@pytest.mark.parametrize("change", [pin, generic, share_kernels])
def test_a_function_whose_dtypes_must_not_change_is_left_alone(
    change: Callable[[function_pb2.FunctionDef], None],
) -> None:
    graph_def = graph(FUNCTIONS + WORK + call("product"))
    assert planned(graph_def) == {"call"}
    change(library_of(graph_def)["product"])
    assert planned(graph_def) == set()


@pytest.mark.parametrize(("noinline", "xla"), [(True, True), (False, False)])
def test_a_function_that_shares_no_kernels_is_planned(noinline: bool, xla: bool) -> None:
    graph_def = graph(FUNCTIONS + WORK + call("product"))
    function = library_of(graph_def)["product"]
    function.attr["_noinline"].b, function.attr["_XlaMustCompile"].b = noinline, xla
    assert planned(graph_def) == {"call"}


@pytest.mark.parametrize(("xla", "calls"), [(True, {"call"}), (False, set())])
def test_what_only_wraps_a_call_that_xla_compiles_is_planned_with_it(
    xla: bool, calls: set[str]
) -> None:
    graph_def = graph(FUNCTIONS + call("product"))
    graph_def.node[-1].attr["_XlaMustCompile"].b = xla
    assert planned(graph_def) == calls


@pytest.mark.parametrize("attr", ["f", "Tin", "Tout"])
def test_a_call_without_one_of_its_attrs_is_left_alone(attr: str) -> None:
    graph_def = graph(FUNCTIONS + WORK + call("product"))
    del graph_def.node[-1].attr[attr]
    assert planned(graph_def) == set()
    assert attr not in graph_def.node[-1].attr


def test_functions_that_call_themselves_are_left_alone() -> None:
    graph_def = graph(FUNCTIONS + WORK + call("twice"))
    library_of(graph_def)["twice"].node_def[1].attr["f"].func.name = "twice"
    assert planned(graph_def) == {"call", "call.b"}
    # The call of itself is all that the function has, and no work.
    graph_def = graph(FUNCTIONS + call("wrapper") + call("wrapper", name="other"))
    library_of(graph_def)["wrapper"].node_def[0].attr["f"].func.name = "wrapper"
    assert planned(graph_def) == set()


def test_copies_of_functions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten nodes in all: x, work, six calls, and one each in `product` and `plain`."""
    calls = "".join(call("product", name=f"call{number}") for number in range(5))
    graph_def = graph(FUNCTIONS + WORK + calls + call("plain", name="last"))
    assert len(planned(graph_def)) == 6
    # Each copy has one node and one argument.
    monkeypatch.setattr(call_tree, "GROWTH", 1)
    assert planned(graph_def) == {"call0", "call1", "call2", "call3", "call4"}
    monkeypatch.setattr(call_tree, "GROWTH", 0)
    assert planned(graph_def) == set()


def test_callees_bear_the_attrs_that_name_them() -> None:
    tree = tree_of(graph(FUNCTIONS + WORK + LOOP.format(body="twice")))
    (loop,) = tree.calls
    assert [region.callee_of for region in loop.callees] == [("cond", 0), ("body", 0)]
    assert loop.callee("body").proto.signature.name == "twice"
    assert [region.is_main for region in tree.walk()] == [True, False, False, False, False]
    names = [region.proto.signature.name for region in list(tree.walk())[1:]]
    assert sorted(names) == ["product", "product", "test", "twice"]
    above = names.index("twice")
    assert names[above + 1 : above + 3] == ["product", "product"]


def test_functions_of_a_list_go_by_their_positions() -> None:
    node = node_def_pb2.NodeDef(op="Case")
    kind = call_tree.CALL_KINDS["Case"]
    assert function_names(node, kind) == []
    assert "branches" not in node.attr
    for name in ("one", "other"):
        node.attr["branches"].list.func.add(name=name)
    assert function_names(node, kind) == [("branches", 0, "one"), ("branches", 1, "other")]
