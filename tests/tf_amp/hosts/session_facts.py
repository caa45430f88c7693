"""Runs the cases of a session script in one subprocess and hands its facts to the tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from environments import RunPython

HERE = str(Path(__file__).resolve().parent)


def facts_of(
    run_python: RunPython,
    call: str,
    env: Mapping[str, str] | None = None,
    *,
    args: Sequence[str] = (),
    timeout: float = 300,
) -> dict[str, dict[str, Any]]:
    """Calls `module.function(...)` of this folder; returns its reported facts by case name."""
    module = call.partition(".")[0]
    code = f"import sys\nsys.path.insert(0, {HERE!r})\nimport {module}\n{call}\n"
    done = run_python(code, env=env, args=args, timeout=timeout)
    lines = [line[2:] for line in done.stdout.splitlines() if line.startswith("@@")]
    facts = [json.loads(line) for line in lines]
    return {fact.pop("name"): fact for fact in facts}
