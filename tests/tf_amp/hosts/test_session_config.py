"""Configs of sessions while AMP is on."""

from __future__ import annotations

from typing import Any

import pytest
from session_facts import RunPython, facts_of
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context

from tf_amp.hosts.session_config import SessionConfigHook, adjusted

CASES = ("obstacles", "upstream_option", "server_target", "gpu_layout", "wrapped_by_others")


@pytest.fixture(scope="module")
def facts(run_forked: RunPython) -> dict[str, dict[str, Any]]:
    names = ", ".join(map(repr, CASES))
    return facts_of(run_forked, f"session_failure_cases.main({names})")


@pytest.mark.parametrize(
    "field",
    ["disable_meta_optimizer", "use_plugin_optimizers", "place_pruned_graph"],
)
def test_config_that_keeps_plugins_out_is_said_once(facts: Any, field: str) -> None:
    (line,) = [line for line in facts["obstacles"]["said"] if field in line]
    assert "stays as it is" in line
    assert "leave the field out" in line


def test_obstacles_really_keep_plugins_out(facts: Any) -> None:
    assert facts["obstacles"]["dtypes"] == ["MatMul:float32"]


def test_upstream_mixed_precision_is_off_in_a_copy_of_the_config(facts: Any) -> None:
    found = facts["upstream_option"]
    assert found["untouched"]
    assert found["options"] == [found["off"], ["constfold"]]
    assert found["after"] == found["on"]
    (line,) = found["said"]
    assert line.count("auto_mixed_precision_onednn_bfloat16") == 1


def test_a_list_of_upstream_mixed_precision_alone_does_not_become_all_optimizers() -> None:
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.optimizers.append("auto_mixed_precision")
    assert list(adjusted(config, "CPU").graph_options.rewrite_options.optimizers) == ["pruning"]


def test_session_without_a_config_gets_the_one_that_it_would_have_had() -> None:
    hook = SessionConfigHook("CPU", lambda _: None, lambda _: None)
    assert hook.config_for(None) == adjusted(context.context().config, "CPU")
    assert hook.config_for("no config") == "no config"


def test_session_of_a_server_that_is_not_known_is_named_once(facts: Any) -> None:
    (line,) = facts["server_target"]["said"]
    assert facts["server_target"]["target"] in line


def test_layout_optimizer_is_off_on_a_gpu_alone(facts: Any) -> None:
    found = facts["gpu_layout"]
    assert found["layout"]["GPU"] == found["off"]
    assert found["layout"]["CPU"] != found["off"]


def test_switching_off_leaves_a_wrapper_of_somebody_else(facts: Any) -> None:
    assert facts["wrapped_by_others"] == {"kept": True, "untouched": True}
