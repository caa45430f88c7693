"""Runs the commands of `benchmarks/gpu` in a Python that has jaxlib, which may be another one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PYTHON = os.environ.get("TF_AMP_JAX_PYTHON", sys.executable)
RELEASE = "0.11.2"


def _release() -> str:
    code = "from importlib import metadata; import jax; print(metadata.version('jaxlib'))"
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


needs_jaxlib = pytest.mark.skipif(
    _release() != RELEASE,
    reason=f"needs jax and jaxlib {RELEASE}, here or where TF_AMP_JAX_PYTHON points",
)


def run_command(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs a command on the CPU and returns what it printed."""
    command = [PYTHON, "-m", f"gpu.{module}", *map(str, arguments), "--platform", "cpu"]
    return subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300)
