from __future__ import annotations

from graph_diff import added
from graph_text import graph

from graph_passes import PrecisionConfig, rewrite_function_def, rewrite_graph_def

TEXT = """
x = Const(0.5, [8, 8]) @ "/device:GPU:1"
parts = Split(0, x, num_split=2) @ "/device:GPU:0"
allow1 = MatMul(parts[1], parts[1], transpose_a=True, after=[x]) @ "/device:GPU:0"
allow2 = MatMul(parts[1], parts[1], transpose_a=True)
out1 = Exp(allow1)
out2 = Exp(allow1)
out3 = Exp(allow2)
"""
KEEP = ("parts", "out1", "out2", "out3")


def test_casts_are_named_placed_and_shared() -> None:
    before = graph(TEXT)
    after = rewrite_graph_def(before, PrecisionConfig(), preserve=KEEP).proto
    casts = {node.name: (node.input[0], node.device) for node in added(before, after)}
    assert casts == {
        "parts-1-CastToFp16-0-AutoMixedPrecision": ("parts:1", "/device:GPU:0"),
        "allow1-0-CastToFp32-0-AutoMixedPrecision": ("allow1", "/device:GPU:0"),
        "allow2-0-CastToFp32-0-AutoMixedPrecision": ("allow2", ""),
    }
    nodes = {node.name: list(node.input) for node in after.node}
    low = "parts-1-CastToFp16-0-AutoMixedPrecision"
    assert nodes["allow1"] == [low, low, "^x"]
    assert nodes["out1"] == nodes["out2"] == ["allow1-0-CastToFp32-0-AutoMixedPrecision"]


def test_name_that_is_taken() -> None:
    before = graph(TEXT)
    taken = before.node.add(name="allow2-0-CastToFp32-0-AutoMixedPrecision", op="NoOp")
    after = rewrite_graph_def(before, PrecisionConfig(), preserve=KEEP).proto
    names = [node.name for node in added(before, after)]
    assert "allow2-0-CastToFp32-1-AutoMixedPrecision" in names
    assert [node for node in after.node if node.name == taken.name] == [taken]


def test_casts_of_bfloat16_and_in_functions() -> None:
    function = graph(
        """
        def f(x: float32):
            allow1 = MatMul(x, x)
            return allow1, x
        """
    ).library.function[0]
    result = rewrite_function_def(function, PrecisionConfig(target_dtype="bfloat16", device="CPU"))
    assert result.changed
    new = result.proto
    down, up = "x-0-CastToBf16-0-AutoMixedPrecision", "allow1-0-CastToFp32-0-AutoMixedPrecision"
    assert {n.name: list(n.input) for n in new.node_def} == {
        "allow1": [f"{down}:y:0"] * 2,
        down: ["x"],
        up: ["allow1:product:0"],
    }
    assert dict(new.ret) == {"result_0": f"{up}:y:0", "result_1": "x"}
    assert new.signature == function.signature
