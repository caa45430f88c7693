"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

REPOSITORY = Path(__file__).resolve().parent.parent
PLUGIN = REPOSITORY / "tf_amp" / "hosts" / "graph_plugin.c"
AMP_PREFIXES = ("TF_ENABLE_AUTO_MIXED_PRECISION", "TF_AUTO_MIXED_PRECISION")


def pytest_configure() -> None:
    """Builds the shared object where the sources run without having been installed since."""
    library, compiler = PLUGIN.with_name("libtf_amp.so"), shutil.which("cc")
    stale = not library.exists() or library.stat().st_mtime < PLUGIN.stat().st_mtime
    if stale and compiler and os.access(PLUGIN.parent, os.W_OK):
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, PLUGIN], check=True)


@pytest.fixture(scope="session")
def run_python(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a snippet in a fresh interpreter that has no AMP variable but those given.

    The snippet is written to a file, because tf.function needs source code to be readable.
    """

    def run(
        code: str,
        env: Mapping[str, str] | None = None,
        *,
        args: tuple[str, ...] = (),
        timeout: float = 300,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path_factory.mktemp("script") / "script.py"
        script.write_text(textwrap.dedent(code))
        full = {k: v for k, v in os.environ.items() if not k.startswith(AMP_PREFIXES)}
        full["PYTHONPATH"] = os.pathsep.join(
            p for p in (str(REPOSITORY), os.environ.get("PYTHONPATH", "")) if p
        )
        full["PYTHONFAULTHANDLER"] = "1"  # a crash says where
        full.update(env or {})
        done = subprocess.run(
            [sys.executable, str(script), *args],
            env=full,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            pytest.fail(
                f"script exited with {done.returncode}\n--- stdout\n{done.stdout[-4000:]}"
                f"\n--- stderr\n{done.stderr[-8000:]}"
            )
        return done

    return run
