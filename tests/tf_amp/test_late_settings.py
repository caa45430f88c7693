"""Variables that are set after they were read."""

from __future__ import annotations

import textwrap

import pytest
from environments import AMP, REWRITE, RunPython

SCALING = f"{AMP}_LOSS_SCALING"
LEVEL, LOG_PATH = f"{REWRITE}_LEVEL", f"{REWRITE}_LOG_PATH"
HERE = {f"{REWRITE}_IGNORE_PERFORMANCE": "1"}
BFLOAT16 = HERE | {AMP: "1", f"{REWRITE}_DTYPE": "bfloat16"}
FLOAT16 = HERE | {AMP: "1", f"{REWRITE}_DTYPE": "float16"}

PRELUDE = """
import os
import numpy as np, tensorflow as tf
import tf_amp.autoload
tf_amp.autoload.activate()

v1, late = tf.compat.v1, os.environ.update
on, off = tf_amp.enable_mixed_precision_graph_rewrite, tf_amp.disable_mixed_precision_graph_rewrite
value = np.ones((8, 8), "float32")

@tf.function
def early(x):
    return tf.matmul(x, x)

def trace():
    tf.function(lambda x: tf.matmul(x, x))(value)
"""

WAYS = {
    "session": """
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [8, 8])
            for _ in range(3):
                session.run(tf.matmul(x, x), {x: value})
        """,
    "session in use": """
        with tf.Graph().as_default(), v1.Session() as session:
            one = tf.constant(1.0) + 1.0
            value = os.environ.pop(AMP)
            session.run(one)
            os.environ[AMP] = value
            session.run(one)
        """,
    "make_callable": """
        with tf.Graph().as_default(), v1.Session() as session:
            x = v1.placeholder(tf.float32, [8, 8])
            session.make_callable(tf.matmul(x, x), [x])(value)
        """,
    "monitored session": """
        with tf.Graph().as_default():
            one = tf.constant(1.0) + 1.0
            with v1.train.MonitoredSession() as session:
                session.run(one)
        """,
    "Keras in a graph": """
        import tf_keras
        with tf.Graph().as_default():
            x = tf_keras.backend.placeholder((8, 8))
            tf_keras.backend.function([x], [tf.matmul(x, x)])([value])
        """,
    "function": "trace()\ntrace()",
    "map": "list(tf.data.Dataset.range(2).map(lambda x: x + 1))",
    "fit": """
        import keras
        model = keras.Sequential([keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        model.fit(value, np.ones((8, 2)), verbose=0)
        """,
}


def warnings(run: RunPython, script: str, env: dict[str, str] | None = None) -> list[str]:
    """The warnings of a program, but for that at its end which is about nothing converted."""
    script = f"{PRELUDE}\nAMP = {AMP!r}\n{textwrap.dedent(script)}"
    lines = run(script, env=env or {}).stderr.splitlines()
    found = [line for line in lines if line.startswith("tf_amp: WARNING")]
    return [line for line in found if "AMP was on, but" not in line]


@pytest.mark.parametrize("before", ["", "early(value)\n"])
@pytest.mark.parametrize("way", WAYS)
def test_a_variable_that_switches_on_is_told_once(
    run_forked: RunPython, way: str, before: str
) -> None:
    script = f"{before}late({{AMP: '1'}})\n{textwrap.dedent(WAYS[way])}"
    (line,) = warnings(run_forked, script)
    assert f"{AMP} was set after TensorFlow had been imported and does nothing" in line
    assert "before `import tensorflow`" in line


@pytest.mark.parametrize(
    ("script", "env"),
    [
        ("early(value)\nlate({AMP: '1'})\nearly(value)", {}),
        ("early(value)\nlate({AMP: '1'})\nearly(value)", {AMP: "0"}),
        (f"early(value)\nlate({{{SCALING!r}: '0'}})\nearly(value)", FLOAT16),
    ],
)
def test_what_runs_functions_traced_before_is_told_at_its_end(
    run_forked: RunPython, script: str, env: dict[str, str]
) -> None:
    (line,) = warnings(run_forked, script, env)
    assert "does nothing" in line


@pytest.mark.parametrize(
    ("changes", "env", "in_force"),
    [
        ({SCALING: "0"}, FLOAT16, "loss scaling on (float16 needs it)"),
        ({SCALING: "1"}, BFLOAT16, "loss scaling off (bfloat16"),
        ({SCALING: "perhaps"}, FLOAT16, "loss scaling on"),
        ({AMP: "0"}, BFLOAT16, "bfloat16 on CPU"),
        ({AMP: ""}, BFLOAT16, "bfloat16 on CPU"),
        ({f"{AMP}_GRAPH_REWRITE": "0"}, FLOAT16, "float16 on CPU"),
        ({f"{AMP}_GRAPH_REWRITE": "1"}, HERE | {SCALING: "1"}, "graph rewrite off"),
        ({f"{REWRITE}_DTYPE": "float16"}, BFLOAT16, "bfloat16 on CPU"),
        ({LEVEL: "TENSOR_CORES_ONLY"}, BFLOAT16, "level default"),
        ({LOG_PATH: "trace"}, BFLOAT16, "level default"),
    ],
)
@pytest.mark.parametrize("way", ["function", "session"])
def test_a_change_of_what_is_on_is_told_once_with_what_is_in_force(
    run_forked: RunPython, way: str, changes: dict[str, str], env: dict[str, str], in_force: str
) -> None:
    script = f"late({changes!r})\n{textwrap.dedent(WAYS[way])}"
    (line,) = warnings(run_forked, script, env)
    ((name, value),) = changes.items()
    assert f"{name}={value!r} came after AMP had been switched on and does nothing" in line
    assert in_force in line.partition("In force is: ")[2]
    assert "disable_mixed_precision_graph_rewrite(); tf_amp.enable" in line


@pytest.mark.parametrize(
    ("script", "env"),
    [
        # Another way to say what is in force already.
        (f"late({{{SCALING!r}: '0', {AMP!r}: 'true'}})\ntrace()", BFLOAT16),
        (f"late({{'{REWRITE}_DTYPE': 'bfloat16'}})\ntrace()", HERE | BFLOAT16),
        ("late({AMP: '0'})\ntrace()", {}),
        ("late({AMP: '0'})\noff()\ntrace()", BFLOAT16),
        # Read by a call, or overridden by one.
        (f"late({{AMP: '1', {LEVEL!r}: 'TENSOR_CORES_ONLY'}})\non()\ntrace()", HERE),
        (f"off()\nlate({{{LEVEL!r}: 'TENSOR_CORES_ONLY'}})\non()\ntrace()", BFLOAT16),
        ("on()\nlate({AMP: '0'})\ntrace()", HERE),
        ("late({AMP: '1'})\ntf_amp.autoload.activate()\ntrace()", HERE),
        # For other processes, or not ours.
        ("late({AMP: '1'})", {}),
        ("late({'TF_CPP_MIN_LOG_LEVEL': '1', 'AMP': '1'})\ntrace()", {}),
        ("trace()\noff()\ntrace()", BFLOAT16),
    ],
)
def test_what_counts_or_changes_nothing_is_not_told(
    run_forked: RunPython, script: str, env: dict[str, str]
) -> None:
    assert warnings(run_forked, script, env) == []


@pytest.mark.parametrize("way", ["", *WAYS])
@pytest.mark.parametrize(
    ("env", "call", "told"),
    [
        ({f"{REWRITE}_DTYPE": "float16", LOG_PATH: "trace"}, "", True),
        ({LOG_PATH: " "}, "", False),
        ({LOG_PATH: "trace", AMP: "0"}, "", False),
        ({LOG_PATH: "trace", SCALING: "0"}, "", False),
        (HERE, "tf_amp.enable_mixed_precision_graph_rewrite()", False),
    ],
)
def test_what_is_set_without_a_word_of_on_or_off_is_told_once(
    run_forked: RunPython, way: str, env: dict[str, str], call: str, told: bool
) -> None:
    before = PRELUDE.partition("v1, late")[0] + PRELUDE.partition("_rewrite\n")[2]
    script = (
        f"{before}\n{call}\nAMP, v1 = {AMP!r}, tf.compat.v1\n{textwrap.dedent(WAYS.get(way, ''))}"
    )
    script = script.replace("os.environ.pop(AMP)", "'0'")
    lines = run_forked(script, env=env).stderr.splitlines()
    found = [line for line in lines if "set, but AMP is off" in line]
    assert len(found) == (told and bool(way))
    assert all(name in line for line in found for name in (*env, f"{AMP}=1"))


def test_nothing_is_told_where_it_cannot_be_seen(run_forked: RunPython) -> None:
    script = """
        from tensorflow.python.client import session

        del session.BaseSession._extend_graph
        tf_amp.autoload._watch_variables()
        late({AMP: "1"})
        trace()
        """
    before = PRELUDE.replace("tf_amp.autoload.activate()", "")
    done = run_forked(f"{before}\nAMP = {AMP!r}\n{textwrap.dedent(script)}")
    assert "tf_amp" not in done.stderr


def test_tracebacks_of_sessions_do_not_name_us(run_forked: RunPython) -> None:
    script = """
        import traceback
        with tf.Graph().as_default(), v1.Session() as session:
            try:
                session.run(tf.raw_ops.Assert(condition=False, data=[1]))
            except tf.errors.InvalidArgumentError:
                print(traceback.format_exc())
        """
    shown = run_forked(PRELUDE + textwrap.dedent(script)).stdout
    assert "Session" in shown or "session" in shown
    assert "late_settings" not in shown and "patches.py" not in shown
