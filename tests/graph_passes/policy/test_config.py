from __future__ import annotations

import dataclasses

import pytest

from graph_passes import RULES, ListEdit, PrecisionConfig
from graph_passes.policy.cost_table_files import shipped_table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"target_dtype": "float8"},
            r"`target_dtype` must be one of 'float16', 'bfloat16'.*float8",
        ),
        ({"device": "TPU"}, r"`device` must be one of 'GPU', 'CPU'\. Received: device='TPU'"),
        ({"level": "BOGUS"}, r"`level` must be one of '', 'TENSOR_CORES_ONLY'.*'BOGUS'"),
        ({"disabled_rules": frozenset(["cots"])}, r"unknown rules: cots\. Legal: .*cost"),
        (
            {"level": "UNSAFE_FORCE_ALL", "device": "CPU"},
            r"float16 on a GPU only.*device='CPU'.*Leave the level empty",
        ),
        (
            {"level": "UNSAFE_FORCE_ALL", "target_dtype": "bfloat16"},
            r"float16 on a GPU only.*target_dtype='bfloat16'",
        ),
        ({"unknown_dimension": 0}, r"must be at least 1\. Received: 0"),
        (
            {"cost_table": shipped_table("cpu-avx512_bf16", "bfloat16")},
            r"is for bfloat16 on CPU, and the graph is to be rewritten for float16 on GPU",
        ),
    ],
)
def test_illegal_choice_says_what_is_legal(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrecisionConfig(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"list_name": "white"}, "`list_name` must be one of 'allow', 'infer', 'clear', 'deny'"),
        ({"action": "drop"}, "`action` must be one of 'add', 'remove'"),
        ({"op": ""}, "`op` must be an op type"),
        ({"op": " MatMul"}, "without blanks around it.*' MatMul'"),
    ],
)
def test_illegal_edit(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ListEdit(**{"list_name": "allow", "action": "add", "op": "MatMul"} | arguments)


def test_config_cannot_be_changed_and_can_be_a_key() -> None:
    config = PrecisionConfig(disabled_rules=frozenset(["constant-range"]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.level = "TENSOR_CORES_ONLY"
    assert {config: 1}[dataclasses.replace(config)] == 1


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_in_force_unless_disabled_or_in_parity_mode(rule: str) -> None:
    assert PrecisionConfig().has_rule(rule)
    assert not PrecisionConfig(disabled_rules=frozenset([rule])).has_rule(rule)
    assert not PrecisionConfig(parity=True).has_rule(rule)


def test_any_collection_of_rules_and_edits_will_do() -> None:
    edit = ListEdit(list_name="allow", action="add", op="Exp")
    config = PrecisionConfig(disabled_rules={"cost"}, list_edits=[edit])  # type: ignore[arg-type]
    assert hash(config) == hash(
        PrecisionConfig(disabled_rules=frozenset(("cost",)), list_edits=(edit,))
    )
