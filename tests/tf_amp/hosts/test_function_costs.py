"""The cost tables in the function host: in force by themselves, with one of its own for XLA."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
from environments import REWRITE, RunPython

from graph_passes.policy.cost_table import CostTable, Curve, OpCost
from graph_passes.policy.cost_table_files import format_table, shipped_table

ENV = {f"{REWRITE}_DTYPE": "bfloat16"}
FAST, SLOW = Curve((1,), (1e-9,)), Curve((1,), (1e-5,))
MEASURED, UNKNOWN = "cpu-avx512_bf16", "cpu-of-another-kind"

# The first argument is the class of device to take the machine for.
PRELUDE = """
import sys
import tensorflow as tf
import tf_amp
import tf_amp.cost_tables
import tf_amp.hardware

tf_amp.hardware.probe_cpu_flags = lambda: frozenset({"avx512_bf16"})
tf_amp.hardware.probe_onednn = lambda: True
tf_amp.cost_tables.device_class = lambda _: sys.argv[1]
tf_amp.cost_tables.tensorflow_release = lambda: "2.21"
tf_amp.enable_mixed_precision_graph_rewrite()
WEIGHTS = tf.Variable(tf.ones((512, 512)))
X = tf.ones((512, 512))

def dense(x):
    return tf.matmul(tf.sigmoid(tf.matmul(x, WEIGHTS)), WEIGHTS)

def traced(function, op="MatMul"):
    context = function._inference_function._bound_context
    definition = context.get_function_def(function._inference_function.name)
    return sorted({tf.as_dtype(n.attr["T"].type).name for n in definition.node_def if n.op == op})

def compiled(function):
    hlo = function.experimental_get_compiler_ir(X)(stage="hlo")
    return sorted({line.split("=")[1].strip().split("[")[0]
                   for line in hlo.splitlines() if " dot(" in line})
"""

BOTH = """
for jit in (False, True):
    step = tf.function(dense, jit_compile=jit)
    concrete = step.get_concrete_function(X)
    concrete(X)
    print(jit, traced(concrete), traced(concrete, "Sigmoid"))
"""

NESTED = """
for _ in range(2):
    inner = tf.function(dense)
    inner(X)
    outer = tf.function(lambda x: inner(x) * 2.0, jit_compile=True)
    print("calls one traced before", traced(inner.get_concrete_function(X)), compiled(outer))

@tf.function(jit_compile=True)
def loop(x):
    for _ in tf.range(3):
        x = tf.sigmoid(tf.matmul(x, WEIGHTS))
    return x

print("loop", compiled(loop))

inner = tf.function(dense, jit_compile=True)
outer = tf.function(lambda x: tf.matmul(inner(tf.matmul(x, WEIGHTS)), WEIGHTS))
outer(X)
print("is called", traced(outer.get_concrete_function(X)), compiled(inner))

with tf.GradientTape() as tape:
    loss = tf.reduce_sum(inner(X))
tape.gradient(loss, WEIGHTS)
context = inner.get_concrete_function(X)._inference_function._bound_context
found = set()
for name in context.list_function_names():
    definition = context.get_function_def(name)
    if "_XlaMustCompile" in definition.attr and definition.attr["_XlaMustCompile"].b:
        found |= {tf.as_dtype(n.attr["T"].type).name
                  for n in definition.node_def if n.op == "MatMul"}
print("gradient", found)
"""

BATCHED = """
from tensorflow.python.eager import context

inner = tf.function(dense)
step = tf.function(lambda x: inner(x) * 2.0, jit_compile=True)

@tf.function
def train(batches):
    return step(tf.matmul(next(batches), WEIGHTS))

batches = iter(tf.data.Dataset.from_tensors(tf.ones(512)).repeat(4096).batch(1024))
for _ in range(3):
    train(batches)
running = map(context.context().get_function_def, context.context().list_function_names())
for function in running:
    name = function.signature.name
    types = {tf.as_dtype(n.attr["T"].type).name for n in function.node_def if n.op == "MatMul"}
    if "tf_amp_size" in name and types:
        print(name.split("_")[3], *sorted(types))
"""


def table(**rows: tuple[Curve, Curve]) -> CostTable:
    shipped = shipped_table(MEASURED, "bfloat16")
    assert shipped is not None
    costs = ((op, OpCost("flops" if op == "MatMul" else "elements", *t)) for op, t in rows.items())
    return dataclasses.replace(shipped, rows=tuple(costs))


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return done.stdout.splitlines()


@pytest.mark.parametrize("own", [False, True])
def test_xla_leaves_element_wise_ops_out_of_account(
    run_forked: RunPython, tmp_path: Path, own: bool
) -> None:
    costs = table(MatMul=(SLOW, FAST), Sigmoid=(FAST, SLOW))
    path = tmp_path / "costs.toml"
    path.write_text(format_table(dataclasses.replace(costs, compiled=own)))
    env = {**ENV, f"{REWRITE}_COST_TABLE": str(path)}
    printed = lines(run_forked(PRELUDE + BOTH, env, args=(UNKNOWN,)))
    assert printed[1] == "True ['bfloat16'] ['bfloat16']"
    # A table for XLA has nothing to say of what XLA does not compile.
    assert printed[0] == f"False ['bfloat16'] ['{'bfloat16' if own else 'float32'}']"


def test_what_xla_makes_slower_stays_float32_and_is_told_once(run_forked: RunPython) -> None:
    done = run_forked(PRELUDE + BOTH + NESTED, ENV, args=(MEASURED,))
    assert lines(done)[0].startswith("False ['bfloat16']")
    assert lines(done)[1:] == [
        "True ['float32'] ['float32']",
        *["calls one traced before ['bfloat16'] ['f32']"] * 2,
        "loop ['f32']",
        "is called ['bfloat16'] ['f32']",
        "gradient {'float32'}",
    ]
    (said,) = [line for line in done.stderr.splitlines() if "compiled by XLA" in line]
    assert said.startswith("tf_amp: WARNING: 'dense' stays float32: it is compiled by XLA")
    for part in ("shipped for cpu-avx512_bf16-xla2.21", "MatMul", "jit_compile=False"):
        assert part in said
    assert f"{REWRITE}_COST_TABLE=off" in said
    # What is not named there says it in its own line.
    (further,) = [line for line in done.stderr.splitlines() if " loop: " in line]
    assert further.endswith("stays float32: slower under XLA here")


def test_what_xla_compiles_stays_as_it_is_when_its_caller_is_planned_for_a_batch(
    run_forked: RunPython,
) -> None:
    done = run_forked(PRELUDE + BATCHED, ENV, args=(MEASURED,))
    assert lines(done) == ["train bfloat16"]


@pytest.mark.parametrize(
    ("device_class", "env"),
    [
        (MEASURED, {f"{REWRITE}_COST_TABLE": "off"}),
        (MEASURED, {f"{REWRITE}_IGNORE_PERFORMANCE": "1"}),
        (UNKNOWN, {}),
    ],
)
def test_without_a_table_for_xla_everything_is_converted(
    run_forked: RunPython, device_class: str, env: dict[str, str]
) -> None:
    done = run_forked(PRELUDE + BOTH + NESTED, {**ENV, **env}, args=(device_class,))
    assert lines(done)[1] == "True ['bfloat16'] ['bfloat16']"
    assert lines(done)[-1] == "gradient {'bfloat16'}"
    assert not [line for line in lines(done)[2:5] if "['bf16']" not in line]
    assert "stays float32" not in done.stderr
