from __future__ import annotations

import pytest
from decisions import reasons_of
from graph_text import graph
from parity import converted

from graph_passes import PrecisionConfig, rewrite_graph_def

LIST = """
def through(items: variant):
    return items

def same(items: variant):
    return items

def test(items: variant):
    go = Const(True)
    return go

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
        ("call = StatefulPartitionedCall(written, Tout=[variant], f=through)", "call", "", False),
        ("call = StatelessWhile(written, cond=test, body=through)", "call", "", False),
        (
            "call = StatelessIf(1, written, Tout=[variant], then_branch=same, else_branch=same)",
            "call",
            "",
            False,
        ),
        (
            "other = Placeholder(dtype=variant)\nmixed = Select(True, written, other)",
            "mixed",
            "",
            False,
        ),
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
        "behind an op of the deny list: deny1 -> written -> read"
        in reasons_of(result.report)["read"]
    )


def test_in_parity_functional_ops_are_no_boundary() -> None:
    """TensorFlow's pass meets them lowered."""
    call = "call = StatelessWhile(written, cond=test, body=through)"
    before = graph(LIST.format(between=call, handle="call", device=""))
    result = rewrite_graph_def(before, PrecisionConfig(parity=True), preserve=("out",))
    assert {"items", "written", "read"} <= converted(before, result.proto)


NESTED = """
outer = EmptyTensorList([8, 8], 4, element_dtype=variant)
pushed = TensorListPushBack(outer, written)
popped = TensorListPopBack(pushed, [8, 8], element_dtype=variant)
late = TensorListPushBack(popped[1], x) @ "/device:CPU:0"
"""


@pytest.mark.parametrize(("parity", "is_low"), [(False, False), (True, True)])
def test_a_list_of_lists_binds_what_is_put_in_and_taken_out(parity: bool, is_low: bool) -> None:
    """One that is used on another device stays float32; TensorFlow's pass does not see that."""
    before = graph(LIST.format(between=NESTED, handle="written", device=""))
    result = rewrite_graph_def(before, PrecisionConfig(parity=parity), preserve=("out", "late"))
    assert result.failure is None
    assert ({"items", "written", "read"} <= converted(before, result.proto)) is is_low
    if not is_low:
        assert converted(before, result.proto).isdisjoint({"items", "written", "read", "late"})


def test_a_list_of_lists_is_read_through() -> None:
    nested = NESTED.rpartition("late")[0]
    before = graph(LIST.format(between=nested, handle="popped[1]", device=""))
    result = rewrite_graph_def(before, PrecisionConfig(), preserve=("out",))
    assert result.failure is None
    assert {"items", "written", "read"} <= converted(before, result.proto)


def test_a_list_of_another_device_denies_nothing() -> None:
    cpu = '@ "/device:CPU:0"'
    before = graph(
        f"""
        x = Const(0.5, [8, 8])
        items = EmptyTensorList([8, 8], 4, element_dtype=float32) {cpu}
        written = TensorListPushBack(items, x) {cpu}
        read = TensorListPopBack(written, [8, 8], element_dtype=float32) {cpu}
        allow1 = MatMul(x, x)
        infer1 = AddV2(allow1, read[1])
        allow2 = MatMul(infer1, infer1)
        out = Identity(allow2)
        """
    )
    result = rewrite_graph_def(before, PrecisionConfig(), preserve=("out",))
    assert converted(before, result.proto) == {"allow1", "infer1", "allow2"}


WRITERS = {
    "TensorListFromTensor": "TensorListFromTensor(deny1, [8])",
    "TensorListPushBack": "TensorListPushBack(items, deny1)",
    "TensorListPushBackBatch": "TensorListPushBackBatch(items, deny1)",
    "TensorListScatter": "TensorListScatter(deny1, [0, 1], [8])",
    "TensorListScatterIntoExistingList": "TensorListScatterIntoExistingList(items, deny1, [0])",
    "TensorListScatterV2": "TensorListScatterV2(deny1, [0, 1], [8], 2)",
    "TensorListSetItem": "TensorListSetItem(items, 0, deny1)",
    "TensorListSplit": "TensorListSplit(deny1, [8], lengths)",
}
READERS = {
    "TensorListConcat": "TensorListConcat(written, element_dtype=float32)",
    "TensorListConcatV2": "TensorListConcatV2(written, [8], lengths, element_dtype=float32)",
    "TensorListGather": "TensorListGather(written, [0], [8], element_dtype=float32)",
    "TensorListGetItem": "TensorListGetItem(written, 0, [8], element_dtype=float32)",
    "TensorListPopBack": "TensorListPopBack(written, [8], element_dtype=float32)",
    "TensorListStack": "TensorListStack(written, [8], element_dtype=float32)",
}


@pytest.mark.parametrize(
    ("writer", "reader"),
    [*((op, "TensorListStack") for op in WRITERS), *(("TensorListPushBack", op) for op in READERS)],
)
def test_what_is_read_is_what_was_written(writer: str, reader: str) -> None:
    before = graph(
        f"""
        x = Const(0.5, [8, 8])
        deny1 = Exp(x)
        lengths = Cast([4, 4], DstT=int64)
        items = EmptyTensorList([8, 8], 4, element_dtype=float32)
        written = {WRITERS[writer]}
        read = {READERS[reader]}
        infer1 = Tanh(read{"[1]" if reader == "TensorListPopBack" else ""})
        allow1 = MatMul(infer1, infer1)
        out = Identity(allow1)
        """
    )
    result = rewrite_graph_def(before, PrecisionConfig(), preserve=("out",))
    assert converted(before, result.proto) == {"allow1"}
    found = reasons_of(result.report)["infer1"]
    assert found.endswith("deny1 -> written -> read -> infer1")
