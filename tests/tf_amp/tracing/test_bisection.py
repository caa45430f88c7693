"""The conversion that breaks a program, found by running it."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
from environments import CONVERTS, FLOAT16, RunPython

from graph_passes import format_rules
from tf_amp.cli.main import parser
from tf_amp.tool_error import ToolError
from tf_amp.tracing.bisection import Check
from tf_amp.tracing.keep_rule import keep_rule

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAIN = "import sys; from tf_amp.cli.main import main; sys.exit(main())"


@pytest.mark.parametrize(
    ("text", "output", "holds"),
    [
        ("loss < 3", "loss: 5.0\nloss: 2.5", True),
        ("loss < 3", "loss: 2.0\nloss: 3.5e0", False),
        ("loss < 3", "loss: nan", False),
        ("loss < 3", "1/1 - 0s - loss: 0.25 - val_loss: 9", True),
        ("val_loss<=9", "loss: 0.25 - val_loss: 9", True),
        ("loss < 3", '{"loss": 1e-3}', True),
        ("accuracy > 0.5", "accuracy = 0.75", True),
        ("loss < 3", "nothing", False),
        ("loss > -1", "loss inf", True),
    ],
)
def test_check(text: str, output: str, holds: bool) -> None:
    assert Check.parse(text).holds(output) is holds


@pytest.mark.parametrize("text", ["loss", "loss == 3", "< 3", "loss < x"])
def test_what_is_no_check(text: str) -> None:
    with pytest.raises(ValueError, match="NAME < FIGURE"):
        Check.parse(text)


@pytest.mark.parametrize("node", ["a/b", "__inference_step_12/a.b[0]-1", 'quote"s'])
def test_a_rule_matches_its_node_alone(node: str) -> None:
    (rule,) = tomllib.loads(format_rules([keep_rule(node, 'why "so"')]))["rule"]
    assert rule["action"] == "keep_float32"
    assert re.fullmatch(rule["node"], re.sub("^__inference_step_12/", "", node))
    assert not re.fullmatch(rule["node"], "a/bb")


PROGRAM = """
import sys
import tensorflow as tf
w = tf.Variable(tf.eye(32))

@tf.function
def step(x):
    for number in range(12):
        with tf.name_scope(f"block{number}"):
            x = tf.nn.relu(tf.matmul(x, w))
            if number == 7:
                x = tf.matmul(x * 1e5, w)  # the culprit
                x = tf.matmul(x * 1e-5, w)
    return tf.reduce_sum(x)

print("loss:", float(step(tf.ones([4, 32]))))
"""


@pytest.mark.slow
def test_the_culprit_is_named_with_its_line_and_rule(run_forked: RunPython, tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    env = FLOAT16
    rules = tmp_path / "rules.toml"
    command = ("--", sys.executable, "-m", "tf_amp", "run", str(program))
    done = run_forked(
        MAIN, env, args=("bisect", "--check", "loss < 1e3", "--rules", str(rules), *command)
    )
    line = (
        PROGRAM.splitlines().index("                x = tf.matmul(x * 1e5, w)  # the culprit") + 1
    )
    first, where = done.stdout.splitlines()[:2]
    assert re.fullmatch(r"MatMul block7/MatMul_1, number \d+ of \d+, in step", first)
    assert where == f"  at {program}:{line}"
    total = int(re.findall(r"of (\d+),", first)[0])
    runs = int(re.findall(r"(\d+) runs", done.stdout)[0])
    assert runs <= 4 + total.bit_length()
    (rule,) = tomllib.loads(rules.read_text())["rule"]
    assert rule["node"] == "block7/MatMul_1"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("pass", "passes, and no graph of it was converted"),
        (PROGRAM, "passes with all conversions"),
        ("raise SystemExit(3)", "fails, and no graph of it was converted"),
        pytest.param(
            PROGRAM + "\nraise SystemExit(3)",
            "fails without any conversion",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_no_conversion_breaks(
    run_forked: RunPython, tmp_path: Path, program: str, said: str
) -> None:
    (tmp_path / "train.py").write_text(program)
    env = CONVERTS
    command = ("--", sys.executable, "-m", "tf_amp", "run", str(tmp_path / "train.py"))
    done = run_forked(MAIN, env, args=("bisect", *command), check=False)
    assert done.returncode == 1
    assert said in done.stderr


def test_a_run_that_is_stopped_is_told(run_forked: RunPython, tmp_path: Path) -> None:
    command = ("--", sys.executable, "-c", "import time; time.sleep(60)")
    done = run_forked(MAIN, args=("bisect", "--timeout", "1", *command), check=False)
    assert "stopped after --timeout 1 seconds\nrun 1, all conversions: fails" in done.stderr


@pytest.mark.parametrize("convert", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_figure_that_is_never_printed(
    run_forked: RunPython, tmp_path: Path, convert: bool
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM if convert else "print('loss:', 1)")
    command = ("--", sys.executable, "-m", "tf_amp", "run", str(tmp_path / "train.py"))
    for name, missing in (("los", True), ("loss", False)):
        args = ("bisect", "--check", f"{name} > 1e9", *command)
        done = run_forked(MAIN, CONVERTS, args=args, check=False)
        assert done.returncode == 1
        assert ("No run printed a figure 'los'" in done.stderr) == missing


def test_rules_that_cannot_be_written_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    done = types.SimpleNamespace(found=(), runs=9, passes=True, rules="[[rule]]\n")
    monkeypatch.setattr("tf_amp.tracing.bisection.bisect", lambda *_, **__: done)
    arguments = parser().parse_args(["bisect", "--rules", "/proc/none/rules.toml", "--", "true"])
    with pytest.raises(ToolError, match=r"were not written: .*\n\n\[\[rule\]\]"):
        arguments.run(arguments)
