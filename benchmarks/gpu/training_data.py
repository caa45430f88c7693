"""What the numerics of training are told by: the tasks of `parity_tasks.py`, batches and all.

TensorFlow and Keras are imported by the functions that make the files; reading them needs neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

_VARIABLE = "variable "


def task_model(name: str, steps: int, seed: int = 0) -> tuple[Any, list[np.ndarray], Any]:
    """The compiled model of a task, its first batch, and the task itself.

    Args:
        name: one of `parity_tasks.TASK_NAMES`.
        steps: after which the learning rate reaches 0.
        seed: of the initial weights and of the order of the data.
    """
    import keras
    from parity_tasks import make_task

    policy = keras.config.dtype_policy()
    keras.backend.clear_session()  # so that layers have the same names with every seed
    keras.config.set_dtype_policy(policy)
    task = make_task(name, seed, steps)
    return task.model, list(task.batch(np.random.default_rng(seed))), task


def write_runs(folder: Path, name: str, steps: int, seeds: int) -> None:
    """Writes the weights and batches of each seed, and the data to judge by."""
    for seed in range(seeds):
        model, _, task = task_model(name, steps, seed)
        random = np.random.default_rng(seed)
        inputs, labels = zip(*(task.batch(random) for _ in range(steps)), strict=True)
        held_out = dict(zip(("held_out_inputs", "held_out_labels"), task.held_out, strict=True))
        initial = {f"{_VARIABLE}{v.path}": v.numpy() for v in model.variables}
        batches = {"inputs": np.stack(inputs), "labels": np.stack(labels)}
        np.savez_compressed(folder / f"{name}.seed{seed}.npz", **batches, **held_out, **initial)


def read_run(path: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Reads what `write_runs` wrote of a seed.

    Returns:
        `inputs` and `labels` (steps, batch, ...), `held_out_inputs` and `held_out_labels`; and the
        initial values of variables by name.
    """
    with np.load(path) as data:
        arrays = {name: data[name] for name in data.files}
    initial = {
        name.removeprefix(_VARIABLE): arrays.pop(name)
        for name in list(arrays)
        if name.startswith(_VARIABLE)
    }
    return arrays, initial
