"""`tf-amp tune`, and which cost table holds afterwards."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from environments import CONVERTS, REWRITE, RunPython

from graph_passes.policy.cost_table_files import load_table
from tf_amp.cost_tables import choose_table, tensorflow_release
from tf_amp.env_config import read_settings
from tf_amp.hardware import Target

MAIN = "import sys; from tf_amp.cli.main import main; sys.exit(main())"
# The tests run on hardware without fast units as well.


@pytest.mark.slow
def test_tune_writes_a_table_that_the_setting_takes(run_python: RunPython, tmp_path: Path) -> None:
    path = tmp_path / "mine" / "costs.toml"
    # AMP is on in the environment: the command must measure without it all the same.
    env = {**CONVERTS, "TF_ENABLE_AUTO_MIXED_PRECISION": "1"}
    done = run_python(MAIN, env, args=("tune", "--output", str(path), "--only", "Relu", "MatMul"))
    assert [key for key, _ in load_table(path).rows] == ["MatMul", "Relu"]
    assert f"Written to {path}" in done.stdout
    assert f"{REWRITE}_COST_TABLE={path}" in done.stdout
    assert "3/3" in done.stderr  # the progress bar: two rows and the Casts
    assert list(path.parent.iterdir()) == [path]

    used = run_python(MAIN, {**env, f"{REWRITE}_COST_TABLE": str(path)}, args=("env", "--json"))
    assert json.loads(used.stdout)["cost_table"] == str(path)


def test_tune_keeps_the_table_in_the_users_cache(
    run_forked: RunPython,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = f"""
        import tf_amp.tuning_probes as probes
        few = tuple(p for p in probes.probes() if p.key == "Neg")
        probes.probes = lambda: few
        products = tuple(p for p in probes.compiled_probes() if p.key == "MatMul")
        probes.compiled_probes = lambda: products
        {MAIN}
    """
    env = {**CONVERTS, "XDG_CACHE_HOME": str(tmp_path)}
    done = run_forked(code, env, args=("tune",))
    paths = sorted((tmp_path / "tf-amp" / "cost_tables").iterdir(), key=lambda p: "xla" in p.name)
    for path, rows in zip(paths, (["Neg"], ["MatMul"]), strict=True):
        assert path.name.startswith("cpu-")
        assert path.name.endswith("-bfloat16.toml")
        assert f"Written to {path}" in done.stdout
        assert [key for key, _ in load_table(path).rows] == rows
    assert f"it counts only where {REWRITE}_COST_TABLE names it" in done.stdout
    path, compiled = paths
    release = tensorflow_release()
    assert compiled.name == path.name.replace("-bfloat16", f"-xla{release}-bfloat16")

    # Who asks to ignore performance has no table, and so has hardware without fast units: what a
    # program on other hardware would find is asked for here.
    target = Target("bfloat16", "CPU", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = functools.partial(choose_table, read_settings({}), target)
    assert chosen().reason == f"measured by `tf-amp tune`: {path}"
    assert chosen(compiled=True).reason == f"measured by `tf-amp tune`: {compiled}"

    path.write_text("broken")
    assert chosen().reason != f"measured by `tf-amp tune`: {path}"
    assert f"{str(path)!r} is no TOML" in caplog.text


def test_tune_measures_under_xla_alone_where_asked(run_forked: RunPython, tmp_path: Path) -> None:
    path = tmp_path / "xla.toml"
    arguments = ("tune", "--xla", "--output", str(path), "--only", "MatMul")
    done = run_forked(MAIN, CONVERTS, args=arguments)
    assert load_table(path).compiled
    assert "Measured 1 ops under XLA" in done.stdout
    on = {**CONVERTS, "TF_ENABLE_AUTO_MIXED_PRECISION": "1", f"{REWRITE}_COST_TABLE": str(path)}
    used = json.loads(run_forked(MAIN, on, args=("env", "--json")).stdout)
    assert used["cost_table_xla"] == str(path)
    assert used["cost_table"] != str(path)


@pytest.mark.slow
def test_wrong_calls_and_hardware_are_told_with_a_remedy(
    run_forked: RunPython, tmp_path: Path
) -> None:
    file = tmp_path / "a file"
    file.write_text("")
    for arguments, env, said in (
        (("--only", "Relu"), CONVERTS, "--only needs --output"),
        (("--only", "Rleu", "--output", "x.toml"), CONVERTS, "no row 'Rleu'"),
        (("--xla", "--only", "Relu", "--output", "x.toml"), CONVERTS, "no row 'Relu'"),
        ((), {f"{REWRITE}_DTYPE": "float16"}, "nothing to measure"),
        (("--only", "Neg", "--output", str(file / "x.toml")), CONVERTS, "could not be written"),
    ):
        done = run_forked(MAIN, env, args=("tune", *arguments), check=False)
        assert done.returncode == (2 if "needs" in said else 1), done.stderr[-2000:]
        assert said in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no folder", "full disk"])
def test_a_table_that_cannot_be_written_is_not_lost(
    run_python: RunPython, tmp_path: Path, fault: str
) -> None:
    path, code = tmp_path / "tables" / "x.toml", MAIN
    if fault == "no folder":
        path.parent.write_text("")
    else:
        path.parent.mkdir()
        path.write_text("the one before")
        code = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (99, 99)); {MAIN}"
    arguments = ("--only", "Neg", "--output", str(path))
    done = run_python(code, CONVERTS, args=("tune", *arguments), check=False)
    assert done.returncode == 1
    assert "on standard output" in done.stderr
    (tmp_path / "saved.toml").write_text(done.stdout)
    assert [key for key, _ in load_table(tmp_path / "saved.toml").rows] == ["Neg"]
    if fault == "full disk":
        assert list(path.parent.iterdir()) == [path]
        assert path.read_text() == "the one before"
