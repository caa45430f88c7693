"""The command line: `tf-amp run` and `tf-amp env`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from environments import AMP, BFLOAT16, REWRITE, WITHOUT_UNITS, RunPython

MAIN = "import sys; from tf_amp.cli.main import main; sys.exit(main())"


def _tf_amp(
    run_python: RunPython, *arguments: str, env: dict[str, str] | None = None, check: bool = False
) -> subprocess.CompletedProcess[str]:
    return run_python(MAIN, env, args=arguments, check=check)


def test_help_needs_no_tensorflow(run_python: RunPython) -> None:
    code = (
        "import sys; from tf_amp.cli.main import parser; print(parser().format_help());"
        "assert 'tensorflow' not in sys.modules"
    )
    printed = run_python(code).stdout
    for command in ("run", "demo", "env"):
        assert f"  {command} " in printed


@pytest.mark.parametrize(
    "arguments",
    [
        *((), ("rnu",), ("run",), ("run", "--dtype", "float8", "x.py")),
        *(("compare", "a", "b", "--rounds", "-1"), ("diff", "a", "b", "--limit", "-1")),
        *(("compare", "a", "b", "--seed", "-1"), ("diagnose", "m", "--tolerance", "nan")),
        ("calibrate", "m", "--inputs", "x.npz", "-o", "r.toml", "--tolerance", "nan"),
        ("profile", "--timeout", "inf", "--", "python"),
    ],
)
def test_a_wrong_call_says_how_to_call_it(
    run_python: RunPython, arguments: tuple[str, ...]
) -> None:
    done = _tf_amp(run_python, *arguments)
    assert done.returncode == 2
    assert "usage: tf-amp" in done.stderr
    if "float8" in arguments:
        assert "bfloat16" in done.stderr
    if "-1" in arguments:
        assert "'-1' is no whole number, 0 or more" in done.stderr
    if {"nan", "inf"} & {*arguments}:
        assert "is no number, 0 or more" in done.stderr


@pytest.mark.parametrize("full", [False, True])
def test_output_that_nobody_takes_makes_no_traceback(run_forked: RunPython, full: bool) -> None:
    code = f"""
    import os, sys
    end, begin = os.pipe()
    os.close(end)
    os.dup2(os.open("/dev/full", os.O_WRONLY) if {full} else begin, 1)
    sys.argv = ["tf-amp", "lists"]
    {MAIN}
    """
    done = run_forked(code, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
    assert ("tf-amp lists: error: [Errno 28] No space left" in done.stderr) == full


def test_who_interrupts_a_command_sees_no_traceback(run_python: RunPython) -> None:
    code = f"""
    import signal, sys
    from tf_amp.cli import completion
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    completion.run = lambda *_: signal.raise_signal(signal.SIGINT)
    sys.argv = ["tf-amp", "completion", "bash"]
    {MAIN}
    """
    done = run_python(code, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_no_stdout_is_no_error(run_python: RunPython) -> None:
    code = f"import sys; sys.stdout = None; sys.argv = ['tf-amp', 'lists']; {MAIN}"
    run_python(code)


ECHO = """
import json, os, sys
print(json.dumps({
    "name": __name__, "argv": sys.argv, "path": sys.path[0],
    "env": {k: v for k, v in os.environ.items() if "AUTO_MIXED_PRECISION" in k},
    "hooked": type(sys.meta_path[0]).__module__, "tensorflow": "tensorflow" in sys.modules,
}))
"""


def test_run_starts_the_script_as_python_would(run_python: RunPython, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ECHO)
    done = _tf_amp(run_python, "run", str(script), "--epochs", "3", "-m", check=True)
    told = json.loads(done.stdout)
    assert told["name"] == "__main__"
    assert told["argv"] == [str(script), "--epochs", "3", "-m"]
    assert told["path"] == str(tmp_path)
    assert told["env"] == {AMP: "1", f"{AMP}_GRAPH_REWRITE": "1"}
    assert told["hooked"] == "tf_amp.autoload"
    assert not told["tensorflow"]


def test_options_of_run_become_variables_and_win(run_python: RunPython, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ECHO)
    options = ("--dtype", "bfloat16", "--level", "TENSOR_CORES_ONLY", "--log-path", "logs")
    options += ("--no-loss-scaling", "--ignore-performance")
    env = {f"{AMP}_GRAPH_REWRITE": "0", f"{REWRITE}_DTYPE": "float16"}
    done = _tf_amp(run_python, "run", *options, str(script), env=env, check=True)
    assert json.loads(done.stdout)["env"] == {
        **BFLOAT16,
        f"{AMP}_GRAPH_REWRITE": "1",
        f"{AMP}_LOSS_SCALING": "0",
        f"{REWRITE}_LEVEL": "TENSOR_CORES_ONLY",
        f"{REWRITE}_LOG_PATH": "logs",
    }


def test_run_starts_a_module(run_python: RunPython, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(ECHO)
    code = f"import os; os.chdir({str(tmp_path)!r})\n{MAIN}"
    done = run_python(code, args=("run", "-m", "package.train", "7"))
    told = json.loads(done.stdout)
    assert told["name"] == "__main__"
    assert told["argv"] == [str(tmp_path / "package" / "train.py"), "7"]


@pytest.mark.parametrize("name", ["nosuch", "nosuch.train", "package", "package.broken"])
def test_a_module_that_is_not_there_is_told_as_python_tells_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "broken.py").write_text("import nosuch")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ours, pythons = (
        subprocess.run(
            [sys.executable, *words, "-m", name],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=env,
        )
        for words in (["-m", "tf_amp", "run"], [])
    )
    assert ours.returncode == pythons.returncode == 1
    assert ours.stderr.splitlines()[-1] == pythons.stderr.splitlines()[-1]
    assert ("Traceback" in ours.stderr) == ("Traceback" in pythons.stderr)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 knows no PYTHONSAFEPATH")
def test_a_safe_path_stays_safe(run_python: RunPython, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.path)")
    env = {"PYTHONSAFEPATH": "1"}
    safe = _tf_amp(run_python, "run", str(script), env=env, check=True).stdout
    assert safe == run_python("import sys; print(sys.path)", env).stdout
    assert str(tmp_path) not in safe


@pytest.mark.parametrize("arguments", [("env",), ("tune",)])
def test_commands_without_tensorflow_say_what_to_install(
    run_python: RunPython, arguments: tuple[str, ...]
) -> None:
    code = f"import sys; sys.modules['tensorflow'] = None\n{MAIN}"
    code = (
        "import importlib.util; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'tensorflow' else find(name)\n"
    ) + code
    done = run_python(code, args=arguments, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "pip install tensorflow" in done.stderr


def test_env_writes_nothing(run_forked: RunPython, tmp_path: Path) -> None:
    env = {
        AMP: "1",
        f"{REWRITE}_LOG_PATH": str(tmp_path / "graphs"),
        f"{REWRITE}_DTYPE": "bfloat16",
    }
    env[f"{REWRITE}_IGNORE_PERFORMANCE"] = "1"
    assert str(tmp_path) in _tf_amp(run_forked, "env", env=env, check=True).stdout
    assert not (tmp_path / "graphs").exists()


def test_arguments_come_from_a_file_too(run_forked: RunPython, tmp_path: Path) -> None:
    (tmp_path / "inner.flags").write_text("--diff\n")
    (tmp_path / "ci.flags").write_text(f"# for CI\n--json\n--flagfile={tmp_path}/inner.flags\n")
    done = _tf_amp(run_forked, "lists", f"--flagfile={tmp_path}/ci.flags", check=True)
    assert json.loads(done.stdout)["ops"] == []
    done = _tf_amp(run_forked, "lists", f"--flagfile={tmp_path}/none.flags")
    assert done.returncode == 2
    assert "none.flags" in done.stderr and "Traceback" not in done.stderr


def test_a_file_of_the_programs_arguments_is_the_programs(
    run_python: RunPython, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.argv[1:])")
    done = _tf_amp(run_python, "run", str(tmp_path / "program.py"), "--flagfile=none", check=True)
    assert done.stdout.strip() == "['--flagfile=none']"


def test_version_and_progress_bars_cost_nothing(run_python: RunPython) -> None:
    code = (
        "import sys, tf_amp.cli.main, tf_amp.loss_scale.rule\n"
        "assert 'rich' not in sys.modules\n"
        "tf_amp.cli.main.main(['--version'])"
    )
    import tf_amp

    assert run_python(code).stdout == f"tf-amp {tf_amp.__version__}\n"


def test_the_exit_status_of_the_script_comes_through(run_python: RunPython, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(7)")
    assert _tf_amp(run_python, "run", str(script)).returncode == 7


@pytest.mark.parametrize("error", ["ToolError('no model')", "BrokenPipeError('a worker is gone')"])
def test_an_error_of_a_tool_that_the_script_calls_is_its_own(
    run_python: RunPython, tmp_path: Path, error: str
) -> None:
    script = tmp_path / "program.py"
    script.write_text(f"from tf_amp.tool_error import ToolError\n\nraise {error}\n")
    done = _tf_amp(run_python, "run", str(script))
    assert f'File "{script}", line 3' in done.stderr
    assert done.stderr.endswith(f"Error: {error.split(chr(39))[1]}\n")


def test_a_missing_script_is_told(run_python: RunPython) -> None:
    done = _tf_amp(run_python, "run", "no_such_script.py")
    assert done.returncode == 2
    assert "there is no script 'no_such_script.py'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({f"{REWRITE}_LEVEL": "BOGUS"}, "TREAT_INFER_AS_DENY"),
        ({f"{REWRITE}_DTYPE": "float8"}, "bfloat16"),
        (
            {f"{REWRITE}_ALLOWLIST_ADD": "Exp", f"{REWRITE}_BLACKLIST_ADD": "Exp"},
            f"{REWRITE}_BLACKLIST_ADD",
        ),
    ],
)
def test_illegal_settings_end_run_and_env_without_a_traceback(
    run_python: RunPython, tmp_path: Path, env: dict[str, str], said: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('started')")
    for arguments in (("run", str(script)), ("env",)):
        done = _tf_amp(run_python, *arguments, env=env)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("tf-amp: error: ")
        assert next(iter(env)) in done.stderr
        assert said in done.stderr


def test_run_puts_a_real_script_into_mixed_precision(run_python: RunPython, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import tensorflow as tf\n"
        "@tf.function\n"
        "def product(x):\n"
        "    return tf.matmul(x, x)\n"
        "x = tf.ones([1024, 1024])\n"
        "product(x)\n"
        "traced = product.get_concrete_function(x)\n"
        "from tensorflow.python.eager import context\n"
        "nodes = context.context().get_function_def(traced.name).node_def\n"
        "print({tf.dtypes.as_dtype(n.attr['T'].type).name for n in nodes if n.op == 'MatMul'})\n"
    )
    options = ("--dtype", "bfloat16", "--ignore-performance")
    done = _tf_amp(run_python, "run", *options, str(script), check=True)
    assert done.stdout == "{'bfloat16'}\n"


def test_env_prints_what_is_in_force(run_forked: RunPython) -> None:
    env = {
        AMP: "1",
        f"{AMP}_LOSS_SCALING": "0",
        f"{REWRITE}_DTYPE": "bfloat16",
        f"{REWRITE}_IGNORE_PERFORMANCE": "true",
        f"{REWRITE}_DENYLIST_ADD": "MatMull, Conv2D",
        f"{REWRITE}_LVEL": "x",
        f"{REWRITE}_RULES_DISABLE": "constant-range",
    }
    told = json.loads(_tf_amp(run_forked, "env", "--json", env=env, check=True).stdout)
    assert told["graph_rewrite"] is True
    assert told["target_dtype"] == "bfloat16"
    assert told["loss_scaling"] is False
    assert told["decided_by"]["loss_scaling"] == f"{AMP}_LOSS_SCALING"
    assert told["list_edits"] == ["deny add MatMull", "deny add Conv2D"]
    assert told["variables"][f"{REWRITE}_DENYLIST_ADD"] == "MatMull, Conv2D"
    rules = {rule.split(" ")[0]: rule.split(" ")[1] for rule in told["rules"]}
    assert rules["constant-range:"] == "off"
    assert rules["variable-update:"] == "on"
    notes = "\n".join(told["notes"])
    assert f"did you mean {REWRITE}_LEVEL?" in notes
    assert "MatMul" in notes and "MatMull" in notes
    assert "Conv2D" in notes


def test_env_tells_which_rules_are_at_work_where_nothing_is_converted(
    run_forked: RunPython,
) -> None:
    env = {AMP: "1", f"{REWRITE}_DTYPE": "float16", f"{REWRITE}_RULES_DISABLE": "batch-norm"}
    done = run_forked(WITHOUT_UNITS + MAIN, env, args=("env", "--json"))
    rules = [rule.split(": ")[0] for rule in json.loads(done.stdout)["rules"] if ": on (" in rule]
    assert set(rules) - {"grouped-convolution", "onednn-kernel"} == {"fused-update"}


def test_env_with_nothing_set_says_off(run_forked: RunPython) -> None:
    printed = _tf_amp(run_forked, "env", check=True).stdout
    assert "graph_rewrite        False" in printed
    assert "loss_scaling         False" in printed
    assert "loss_scaling_reason  not asked for" in printed


def test_python_m_works() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tf_amp.cli.main", "--help"],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "usage: tf-amp" in done.stdout


def test_package_can_be_run_as_a_module(run_forked: RunPython) -> None:
    wanted = _tf_amp(run_forked, "env", check=True).stdout
    run_module = "import runpy; runpy.run_module('tf_amp', run_name='__main__', alter_sys=True)"
    assert run_forked(run_module, args=("env",)).stdout == wanted
