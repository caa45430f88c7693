"""Fixtures shared by all tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from environments import AMP, REWRITE, RunPython

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

REPOSITORY = Path(__file__).resolve().parent.parent
FORK_SERVER = Path(__file__).with_name("fork_server.py")
PLUGIN = REPOSITORY / "tf_amp" / "hosts" / "graph_plugin.c"
AMP_PREFIXES = (AMP, REWRITE.removesuffix("_GRAPH_REWRITE"))


def pytest_configure() -> None:
    """Builds the shared object where the sources run without having been installed since."""
    library, compiler = PLUGIN.with_name("libtf_amp.so"), shutil.which("cc")
    stale = not library.exists() or library.stat().st_mtime < PLUGIN.stat().st_mtime
    if stale and compiler and os.access(PLUGIN.parent, os.W_OK):
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, PLUGIN], check=True)


Start = Callable[
    [Path, Sequence[str], Mapping[str, str], float], "subprocess.CompletedProcess[str]"
]
"""Runs a script with arguments and an environment, for so many seconds at most."""


def _environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment as it is, with no AMP variable but those given."""
    full = {k: v for k, v in os.environ.items() if not k.startswith(AMP_PREFIXES)}
    full["PYTHONPATH"] = os.pathsep.join(
        p for p in (str(REPOSITORY), os.environ.get("PYTHONPATH", "")) if p
    )
    full["PYTHONFAULTHANDLER"] = "1"  # a crash says where
    full.update(env or {})
    return full


def _runner(folders: pytest.TempPathFactory, start: Start) -> RunPython:
    def run(
        code: str,
        env: Mapping[str, str] | None = None,
        *,
        args: tuple[str, ...] = (),
        timeout: float = 300,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        # A file, because tf.function needs source code to be readable.
        script = folders.mktemp("script") / "script.py"
        script.write_text(textwrap.dedent(code))
        done = start(script, args, _environment(env), timeout)
        if check and done.returncode:
            pytest.fail(
                f"script exited with {done.returncode}\n--- stdout\n{done.stdout[-4000:]}"
                f"\n--- stderr\n{done.stderr[-8000:]}"
            )
        return done

    return run


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> RunPython:
    """Runs a snippet in a fresh interpreter that has no AMP variable but those given."""

    def start(
        script: Path, args: Sequence[str], env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(script), *args],
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return _runner(tmp_path_factory, start)


@pytest.fixture(scope="session")
def run_forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunPython]:
    """As `run_python`, in a process in which TensorFlow has been imported, with AMP off.

    It takes three seconds less. A snippet is on its own here too; what it cannot show is what
    happens at the import: `autoload.activate()` switches AMP on at once. Nor does it replace a
    fresh interpreter where processes, their start or their end are what is tested.
    """
    servers: list[subprocess.Popen[str]] = []

    def start(
        script: Path, args: Sequence[str], env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        if not servers:
            servers.append(
                subprocess.Popen(
                    [sys.executable, str(FORK_SERVER)],
                    env=_environment(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        (server,) = servers
        assert server.stdin is not None and server.stdout is not None
        output = [script.with_name(name) for name in ("stdout", "stderr")]
        asked = {
            "script": str(script),
            "args": args,
            "env": env,
            "folder": os.getcwd(),
            "output": [str(file) for file in output],
            "timeout": timeout,
        }
        try:
            server.stdin.write(json.dumps(asked) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
            assert answer, "the server of forks has ended"
        except BaseException:
            # Of a test that was broken off; the next one must not be given its answer.
            servers.clear()
            os.killpg(server.pid, signal.SIGKILL)
            server.communicate()
            raise
        code_of_exit = json.loads(answer)
        texts = [file.read_text() for file in output]
        if code_of_exit is None:
            raise subprocess.TimeoutExpired(str(script), timeout, *texts)
        return subprocess.CompletedProcess([str(script), *args], code_of_exit, *texts)

    yield _runner(tmp_path_factory, start)
    for server in servers:
        server.communicate()  # its end is that of its input
