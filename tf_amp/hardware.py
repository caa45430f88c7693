"""What the hardware is fast at, and the target dtype that follows from it.

A dtype for which there are no fast units makes a program slower (float16 on a CPU without such
units by a factor of 2 to 7), so without them nothing is converted unless that is asked for
explicitly.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tf_amp.env_config import Settings
from tf_amp.env_variables import IGNORE_PERFORMANCE, is_on

_log = logging.getLogger("tf_amp")

# Compute capability from which Tensor Cores take the dtype: Volta for float16, Ampere for bfloat16.
GPU_CAPABILITY = {"float16": (7, 0), "bfloat16": (8, 0)}
# Any of these flags of /proc/cpuinfo means fast matrix units for the dtype. AVX512_FP16 is none for
# float16: with it TensorFlow's convolutions take longer than in float32, and their gradients to the
# filter, for which oneDNN is not asked, a thousand times as long.
CPU_FLAGS: Mapping[str, tuple[str, ...]] = {
    "float16": (),
    "bfloat16": ("avx512_bf16", "amx_bf16"),
}

# oneDNN's own variables, the first before the second, and values at which it uses no such units;
# from AVX2 down, its kernels for bfloat16 end in an error.
_ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_WITHOUT_UNITS = frozenset(
    ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
)

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Target:
    """What graphs are rewritten for.

    Attributes:
        target_dtype: ``float16``, ``bfloat16``, or None if nothing should be rewritten.
        device: The device type whose kernels and units count.
        reason: Why: what the hardware has, or what it lacks and what to do about it.
    """

    target_dtype: Literal["float16", "bfloat16"] | None
    device: Literal["GPU", "CPU"]
    reason: str


def probe_gpu_capabilities() -> list[tuple[int, int] | None]:
    """Asks TensorFlow for the compute capability of each visible GPU.

    Starts no runtime and takes no GPU memory.

    Returns:
        One ``(major, minor)`` per GPU, None where the driver tells none (ROCm).
    """
    from tensorflow.python.eager import context

    # `tf.config` would make the context of the process. One that is older than the script's
    # `disable_eager_execution` stays eager below it: in branches of a v1 graph, `init_scope` then
    # leaves the graph.
    asked = context.context_safe() or context.Context()
    return [
        asked.get_device_details(device).get("compute_capability")
        for device in asked.get_visible_devices("GPU")
    ]


def probe_cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Reads the instruction-set flags of the first processor that Linux lists.

    Args:
        cpuinfo: A file in the format of ``/proc/cpuinfo``.

    Returns:
        The flags; empty where the file does not exist (other systems) or lists none.
    """
    try:
        with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                key, _, flags = line.partition(":")
                if key.strip() in ("flags", "Features"):
                    return frozenset(flags.split())
    except OSError as error:
        _log.debug("%s could not be read: %s", cpuinfo, error)
    return frozenset()


def uses_onednn() -> bool:
    """Whether TensorFlow takes oneDNN's kernels by itself."""
    from tensorflow.python.util import _pywrap_util_port

    return bool(_pywrap_util_port.IsMklEnabled())


def probe_onednn() -> bool:
    """Whether TensorFlow uses oneDNN, and with the CPU's units for bfloat16, if it has any."""
    limit = next(filter(None, map(os.environ.get, _ISA_LIMITS)), "")
    return uses_onednn() and limit.upper() not in _WITHOUT_UNITS


def has_onednn_kernels() -> bool:
    """Whether oneDNN's kernels run ops that name them, even if TensorFlow takes none by itself.

    They are in builds for x86, and ``TF_ENABLE_ONEDNN_OPTS=0`` says that none are wanted.
    """
    from graph_passes.ops.kernels import has_kernel
    from graph_passes.ops.op_types import of_onednn

    wanted = os.environ.get("TF_ENABLE_ONEDNN_OPTS") or "1"
    return is_on(wanted) and has_kernel(of_onednn("Conv2DBackpropFilter"), "CPU")


def choose_target(
    settings: Settings,
    *,
    gpu_capabilities: Sequence[tuple[int, int] | None] | None = None,
    cpu_flags: Collection[str] | None = None,
    onednn: bool | None = None,
) -> Target:
    """Chooses the dtype and the device type to rewrite for.

    With at least one visible GPU the GPUs decide (the slowest, if they differ), otherwise the CPU.
    ``auto`` means float16 on GPU and bfloat16 on CPU.

    Args:
        settings: Of these, `target_dtype` and `ignore_performance` count.
        gpu_capabilities: Compute capability of each GPU; None probes the machine.
        cpu_flags: CPU flags as /proc/cpuinfo spells them; None probes the machine.
        onednn: Whether TensorFlow uses oneDNN, with those units; None asks it.

    Returns:
        The target. Its dtype is None if the hardware has no fast units for it and
        `ignore_performance` is off.
    """
    if gpu_capabilities is None:
        gpu_capabilities = probe_gpu_capabilities()
    device: Literal["GPU", "CPU"] = "GPU" if gpu_capabilities else "CPU"
    dtype: Literal["float16", "bfloat16"]
    if settings.target_dtype == "auto":
        dtype = "float16" if device == "GPU" else "bfloat16"
    else:
        dtype = "float16" if settings.target_dtype == "float16" else "bfloat16"
    if gpu_capabilities:
        fast, fact = _judge_gpus(dtype, gpu_capabilities)
    else:
        flags = probe_cpu_flags() if cpu_flags is None else frozenset(cpu_flags)
        fast, fact = _judge_cpu(dtype, flags, probe_onednn() if onednn is None else onednn)
    if fast:
        return Target(dtype, device, f"{dtype} on {device}: {fact}")
    if settings.ignore_performance:
        return Target(dtype, device, f"{dtype} on {device} although {fact} (asked to ignore that)")
    return Target(
        None,
        device,
        f"{dtype} on {device} would be slow: {fact}. {IGNORE_PERFORMANCE}=1 converts all the same.",
    )


def _judge_gpus(dtype: str, capabilities: Sequence[tuple[int, int] | None]) -> tuple[bool, str]:
    needed = GPU_CAPABILITY[dtype]
    wanted = f"fast {dtype} units come with {needed[0]}.{needed[1]}"
    known = [c for c in capabilities if c is not None]
    if len(known) < len(capabilities):
        return False, f"the driver tells no compute capability of a GPU; {wanted}"
    lowest = min(known)
    return lowest >= needed, (
        f"the compute capability is {lowest[0]}.{lowest[1]}"
        f"{' (the lowest of the visible GPUs)' if len(set(known)) > 1 else ''}; {wanted}"
    )


def _judge_cpu(dtype: str, flags: frozenset[str], onednn: bool) -> tuple[bool, str]:
    names = [flag.upper() for flag in CPU_FLAGS[dtype]]
    found = [flag.upper() for flag in CPU_FLAGS[dtype] if flag in flags]
    if found and onednn:
        return True, f"the CPU has {' and '.join(found)}"
    if found:
        return False, (
            f"the CPU has {' and '.join(found)}, but TensorFlow does not use oneDNN's "
            "kernels for it, as with TF_ENABLE_ONEDNN_OPTS=0 or ONEDNN_MAX_CPU_ISA"
        )
    if not names:
        others = [other for other, units in CPU_FLAGS.items() if not flags.isdisjoint(units)]
        return False, (
            f"no GPU is visible, and TensorFlow has no fast {dtype} on CPUs"
            f"{f' ({others[0]} is fast on this one)' if others else ''}"
        )
    if not flags:
        return False, f"no GPU is visible, and no flags of the CPU could be read from {_CPUINFO}"
    return False, f"no GPU is visible, and the CPU has neither {' nor '.join(names)}"


def processor_name(device: Literal["GPU", "CPU"]) -> str:
    """Names what graphs run on, for people and to tell machines apart.

    Args:
        device: "GPU" for the first one, "CPU" for the processor with its number of cores.

    Returns:
        For example "AMD EPYC 9V74, 2 cores"; the kind of machine where no more is told.
    """
    if device == "GPU":
        import tensorflow as tf

        first = tf.config.list_physical_devices("GPU")[0]
        details = tf.config.experimental.get_device_details(first)
        return str(details.get("device_name", "GPU"))
    try:
        lines = Path(_CPUINFO).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    # A model name is free text and goes into a quoted string.
    name = (names or [platform.machine()])[0].replace('"', "").replace("\\", "")
    return f"{name}, {os.cpu_count()} cores"
