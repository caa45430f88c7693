"""Environments in which TensorFlow's own pass can be run and timed. Imports no TensorFlow.

They must be in force when TensorFlow is imported, so a process is started with them.
"""

from __future__ import annotations

from variants import environment

DTYPES = ("float16", "bfloat16")
"""The target dtypes of the pass. A process runs it for one of them."""


def oracle_environment(dtype: str) -> dict[str, str]:
    """Returns the environment of a process that runs `oracle.run_oracle` or `timed_oracle`.

    Args:
        dtype: "float16", whose plan is for a GPU that need not be there, or "bfloat16".
    """
    env = environment("float32")
    # The log then tells the time of every graph optimizer.
    env |= {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "meta_optimizer=1"}
    if dtype == "float16":
        env["TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_SIMULATE_GPU"] = "1"
        env["CUDA_VISIBLE_DEVICES"] = ""
    return env
