"""A device through jaxlib: programs compiled and run on it, and what is known about it.

Compiling HLO needs jaxlib's private client API: the release is pinned, and another one warned of.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np
from jax._src.lib import xla_client

JAXLIB = "0.11.2"
"""The release that was tried."""
_SMI_FIELDS = (
    *("name", "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw"),
    *("temperature.gpu", "utilization.gpu", "clocks_event_reasons.active"),
)


def open_device(name: str) -> Any:
    """The first device of a platform, "cuda" or "cpu".

    Raises:
        RuntimeError: jaxlib finds none; it never falls back on another.
    """
    jax.config.update("jax_platforms", name)
    jax.config.update("jax_enable_x64", True)  # TensorFlow counts in int64
    found = metadata.version("jaxlib")
    if found != JAXLIB:
        print(f"jaxlib is {found}; tried with {JAXLIB} alone.", file=sys.stderr)
    return jax.devices()[0]


class Loaded:
    """An HLO module compiled for a device, with its parameters on it.

    Args:
        device: of `open_device`.
        hlo: a serialized HLO module.
    """

    def __init__(self, device: Any, hlo: bytes) -> None:
        module = xla_client._xla.mlir.hlo_to_stablehlo(hlo)
        devices = xla_client.DeviceList((device,))
        self._device = device
        self._executable = device.client.compile_and_load(
            module, devices, xla_client.CompileOptions()
        )
        text = self._executable.hlo_modules()[0].to_string()
        head = text.partition("\n")[0]
        # "{2}: (1, {}, may-alias)": result 2 is the new value of parameter 1, whose buffer it takes
        pairs = re.findall(r"\{(\d*)\}: \((\d+), \{\}", head)
        self.assigned = {int(result or 0): int(parameter) for result, parameter in pairs}
        self.kernels = entry_kernels(text)
        self._buffers: list[Any] = []

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by the compiled buffer assignment; `peak` is all that the program occupies."""
        return memory_of(self._executable.get_compiled_memory_stats())

    def give(self, values: Sequence[np.ndarray]) -> None:
        """Puts the parameters on the device."""
        self._buffers = [jax.device_put(value, self._device) for value in values]

    def put(self, at: int, value: np.ndarray) -> None:
        """Replaces one parameter."""
        self._buffers[at] = jax.device_put(value, self._device)

    def read(self, at: int) -> np.ndarray:
        """The value that a parameter has now."""
        return np.asarray(self._buffers[at])

    def step(self) -> list[Any]:
        """Starts one step; what it assigns is what the next one reads. Does not wait."""
        results = self._executable.execute(self._buffers)
        for result, parameter in self.assigned.items():
            self._buffers[parameter] = results[result]
        return list(results)


def memory_of(stats: Any) -> dict[str, int]:
    """The bytes of a compiled program's buffers.

    Args:
        stats: what XLA's buffer assignment says of it, as jaxlib gives that.

    Returns:
        `arguments`, `outputs`, `aliased` (outputs that take the place of arguments), `temporary`,
        and `peak`: arguments, temporary buffers and the outputs that are not aliased.
    """
    found = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporary": stats.temp_size_in_bytes,
    }
    found["peak"] = found["arguments"] + found["outputs"] - found["aliased"] + found["temporary"]
    return found


def entry_kernels(text: str) -> dict[str, int]:
    """What a compiled module starts: opcode, or target of a custom call -> how often.

    Args:
        text: the optimized module. Of loops the body counts once.
    """
    computations = re.split(r"\n(?=\S)", text)
    entry = next((part for part in computations if part.startswith("ENTRY")), "")
    called = set(re.findall(r"(?:body|to_apply|branch_computations)=\{?%?([\w.-]+)", entry))
    bodies = [c for c in computations if c.split(" ", 1)[0].lstrip("%") in called]
    counts: Counter[str] = Counter()
    for part in (entry, *bodies):
        counts.update(re.findall(r'custom_call_target="([^"]+)"', part))
        counts.update(re.findall(r"\s(fusion|convert|dot|convolution|reduce|while|copy)\(", part))
    return dict(counts)


def facts(device: Any) -> dict[str, Any]:
    """What a measurement on this device has to state."""
    return {
        "device": device.device_kind,
        "compute_capability": getattr(device, "compute_capability", None),
        "platform": device.client.platform_version,
        "jaxlib": metadata.version("jaxlib"),
        "jax": metadata.version("jax"),
        "cores": len(os.sched_getaffinity(0)),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "NVIDIA_TF32_OVERRIDE": os.environ.get("NVIDIA_TF32_OVERRIDE", ""),
        "float32_products": float32_products(),
        "nvidia_smi": nvidia_smi(),
    }


def float32_products() -> str:
    """In what a float32 matrix product is computed here, by its error: "TF32" or "float32"."""
    random = np.random.default_rng(0)
    left, right = (random.standard_normal((512, 512), np.float32) for _ in range(2))
    exact = left.astype(np.float64) @ right.astype(np.float64)
    found = np.asarray(jax.jit(jax.numpy.matmul)(left, right))
    error = float(np.abs(found - exact).max() / np.abs(exact).max())
    return f"{'TF32' if error > 2e-5 else 'float32'} (largest error {error:.1e})"


def nvidia_smi() -> dict[str, str] | None:
    """Clocks, driver and temperature now; None where there is no such program."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    fields = done.stdout.splitlines()[0].split(",")
    return dict(zip(_SMI_FIELDS, map(str.strip, fields), strict=False))
