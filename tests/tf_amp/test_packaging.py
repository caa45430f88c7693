"""A wheel or an editable install in a fresh environment switches a plain script over by itself."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from environments import AMP, BFLOAT16, CONVERTS, REWRITE

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = ("tf_amp", "graph_passes", "pyproject.toml", "setup.py", "README.md", "LICENSE")
AUTOLOAD = "tf_amp_autoload.pth"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

# A script that knows nothing of tf_amp, but for printing what became of its function.
SCRIPT = """
import tensorflow as tf

@tf.function
def product(x):
    return tf.matmul(x, x)

x = tf.ones([1024, 1024])
product(x)
traced = product.get_concrete_function(x)
from tensorflow.python.eager import context
definition = context.context().get_function_def(traced.name)
types = {n.attr["T"].type for n in definition.node_def if n.op == "MatMul"}
print([tf.dtypes.as_dtype(t).name for t in types], traced.outputs[0].dtype.name)
"""


def _run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("TF_", "PYTHON"))}
    base |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=base | env, capture_output=True, text=True
    )


def _must(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    done = _run(*command, cwd=cwd, **env)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def _copy_sources(target: Path) -> Path:
    target.mkdir()
    for name in (*SOURCES, AUTOLOAD):
        if (REPOSITORY / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(REPOSITORY / name, target / name, ignore=ignore)
        else:
            shutil.copy(REPOSITORY / name, target / name)
    return target


def _backend(root: Path) -> dict[str, str]:
    """Where the build backend is: in this environment, or fetched if that one is too old."""
    try:
        if int(importlib.metadata.version("setuptools").split(".")[0]) >= 77:
            return {}
    except importlib.metadata.PackageNotFoundError:
        pass  # a virtual environment of Python 3.12 or newer has none
    target = root / "backend"
    _must(*PIP, "install", "--quiet", "--target", target, "setuptools>=77", cwd=root)
    return {"PYTHONPATH": str(target)}


def _build(hook: str, sources: Path, **env: str) -> Path:
    """Calls a hook of the build backend, as pip does, and returns the file it makes."""
    code = f"from setuptools import build_meta; print(build_meta.{hook}('made'))"
    done = _must(sys.executable, "-c", code, cwd=sources, **env)
    return sources / "made" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module", params=["wheel", pytest.param("editable", marks=pytest.mark.slow)])
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the package, sharing only the libraries of this one."""
    root = tmp_path_factory.mktemp(request.param)
    sources = _copy_sources(root / "sources")
    backend = _backend(root)
    if request.param == "wheel":
        # Through a source distribution, so that one that lacks a file fails here.
        archive = _build("build_sdist", sources, **backend)
        shutil.unpack_archive(archive, root / "unpacked")
        wheel = _build("build_wheel", next((root / "unpacked").iterdir()), **backend)
    else:
        wheel = _build("build_editable", sources, **backend)
    assert wheel.name.startswith("tf_amp-") and "-py3-none-" in wheel.name
    fresh = root / "venv"
    venv.create(fresh, with_pip=False, symlinks=True)
    install = ("--python", fresh / "bin/python", "install", "--no-deps", "--no-index", wheel)
    _must(*PIP, *install, cwd=root)
    # TensorFlow need not be installed a second time: a path, whose own .pth files are not read.
    found = importlib.util.find_spec("tensorflow")
    assert found is not None and found.origin is not None
    shared = Path(found.origin).parents[1]
    (_site_packages(fresh) / "zz_shared.pth").write_text(f"{shared}\n")
    (root / "script.py").write_text(SCRIPT)
    return fresh


def _site_packages(fresh: Path) -> Path:
    (path,) = fresh.glob("lib/python*/site-packages")
    return path


def test_the_pth_file_is_on_top_of_site_packages_and_recorded(environment: Path) -> None:
    site = _site_packages(environment)
    assert (site / AUTOLOAD).read_text() == (REPOSITORY / AUTOLOAD).read_text()
    (record,) = site.glob("tf_amp-*.dist-info/RECORD")
    assert any(line.startswith(AUTOLOAD + ",") for line in record.read_text().splitlines())


def test_the_start_of_python_imports_nothing(environment: Path) -> None:
    code = "import sys; print([m for m in sys.modules if m.startswith(('tf_amp', 'graph_passes'))])"
    for value in ("", "0", "1"):
        done = _must(environment / "bin/python", "-c", code, cwd=environment.parent, **{AMP: value})
        assert done.stdout == "[]\n"


def test_unset_leaves_the_script_in_float32(environment: Path) -> None:
    done = _must(environment / "bin/python", "script.py", cwd=environment.parent)
    assert done.stdout == "['float32'] float32\n"


def test_the_variable_alone_puts_a_plain_script_into_mixed_precision(environment: Path) -> None:
    env = BFLOAT16
    done = _must(environment / "bin/python", "script.py", cwd=environment.parent, **env)
    assert done.stdout == "['bfloat16'] float32\n"
    assert "AMP on" in done.stderr


def test_a_script_may_set_the_variable_itself(environment: Path) -> None:
    (environment.parent / "sets.py").write_text(f"import os; os.environ['{AMP}'] = '1'\n{SCRIPT}")
    env = CONVERTS
    done = _must(environment / "bin/python", "sets.py", cwd=environment.parent, **env)
    assert done.stdout == "['bfloat16'] float32\n"


def test_an_illegal_value_ends_the_script(environment: Path) -> None:
    env = {AMP: "1", f"{REWRITE}_LEVEL": "BOGUS"}
    done = _run(environment / "bin/python", "script.py", cwd=environment.parent, **env)
    assert done.returncode == 1
    assert f"EnvConfigError: {REWRITE}_LEVEL has the value 'BOGUS'" in done.stderr
    assert done.stdout == ""


def test_the_command_is_installed(environment: Path) -> None:
    done = _must(environment / "bin/tf-amp", "--help", cwd=environment.parent)
    assert "demo" in done.stdout
    version = _must(environment / "bin/tf-amp", "--version", cwd=environment.parent).stdout
    (info,) = _site_packages(environment).glob("tf_amp-*.dist-info")
    assert f"tf_amp-{version.split()[1]}.dist-info" == info.name
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()


def test_the_op_lists_are_installed(environment: Path) -> None:
    code = (
        "import importlib.util as u; print(*u.find_spec('graph_passes').submodule_search_locations)"
    )
    done = _must(environment / "bin/python", "-c", code, cwd=environment.parent)
    lists = {path.stem for path in Path(done.stdout.strip(), "lists").glob("*.toml")}
    assert lists >= {"float16", "bfloat16"}
