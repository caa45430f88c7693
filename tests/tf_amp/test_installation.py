"""The installed state: what is decided, said and counted."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from environments import CONVERTS, RunPython

from tf_amp import plan
from tf_amp.env_config import Settings
from tf_amp.hardware import Target

PRELUDE = """
# Where the package is installed, Python's start has switched AMP on by itself.
import tf_amp.autoload
tf_amp.autoload.deactivate()
import dataclasses, json, logging
import tensorflow as tf
from tf_amp import compatibility, installation
from tf_amp.env_config import EnvConfigError, Settings, read_settings
from tf_amp.hosts import session as session_host
from tf_amp.patches import Patches
from tensorflow.python.eager.polymorphic_function import atomic_function

NOT_HOOKED = atomic_function.from_func_graph

def on(**settings):
    chosen = {"target_dtype": "bfloat16", "ignore_performance": True, "cost_table": "off",
              **settings}
    return installation.install(Settings(graph_rewrite=True, **chosen), source="test")

def product():
    @tf.function
    def product(x):
        return tf.matmul(x, x)
    return product(tf.ones((8, 8)))

def session(*options):
    config = tf.compat.v1.ConfigProto()
    for option in options:
        setattr(config.graph_options, option, True)
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as made:
        made.run(tf.ones([8, 8]) @ tf.ones([8, 8]))

def no_plugin(_):
    raise session_host.CApiError("not to be had")

def members():
    rows = compatibility.FUNCTION_HOST + compatibility.SESSION_HOST
    return {(row.module, row.path): row.find() for row in rows}
"""


def run(run_python: RunPython, script: str, **options: Any) -> CompletedProcess[str]:
    return run_python(PRELUDE + textwrap.dedent(script), **options)


def ours(done: CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("tf_amp")]


FLOAT16, BFLOAT16 = Target("float16", "GPU", ""), Target("bfloat16", "CPU", "")
NOTHING = Target(None, "CPU", "")


@pytest.mark.parametrize(
    ("target", "settings", "on", "why"),
    [
        (FLOAT16, {"loss_scaling": True}, True, "float16 needs it"),
        (BFLOAT16, {"loss_scaling": True}, False, "range of float32"),
        (BFLOAT16, {"loss_scaling": True, "loss_scaling_asked": True}, True, "asked for"),
        (NOTHING, {"loss_scaling": True}, False, "nothing is converted"),
        (NOTHING, {"loss_scaling": True, "loss_scaling_asked": True}, True, "asked for"),
        (NOTHING, {"loss_scaling": True, "graph_rewrite": False}, True, "asked for"),
        (FLOAT16, {"loss_scaling": False}, False, "not asked for"),
    ],
)
def test_loss_scaling_follows_from_the_target(
    target: Target, settings: dict[str, bool], on: bool, why: str
) -> None:
    chosen = Settings(**{"graph_rewrite": True, **settings})
    decided, reason = plan._decide_loss_scaling(chosen, target, plan.ENVIRONMENT)
    assert decided is on
    assert why in reason


def test_one_line_when_switched_on_and_one_for_the_graph(run_forked: RunPython) -> None:
    script = """
        settings = dataclasses.replace(read_settings(), target_dtype="bfloat16",
                                       ignore_performance=True, cost_table="off")
        first = installation.install(settings, source="environment")
        assert installation.install(settings, source="environment") is first
        assert installation.current() is first
        product(), product()
        print(json.dumps(first.status().as_dict()))
    """
    env = {
        "TF_ENABLE_AUTO_MIXED_PRECISION": "1",
        "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_ALLOWLIST_ADD": "Relu",
        "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DENYLIST_ADD": "MatMull",
        "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRIT": "1",
    }
    done = run(run_forked, script, env=env)
    on, *notes, graph = ours(done)
    assert on.startswith("tf_amp: AMP on: bfloat16 on ")
    assert "2 list edits; loss scaling off (bfloat16 has the range of float32" in on
    assert on.endswith("decided by TF_ENABLE_AUTO_MIXED_PRECISION.")
    assert len(notes) == 3
    assert "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRIT is read by nobody" in notes[0]
    assert any("moved 'Relu' from the clear list to the allow list" in note for note in notes)
    assert any("'MatMull'" in note and "Did you mean 'MatMul'?" in note for note in notes)
    assert graph == "tf_amp: product: MatMul 1 of 1 in bfloat16, 2 casts"

    status = json.loads(done.stdout)
    assert status["enabled"]
    assert status["why"] == "switched on by environment"
    assert status["decided_by"]["graph_rewrite"] == "TF_ENABLE_AUTO_MIXED_PRECISION"
    assert (status["target_dtype"], status["graph_rewrite"]) == ("bfloat16", True)
    assert status["list_edits"] == ["allow add Relu", "deny add MatMull"]
    assert (status["graphs_rewritten"], status["graphs_failed"]) == (2, 0)
    assert (status["nodes_converted"], status["nodes_total"], status["casts"]) == (4, 4, 4)
    assert status["hosts"]["function"] == "hooked"
    assert (status["loss_scaling"], status["loss_scale"]["skipped_steps"]) == (False, 0)


@pytest.mark.parametrize("hooked", [True, False])
def test_on_hardware_without_units_nothing_is_converted(
    run_forked: RunPython, hooked: bool
) -> None:
    """Nor is anything hooked without the rules that pay in float32."""
    script = f"""
        from graph_passes.policy.config import PAY_IN_FLOAT32
        from tf_amp import hardware
        hardware.probe_cpu_flags = lambda: frozenset({{"sse2"}})
        hardware.probe_gpu_capabilities = list
        off = frozenset(PAY_IN_FLOAT32) - {{"fused-update" if {hooked} else ""}}
        installed = installation.install(
            Settings(graph_rewrite=True, loss_scaling=True, log_path="trace", disabled_rules=off),
            source="environment",
        )
        assert (atomic_function.from_func_graph is not NOT_HOOKED) is {hooked}
        assert product().dtype == tf.float32
        session()
        print(json.dumps(installed.status().as_dict()))
    """
    done = run(run_forked, script)
    on, warning = ours(done)
    assert "AMP on: nothing is converted" in on
    assert warning.startswith(
        "tf_amp: WARNING: AMP was asked for, but every graph stays in float32"
    )
    assert "AVX512_BF16" in warning
    assert "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_IGNORE_PERFORMANCE=1" in warning
    status = json.loads(done.stdout)
    assert ("is done: fused-update." in warning) is hooked
    hosts = dict.fromkeys(("function", "session"), "hooked") if hooked else {}
    assert (status["enabled"], status["graph_rewrite"], status["hosts"]) == (True, False, hosts)
    assert (status["graphs_rewritten"], status["nodes_converted"], status["casts"]) == (0, 0, 0)
    assert "AVX512_BF16" in status["reason"]
    assert warning.endswith("No trace is written to trace.")
    assert status["log_path"] is None


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("on()", None),
        ("on()\ntf.config.list_physical_devices()", None),
        ("on()\nlen(tf.data.Dataset.range(3))", "no function ran, those of input pipelines aside"),
        ("on()\ntf.ones([8, 8]) @ tf.ones([8, 8])", "decorate the step with tf.function"),
        (
            "on()\ntf.function(lambda x: tf.nn.relu(x))(tf.ones(3))",
            "no op of the allow list is present",
        ),
        (
            "on()\nx = tf.ones([64, 64], tf.float64)\ntf.function(lambda x: tf.nn.relu(x @ x))(x)",
            "MatMul x1, of the allow list: in float64, and only float32 is converted",
        ),
        (
            "on()\nx = tf.ones([64, 64], tf.half)\ntf.function(lambda x: tf.nn.relu(x @ x))(x)",
            "MatMul x1, of the allow list: the program itself has it in float16",
        ),
        (
            "on()\nsession('place_pruned_graph')",
            "a session stays as it is, because in its config `graph_options.place_pruned_graph`",
        ),
        (
            "session_host.graph_plugin = no_plugin\non()\nsession()",
            "not to be had; graphs of tf.compat.v1.Session stay as they are",
        ),
        ("on()\nproduct()", None),
        ("on()\ninstallation.uninstall()", None),
        ("installation.install(Settings(loss_scaling=True), source='test')", None),
    ],
)
def test_warning_at_exit_where_nothing_was_converted(
    run_forked: RunPython, script: str, expected: str | None
) -> None:
    done = run_forked(PRELUDE + script)
    warnings = [line for line in ours(done) if "no graph was converted" in line]
    assert len(warnings) == (expected is not None)
    if expected is not None:
        assert expected in warnings[0]
        assert ours(done)[-1] == warnings[0]


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("import no_such_module", False),
        ("assert not tf.constant(1.0)", False),
        ("tf.ones(1)\nimport threading\nthreading.Timer(0, lambda: 1 / 0).start()", True),
        ("tf.function(lambda x: tf.nn.relu(x))(tf.ones(3))\nraise ValueError", True),
        ("tf.ones(1)\nimport sys\nsys.exit(1)", True),
    ],
)
def test_a_program_that_dies_before_its_work_has_the_last_word(
    run_forked: RunPython, script: str, told: bool
) -> None:
    done = run_forked(f"{PRELUDE}\non()\n{script}", check=False)
    assert any("AMP was on, but" in line for line in ours(done)) == told


def test_updates_alone_are_not_said_to_be_nothing(run_forked: RunPython) -> None:
    script = """
        import keras
        on()
        model = keras.Sequential([keras.layers.Embedding(8, 4), keras.layers.LayerNormalization()])
        model.compile(keras.optimizers.Adam(), "mse", jit_compile=False)
        model.fit(tf.zeros([4, 2]), tf.zeros([4, 2, 4]), verbose=0)
    """
    done = run(run_forked, script)
    *_, line, last = ours(done)
    assert "fused; it has no matrix product or convolution in float32" in line
    assert "AMP was on, but no matrix product or convolution was converted (" in last


def test_unsupported_tensorflow_is_not_hooked(run_forked: RunPython) -> None:
    script = """
        import tf_amp
        tf.__version__ = "2.22.0"
        assert on() is None
        assert atomic_function.from_func_graph is NOT_HOOKED
        product()
        print(json.dumps(tf_amp.status().as_dict()))
        optimizer = object()
        from unittest import mock
        with mock.patch("tf_amp.api._refuse_optimizer"):
            assert tf_amp.enable_mixed_precision_graph_rewrite(optimizer) is optimizer
    """
    done = run(run_forked, script)
    assert not any("AMP on" in line for line in ours(done))
    assert "AMP stays off" in ours(done)[0]
    status = json.loads(done.stdout)
    assert not status["enabled"]
    assert "TensorFlow 2.22.0 is not supported (supported: 2.17 to 2.21)" in status["why"]


def test_everything_that_is_replaced_is_a_row_and_comes_off(run_forked: RunPython) -> None:
    script = """
        before = members()
        on()
        replaced = {row for row, member in members().items() if member is not before[row]}
        installation.uninstall()
        assert members() == before
        rows = []
        class Noting(Patches):
            def replace(self, owner, name, make):
                rows.append((owner, name))
                super().replace(owner, name, make)
        from tf_amp.hosts import function, function_originals, session, session_plugin
        for module in function, function_originals, session, session_plugin:
            module.Patches = Noting
        on()
        for owner, name in rows:
            module = getattr(owner, "__module__", owner.__name__)
            path = f"{owner.__name__}.{name}" if isinstance(owner, type) else name
            assert (module, path) in replaced, (module, path)
        assert len(rows) == len(replaced) > 10, rows
    """
    run(run_forked, script)


def test_an_installation_that_fails_leaves_nothing_behind(run_forked: RunPython) -> None:
    script = """
        import tf_amp
        before, real, handlers = members(), Patches.replace, 0
        for failing in range(30):
            calls = iter(range(100))
            def replace(self, *arguments):
                if next(calls) == failing:
                    raise RuntimeError("planted")
                real(self, *arguments)
            Patches.replace = replace
            try:
                on()
            except RuntimeError:
                handlers += 1
                assert members() == before, failing
                assert installation.current() is None and not tf_amp.status().enabled
            else:
                break
        assert handlers == next(calls) > 10, handlers  # each replacement has failed once
        assert product().dtype == tf.float32 and tf_amp.status().graphs_rewritten == 1
    """
    run(run_forked, script)


def test_patches_that_others_made_since_are_left_alone(run_forked: RunPython) -> None:
    script = """
        import functools
        on()
        ours = atomic_function.from_func_graph
        called = []
        @functools.wraps(ours)
        def theirs(*args, **kwargs):
            called.append(args)
            return ours(*args, **kwargs)
        atomic_function.from_func_graph = theirs
        installation.uninstall()
        assert atomic_function.from_func_graph is theirs
        product()
        assert called
        again = on()
        product()
        assert again.status().graphs_rewritten == 1
    """
    run(run_forked, script)


def test_settings_replace_each_other_and_contradictions_name_variables(
    run_forked: RunPython,
) -> None:
    script = """
        first = on()
        second = on(level="TENSOR_CORES_ONLY")
        assert second is not first
        assert installation.current() is second
        assert atomic_function.from_func_graph is not NOT_HOOKED
        assert installation.install(Settings(), source="test") is None
        assert installation.current() is None
        assert atomic_function.from_func_graph is NOT_HOOKED
        assert not installation.uninstall()
        try:
            on(level="UNSAFE_FORCE_ALL", decided_by={"level": "LEVEL_VARIABLE"})
        except EnvConfigError as error:
            print(error)
        assert installation.current() is None
        assert atomic_function.from_func_graph is NOT_HOOKED
    """
    done = run(run_forked, script)
    assert "UNSAFE_FORCE_ALL" in done.stdout
    assert "LEVEL_VARIABLE" in done.stdout


def test_failed_rewrites_are_said_with_the_place_of_both_graphs(
    run_forked: RunPython, tmp_path: Path
) -> None:
    script = f"""
        from tf_amp.hosts import function_calls
        real = function_calls.rewrite_function_def
        def failing(definition, *args, **kwargs):
            result = real(definition, *args, **kwargs)
            return dataclasses.replace(result, proto=definition, changed=False,
                                       failure="a planted failure", rejected=result.proto)
        function_calls.rewrite_function_def = failing
        installed = on(log_path={str(tmp_path / "made")!r})
        for _ in range(5):
            assert product().dtype == tf.float32
        print(json.dumps(installed.status().as_dict()))
    """
    done = run(run_forked, script)
    errors = [line for line in ours(done) if "ERROR" in line]
    assert len(errors) == 3  # of five; the number is in the status
    assert "'product'" in errors[0]
    assert "a planted failure" in errors[0]
    assert str(tmp_path / "made") in errors[0]
    assert json.loads(done.stdout)["graphs_failed"] == 5
    assert "'product': a planted failure" in ours(done)[-1]
    names = sorted(path.name for path in (tmp_path / "made").glob("*/*"))
    assert names[0] == "graphdef_AutoMixedPrecision_product_0000.pb"
    assert sum("product" in name for name in names) == 5 * 4


def test_log_path_that_cannot_be_written_is_one_warning(
    run_forked: RunPython, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    script = f"""
        on(log_path={str(tmp_path / "file" / "below")!r})
        product(), product()
    """
    done = run(run_forked, script)
    warnings = [line for line in ours(done) if "WARNING" in line]
    assert len(warnings) == 1
    assert "cannot be written" in warnings[0]
    assert str(tmp_path / "file" / "below") in warnings[0]
    assert any("product: MatMul 1 of 1" in line for line in ours(done))


def test_a_function_and_its_caller_are_counted_once(run_forked: RunPython) -> None:
    script = """
        installed = on()
        @tf.function
        def inner(x):
            return tf.matmul(x, x)
        @tf.function
        def outer(x):
            return inner(x) * tf.matmul(inner(x), x)
        x = tf.ones((8, 8))
        inner(x)
        alone = installed.status()
        outer(x)
        both = installed.status()
        from tensorflow.python.eager import context
        definition = context.context().get_function_def(outer.get_concrete_function(x).name)
        print(alone.nodes_converted, both.nodes_converted - alone.nodes_converted,
              both.nodes_total, both.casts, both.graphs_rewritten)
    """
    printed = list(map(int, run(run_forked, script).stdout.split()))
    # The caller alone: its two calls with a product each, a product and a multiplication.
    assert printed[0] == 2
    assert printed[2] <= 10
    assert printed[4] == 2


def test_steps_of_keras_and_a_policy_are_named(run_forked: RunPython) -> None:
    script = """
        import keras, numpy as np
        keras.config.set_dtype_policy("mixed_bfloat16")
        on()
        model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(8, dtype="float32")])
        model.compile("sgd", "mse")
        x = np.ones((8, 8), np.float32)
        model.fit(x, x, verbose=0)
        model.evaluate(x, x, verbose=0)
        model.predict(x, verbose=0)
    """
    lines = ours(run(run_forked, script))
    for step in ("fit", "evaluate", "predict"):
        assert sum(f"({step}): MatMul" in line for line in lines) == 1
    (policy,) = [line for line in lines if "policy" in line]
    assert "'mixed_bfloat16'" in policy
    assert "keras.config.set_dtype_policy('float32')" in policy


def test_the_pass_may_be_what_imports_tensorflow(run_python: RunPython) -> None:
    code = """
        import tf_amp.autoload
        tf_amp.autoload.activate()
        import graph_passes
        import tf_amp
        print(tf_amp.status()["enabled"])
    """
    done = run_python(code, {"TF_ENABLE_AUTO_MIXED_PRECISION": "1", **CONVERTS})
    assert done.stdout.split() == ["True"]
    assert "could not be switched on" not in done.stderr


def test_switching_on_and_off_makes_no_context_of_tensorflow(run_forked: RunPython) -> None:
    """Made before a script disables eager execution, one lets `init_scope` leave its graph."""
    done = run(
        run_forked,
        """
        import tf_amp
        from tensorflow.python.eager import context

        on(target_dtype="float16")
        optimizer = tf_amp.enable_mixed_precision_graph_rewrite(
            tf.compat.v1.train.AdamOptimizer(0.5)
        )
        print(tf_amp.status().enabled, context.context_safe())
        tf_amp.disable_mixed_precision_graph_rewrite()
        print(context.context_safe())

        on(target_dtype="float16")
        tf.compat.v1.disable_eager_execution()

        def where():
            with tf.init_scope():
                return tf.constant(tf.executing_eagerly())

        in_a_branch = tf.cond(tf.constant(True), where, where)
        with tf.compat.v1.Session() as session:
            print(session.run(in_a_branch))
        """,
    )
    assert done.stdout.splitlines()[-3:] == ["True None", "None", "False"]
