"""The four ways to train that the benchmarks compare, and how a process is put into each.

- ``float32``: nothing is switched on.
- ``tf_amp``: the environment variable ``TF_ENABLE_AUTO_MIXED_PRECISION`` alone.
- ``upstream``: the graph optimizer that TensorFlow has itself.
- ``keras_policy``: a Keras mixed dtype policy, set before the model is built.

A variant holds for a whole process, so every process has exactly one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIANTS = ("float32", "tf_amp", "upstream", "keras_policy")
DTYPES = ("bfloat16", "float16")
FLOAT32 = "float32"
"""In place of a target dtype: what tf_amp does on a CPU without fast units for any."""

_REPOSITORY = Path(__file__).resolve().parent.parent
_PREFIXES = ("TF_ENABLE_AUTO_MIXED_PRECISION", "TF_AUTO_MIXED_PRECISION")
_UPSTREAM_OPTIONS = {
    "bfloat16": "auto_mixed_precision_onednn_bfloat16",
    "float16": "auto_mixed_precision",
}


def variants_for(dtype: str) -> tuple[str, ...]:
    """The variants that do something for a dtype of `DTYPES` or in `FLOAT32`, float32 itself."""
    return VARIANTS[:2] if dtype == FLOAT32 else VARIANTS


def environment(
    variant: str, dtype: str = "bfloat16", base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns the environment that a process of a variant is started with.

    Args:
        variant: one of `VARIANTS`.
        dtype: the target dtype of the variants that have one, of `DTYPES`; or `FLOAT32`.
        base: what to start from. AMP variables in it are left out: they would reach every variant.

    Raises:
        ValueError: `variant` or `dtype` is unknown, or the variant does nothing in `FLOAT32`.
    """
    if variant not in VARIANTS:
        raise ValueError(f"Unknown variant {variant!r}; legal values are {', '.join(VARIANTS)}.")
    if dtype not in (*DTYPES, FLOAT32):
        legal = ", ".join((*DTYPES, FLOAT32))
        raise ValueError(f"Unknown dtype {dtype!r}; legal values are {legal}.")
    if variant not in variants_for(dtype):
        legal = ", ".join(variants_for(dtype))
        raise ValueError(f"{variant} does nothing in float32; variants that do are {legal}.")
    env = {name: value for name, value in base.items() if not name.startswith(_PREFIXES)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_REPOSITORY), env.get("PYTHONPATH"))))
    env.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if variant == "tf_amp":
        env["TF_ENABLE_AUTO_MIXED_PRECISION"] = "1"
        env["TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_DTYPE"] = "auto" if dtype == FLOAT32 else dtype
        # float16 has no fast kernels on a CPU, and is measured there for its numerics alone.
        if dtype == "float16":
            env["TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_IGNORE_PERFORMANCE"] = "1"
    return env


def prepare(variant: str, dtype: str = "bfloat16") -> None:
    """Puts this process into a variant; call it before TensorFlow is imported.

    Args:
        variant: the one whose `environment` this process was started with.
        dtype: as for `environment`.

    Raises:
        RuntimeError: the variant is ``tf_amp``, and it rewrites nothing or for another dtype.
    """
    if variant == "tf_amp":
        # The start-up file of an installed tf-amp has done this already; in a checkout nobody has.
        from tf_amp import autoload, hardware

        if dtype == FLOAT32:
            hardware.probe_cpu_flags = lambda *_: frozenset()
            hardware.probe_gpu_capabilities = list
        autoload.activate()
    import tensorflow as tf

    if variant == "tf_amp":
        status = amp_status()
        if not status["hosts"] or (status["target_dtype"] or FLOAT32) != dtype:
            raise RuntimeError(
                f"AMP is not on for {dtype}: {status['why']}; {status['reason']}. "
                "A measurement would compare float32 with itself."
            )
    elif variant == "upstream":
        tf.config.optimizer.set_experimental_options({_UPSTREAM_OPTIONS[dtype]: True})
    elif variant == "keras_policy":
        import keras

        keras.config.set_dtype_policy(f"mixed_{dtype}")


def amp_status() -> dict[str, Any]:
    """Returns what `tf_amp.status()` says in this process."""
    import tf_amp

    return tf_amp.status().as_dict()
