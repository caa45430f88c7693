from __future__ import annotations

import pytest
from graph_text import graph
from parity import converted

from graph_passes import PrecisionConfig, rewrite_graph_def

LIST = """
def through(items: variant):
    return items

x = Const(0.5, [8, 8])
allow1 = MatMul(x, x)
items = EmptyTensorList([8, 8], 4, element_dtype=float32) {device}
written = TensorListPushBack(items, allow1)
{between}
read = TensorListPopBack({handle}, [8, 8], element_dtype=float32)
allow2 = MatMul(read[1], read[1])
out = Identity(allow2)
"""


@pytest.mark.parametrize(
    ("between", "handle", "device", "is_low"),
    [
        ("", "written", "", True),
        ("copy = Identity(written)", "copy", "", True),
        ("other = TensorListPushBack(written, x)", "other", "", True),
        ("call = PartitionedCall(written, Tout=[variant], f=through)", "call", "", False),
        ("call = through(written)", "call", "", False),
        ("", "written", "@ '/device:CPU:0'", False),
        ("sink = OptionalFromValue(written)", "written", "", False),
    ],
)
def test_list_goes_low_as_a_whole_or_not_at_all(
    between: str, handle: str, device: str, is_low: bool
) -> None:
    before = graph(LIST.format(between=between, handle=handle, device=device))
    config = PrecisionConfig(disabled_rules=frozenset(["function-signatures"]))
    result = rewrite_graph_def(before, config, preserve=("out",))
    assert result.failure is None
    members = {n.name for n in before.node if "TensorList" in n.op}
    assert converted(before, result.proto) & members == (members if is_low else set())


def test_two_lists_are_apart() -> None:
    text = (
        LIST.format(between="", handle="written", device="")
        + """
plain = EmptyTensorList([8, 8], 4, element_dtype=float32)
stored = TensorListPushBack(plain, x)
got = TensorListPopBack(stored, [8, 8], element_dtype=float32)
out2 = Identity(got[1])
"""
    )
    before = graph(text)
    result = rewrite_graph_def(before, PrecisionConfig(), preserve=("out", "out2"))
    assert converted(before, result.proto).isdisjoint({"plain", "stored", "got"})


def test_deny_op_behind_a_list_reaches_through_it() -> None:
    """What is written to a list behind a deny op stays float32 where it is read."""
    before = graph(
        """
        x = Const(0.5, [8, 8])
        deny1 = Exp(x)
        items = EmptyTensorList([8, 8], 4, element_dtype=float32)
        written = TensorListPushBack(items, deny1)
        read = TensorListPopBack(written, [8, 8], element_dtype=float32)
        infer1 = Tanh(read[1])
        allow1 = MatMul(infer1, infer1)
        out = Identity(allow1)
        """
    )
    result = rewrite_graph_def(before, PrecisionConfig(), preserve=("out",))
    assert converted(before, result.proto) == {"allow1"}
    assert (
        "behind an op of the deny list: deny1 -> written -> read" in result.report.reasons["read"]
    )
