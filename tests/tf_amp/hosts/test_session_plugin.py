"""Registration of the graph plugin in TensorFlow."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from session_facts import RunPython, facts_of

SOURCE = Path(__file__).parents[3] / "tf_amp" / "hosts" / "graph_plugin.c"


@pytest.fixture(scope="module")
def facts(run_forked: RunPython) -> dict[str, dict[str, Any]]:
    return facts_of(run_forked, "session_plugin_cases.main()")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("plugin")

    def build(name: str, *options: str) -> str:
        library = str(folder / name)
        flags = ["-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([compiler, *flags, *options, "-o", library, str(SOURCE)], check=True)
        return library

    return build


def test_refusal_names_reason_and_leaves_sessions_running(facts: Any) -> None:
    refusals = facts["refusals"]["refusals"]
    assert "not_built.so was not built" in refusals["missing"]
    assert "built from another version of this package" in refusals["other"]
    assert all("stay as they are" in text for text in refusals.values())
    assert facts["refusals"]["dtypes"] == ["MatMul:float32"] * 2


def test_device_settings_survive_registration(facts: Any) -> None:
    assert facts["devices_untouched"] == {"started": False, "logical": 2}


def test_registration_happens_once_whatever_is_reloaded(facts: Any) -> None:
    assert facts["registers_once"] == {
        "same": True,
        "copy": True,
        "device_types": ["CPU", "GPU"],
        "dtypes": ["MatMul:bfloat16"],
    }


def test_handler_sees_each_graph_once_with_its_names(facts: Any) -> None:
    assert facts["once_per_graph"] == {
        "calls": 1,
        "preserve": ["Placeholder", "mul"],
        "fetches": ["mul:0"],
    }


def test_exit_waits_for_a_running_callback(facts: Any) -> None:
    found = facts["exit_waits_for_callbacks"]
    assert 0.25 < found["waited"] < 3
    assert found["running"] == 0
    assert found["handler"] is None


@pytest.mark.slow
def test_fork_after_switching_on(run_python: RunPython) -> None:
    found = facts_of(run_python, "session_plugin_cases.fork()", timeout=120)
    assert found["fork"] == {"child": 0, "parent": ["MatMul:bfloat16"]}


@pytest.mark.slow
def test_interpreter_exits_with_sessions_open(run_python: RunPython) -> None:
    found = facts_of(run_python, "session_plugin_cases.exit_while_running()", timeout=120)
    assert found["exit"] == {"finite": True}


def test_documented_entry_serves_both_devices(run_forked: RunPython) -> None:
    found = facts_of(run_forked, "session_plugin_cases.documented_entry()")
    assert found["documented"] == {"refusals": {}, "dtypes": ["MatMul:bfloat16"]}


def test_graphs_of_others_never_reach_python(run_forked: RunPython) -> None:
    found = facts_of(run_forked, "session_plugin_cases.not_ours()")
    assert found["not_ours"] == {"seen": [0, 1], "optimized": True}


def test_library_loaded_by_others_registers_nothing(run_python: RunPython, compiled: Any) -> None:
    env = {"TF_PLUGGABLE_DEVICE_LIBRARY_PATH": compiled("copy.so")}
    found = facts_of(run_python, "session_plugin_cases.loaded_by_others()", env)
    assert found["loaded"] == {"refusals": {}, "dtypes": ["MatMul:bfloat16"]}


@pytest.mark.slow
def test_foreign_graph_plugin_is_not_raced(run_python: RunPython, compiled: Any) -> None:
    library = compiled("foreign.so", "-Dtf_amp_device=foreign_device")
    env = {"TF_PLUGGABLE_DEVICE_LIBRARY_PATH": library}
    found = facts_of(run_python, "session_plugin_cases.loaded_by_others()", env)["loaded"]
    assert library in found["refusals"]["session"]
    assert found["dtypes"] == ["MatMul:float32"]
