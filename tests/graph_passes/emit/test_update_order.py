"""Updates wait for what holds the variable's value, where that may run before or after them."""

from __future__ import annotations

import pytest
from graph_text import graph, inferred_shapes

from graph_passes import PrecisionConfig, rewrite_graph_def

CPU = PrecisionConfig(target_dtype="bfloat16", device="CPU")
TEXT = """
w = VarHandleOp(dtype=float32, shape=[{size}], shared_name="w")
a = VarHandleOp(dtype=float32, shape=[{size}], shared_name="a")
read = ReadVariableOp(w, dtype=float32)
before = Exp(read)
lr = Const(0.5)
rate = Const(0.875)
old = ReadVariableOp(a, dtype=float32)
kept = Mul(old, rate)
scaled = Mul(before, lr)
value = Sub(kept, scaled)
write = AssignVariableOp(a, value, after=[old, read])
new = ReadVariableOp(a, dtype=float32, after=[write])
last = AssignAddVariableOp(w, new)
end = NoOp(after=[last])
"""


def awaited(
    text: str,
    config: PrecisionConfig = CPU,
    size: int = 2048,
    fetched: tuple[str, ...] = (),
    device: str = "",
) -> list[str]:
    """What the update waits for besides what its parts waited for."""
    before = graph(TEXT.format(size=size) + text)
    for node in before.node if device else ():
        node.device = device
    shapes = inferred_shapes(before)
    preserve = ("before", "end", *fetched)
    result = rewrite_graph_def(before, config, preserve=preserve, shapes=shapes)
    assert result.failure is None
    (last,) = (node for node in result.graph_def.node if node.name == "last")
    assert last.op == "ResourceApplyKerasMomentum"
    return [name[1:] for name in last.input if name[0] == "^" and name != "^read"]


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        ("beside = Expm1(read)", ["beside"]),
        ("flat = Reshape(read, [-1])\nalike = Identity(flat)\nbeside = Exp(alike)", ["beside"]),
        (
            "again = ReadVariableOp(w, dtype=float32)\none = Exp(again)\ntwo = Expm1(read)",
            ["one", "two"],
        ),
        ("other = ReadVariableOp(a, dtype=float32, after=[last])\nbeside = Exp(other)", []),
        ("behind = Expm1(read, after=[last])", []),
        ("late = NoOp(after=[last])\nbehind = Expm1(read, after=[late])", []),
        ('apart = Expm1(read) @ "/device:CPU:1"', []),
    ],
)
def test_what_may_run_before_or_after_is_awaited(text: str, waits: list[str]) -> None:
    fetched = tuple(line.split()[0] for line in text.splitlines())
    assert awaited(text, fetched=fetched) == waits


PRODUCT = """
matrix = Reshape(read, [32, 64])
x = Placeholder(dtype=float32, shape=[8, 64])
beside = MatMul(x, matrix, transpose_b=True)
out = Exp(beside)
"""


def test_a_cast_is_not_awaited() -> None:
    """It is done before the product of low precision that reads it begins."""
    assert awaited(PRODUCT, fetched=("beside", "out")) == ["beside"]  # float32, as it is fetched
    assert awaited(PRODUCT, fetched=("out",)) == []


def test_small_variables_are_left() -> None:
    """Less than a page is copied in no time, and lies elsewhere."""
    assert awaited("beside = Expm1(read)", size=1024, fetched=("beside",)) == ["beside"]
    assert awaited("beside = Expm1(read)", size=1023, fetched=("beside",)) == []


def test_a_gpu_runs_them_in_the_order_in_which_they_are_started() -> None:
    config = PrecisionConfig(target_dtype="float16", device="GPU")
    device = "/device:GPU:0"
    assert awaited("beside = Expm1(read)", config, fetched=("beside",), device=device) == []
