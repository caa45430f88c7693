"""What a trace tells of the process that wrote it."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow

from graph_passes import ListEdit, PrecisionConfig, Rule
from graph_passes.policy.cost_table_files import format_table, load_table
from tf_amp import __version__
from tf_amp.env_variables import PROFILE, VARIABLES
from tf_amp.hardware import CPU_FLAGS, probe_cpu_flags, probe_gpu_capabilities
from tf_amp.plan import Plan

PROCESS = "process.json"
"""The file that says what was in force, and on what machine."""
_TABLE, _COMPILED_TABLE = "cost_table.toml", "cost_table_xla.toml"
SCHEMA_VERSION = 1


def describe(plan: Plan) -> dict[str, str]:
    """The files that tell of this process: file name -> text.

    Of the environment only the variables of this package are in it, and of `TF_CONFIG` the type and
    number of the task; of the command line only the name of the script.

    Args:
        plan: what is in force.
    """
    status = plan.status()
    process = {
        "schema_version": SCHEMA_VERSION,
        "process": os.getpid(),
        "rank": _rank(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "script": Path(sys.argv[0]).name if sys.argv else "",
        "versions": {
            "tf_amp": __version__,
            "tensorflow": tensorflow.__version__,
            "python": platform.python_version(),
        },
        "hardware": {
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            "cpu_units": sorted(set(sum(CPU_FLAGS.values(), ())) & probe_cpu_flags()),
            "gpu_capabilities": probe_gpu_capabilities(),
        },
        "variables": variables_set(),
        "settings": {
            name: status[name]
            for name in (
                *("why", "decided_by", "target_dtype", "device", "reason", "level", "cost_table"),
                *("cost_table_xla", "list_edits", "loss_scaling", "loss_scaling_reason"),
            )
        },
        "config": _config(plan.config),
        "notes": plan.notes,
    }
    files = {PROCESS: json.dumps(process, indent=1, default=str)}
    for name, choice in ((_TABLE, plan.costs), (_COMPILED_TABLE, plan.compiled_costs)):
        if choice.table is not None:
            files[name] = format_table(choice.table)
    return files


def variables_set() -> dict[str, str]:
    """The variables of this package that are set and decide something: name -> value."""
    names = (name for variable in VARIABLES for name in (variable.name, *variable.legacy))
    return {
        name: os.environ[name]
        for name in names
        if name != PROFILE and os.environ.get(name, "").strip()
    }


def _rank() -> str:
    """Which task of a distributed training this process is, such as "worker 0"; "" if none."""
    try:
        task = json.loads(os.environ.get("TF_CONFIG", "{}"))["task"]
        return f"{task['type']:.20} {int(task['index'])}"
    except (KeyError, TypeError, ValueError):
        return ""


def _config(config: PrecisionConfig | None) -> dict[str, Any] | None:
    if config is None:
        return None
    return {
        "target_dtype": config.target_dtype,
        "device": config.device,
        "only_device": config.only_device,
        "level": config.level,
        "list_edits": [dataclasses.asdict(edit) for edit in config.list_edits],
        "rules": [rule.to_dict() for rule in config.rules],
        "disabled_rules": sorted(config.disabled_rules),
    }


def config_of(folder: Path, config: Mapping[str, Any], *, compiled: bool) -> PrecisionConfig:
    """The configuration with which a process rewrote graphs.

    Args:
        folder: its folder.
        config: the entry "config" of its `PROCESS` file.
        compiled: whether it is that for functions that XLA compiles.

    Raises:
        ValueError: it is none that this release knows.
    """
    tables = [folder / name for name in (_COMPILED_TABLE, _TABLE)[not compiled :]]
    found = [load_table(path) for path in tables if path.exists()]
    edits = tuple(ListEdit(**edit) for edit in config["list_edits"])
    rules = tuple(Rule(**rule) for rule in config.get("rules", ()))
    off = frozenset(config["disabled_rules"])
    fields = {**config, "list_edits": edits, "rules": rules, "disabled_rules": off}
    return PrecisionConfig(**fields, cost_table=found[0] if found else None, fused=compiled)
