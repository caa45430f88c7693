"""`tf_amp.explain()`: the state of AMP as a text."""

from __future__ import annotations

import dataclasses

from environments import RunPython

from tf_amp.explanation import Explanation
from tf_amp.state import FunctionStatus, Status


def test_functions_rules_and_loss_scales_have_lines() -> None:
    scale = {"name": "sgd", "state": {"scale": 8.0, "skipped_steps": 1}}
    status = Status(
        enabled=True,
        why="switched on by hand",
        graph_rewrite=True,
        reason="float16 on GPU",
        rules={"r.toml [1]: 'so' (deny)": 1, "r.toml [2]: 'no' (allow)": 0},
        functions=(
            FunctionStatus("step (fit)", 9, 7, 12, {"MatMul: slower here": 2}),
            FunctionStatus("predict", 3, 3, 4, {}),
        ),
        loss_scale={"loss_scales": [scale, *[{"name": "adam", "state": None}] * 3]},
        log_path="trace",
    )
    lines = str(Explanation(status)).splitlines()
    assert "AMP is on, switched on by hand: float16 on GPU" in lines
    assert "rule r.toml [1]: 'so' (deny): meets 1 node" in lines
    assert "rule r.toml [2]: 'no' (allow): meets no nodes" in lines
    assert "loss scale of sgd: scale 8.0, skipped steps 1" in lines
    assert "loss scale of adam: not known (3 of this name)" in lines
    rows = [line.split() for line in lines if " of " in line and "loss" not in line]
    assert rows == [
        ["step", "(fit)", "7", "of", "9", "12", "2", "MatMul:", "slower", "here"],
        ["predict", "3", "of", "3", "4", "-"],
    ]
    assert "tf-amp explain trace" in lines[-1]


def test_a_table_for_functions_that_xla_compiles_has_a_line_where_it_is_another() -> None:
    asked = "IGNORE_PERFORMANCE asks not to weigh costs"
    same = Status(enabled=True, graph_rewrite=True, cost_table=asked, cost_table_xla=asked)
    other = dataclasses.replace(same, cost_table_xla="xla.toml")
    assert "under XLA" not in str(Explanation(same))
    assert "cost table under XLA: xla.toml" in str(Explanation(other)).splitlines()


def test_where_no_graph_is_rewritten_no_function_is_said_to_be_missing() -> None:
    lines = str(Explanation(Status(enabled=True, why="by hand", reason="no units"))).splitlines()
    assert lines[0] == "AMP is on, by hand, and converts nothing: no units"
    assert not any("traced" in line or "LOG_PATH" in line for line in lines)


def test_what_is_done_in_float32_is_said_wherever_there_is_some() -> None:
    some = Status(enabled=True, why="by hand", fused={"batch-norm": 2, "fused-update": 0})
    line = "done in float32 too: batch-norm 2, fused-update 0"
    assert line in str(Explanation(some)).splitlines()
    low = dataclasses.replace(some, graph_rewrite=True)
    assert line in str(Explanation(low)).splitlines()
    assert "done in" not in str(Explanation(dataclasses.replace(some, fused={})))


def test_without_amp_it_says_why_and_needs_no_tensorflow(run_python: RunPython) -> None:
    code = "import sys, tf_amp; print(tf_amp.explain()); print('tensorflow' in sys.modules)"
    off, imported = run_python(code).stdout.splitlines()
    assert off.startswith("AMP is off: none of TF_ENABLE_AUTO_MIXED_PRECISION")
    assert imported == "False"


def test_program_is_explained_function_by_function(run_forked: RunPython) -> None:
    code = """
    from tf_amp import autoload
    autoload.activate()
    import tensorflow as tf, tf_amp

    @tf.function
    def step(x):
        with tf_amp.keep_float32("so"):
            y = tf.matmul(x, x)
        return tf.matmul(y, x) + 1.0

    step(tf.ones([64, 64]))
    print(tf_amp.explain())
    """
    prefix = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE"
    env = {
        "TF_ENABLE_AUTO_MIXED_PRECISION": "1",
        f"{prefix}_DTYPE": "bfloat16",
        f"{prefix}_IGNORE_PERFORMANCE": "1",
        f"{prefix}_RULES_DISABLE": "cost,cast-cut",
    }
    text = run_forked(code, env).stdout
    (row,) = (line for line in text.splitlines() if line.startswith("step "))
    assert row.split(maxsplit=5)[1:] == ["1", "of", "2", "3", "1 MatMul: kept by a rule"]
