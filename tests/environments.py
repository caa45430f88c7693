"""Environments of the programs that tests run: what AMP does in them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
"""The fixtures `run_python` and `run_forked` of conftest.py."""

AMP = "TF_ENABLE_AUTO_MIXED_PRECISION"
REWRITE = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE"

CONVERTS = {f"{REWRITE}_IGNORE_PERFORMANCE": "1", f"{REWRITE}_DTYPE": "bfloat16"}
"""On any CPU, once AMP is switched on."""
BFLOAT16 = {AMP: "1", **CONVERTS}
FLOAT16 = {**BFLOAT16, f"{REWRITE}_DTYPE": "float16"}

WITHOUT_UNITS = """
import tf_amp.hardware
tf_amp.hardware.probe_cpu_flags = frozenset
tf_amp.hardware.probe_gpu_capabilities = list
"""
"""Before AMP is switched on, this makes a machine of one that is fast in float32 alone."""
