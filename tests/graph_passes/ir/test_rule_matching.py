"""Which rule decides which node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from graph_text import graph

from graph_passes import ListEdit, PrecisionConfig, Rule
from graph_passes.ir.rule_matching import MARK, decide, is_at, read_mark, write_mark
from graph_passes.policy.rules import RuleConflictError

GRAPH = graph(
    """
    x = Const(0.5, [8, 8])
    y = MatMul(x, x, transpose_a=True)
    """
)
NAMES = (
    "enc/att/MatMul",
    "enc/att/Softmax",
    "enc/attic/MatMul",
    "gradient_tape/enc/att/MatMul/MatMul",
    "gradient_tape/enc/att/mul",
    "outer/gradient_tape/enc/att/MatMul/MatMul_1",
    "gradients/enc/att/Softmax_grad/mul",
    "gradients_1/enc/att/MatMul_grad/MatMul",
    "gradient_tape/loop/gradients/enc/att/Softmax_grad/mul",
    "head/MatMul",
)


def nodes(names: Sequence[str] = NAMES) -> list[Any]:
    made = graph("x = Const(0.5, [8, 8])\n")
    for name in names:
        made.node.add().CopyFrom(GRAPH.node[1])
        made.node[-1].name = name
    return list(made.node)


def decided(*rules: Rule, **more: Any) -> dict[str, str]:
    found = decide(nodes(), PrecisionConfig(rules=rules, **more))
    return {name: rule.action for name, rule in found.rules.items()}


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        ("enc/att/.*", {n for n in NAMES if "enc/att/" in n}),
        (
            "enc/att/MatMul",
            {
                "enc/att/MatMul",
                "gradient_tape/enc/att/MatMul/MatMul",
                "outer/gradient_tape/enc/att/MatMul/MatMul_1",
                "gradients_1/enc/att/MatMul_grad/MatMul",
            },
        ),
        (
            "enc/att/Softmax",
            {
                "enc/att/Softmax",
                "gradients/enc/att/Softmax_grad/mul",
                "gradient_tape/loop/gradients/enc/att/Softmax_grad/mul",
            },
        ),
        ("enc/att", set()),
        ("MatMul", set()),
        ("gradient_tape/.*", {n for n in NAMES if n.startswith("gradient_tape")}),
        ("head/.*|x", {"head/MatMul", "x"}),
    ],
)
def test_name_matches_as_a_whole_and_gradients_follow(node: str, expected: set[str]) -> None:
    assert decided(Rule(action="keep_float32", node=node)).keys() == expected


@pytest.mark.parametrize(
    ("rule", "count"),
    [
        ({"op": "MatMul"}, len(NAMES)),
        ({"op": "Const"}, 1),
        ({"op": "MatMul", "node": "head/.*"}, 1),
        ({"attr": "T", "value": "float32"}, len(NAMES)),
        ({"attr": "T", "value": "DT_FLOAT"}, len(NAMES)),
        ({"attr": "T", "value": "half"}, 0),
        ({"attr": "T", "value": 1}, 0),
        ({"attr": "value", "value": ()}, 0),
        ({"attr": "dtype", "value": "float32"}, 1),
        ({"attr": "transpose_a", "value": True}, len(NAMES)),
        ({"attr": "transpose_a", "value": 1}, 0),
        ({"attr": "transpose_b", "value": True}, 0),
        ({"attr": "none", "value": True}, 0),
        ({"layer": "enc/att"}, 8),
        ({"layer": "att"}, 8),
        ({"layer": "head"}, 1),
        ({"layer": "hea"}, 0),
        ({"layer": "gradients/enc"}, 3),
        ({"function": "train_step"}, len(NAMES) + 1),
        ({"function": "__inference_train_step_12"}, len(NAMES) + 1),
        ({"function": r".*\(fit\)"}, len(NAMES) + 1),
        ({"function": "train"}, 0),
        ({"source": "model.py"}, 1),
        ({"source": "model.py:42"}, 1),
        ({"source": "model.py:4"}, 0),
        ({"source": "odel.py"}, 0),
    ],
)
def test_all_criteria_must_hold(rule: dict[str, Any], count: int) -> None:
    one, given = Rule(action="allow", **rule), nodes()
    found = decide(
        given,
        PrecisionConfig(rules=(one,)),
        ["__inference_train_step_12", "step (fit)"],
        lambda name: ["lib/keras.py:3", "a/model.py:42"] if name == "head/MatMul" else (),
    )
    assert found.matched.get(one, 0) == len(found.rules) == count
    assert given == nodes()  # to read an attribute that a node lacks would add it


@pytest.mark.parametrize(
    ("attr", "value"),
    [("padding", "SAME"), ("strides", (1, 2, 2, 1)), ("shape", (8, 8)), ("num", 3)],
)
def test_values_of_every_kind_are_compared(attr: str, value: Any) -> None:
    found = graph("""
        x = Placeholder(dtype=float32, shape=[8, 8])
        y = MaxPool(x, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")
        z = Unpack(x, num=3)
    """)
    rule = Rule(action="deny", attr=attr, value=value)
    assert len(decide(found.node, PrecisionConfig(rules=(rule,))).rules) == 1


@pytest.mark.parametrize(
    ("value", "fits"), [(0.1, True), (0.10000000149011612, True), (0.11, False), ("0.1", False)]
)
def test_a_float_is_rounded_as_attributes_round_it(value: float | str, fits: bool) -> None:
    node = graph("x = Const(0.5, [8])\ny = LeakyRelu(x, alpha=0.1)").node[-1]
    other = graph("x = Const(0.5, [8])").node[-1]
    other.attr["ratios"].list.f.extend([0.1, 1.0])
    rules = (
        Rule(action="deny", attr="alpha", value=value),
        Rule(action="deny", attr="ratios", value=(value, 1.0)),
    )
    found = decide([node, other], PrecisionConfig(rules=rules))
    assert set(found.rules) == ({"x", "y"} if fits else set())


def test_nodes_without_rules_are_not_asked_for_lines() -> None:
    def lines(_: str) -> tuple[str, ...]:
        raise AssertionError

    assert not decide(nodes(), PrecisionConfig(), (), lines).rules


FILE, CALL = (Rule(action="deny", node="head/.*", level=level) for level in ("file", "call"))


@pytest.mark.parametrize(
    ("rules", "edits", "action"),
    [
        ((FILE,), (), "deny"),
        ((FILE, Rule(action="allow", op="MatMul", level="call")), (), "allow"),
        ((FILE,), (ListEdit(list_name="allow", action="add", op="MatMul"),), None),
        ((CALL,), (ListEdit(list_name="allow", action="add", op="MatMul"),), "deny"),
        ((CALL,), (ListEdit(list_name="allow", action="add", op="Exp"),), "deny"),
    ],
)
def test_higher_level_wins(
    rules: tuple[Rule, ...], edits: tuple[ListEdit, ...], action: str | None
) -> None:
    assert decided(*rules, list_edits=edits).get("head/MatMul") == action


@pytest.mark.parametrize("turn", [1, -1])
def test_contradiction_names_both(turn: int) -> None:
    rules = (
        Rule(action="allow", op="MatMul", why="fast", origin="a.toml [1]"),
        Rule(action="deny", node="head/.*", why="slow", origin="b.toml [7]"),
    )
    with pytest.raises(RuleConflictError, match="'head/MatMul'") as error:
        decided(*rules[::turn])
    assert "a.toml [1]: 'fast' says allow" in str(error.value)
    assert "b.toml [7]: 'slow' says deny" in str(error.value)


def test_rules_that_agree_are_no_contradiction() -> None:
    assert decided(FILE, Rule(action="deny", op="MatMul", level="file"))["head/MatMul"] == "deny"


def test_mark_wins_over_every_rule() -> None:
    marked = nodes(["a", "b"])
    marked[1].attr[MARK].s = write_mark("keep_float32", "model.py:3;", "why; not")
    found = decide(marked, PrecisionConfig(rules=(Rule(action="allow", op="MatMul"),)))
    assert {name: rule.action for name, rule in found.rules.items()} == {
        "a": "keep_float32",
        "b": "allow",
    }
    assert str(found.rules["a"]) == "model.py:3,: 'why; not'"


def test_mark_of_a_later_release_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert read_mark(b"float8;model.py:3;why") is None
    (said,) = caplog.messages
    assert "model.py:3 asks for 'float8'" in said
    marked = nodes(["a"])
    marked[1].attr[MARK].s = b"float8;model.py:3;why"
    assert not decide(marked, PrecisionConfig()).rules


@pytest.mark.parametrize(
    ("line", "asked", "expected"),
    [
        ("a/model.py:42", "model.py:42", True),
        ("a/model.py:42", "a/model.py", True),
        ("a/model.py:42", "model.py", True),
        ("a/model.py:42", "model.py:4", False),
        ("a/amodel.py:42", "model.py", False),
    ],
)
def test_line_is_at_what_was_asked(line: str, asked: str, expected: bool) -> None:
    assert is_at(line, asked) == expected
