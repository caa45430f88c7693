"""Which function of the runtime tells what a training step computes in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import function_evidence
import pytest
from environments import FLOAT16
from tensorflow.core.framework.node_def_pb2 import NodeDef

SCRIPT = """
import sys
sys.path.append(sys.argv[1])
import keras
import numpy as np
from function_evidence import low_precision_ops

# Nobody reads the gradient of the images that the first convolution's gradient comes with.
model = keras.Sequential([keras.layers.Conv2D(8, 3), keras.layers.Flatten(), keras.layers.Dense(4)])
model.compile("sgd", "mse", jit_compile=False)
model.train_on_batch(np.ones((8, 12, 12, 4), "float32"), np.ones((8, 4), "float32"))
print(low_precision_ops())
"""
"""A step that makes its variables is traced twice, and runs as the second trace."""


@pytest.mark.slow
def test_the_trace_that_runs_is_told_not_the_one_with_more_nodes(run_python: Any) -> None:
    done = run_python(
        SCRIPT,
        env=FLOAT16,
        args=(str(Path(function_evidence.__file__).parent),),
    )
    found = "{'float16': {'Conv2D': 1, 'Conv2DBackpropFilter': 1, 'MatMul': 3}}"
    assert done.stdout.splitlines()[-1] == found


@pytest.mark.parametrize(
    ("name", "op", "counts"),
    [
        ("dense/MatMul", "MatMul", True),
        ("grad/filter", "_MklNativeConv2DBackpropFilterWithBias", True),
        ("grad/BiasAddGrad/ones_product/MatMul", "MatMul", False),
        ("relu", "Relu", False),
    ],
)
def test_a_sum_that_became_a_product_is_none(name: str, op: str, counts: bool) -> None:
    assert function_evidence.is_product(NodeDef(name=name, op=op)) is counts
