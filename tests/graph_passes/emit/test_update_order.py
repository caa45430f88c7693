"""Updates wait for products with the variable's value that may run before or after them."""

from __future__ import annotations

import pytest
from graph_text import graph, inferred_shapes

from graph_passes import PrecisionConfig, rewrite_graph_def

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
TEXT = """
x = Placeholder(dtype=float32, shape=[8, 32])
dy = Placeholder(dtype=float32, shape=[8, 64])
w = VarHandleOp(dtype=float32, shape=[32, 64], shared_name="w")
a = VarHandleOp(dtype=float32, shape=[32, 64], shared_name="a")
read = ReadVariableOp(w, dtype=float32)
before = MatMul(x, read)
error = Sub(before, dy)
gradient = MatMul(x, error, transpose_a=True)
lr = Const(0.5)
rate = Const(0.875)
old = ReadVariableOp(a, dtype=float32)
kept = Mul(old, rate)
scaled = Mul(gradient, lr)
value = Sub(kept, scaled)
write = AssignVariableOp(a, value, after=[old, read])
new = ReadVariableOp(a, dtype=float32, after=[write])
last = AssignAddVariableOp(w, new)
end = NoOp(after=[last])
"""
FLOAT32 = ("before", "gradient", "end")


def awaited(
    text: str,
    fetched: tuple[str, ...] = (),
    config: PrecisionConfig = CPU,
    device: str = "",
) -> list[str]:
    """What the update waits for besides what its parts waited for."""
    before = graph(TEXT + text)
    for node in before.node if device else ():
        node.device = device
    shapes = inferred_shapes(before)
    result = rewrite_graph_def(before, config, preserve=(*FLOAT32, *fetched), shapes=shapes)
    assert result.failure is None
    (new,) = (node for node in result.graph_def.node if node.name.startswith("last/Resource"))
    assert new.op == "ResourceApplyKerasMomentum"
    return [name[1:] for name in new.input if name[0] == "^" and name != "^read"]


BESIDE = "beside = MatMul(error, read, transpose_b=True)\n"


def test_arguments_of_a_graph_are_nodes_of_it() -> None:
    """A graph that was made of a function has such ops of its own."""
    before = graph(TEXT + BESIDE)
    shapes = inferred_shapes(before)
    for index, node in enumerate(before.node[:2]):
        node.op = "_Arg"
        node.attr["T"].CopyFrom(node.attr["dtype"])
        node.attr["index"].i = index
        del node.attr["dtype"], node.attr["shape"]
    result = rewrite_graph_def(before, CPU, preserve=(*FLOAT32, "beside"), shapes=shapes)
    (new,) = (node for node in result.graph_def.node if node.name.startswith("last/Resource"))
    assert "^beside" in new.input


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        (BESIDE, ["beside"]),
        (
            (
                "flat = Reshape(read, [-1, 64])\nalike = Identity(flat)\n"
                "beside = MatMul(error, alike, transpose_b=True)"
            ),
            ["beside"],
        ),
        (
            (
                "again = ReadVariableOp(w, dtype=float32)\none = MatMul(x, again)\n"
                "two = MatMul(dy, read, transpose_b=True)"
            ),
            ["one", "two"],
        ),
        ("beside = Exp(read)", []),  # done in no time
        ("other = Neg(read)\nbeside = MatMul(error, other, transpose_b=True)", []),
        ("other = ReadVariableOp(a, dtype=float32, after=[last])\none = MatMul(x, other)", []),
        ("behind = MatMul(x, read, after=[last])", []),
        ("late = NoOp(after=[last])\nbehind = MatMul(x, read, after=[late])", []),
        ('apart = MatMul(x, read) @ "/device:CPU:1"', []),
    ],
)
def test_what_may_run_before_or_after_is_awaited(text: str, waits: list[str]) -> None:
    fetched = tuple(line.split()[0] for line in text.splitlines())
    assert awaited(text, fetched) == waits


def test_a_product_of_low_precision_is_not_awaited() -> None:
    """What it reads is a Cast, which is done long before."""
    text = BESIDE + "out = Exp(beside)"
    assert awaited(text, ("beside", "out")) == ["beside"]  # float32, as it is fetched
    assert awaited(text, ("out",)) == []
    low = "square = MatMul(dy, dy, transpose_b=True)\nmade = MatMul(square, dy)\n"
    assert awaited(low + text.replace("error", "made"), ("out",)) == []


BRANCH = """
on = Placeholder(dtype=bool, shape=[])
both = Switch(x, on)
taken = Identity(both[1])
beside = MatMul(x, read, after=[taken])
"""


@pytest.mark.parametrize(("text", "waits"), [(BESIDE, ["^beside"]), (BRANCH, [])])
def test_an_update_does_not_wait_for_a_branch_that_may_not_be_taken(
    text: str, waits: list[str]
) -> None:
    """It would not run where that is not."""
    start = TEXT[: TEXT.index("rate =")] + "last = ResourceApplyGradientDescent(w, lr, gradient)\n"
    low = "low = MatMul(dy, dy, transpose_b=True)\nout = Exp(low)\n"
    fetched = ("before", "gradient", "last", "beside", "out")
    result = rewrite_graph_def(graph(start + low + text), CPU, preserve=fetched)
    assert result.changed
    (update,) = (node for node in result.graph_def.node if node.name == "last")
    assert update.input[3:] == waits


def test_a_gpu_runs_them_in_the_order_in_which_they_are_started() -> None:
    config = PrecisionConfig(target_dtype="float16", device="GPU")
    assert awaited(BESIDE, ("beside",), config, "/device:GPU:0") == []
