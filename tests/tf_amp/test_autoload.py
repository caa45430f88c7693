"""The import hook, tried on a stand-in for TensorFlow; test_packaging tries the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
AUTOLOAD_LINE = (REPOSITORY / "tf_amp_autoload.pth").read_text()
AMP = "TF_ENABLE_AUTO_MIXED_PRECISION"

# tf_amp.installation is replaced by one that only tells when and with what it was called.
PRELUDE = """
import sys, types
calls = []
def install(settings, *, source):
    calls.append((settings.graph_rewrite, settings.loss_scaling, source))
    assert sys.modules["tensorflow"].imported_completely
fake = types.ModuleType("tf_amp.installation")
fake.install = install
import tf_amp
sys.modules["tf_amp.installation"] = tf_amp.installation = fake
"""


@pytest.fixture
def run_with_stand_in(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs code where ``tensorflow`` is an empty package that counts its executions."""
    package = tmp_path / "tensorflow"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import builtins, os\n"
        "builtins.executions = getattr(builtins, 'executions', 0) + 1\n"
        "if os.environ.get('FAIL_ONCE') and builtins.executions == 1:\n"
        "    raise ImportError('broken the first time')\n"
        "imported_completely = True\n"
    )
    (package / "part.py").write_text("value = 7\n")
    (package / "data.txt").write_text("data")

    def run(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(PRELUDE + code)
        base = {k: v for k, v in os.environ.items() if not k.startswith(("TF_", "PYTHONPATH"))}
        base["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
        return subprocess.run(
            [sys.executable, str(script)], env=base | env, capture_output=True, text=True
        )

    return run


def _check(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "statement",
    ["import tensorflow", "from tensorflow import part", "import tensorflow.part as p"],
)
def test_install_runs_once_after_any_form_of_import(
    run_with_stand_in: Callable[..., subprocess.CompletedProcess[str]], statement: str
) -> None:
    code = f"""
{AUTOLOAD_LINE}
assert calls == []
before = len(sys.meta_path)
{statement}
import tensorflow, tensorflow.part
assert calls == [(True, True, "environment")], calls
assert len(sys.meta_path) == before - 1
"""
    _check(run_with_stand_in(code, {AMP: "1"}))


@pytest.mark.parametrize("env", [{}, {AMP: ""}, {f"{AMP}_GRAPH_REWRITE": ""}])
def test_unset_leaves_no_trace(
    run_with_stand_in: Callable[..., subprocess.CompletedProcess[str]], env: dict[str, str]
) -> None:
    code = f"""
before = list(sys.meta_path), set(sys.modules)
{AUTOLOAD_LINE}
assert (list(sys.meta_path), set(sys.modules)) == before
import tensorflow
assert calls == []
"""
    _check(run_with_stand_in(code, env))


@pytest.mark.parametrize(
    ("env", "calls"),
    [
        ({f"{AMP}_GRAPH_REWRITE": "1"}, [(True, False, "environment")]),
        ({f"{AMP}_LOSS_SCALING": "true"}, [(False, True, "environment")]),
        ({AMP: "0"}, []),
        ({AMP: "1", f"{AMP}_GRAPH_REWRITE": "0"}, [(False, True, "environment")]),
    ],
)
def test_each_enabling_variable_counts(
    run_with_stand_in: Callable[..., subprocess.CompletedProcess[str]],
    env: dict[str, str],
    calls: list[tuple[bool, bool, str]],
) -> None:
    _check(run_with_stand_in(f"{AUTOLOAD_LINE}\nimport tensorflow\nassert calls == {calls!r}", env))


def test_the_module_keeps_its_real_loader(
    run_with_stand_in: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = f"""
{AUTOLOAD_LINE}
import importlib.machinery, importlib.resources, inspect, tensorflow
assert type(tensorflow.__loader__) is importlib.machinery.SourceFileLoader
assert tensorflow.__spec__.loader is tensorflow.__loader__
assert "executions" in inspect.getsource(tensorflow)
assert importlib.resources.files("tensorflow").joinpath("data.txt").read_text() == "data"
assert calls
"""
    _check(run_with_stand_in(code, {AMP: "1"}))


def test_an_illegal_value_stops_the_import_before_it_starts(
    run_with_stand_in: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = f"""
import builtins
{AUTOLOAD_LINE}
try:
    import tensorflow
except ValueError as error:
    print(type(error).__name__, error)
assert not hasattr(builtins, "executions") and "tensorflow" not in sys.modules and not calls
"""
    done = run_with_stand_in(code, {AMP: "on!"})
    _check(done)
    assert done.stdout.startswith(f"EnvConfigError {AMP} has the value 'on!'")


def test_a_failed_import_can_be_repeated(
    run_with_stand_in: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = f"""
{AUTOLOAD_LINE}
try:
    import tensorflow
except ImportError:
    assert calls == []
import tensorflow
assert len(calls) == 1
"""
    _check(run_with_stand_in(code, {AMP: "1", "FAIL_ONCE": "1"}))


def test_tensorflow_that_is_imported_already_is_hooked_at_once(
    run_with_stand_in: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = f"""
# Where the package is installed, Python's start has switched AMP on by itself.
import tf_amp.autoload
tf_amp.autoload.deactivate()
import tensorflow
before = list(sys.meta_path)
{AUTOLOAD_LINE}
assert len(calls) == 1 and sys.meta_path == before
"""
    _check(run_with_stand_in(code, {AMP: "1"}))


def test_a_fault_of_ours_leaves_the_program_running_and_is_told(
    run_with_stand_in: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = f"""
def broken(settings, *, source):
    raise RuntimeError("planted")
fake.install = broken
{AUTOLOAD_LINE}
import tensorflow
assert tensorflow.imported_completely
"""
    done = run_with_stand_in(code, {AMP: "1"})
    _check(done)
    assert "everything runs in float32" in done.stderr
    assert "planted" in done.stderr


def test_the_line_names_every_enabling_variable() -> None:
    from tf_amp.env_variables import ENABLING_VARIABLES

    assert AUTOLOAD_LINE.count("\n") == 1
    assert AUTOLOAD_LINE.startswith("import ")
    for name in ENABLING_VARIABLES:
        assert f'"{name}"' in AUTOLOAD_LINE
