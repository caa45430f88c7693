"""Which cost table holds on this machine: the user's own, the shipped one, or none."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tf_amp.env_config import EnvConfigError, Settings
from tf_amp.env_variables import COST_TABLE, IGNORE_PERFORMANCE
from tf_amp.hardware import (
    CPU_FLAGS,
    Target,
    probe_cpu_flags,
    probe_gpu_capabilities,
    probe_onednn,
)

if TYPE_CHECKING:
    from graph_passes.policy.cost_table import CostTable

_log = logging.getLogger("tf_amp")

PLAIN_CPU = "cpu-plain"
"""The class of CPUs without a unit for the dtype, or of which TensorFlow does not use it."""


@dataclass(frozen=True)
class TableChoice:
    """The table in force.

    Attributes:
        table: The table, None where cost is left out of account.
        reason: Where it comes from, or why there is none.
        note: What is amiss with it, as a sentence; "" for nothing.
    """

    table: CostTable | None
    reason: str
    note: str = ""


def device_class(
    target: Target,
    *,
    gpu_capabilities: Sequence[tuple[int, int] | None] | None = None,
    cpu_flags: Collection[str] | None = None,
) -> str:
    """Names the class of device that a cost table is for.

    Args:
        target: The device type and dtype.
        gpu_capabilities: Compute capability of each GPU; None probes the machine.
        cpu_flags: CPU flags as /proc/cpuinfo spells them; None probes the machine.

    Returns:
        "cpu-" and the best unit for the dtype ("cpu-avx512_bf16"), `PLAIN_CPU` without one or
        without oneDNN's kernels, which use it;
        "gpu-" and the lowest compute capability ("gpu-9.0"), "gpu-unknown" where none is told.
    """
    if target.device == "GPU":
        found = probe_gpu_capabilities() if gpu_capabilities is None else gpu_capabilities
        known = [capability for capability in found if capability is not None]
        return f"gpu-{'.'.join(map(str, min(known)))}" if known else "gpu-unknown"
    flags = probe_cpu_flags() if cpu_flags is None else cpu_flags
    # The later a unit stands in the row, the faster it is.
    units = [unit for unit in CPU_FLAGS.get(str(target.target_dtype), ()) if unit in flags]
    return f"cpu-{units[-1]}" if units and probe_onednn() else PLAIN_CPU


def table_class(target: Target, *, compiled: bool) -> str:
    """Names the class that a table is for on this machine.

    Args:
        target: The device type and dtype.
        compiled: Whether it is for functions that XLA compiles.
    """
    from graph_passes.policy.cost_table import compiled_class

    name = device_class(target)
    return compiled_class(name, tensorflow_release()) if compiled else name


def tensorflow_release() -> str:
    """Returns the release of the TensorFlow that is running, such as "2.21"."""
    import tensorflow as tf

    return ".".join(tf.__version__.split(".")[:2])


def user_cache() -> Path:
    """Returns where things that are measured on this machine are kept; it need not exist.

    Returns:
        ``$XDG_CACHE_HOME/tf-amp`` or ``~/.cache/tf-amp``.

    Raises:
        OSError: The user has no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    if not base:
        home = os.environ.get("HOME") or os.path.expanduser("~")
        if home == "~":
            raise OSError("this user has no home directory, and XDG_CACHE_HOME is not set")
        base = os.path.join(home, ".cache")
    return Path(base) / "tf-amp"


def cached_table_path(name: str, target_dtype: str) -> Path:
    """Returns where `tf-amp tune` keeps the table of this machine.

    Args:
        name: The class of device.
        target_dtype: "float16" or "bfloat16".

    Returns:
        A file in the `user_cache`; it need not exist.

    Raises:
        OSError: The user has no home directory.
    """
    from graph_passes.policy.cost_table_files import table_name

    return user_cache() / "cost_tables" / table_name(name, target_dtype)


def choose_table(settings: Settings, target: Target, *, compiled: bool = False) -> TableChoice:
    """Chooses the table for what graphs are rewritten for.

    Args:
        settings: Of these, `cost_table` counts. A file takes the place of the table of its kind.
        target: The device type and dtype.
        compiled: Whether it is for functions that XLA compiles.

    Returns:
        The choice. A cached table that cannot be read is a warning, and the shipped one holds.

    Raises:
        EnvConfigError: The settings name a file that cannot be read or is no cost table.
    """
    from graph_passes.policy.cost_table_files import CostTableError, load_table, shipped_table

    if target.target_dtype is None:
        return TableChoice(None, "nothing is converted")
    if settings.cost_table == "off":
        return TableChoice(None, "switched off")
    if settings.cost_table != "auto":
        path = Path(os.path.expanduser(settings.cost_table))
        try:
            table = load_table(path)
        except CostTableError as error:
            raise EnvConfigError(
                f"{settings.decided_by.get('cost_table', COST_TABLE)} names a file that cannot be "
                f"used. {error} Or set it to auto or off."
            ) from error
        if table.compiled == compiled:
            here = table_class(target, compiled=compiled)
            note = "" if table.device_class == here else _of_another_class(path, table, here)
            return TableChoice(table, str(path), note)
    if settings.ignore_performance:
        return TableChoice(None, f"{IGNORE_PERFORMANCE} asks not to weigh costs")
    name = table_class(target, compiled=compiled)
    try:
        cached = cached_table_path(name, target.target_dtype)
        if cached.exists():
            return TableChoice(load_table(cached), f"measured by `tf-amp tune`: {cached}")
    except OSError as error:  # containers have users without a home, or one that is not theirs
        _log.debug("The user's cache cannot be looked at: %s", error)
    except CostTableError as error:
        _log.warning("%s Until then the shipped table holds, if there is one.", error)
    shipped = shipped_table(name, target.target_dtype)
    if shipped is None:
        # What XLA makes for a GPU is measured by a benchmark alone.
        tuned = not compiled or target.device == "CPU"
        advice = "; `tf-amp tune` measures one" if tuned else ""
        return TableChoice(None, f"none is shipped for {name}{advice}")
    return TableChoice(shipped, f"shipped for {name}")


def _of_another_class(path: Path, table: CostTable, here: str) -> str:
    return (
        f"The cost table {path} is for {table.device_class}, and this machine is {here}: what it "
        f"says is faster may be slower here. Set {COST_TABLE} to auto unless that is meant."
    )
