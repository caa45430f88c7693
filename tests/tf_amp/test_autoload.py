"""The import hook, tried on a stand-in for TensorFlow; test_packaging tries the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from environments import AMP

REPOSITORY = Path(__file__).resolve().parents[2]
AUTOLOAD_LINE = (REPOSITORY / "tf_amp_autoload.pth").read_text()

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
{statement}
import tensorflow, tensorflow.part
assert calls == [(True, True, "environment")], calls
assert not [f for f in sys.meta_path if type(f).__module__.startswith("tf_amp")]
"""
    _check(run_with_stand_in(code, {AMP: "1"}))


@pytest.mark.parametrize("env", [{}, {AMP: ""}, {f"{AMP}_GRAPH_REWRITE": ""}])
def test_unset_imports_nothing_and_leaves_no_trace(
    run_with_stand_in: Callable[..., subprocess.CompletedProcess[str]], env: dict[str, str]
) -> None:
    code = f"""
# Where the package is installed, Python's start has placed a finder
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__module__ != "tf_amp_autoload"]
before = list(sys.meta_path), set(sys.modules)
{AUTOLOAD_LINE}
import colorsys
assert (list(sys.meta_path)[1:], set(sys.modules) - {{"colorsys"}}) == before
import tensorflow
assert calls == [] and sys.meta_path == before[0]
"""
    _check(run_with_stand_in(code, env))


def test_a_variable_that_the_script_sets_before_the_import_counts(
    run_with_stand_in: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = f"""
{AUTOLOAD_LINE}
import os, importlib.util
assert importlib.util.find_spec("tensorflow").loader.get_source("tensorflow")  # only asks
os.environ["{AMP}"] = "1"
import tensorflow
assert calls == [(True, True, "environment")], calls
"""
    _check(run_with_stand_in(code, {}))


def test_python_starts_where_tensorflow_or_the_package_is_missing(tmp_path: Path) -> None:
    code = f"""
{AUTOLOAD_LINE}
for name in ("tensorflow", "json"):
    try:
        __import__(name)
        print(name)
    except ModuleNotFoundError as error:
        print("missing", error.name)
"""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TF_", "PYTHON"))}
    for path in (str(REPOSITORY), ""):
        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            env={**env, "PYTHONPATH": path},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.stdout.split() == ["missing", "tensorflow", "json"], done.stderr


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
    code = """
# Where the package is installed, Python's start has switched AMP on by itself.
import tf_amp.autoload
tf_amp.autoload.deactivate()
import tensorflow
before = list(sys.meta_path)
tf_amp.autoload.activate()
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


def test_an_installation_that_raises_fails_each_import(
    run_with_stand_in: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = f"""
from tf_amp.env_config import EnvConfigError
def broken(settings, *, source):
    calls.append(source)
    if len(calls) < 3:
        raise EnvConfigError("planted")
fake.install = broken
{AUTOLOAD_LINE}
for _ in range(2):
    try:
        import tensorflow
    except EnvConfigError:
        assert "tensorflow" not in sys.modules
    else:
        raise AssertionError("float32 without a word")
import tensorflow
assert len(calls) == 3
"""
    _check(run_with_stand_in(code, {AMP: "1"}))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TF_ENABLE_AUTO_MIXED_PRECISON", AMP),
        ("TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRIT", f"{AMP}_GRAPH_REWRITE"),
        ("TF_ENABLE_MIXED_PRECISION", AMP),
        ("TF_ENABLE_ONEDNN_OPTS", None),
        ("TF_XLA_FLAGS", None),
    ],
)
def test_a_misspelt_name_is_said_though_nothing_is_on(
    run_with_stand_in: Callable[..., subprocess.CompletedProcess[str]], name: str, meant: str | None
) -> None:
    done = run_with_stand_in(f"{AUTOLOAD_LINE}\nimport tensorflow\nassert not calls", {name: "1"})
    _check(done)
    said = f"The variable {name} is read by nobody; did you mean {meant}?\n"
    assert done.stderr == (f"tf_amp: WARNING: {said}" if meant else "")


def test_a_variable_that_came_too_late_is_said_when_a_function_is_traced(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = f"""
import tf_amp.autoload
tf_amp.autoload.activate()
import os, sys, tensorflow as tf
os.environ["{AMP}"] = "1"
print("traced", file=sys.stderr)
for _ in range(2):
    tf.function(lambda x: x + 1)(tf.ones(2))
from tensorflow.python.eager.polymorphic_function import atomic_function
assert not hasattr(atomic_function.from_func_graph, "__wrapped__")
"""
    said = run_python(code).stderr.partition("traced")[2]
    (line,) = [line for line in said.splitlines() if line.startswith("tf_amp")]
    assert f"{AMP} was set after TensorFlow had been imported and does nothing" in line
    assert "before `import tensorflow`" in line


# What must not stop `import tensorflow`: each is a place where a start-up hook may stumble.
HOSTILE = {
    "stderr closed": "2>&-",
    "home that cannot be searched": "",
    "no home": "",
}


@pytest.mark.slow
@pytest.mark.parametrize("place", HOSTILE)
def test_surroundings_without_stderr_or_home(tmp_path: Path, place: str) -> None:
    code = (
        "import tf_amp.autoload; tf_amp.autoload.activate(); import tensorflow, tf_amp;"
        "print(tf_amp.status().enabled, tf_amp.status().target_dtype)"
    )
    (tmp_path / "home").mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TF_", "XDG_", "HOME"))}
    env |= {AMP: "1", "PYTHONPATH": str(REPOSITORY), "TF_CPP_MIN_LOG_LEVEL": "2"}
    env |= {"TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DTYPE": "bfloat16"}
    if place.startswith("home"):
        env["HOME"] = str(tmp_path / "home")
        env["XDG_CACHE_HOME"] = str(tmp_path / "home")
        code = (
            "import os; error = PermissionError(13, 'planted'); stat = os.stat\n"
            "def refusing(path, **kw):\n"
            "    if str(path).startswith(os.environ['HOME']): raise error\n"
            "    return stat(path, **kw)\n"
            "os.stat = refusing\n"
        ) + code
    elif place == "no home":
        code = "import os; os.path.expanduser = lambda path: path\n" + code
    script = tmp_path / "script.py"
    script.write_text(
        "from tf_amp import hardware\n"
        "hardware.probe_cpu_flags = lambda: frozenset({'avx512_bf16'})\n"
        "hardware.probe_onednn = lambda: True\n" + code
    )
    done = subprocess.run(
        f"{sys.executable} {script} {HOSTILE[place]}",
        shell=True,
        cwd=tmp_path,  # without a home, Keras writes to a folder named "~"
        env=env,
        stdout=subprocess.PIPE,
        stderr=None if place.startswith("stderr") else subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "bfloat16"]
    assert place.startswith("stderr") or "could not be switched on" not in done.stderr


def test_the_line_is_one_statement_that_imports_nothing_of_ours() -> None:
    assert AUTOLOAD_LINE.count("\n") == 1
    assert AUTOLOAD_LINE.startswith("import sys;")
