"""A version 1 script switches AMP on: by variables alone, unchanged, or by one call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from session_facts import HERE, RunPython, facts_of

REPOSITORY = Path(__file__).parents[3]
PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"


def _run_unchanged(run_python: RunPython, **variables: str) -> dict[str, Any]:
    """Lets Python read the .pth file, as it does at a start where the package is installed."""
    code = (
        f"import sys, site\nsite.addsitedir({str(REPOSITORY)!r})\nsys.path.insert(0, {HERE!r})\n"
        "import runpy\n"
        f"runpy.run_path({str(Path(HERE) / 'session_script.py')!r}, run_name='__main__')\n"
        "import json\n"
        "is_loaded = 'graph_passes' in sys.modules\n"
        "import tf_amp\n"
        "status = tf_amp.status().as_dict()\n"
        "facts = {'name': 'status', 'status': status, 'is_loaded': is_loaded}\n"
        "print('@@' + json.dumps(facts, default=str))\n"
    )
    done = run_python(code, env=variables)
    lines = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("@@")]
    return {line.pop("name"): line for line in lines} | {"stderr": done.stderr}


@pytest.fixture(scope="module")
def plain(run_python: RunPython) -> dict[str, Any]:
    return _run_unchanged(run_python)


@pytest.fixture(scope="module")
def half(run_python: RunPython) -> dict[str, Any]:
    variables = {PREFIX + "DTYPE": "float16", PREFIX + "IGNORE_PERFORMANCE": "1"}
    return _run_unchanged(run_python, TF_ENABLE_AUTO_MIXED_PRECISION="1", **variables)


@pytest.fixture(scope="module")
def called(run_forked: RunPython) -> dict[str, Any]:
    return facts_of(run_forked, "session_enabling_cases.by_call('float16')")


def _all_in(facts: dict[str, Any], dtype: str) -> bool:
    return bool(facts["dtypes"]) and all(entry.endswith(dtype) for entry in facts["dtypes"])


def test_without_a_variable_nothing_is_switched_on(plain: dict[str, Any]) -> None:
    assert not plain["status"]["is_loaded"]
    assert plain["status"]["status"]["enabled"] is False
    assert _all_in(plain["script"], ":float32")


def test_variable_alone_rewrites_and_scales(plain: dict[str, Any], half: dict[str, Any]) -> None:
    assert _all_in(half["script"], ":float16")
    status = half["status"]["status"]
    assert status["hosts"]["session"] == "hooked"
    assert status["loss_scaling"] is True
    assert half["script"]["losses"][0] == pytest.approx(plain["script"]["losses"][0], rel=1e-2)
    assert half["script"]["losses"][-1] == pytest.approx(plain["script"]["losses"][-1], rel=5e-2)
    assert half["script"]["steps"] == 12
    assert "in float16" in half["stderr"] and "casts" in half["stderr"]


def test_loss_scale_is_in_the_graph(half: dict[str, Any]) -> None:
    assert half["status"]["status"]["loss_scale"]["managers"] == 1


def test_call_on_a_v1_optimizer(called: dict[str, Any], plain: dict[str, Any]) -> None:
    assert _all_in(called["script"], ":float16")
    assert called["script"]["losses"][-1] == pytest.approx(plain["script"]["losses"][-1], rel=5e-2)
    assert called["status"]["loss_scale"]["managers"] == 1


def test_call_can_be_taken_back(called: dict[str, Any], plain: dict[str, Any]) -> None:
    assert _all_in(called["plain"], ":float32")
    assert called["plain"]["losses"] == pytest.approx(plain["script"]["losses"], rel=1e-4)
