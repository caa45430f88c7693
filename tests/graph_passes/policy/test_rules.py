"""Rules on single nodes as data: what is legal, and the files of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from graph_passes import PrecisionConfig, Rule, RulesError, format_rules, load_rules

RULES = (
    Rule(action="keep_float32", why='the "logits" overflow', node=r"head/.*\.x", op="MatMul"),
    Rule(action="allow", attr="data_format", value="NHWC", layer="a/b"),
    Rule(action="infer", attr="strides", value=(1, 2, 2, 1)),
    Rule(action="clear", why="größer als 1 \U0001f525", attr="transpose_a", value=True),
    Rule(action="deny", function="train.*", source="model.py:42"),
)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(format_rules(RULES), encoding="utf-8")
    found = load_rules(file, "call")
    fields = [{**rule.to_dict(), "origin": None} for rule in RULES]
    assert [{**rule.to_dict(), "origin": None} for rule in found] == fields
    assert [rule.origin for rule in found] == [f"rules.toml [{n}]" for n in range(1, 6)]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rule_is_made_of_its_own_dict(rule: Rule) -> None:
    assert Rule(**rule.to_dict()) == rule
    assert hash(Rule(**rule.to_dict())) == hash(rule)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"action": "drop", "op": "A"}, "`action` must be one of 'keep_float32', .* 'drop'"),
        ({"action": "allow"}, "without a criterion .* node='.\\*'"),
        ({"action": "allow", "node": "a("}, r"`node` must be a regular expression.*node='a\('"),
        ({"action": "allow", "function": "*"}, "`function` must be a regular expression"),
        ({"action": "allow", "op": 3}, "`op` must be a string. Received: op=3"),
        ({"action": "allow", "attr": "T"}, "`attr` and `value` go together.*attr='T', value=''"),
        ({"action": "allow", "value": 1}, "`attr` and `value` go together"),
        ({"action": "allow", "attr": "T", "value": {}}, "`value` must be a string, a number"),
        ({"action": "allow", "op": "A", "level": "best"}, "`level` must be one of 'file'"),
    ],
)
def test_illegal_rule_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RulesError, match=message):
        Rule(**fields)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rule", "cannot be read: Expected"),
        ("a = 1", r"must have tables \[\[rule\]\] and nothing else. Received the keys: a"),
        ("rule = 3", "must have tables"),
        (
            '[[rule]]\naction = "allow"\nop = "A"\n\n[[rule]]\naction = "allow"\nnodes = "a"',
            r"line 5, table \[\[rule\]\] number 2: the key must be one of .*'nodes'.*mean 'node'",
        ),
        ('[[rule]]\nop = "A"', "line 1, .*`action` must be one of .*Received: None"),
        ('[[rule]]\naction = "keep"\nop = "A"', "`action` must be one of .*Received: 'keep'"),
        ('[[rule]]\naction = "allow"\nop = ""', "`op` is empty"),
        ('rule = [{action = "allow"}]', r"'.*', table \[\[rule\]\] number 1: .*criterion"),
    ],
)
def test_illegal_file_is_refused_with_the_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(text)
    with pytest.raises(RulesError, match=message) as error:
        load_rules(file)
    assert str(file) in str(error.value)


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match="No such file"):
        load_rules(tmp_path / "none.toml")


def test_configuration_takes_rules_only() -> None:
    assert PrecisionConfig(rules=list(RULES)).rules == RULES  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`rules` must be Rule objects"):
        PrecisionConfig(rules=("MatMul",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (Rule(action="allow", op="A", why="it is safe", origin="m.py:3"), "m.py:3: 'it is safe'"),
        (Rule(action="allow", op="A", layer="b"), "a rule: op = 'A', layer = 'b'"),
    ],
)
def test_rule_is_named_by_its_origin_and_reason(rule: Rule, name: str) -> None:
    assert str(rule) == name
