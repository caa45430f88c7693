"""The functions of the package."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest
import tensorflow as tf
from environments import CONVERTS, RunPython
from tensorflow.core.framework import graph_pb2, types_pb2

import tf_amp
from graph_passes import ListEdit, PrecisionConfig

FAST = {
    **CONVERTS,
    "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_COST_TABLE": "off",
}
FLOAT16 = {**FAST, "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DTYPE": "float16"}

PRELUDE = """
import json
import numpy as np
import tensorflow as tf
import tf_amp
from tf_amp import installation

def rule(optimizer):
    return type(optimizer.manager.rule).__name__

def message(call):
    try:
        call()
    except (ValueError, TypeError) as error:
        return type(error).__name__ + ": " + str(error)
    return "nothing raised"

def low():
    @tf.function
    def product(x):
        return tf.matmul(x, x)
    product(tf.ones((8, 8)))
    definition = product.get_concrete_function(tf.ones((8, 8))).inference_fn.definition
    return [node.attr["T"].type for node in definition.node_def if node.op == "MatMul"] == [14]
"""


def run(run_python: RunPython, script: str, env: dict[str, str]) -> tuple[Any, list[str]]:
    done = run_python(PRELUDE + textwrap.dedent(script), env=env)
    lines = [line for line in done.stderr.splitlines() if line.startswith("tf_amp")]
    return json.loads(done.stdout.splitlines()[-1]), lines


def test_importing_and_asking_imports_no_tensorflow(run_python: RunPython) -> None:
    script = """
        import sys
        import tf_amp
        status = tf_amp.status()
        assert "tensorflow" not in sys.modules
        assert set(tf_amp.__all__) <= set(dir(tf_amp))
        try:
            tf_amp.no_such_name
        except AttributeError as error:
            print(error)
        print(status["enabled"], status["why"])
        for name in tf_amp.__all__:
            getattr(tf_amp, name)
        keys = set(status)
        assert status["why"] == status.why
        tf_amp.enable_mixed_precision_graph_rewrite()
        status = tf_amp.status()
        assert status["enabled"] and dict(status) == status.as_dict()
        print(sorted(keys ^ set(status)))
    """
    env = {"TF_ENABLE_AUTO_MIXED_PRECISION": "0"}
    lines = run_python(script, env=env).stdout.splitlines()
    assert lines[0] == "module 'tf_amp' has no attribute 'no_such_name'"
    assert lines[1].startswith("False none of TF_ENABLE_AUTO_MIXED_PRECISION, ")
    assert lines[2] == "[]"  # status has the same keys on and off


START = "from tf_amp import autoload; autoload.activate()"
OFF = "tf_amp.disable_mixed_precision_graph_rewrite()"


@pytest.mark.parametrize(
    ("before", "script", "why"),
    [
        ("1", f"{START}\n{OFF}", f"{OFF} switched it off"),
        ("1", f"installation.Installation.start = None\n{START}", "switching it on failed"),
        ("", START, " was set after TensorFlow had been imported; set it before, or call "),
        ("", "", " is set, but the start-up file of tf-amp did not run: install tf-amp"),
    ],
)
def test_status_says_why_it_is_off_though_asked_for(
    run_forked: RunPython, before: str, script: str, why: str
) -> None:
    name = "TF_ENABLE_AUTO_MIXED_PRECISION"
    late = f"import os\nos.environ[{name!r}] = '1'"
    code = f"{script}\n{late}\nprint(json.dumps(str(tf_amp.explain())))"
    found, _ = run(run_forked, code, {name: before} | FAST)
    assert found.startswith("AMP is off: ")
    assert why in found


def test_optimizers_of_every_library(run_forked: RunPython) -> None:
    script = """
        import keras, tf_keras
        out = {}
        for name, optimizer in {
            "v1": tf.compat.v1.train.GradientDescentOptimizer(0.1),
            "keras": keras.optimizers.Adam(),
            "tf_keras": tf_keras.optimizers.Adam(),
            "legacy": tf_keras.optimizers.legacy.Adam(),
        }.items():
            wrapped = tf_amp.enable_mixed_precision_graph_rewrite(optimizer)
            out[name] = rule(wrapped)
            for again in (wrapped, optimizer):
                assert "ValueError" in message(
                    lambda: tf_amp.enable_mixed_precision_graph_rewrite(again)), name
        fixed = tf_amp.enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(), 128.0)
        out["fixed"] = rule(fixed)
        out["none"] = tf_amp.enable_mixed_precision_graph_rewrite()
        out["on"] = low()
        print(json.dumps(out))
    """
    found, lines = run(run_forked, script, FAST)
    assert found == {
        "v1": "NoLossScale",
        "keras": "NoLossScale",
        "tf_keras": "NoLossScale",
        "legacy": "NoLossScale",
        "fixed": "StaticLossScale",
        "none": None,
        "on": True,
    }
    assert sum("AMP on" in line for line in lines) == 1
    assert any("Loss scaling is off by itself: bfloat16 has the range" in line for line in lines)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (FLOAT16, "DynamicLossScale"),
        ({**FAST, "TF_ENABLE_AUTO_MIXED_PRECISION_LOSS_SCALING": "1"}, "DynamicLossScale"),
    ],
)
def test_dynamic_loss_scale(run_forked: RunPython, env: dict[str, str], expected: str) -> None:
    script = """
        import keras
        wrapped = tf_amp.enable_mixed_precision_graph_rewrite(keras.optimizers.SGD())
        print(json.dumps([rule(wrapped), tf_amp.status().as_dict()]))
    """
    (found, status), _ = run(run_forked, script, env)
    assert found == expected
    assert status["loss_scale"]["managers"] == 1


def test_refusals_leave_everything_off(run_forked: RunPython) -> None:
    script = """
        import keras, tf_keras
        enable = tf_amp.enable_mixed_precision_graph_rewrite
        out = {"string": message(lambda: enable("adam")),
               "scale": message(lambda: enable(keras.optimizers.SGD(), "huge")),
               "own": message(lambda: enable(
                   keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())))}
        for library in (keras, tf_keras):
            policy = getattr(library, "config", library.mixed_precision)
            if library is keras:
                policy.set_dtype_policy("mixed_bfloat16")
            else:
                policy.set_global_policy("mixed_float16")
            out[library.__name__] = message(lambda: enable(keras.optimizers.SGD()))
            if library is keras:
                policy.set_dtype_policy("float32")
            else:
                policy.set_global_policy("float32")
        assert installation.current() is None
        assert not low()
        print(json.dumps(out))
    """
    out, _ = run(run_forked, script, FAST)
    assert out["string"].startswith("TypeError")
    assert "'adam'" in out["string"]
    assert out["scale"].startswith("ValueError")
    assert "'huge'" in out["scale"]
    assert out["own"].startswith("ValueError")
    assert "'mixed_bfloat16'" in out["keras"]
    assert "keras.config.set_dtype_policy('float32')" in out["keras"]
    assert "'mixed_float16'" in out["tf_keras"]
    assert "tf_keras.mixed_precision.set_global_policy('float32')" in out["tf_keras"]


def test_a_refused_call_leaves_what_was_on(run_forked: RunPython) -> None:
    script = """
        import keras
        from tf_amp.env_config import Settings
        installation.install(Settings(loss_scaling=True), source="test")
        before = tf_amp.status().as_dict()
        text = message(lambda: tf_amp.enable_mixed_precision_graph_rewrite(
            keras.optimizers.SGD(), -1.0))
        print(json.dumps([text, tf_amp.status().as_dict() == before, low()]))
    """
    (text, same, converted), _ = run(run_forked, script, FAST)
    assert text.startswith("ValueError")
    assert (same, converted) == (True, False)


def test_what_was_rewritten_stays_so_where_an_optimizer_is_refused_at_last(
    run_forked: RunPython,
) -> None:
    script = """
        import keras
        tf_amp.enable_mixed_precision_graph_rewrite()
        @tf.function
        def product(x):
            return tf.matmul(x, x)
        concrete = product.get_concrete_function(tf.ones((8, 8)))
        concrete(tf.ones((8, 8)))
        keras.backend.backend = lambda: "jax"
        said = message(lambda: tf_amp.enable_mixed_precision_graph_rewrite(keras.optimizers.SGD()))
        nodes = concrete.inference_fn.definition.node_def
        types = [node.attr["T"].type for node in nodes if node.op == "MatMul"]
        print(json.dumps([said, types, len(tf_amp.status().functions)]))
    """
    (said, types, told), _ = run(run_forked, script, FAST)
    assert "backend of Keras is 'jax'" in said
    assert (types, told) == ([types_pb2.DT_BFLOAT16], 1)


def test_enabling_late_warns_and_disabling_is_complete(run_forked: RunPython) -> None:
    script = """
        @tf.function
        def early(x):
            return tf.matmul(x, x)
        early(tf.ones((8, 8)))
        list(tf.data.Dataset.range(2).map(lambda x: x + 1))
        before = low()
        tf_amp.enable_mixed_precision_graph_rewrite()
        during = low()
        status = tf_amp.status()
        tf_amp.disable_mixed_precision_graph_rewrite()
        tf_amp.disable_mixed_precision_graph_rewrite()
        print(json.dumps([before, during, low(), status.as_dict(), tf_amp.status()["enabled"]]))
    """
    (before, during, after, status, enabled), lines = run(run_forked, script, FAST)
    assert (before, during, after, enabled) == (False, True, False, False)
    assert status["decided_by"]["graph_rewrite"].startswith("tf_amp.enable_mixed_precision")
    (late,) = [line for line in lines if "had been traced" in line]
    assert "had been traced: early. They stay in float32" in late
    assert any("AMP off" in line for line in lines)
    assert any("did nothing: AMP is not on" in line for line in lines)


def test_a_program_may_ask_while_it_traces(run_forked: RunPython) -> None:
    script = """
tf_amp.enable_mixed_precision_graph_rewrite()
assert tf.autograph.to_graph(tf_amp.explain)().status.enabled
"""
    assert "AutoGraph" not in run_forked(PRELUDE + script, env=FAST).stderr


def test_functions_traced_before_are_told_once_and_explained(run_forked: RunPython) -> None:
    script = """
        import threading

        def switch():
            for _ in range(5):
                tf_amp.enable_mixed_precision_graph_rewrite()
                tf_amp.disable_mixed_precision_graph_rewrite()

        def from_threads():
            threads = [threading.Thread(target=switch) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        @tf.function
        def early(x):
            return tf.matmul(x, x)

        @tf.function
        def later(x):
            return tf.matmul(x, x) + early(x)

        early(tf.ones((8, 8)))
        from_threads()
        later(tf.ones((8, 8)))
        from_threads()
        tf_amp.enable_mixed_precision_graph_rewrite()
        print(json.dumps([str(tf_amp.explain()), tf_amp.status().traced_before]))
    """
    (text, before), lines = run(run_forked, script, FAST)
    told = [line.partition("traced: ")[2] for line in lines if "had been traced" in line]
    assert [names.partition(".")[0] for names in told] == ["early", "later"]
    assert before == ["early", "later"]
    expected = "traced before AMP was on, so float32 until traced anew: early, later"
    assert expected in text.splitlines()


def test_the_call_wins_over_the_variables(run_forked: RunPython) -> None:
    script = """
        tf_amp.enable_mixed_precision_graph_rewrite()
        print(json.dumps([low(), tf_amp.status()["level"]]))
    """
    env = {
        **FAST,
        "TF_ENABLE_AUTO_MIXED_PRECISION": "0",
        "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LEVEL": "TENSOR_CORES_ONLY",
    }
    (converted, level), _ = run(run_forked, script, env)
    assert (converted, level) == (True, "TENSOR_CORES_ONLY")


def test_illegal_variable_is_an_error_of_the_call(run_forked: RunPython) -> None:
    script = "print(json.dumps(message(tf_amp.enable_mixed_precision_graph_rewrite)))"
    env = {"TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LEVEL": "BOGUS"}
    text, _ = run(run_forked, script, env)
    assert "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LEVEL" in text
    assert "'BOGUS'" in text
    assert "TENSOR_CORES_ONLY" in text


def product_graph() -> graph_pb2.GraphDef:
    graph = graph_pb2.GraphDef()
    graph.node.add(name="given", op="Placeholder").attr["dtype"].type = types_pb2.DT_FLOAT
    product = graph.node.add(name="product", op="MatMul", input=["given", "given"])
    product.attr["T"].type = types_pb2.DT_FLOAT
    relu = graph.node.add(name="relu", op="Relu", input=["product"])
    relu.attr["T"].type = types_pb2.DT_FLOAT
    return graph


def types_of(graph: graph_pb2.GraphDef) -> dict[str, int]:
    return {node.name: node.attr["T"].type for node in graph.node if "T" in node.attr}


@pytest.mark.parametrize(
    ("target_dtype", "device", "low"),
    [("float16", "GPU", 19), ("bfloat16", "GPU", 14), (tf.bfloat16, "CPU", 14)],
)
@pytest.mark.parametrize("parity", [False, True])
def test_rewrite_graph_def(target_dtype: Any, device: Any, low: int, parity: bool) -> None:
    graph = product_graph()
    before = graph.SerializeToString(deterministic=True)
    result = tf_amp.rewrite_graph_def(
        graph, preserve=["relu:0"], target_dtype=target_dtype, device=device, parity=parity
    )
    assert types_of(result.graph_def) == {"product": low, "relu": 1}
    assert result.report.converted_nodes == 1
    assert result.report.target_dtype == tf.as_dtype(target_dtype).name
    assert graph.SerializeToString(deterministic=True) == before


def test_rewrite_graph_def_reads_no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DENYLIST_ADD", "MatMul")
    monkeypatch.setenv("TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_LEVEL", "BOGUS")
    assert tf_amp.rewrite_graph_def(product_graph()).report.converted_nodes > 0
    assert not tf_amp.status()["enabled"]


def test_rewrite_graph_def_preserves_what_a_generator_names() -> None:
    named = (name for name in ("given", "product"))
    assert not tf_amp.rewrite_graph_def(product_graph(), preserve=named).changed


def test_rewrite_graph_def_with_a_config() -> None:
    edit = ListEdit(list_name="deny", action="add", op="MatMul")
    config = PrecisionConfig(target_dtype="bfloat16", device="CPU", list_edits=(edit,))
    assert not tf_amp.rewrite_graph_def(product_graph(), config=config).changed
    with pytest.raises(ValueError, match="give only one"):
        tf_amp.rewrite_graph_def(product_graph(), config=config, device="CPU")


def test_rewrite_graph_def_says_what_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(TypeError, match=r"must be a GraphDef.*type str"):
        tf_amp.rewrite_graph_def("graph.pb")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"write \['relu'\]"):
        tf_amp.rewrite_graph_def(product_graph(), preserve="relu")
    with pytest.raises(ValueError, match=r"'float16', 'bfloat16'.*'float8'"):
        tf_amp.rewrite_graph_def(product_graph(), target_dtype="float8")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'TPU'"):
        tf_amp.rewrite_graph_def(product_graph(), device="TPU")  # type: ignore[arg-type]
    tf_amp.rewrite_graph_def(product_graph(), preserve=["no_such_node"])
    assert "'no_such_node'" in caplog.text


def test_rewrite_graph_def_gives_a_bad_graph_back(caplog: pytest.LogCaptureFixture) -> None:
    graph = product_graph()
    graph.node[1].input[0] = "nowhere"
    result = tf_amp.rewrite_graph_def(graph)
    assert result.failure is not None
    assert result.graph_def == graph
    assert "returned as it was" in caplog.text
