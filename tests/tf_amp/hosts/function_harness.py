"""What the scripts of the function-host tests share; imported inside their subprocess."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function

from tf_amp import installation
from tf_amp.env_config import Settings
from tf_amp.hosts import function
from tf_amp.hosts.function_names import readable_name
from tf_amp.hosts.function_redirects import called_names

COMPUTE = ("MatMul", "BatchMatMulV2", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")


def report(name: str, **facts: Any) -> None:
    """Hands the facts of a case to the test process."""
    print("@@" + json.dumps({"name": name, **facts}), flush=True)


def switch_on(**settings: Any) -> installation.Installation:
    """Installs AMP for bfloat16, whatever this machine is fast at and however small the graph."""
    chosen = {
        "target_dtype": "bfloat16",
        "ignore_performance": True,
        "cost_table": "off",
        **settings,
    }
    installed = installation.install(Settings(graph_rewrite=True, **chosen), source="test")
    assert installed is not None
    return installed


def weights(seed: int = 0, shape: tuple[int, ...] = (64, 64)) -> Any:
    """Values that bfloat16 cannot hold exactly."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def running(name: bytes | str) -> function_pb2.FunctionDef:
    """The definition that the runtime has under a name."""
    return context.context().get_function_def(name)


def most_nodes(chosen: Callable[[Any], bool]) -> int:
    """The nodes of a kind in the function that has the most; Keras traces a step twice."""
    names = [name for _, name in list(atomic_function.RUNTIME_FUNCTION_REFS)]
    runs = filter(context.context().has_function, names)
    return max((sum(map(chosen, running(name).node_def)) for name in runs), default=0)


def compute_types(definition: function_pb2.FunctionDef) -> list[int]:
    """The dtypes of a definition's matrix products and convolutions, without repetition."""
    return node_types(definition.node_def)


def node_types(nodes: Any) -> list[int]:
    """The same for a list of nodes."""
    return sorted({node.attr["T"].type for node in nodes if node.op in COMPUTE})


def live_functions() -> dict[str, list[int]]:
    """Readable name -> dtypes of the compute nodes, of every function with some that may run.

    Those may run that wait for no rewrite, and what they call by name.
    """
    found: dict[str, set[int]] = {}
    runtime, host = context.context(), function._installed
    waiting = host._deferred._waiting if host else {}
    pending = [
        key[1].decode()
        for key in list(atomic_function.RUNTIME_FUNCTION_REFS)
        if key[0] == runtime.function_scope_id and key not in waiting
    ]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name not in seen and runtime.has_function(name):
            seen.add(name)
            pending.extend(called_names(running(name)))
            if types := compute_types(running(name)):
                traced = re.sub("_amp_[0-9a-f]{12}$", "", name)
                found.setdefault(readable_name(traced), set()).update(types)
    return {name: sorted(types) for name, types in found.items()}


def dots(function: Any, *args: Any) -> list[str]:
    """The matrix products and convolutions of a jit-compiled function's HLO: result dtypes."""
    text = function.experimental_get_compiler_ir(*args)(stage="hlo")
    lines = [line for line in text.splitlines() if " dot(" in line or " convolution(" in line]
    return sorted({line.split("=")[1].strip().split("[")[0] for line in lines})


def max_error(got: Any, wanted: Any) -> float:
    """The largest difference, as a Python float."""
    return float(tf.reduce_max(tf.abs(tf.cast(got, tf.float32) - wanted)))
