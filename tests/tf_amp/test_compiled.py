"""What is decided about functions that XLA compiles, and the line that says it."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import tensorflow as tf

from graph_passes import PrecisionConfig, RewriteResult, rewrite_function_def
from graph_passes.policy.cost_table import Curve, OpCost
from graph_passes.policy.cost_table_files import shipped_table
from tf_amp import cost_tables
from tf_amp.compiled import CompiledFunctions, is_compiled
from tf_amp.env_config import read_settings
from tf_amp.env_variables import COST_TABLE
from tf_amp.hardware import Target

CPU = Target("bfloat16", "CPU", "")
CLASS = "cpu-avx512_bf16"


def traced(jit: bool):
    function = tf.function(lambda x: tf.matmul(x, x), jit_compile=jit)
    return function.get_concrete_function(tf.TensorSpec((256, 256))).function_def


def functions(
    monkeypatch: pytest.MonkeyPatch, tmp_path, device_class: str = CLASS, **changes
) -> CompiledFunctions:
    """As they are on a machine of a class, where nobody has measured a table."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cost_tables, "device_class", lambda _: device_class)
    monkeypatch.setattr(cost_tables, "tensorflow_release", lambda: "2.21")
    plain = shipped_table(CLASS, "bfloat16")
    config = PrecisionConfig(target_dtype="bfloat16", device="CPU", cost_table=plain)
    config = dataclasses.replace(config, **changes)
    costs = cost_tables.choose_table(read_settings({}), CPU, compiled=True)
    return CompiledFunctions(costs, config)


def rewritten(found: CompiledFunctions) -> RewriteResult:
    return rewrite_function_def(traced(jit=True), found.config)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_function_tells_whether_xla_compiles_it() -> None:
    assert is_compiled(traced(jit=True))
    assert not is_compiled(traced(jit=False))


def test_a_table_of_their_own_counts_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    found = functions(monkeypatch, tmp_path)
    assert found.apart
    assert found.config.fused
    assert found.config.cost_table is found.costs.table
    other = functions(monkeypatch, tmp_path, "cpu-plain")
    assert not other.apart
    assert other.config.fused
    assert other.config.cost_table == shipped_table(CLASS, "bfloat16")


def test_what_stays_float32_is_told_once_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    slow = OpCost("flops", Curve((1000,), (10e-6,)), Curve((1000,), (2e-6,)))
    plain = shipped_table(CLASS, "bfloat16")
    assert plain is not None
    plain = dataclasses.replace(plain, rows=(("MatMul", slow),))
    found = functions(monkeypatch, tmp_path, cost_table=plain)
    table = found.costs.table
    assert table is not None
    under_xla = OpCost("flops", Curve((1000,), (8e-6,)), Curve((1000,), (9e-6,)))
    table = dataclasses.replace(table, rows=(("MatMul", under_xla),))
    found.costs = dataclasses.replace(found.costs, table=table)
    result = rewritten(found)
    assert not result.changed
    for _ in range(2):
        found.say("step", [result])
    (line,) = said(caplog)
    assert line.startswith("'step' stays float32: it is compiled by XLA (jit_compile=True)")
    assert "shipped for cpu-avx512_bf16-xla2.21" in line
    assert "MatMul 4.0 times as long. Set jit_compile=False" in line  # 8 us under XLA, 2 us without
    assert f"{COST_TABLE}=off" in line
    caplog.clear()
    found = functions(monkeypatch, tmp_path, cost_table=plain)
    found.costs = dataclasses.replace(found.costs, table=table)
    found.say("_conv_xla", [result])  # nobody but Keras can set that
    (line,) = said(caplog)
    assert "Keras itself has it compiled" in line
    assert "jit_compile=False" not in line


def test_no_promise_is_made_without_measurements(
    monkeypatch: pytest.MonkeyPatch, tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    found = functions(monkeypatch, tmp_path, cost_table=None)
    found.say("step", [rewritten(found)])
    (line,) = said(caplog)
    assert "jit_compile=False" not in line


def test_nothing_is_said_of_a_function_that_is_converted_or_has_nothing_to_convert(
    monkeypatch: pytest.MonkeyPatch, tmp_path, caplog: pytest.LogCaptureFixture
) -> None:
    found = functions(monkeypatch, tmp_path)
    nothing = tf.function(lambda x: x + 1.0, jit_compile=True)
    definition = nothing.get_concrete_function(tf.TensorSpec((2,))).function_def
    found.say("step", [rewrite_function_def(definition, found.config)])
    off = dataclasses.replace(found.config, cost_table=None)
    converted = rewrite_function_def(traced(jit=True), off)
    assert converted.changed
    found.say("step", [rewritten(found), converted])
    other = functions(monkeypatch, tmp_path, "cpu-plain")
    other.say("step", [rewritten(found)])
    assert said(caplog) == []
