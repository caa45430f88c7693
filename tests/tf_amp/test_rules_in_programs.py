"""Rules on single nodes in a program: from the file, the call and the line to what runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from environments import CONVERTS, REWRITE, RunPython

ENV = {**CONVERTS, f"{REWRITE}_RULES_DISABLE": "cost,cast-cut"}
ON = {**ENV, "TF_ENABLE_AUTO_MIXED_PRECISION": "1"}
PROGRAM = """
from tf_amp import autoload
autoload.activate()
import tensorflow as tf
from tensorflow.python.eager import context
import tf_amp

@tf.function
def step(x):
    with tf.name_scope("first"):
        y = tf.matmul(x, x)
    with tf.name_scope("second"):
        y = tf.matmul(tf.nn.elu(y), x)  # the line
    return y + 1.0

def types():
    x = tf.ones([64, 64])
    step(x)
    name = step.get_concrete_function(x).name
    nodes = context.context().get_function_def(name).node_def
    return " ".join(str(n.attr["T"].type) for n in nodes if n.op == "MatMul")
"""
LINE = 1 + PROGRAM.split("\n").index("        y = tf.matmul(tf.nn.elu(y), x)  # the line")
KEEP = '[[rule]]\naction = "keep_float32"\n{} = "{}"\nwhy = "so"\n'


def rules_file(folder: Path, *rules: tuple[str, str]) -> str:
    file = folder / "rules.toml"
    file.write_text("".join(KEEP.format(*rule) for rule in rules))
    return str(file)


@pytest.mark.parametrize(
    ("criterion", "value", "types"),
    [
        ("layer", "second", "14 1"),
        ("source", f"script.py:{LINE}", "14 1"),
        ("source", "script.py", "1 1"),
        ("function", "step", "1 1"),
        ("node", "first/MatMul", "1 14"),
    ],
)
def test_file_that_the_variable_names_holds(
    run_forked: RunPython, tmp_path: Path, criterion: str, value: str, types: str
) -> None:
    env = {**ON, f"{REWRITE}_RULES": rules_file(tmp_path, (criterion, value))}
    code = "print('types:', types())\nprint('rules:', dict(tf_amp.status()['rules']))"
    done = run_forked(f"{PROGRAM}\n{code}", env)
    assert f"types: {types}\n" in done.stdout
    assert "rules.toml [1]: 'so' (keep_float32)" in done.stdout
    assert "No node met" not in done.stdout + done.stderr


def test_rule_that_met_no_node_is_named_at_the_end(run_forked: RunPython, tmp_path: Path) -> None:
    file = rules_file(tmp_path, ("node", "first/MatMul"), ("node", "frist/.*"))
    done = run_forked(f"{PROGRAM}\ntypes()", {**ON, f"{REWRITE}_RULES": file})
    (line,) = (line for line in done.stderr.splitlines() if "No node met" in line)
    assert "1 of 2 rules" in line
    assert "rules.toml [2]: 'so'" in line


def test_contradiction_leaves_the_function_as_it_is(run_forked: RunPython, tmp_path: Path) -> None:
    file = rules_file(tmp_path, ("node", "first/MatMul"))
    with open(file, "a") as text:
        text.write('[[rule]]\naction = "allow"\nop = "MatMul"\nwhy = "fast"\n')
    done = run_forked(f"{PROGRAM}\nprint('types:', types())", {**ON, f"{REWRITE}_RULES": file})
    assert "types: 1 1\n" in done.stdout
    (line,) = (line for line in done.stderr.splitlines() if "was dropped" in line)
    assert "rules.toml [1]: 'so' says keep_float32, rules.toml [2]: 'fast' says allow" in line


def test_broken_file_is_an_error_at_the_import(run_python: RunPython, tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text('[[rule]]\naction = "drop"\n')
    done = run_python(PROGRAM, {**ON, f"{REWRITE}_RULES": str(file)}, check=False)
    assert done.returncode != 0
    assert f"{REWRITE}_RULES names a file that cannot be used" in done.stderr
    assert "`action` must be one of 'keep_float32'" in done.stderr


def test_rules_of_a_call_win_over_those_of_the_file(run_forked: RunPython, tmp_path: Path) -> None:
    code = f"""{PROGRAM}
rules = [
    tf_amp.Rule(action="allow", node="first/MatMul"),
    tf_amp.Rule(action="deny", layer="second"),
]
tf_amp.enable_mixed_precision_graph_rewrite(rules=rules)
print("types:", types())
tf_amp.enable_mixed_precision_graph_rewrite()  # asks for nothing new
print("rules:", len(tf_amp.status().rules))
for wrong in (["MatMul"], "none.toml"):
    try:
        tf_amp.enable_mixed_precision_graph_rewrite(rules=wrong)
    except (TypeError, ValueError) as error:
        print("error:", error)
"""
    file = rules_file(tmp_path, ("node", "first/MatMul"))
    done = run_forked(code, {**ENV, f"{REWRITE}_RULES": file})
    assert "types: 14 1\n" in done.stdout
    assert "rules: 3\n" in done.stdout
    assert "error: `rules` must be the path of a file or tf_amp.Rule objects" in done.stdout
    assert "error: The rules file 'none.toml' cannot be read" in done.stdout


def test_rewritten_graph_has_rules_of_the_call(run_forked: RunPython, tmp_path: Path) -> None:
    file = rules_file(tmp_path, ("node", "a"), ("node", "c"))
    code = f"""
import tensorflow as tf
import tf_amp

with tf.Graph().as_default() as graph:
    x = tf.compat.v1.placeholder(tf.float32, [64, 64], "x")
    tf.exp(tf.matmul(tf.matmul(x, x, name="a"), x, name="b"))
result = tf_amp.rewrite_graph_def(
    graph.as_graph_def(), preserve=["x"], rules={file!r}
)
types = [n.attr["T"].type for n in result.graph_def.node if n.op == "MatMul"]
print("types:", *types)
"""
    done = run_forked(code)
    assert "types: 1 19\n" in done.stdout
    assert "No node of the graph meets the criteria of rules.toml [2]: 'so'" in done.stderr
