from __future__ import annotations

import json
from pathlib import Path

import pytest

from graph_passes import ListEdit
from graph_passes.policy.cost_table_files import format_table, shipped_table
from tf_amp.env_config import Settings
from tf_amp.hosts.process_record import PROCESS, config_of, describe
from tf_amp.plan import make_plan


def test_the_configuration_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_ENABLE_AUTO_MIXED_PRECISION", "1")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    edit = ListEdit(list_name="infer", action="add", op="Softmax", source="a variable")
    settings = Settings(
        graph_rewrite=True,
        target_dtype="bfloat16",
        ignore_performance=True,
        list_edits=(edit,),
        disabled_rules=frozenset(("gelu",)),
    )
    plan = make_plan(settings, "a call")
    for name, text in describe(plan).items():
        assert "secret" not in text
        (tmp_path / name).write_text(text)
    process = json.loads((tmp_path / PROCESS).read_text())
    assert process["variables"]["TF_ENABLE_AUTO_MIXED_PRECISION"] == "1"
    found = config_of(tmp_path, process["config"], compiled=False)
    assert found == plan.config
    assert found.list_edits == (edit,)


def test_functions_that_xla_compiles_have_their_own_table(tmp_path: Path) -> None:
    names = {"cost_table.toml": "cpu-avx512_bf16", "cost_table_xla.toml": "cpu-avx512_bf16-xla2.21"}
    for name, device_class in names.items():
        table = shipped_table(device_class, "bfloat16")
        assert table is not None
        (tmp_path / name).write_text(format_table(table))
    fields = {"target_dtype": "bfloat16", "device": "CPU", "level": ""}
    for compiled in (False, True):
        config = config_of(
            tmp_path, {**fields, "list_edits": [], "disabled_rules": []}, compiled=compiled
        )
        assert config.cost_table is not None
        assert (config.cost_table.compiled, config.fused) == (compiled, compiled)


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        (
            '{"cluster": {"worker": ["secret:1"]}, "task": {"type": "worker", "index": 1}}',
            "worker 1",
        ),
        ('{"task": {"type": "chief", "index": "0"}}', "chief 0"),
        ('{"cluster": {}}', ""),
        ("[]", ""),
        ("{", ""),
        (None, ""),
    ],
)
def test_the_rank_and_nothing_else_of_the_cluster(
    config: str | None, rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if config is None:
        monkeypatch.delenv("TF_CONFIG", raising=False)
    else:
        monkeypatch.setenv("TF_CONFIG", config)
    text = describe(make_plan(Settings(graph_rewrite=True), "a call"))[PROCESS]
    assert json.loads(text)["rank"] == rank
    assert "secret" not in text
