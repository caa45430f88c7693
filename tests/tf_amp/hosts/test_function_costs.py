"""The cost table in the function host: in force by itself, and without element-wise ops for XLA."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable
from pathlib import Path

from graph_passes.costs import Curve, OpCost, format_table, shipped_table

RunPython = Callable[..., subprocess.CompletedProcess[str]]
REWRITE = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE"

CODE = """
import tensorflow as tf
import tf_amp

tf_amp.enable_mixed_precision_graph_rewrite()

for jit in (False, True):
    @tf.function(jit_compile=jit)
    def step(x):
        return tf.matmul(tf.sigmoid(tf.matmul(x, x)), x)

    concrete = step.get_concrete_function(tf.TensorSpec((256, 256), tf.float32))
    context = concrete._inference_function._bound_context
    definition = context.get_function_def(concrete._inference_function.name)
    dtypes = [tf.as_dtype(n.attr["T"].type).name for n in definition.node_def
              if n.op in ("MatMul", "Sigmoid")]
    print(jit, *dtypes)
"""


def test_xla_leaves_element_wise_ops_out_of_account(run_python: RunPython, tmp_path: Path) -> None:
    table = shipped_table("cpu-avx512_bf16", "bfloat16")
    assert table is not None
    fast, slow = Curve((1,), (1e-9,)), Curve((1,), (1e-5,))
    rows = (("MatMul", OpCost("flops", slow, fast)), ("Sigmoid", OpCost("elements", fast, slow)))
    path = tmp_path / "costs.toml"
    path.write_text(format_table(dataclasses.replace(table, rows=rows)))
    env = {
        f"{REWRITE}_COST_TABLE": str(path),
        f"{REWRITE}_DTYPE": "bfloat16",
        f"{REWRITE}_IGNORE_PERFORMANCE": "1",
    }
    printed = run_python(CODE, env).stdout.splitlines()
    assert printed == [
        "False bfloat16 float32 bfloat16",
        "True bfloat16 bfloat16 bfloat16",
    ]
    off = run_python(CODE, {**env, f"{REWRITE}_COST_TABLE": "off"}).stdout.splitlines()
    assert off[0] == "False bfloat16 bfloat16 bfloat16"
