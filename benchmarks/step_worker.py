"""One process of `step_time.py`: one workload in one variant, stepping when it is told to."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from variants import DTYPES, FLOAT32, VARIANTS, amp_status, prepare
from worker_channel import Message, serve

from tf_amp.comparison.resident_memory import peak_resident_bytes, reset_peak

MODES = ("training", "inference")
_WARM_UP_STEPS = 3


class StepWorker:
    """Builds a workload on the first request and runs its steps on the others."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._step: Callable[[], Any] | None = None

    def handle(self, request: Message) -> Message:
        """Answers one request; see `_start`, `_run`, `_profile` and `_finish`."""
        answers = {"start": self._start, "run": self._run, "profile": self._profile}
        return (answers | {"finish": self._finish})[request["do"]](request)

    def _start(self, _: Message) -> Message:
        """Builds, traces and warms up; answers with the evidence of what runs."""
        arguments = self._arguments
        prepare(arguments.variant, arguments.dtype)
        # TensorFlow may be imported only after the variant is in force.
        import tensorflow as tf
        from small_workloads import SMALL_WORKLOADS
        from workloads import WORKLOADS

        started = time.perf_counter()
        workload = {**WORKLOADS, **SMALL_WORKLOADS}[arguments.workload]
        model, (x, y) = workload.compiled(jit_compile=arguments.jit_compile)
        if arguments.rows:
            x, y = (np.resize(array, (arguments.rows, *array.shape[1:])) for array in (x, y))
        inputs, labels = tf.constant(x), tf.constant(y)
        if arguments.unknown_batch:
            self._step = _steps_on_data_set(model, arguments.mode, inputs, labels)
        elif arguments.mode == "training":
            self._step = lambda: model.train_on_batch(inputs, labels)
        else:
            self._step = lambda: model.predict_on_batch(inputs)
        built = time.perf_counter()
        self._step()
        first_step = time.perf_counter() - built
        for _ in range(_WARM_UP_STEPS - 1):
            self._step()
        answer: Message = {"build_s": built - started, "first_step_s": first_step}
        answer["math_ops"] = _math_ops()
        if arguments.variant == "tf_amp":
            status = amp_status()
            wanted = "target_dtype nodes_total nodes_converted casts fused graphs_failed"
            answer["amp"] = {key: status[key] for key in wanted.split()}
        answer["peak_mb_until_warm"] = peak_resident_bytes() / 1e6
        reset_peak()
        # TensorFlow's allocator for CPUs counts only where it uses oneDNN's kernels.
        with contextlib.suppress(ValueError):
            tf.config.experimental.reset_memory_stats(_device())
        return answer

    def _run(self, request: Message) -> Message:
        """Runs some steps; answers with their seconds and, in training, the last loss."""
        if self._step is None:
            raise RuntimeError('Asked to "run" before "start".')
        seconds, last = [], None
        for _ in range(request["steps"]):
            started = time.perf_counter()
            last = self._step()
            seconds.append(time.perf_counter() - started)
        loss = float(last) if self._arguments.mode == "training" else None
        return {"seconds": seconds, "loss": loss}

    def _profile(self, request: Message) -> Message:
        """Runs some steps under TensorFlow's profiler; answers with kernel time by op type."""
        import tensorflow as tf

        from tf_amp.profiling.kernels import kernel_seconds, read_profile

        with tempfile.TemporaryDirectory() as directory:
            with tf.profiler.experimental.Profile(directory):
                self._run(request)
            total = kernel_seconds(read_profile(Path(directory)).kernels)
        return {"kernel_ms": {op: 1e3 * s / request["steps"] for op, s in total.items()}}

    def _finish(self, _: Message) -> Message:
        import tensorflow as tf

        answer: Message = {"peak_mb_steps": peak_resident_bytes() / 1e6}
        with contextlib.suppress(ValueError):
            tensors = tf.config.experimental.get_memory_info(_device())
            answer["live_mb_steps"] = tensors["peak"] / 1e6
            answer["live_mb_between_steps"] = tensors["current"] / 1e6
        return answer


def _device() -> str:
    """Where the tensors of a step are."""
    import tensorflow as tf

    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def _steps_on_data_set(model: Any, mode: str, inputs: Any, labels: Any) -> Callable[[], Any]:
    """Steps of `fit` or `predict` on a data set batched as most are: the last may be smaller."""
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices((inputs, labels)).repeat()
    batches = iter(rows.batch(len(inputs)).prefetch(1))
    if mode == "training":
        model.make_train_function()
        return lambda: model.train_function(batches)["loss"]
    model.make_predict_function()
    return lambda: model.predict_function([next(batches)])


def _math_ops() -> dict[str, dict[str, int]]:
    from function_evidence import low_precision_ops

    return low_precision_ops()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--dtype", choices=(*DTYPES, FLOAT32), default="bfloat16")
    parser.add_argument("--jit-compile", action="store_true")
    parser.add_argument("--unknown-batch", action="store_true")
    parser.add_argument("--rows", type=int)
    serve(StepWorker(parser.parse_args()).handle)


if __name__ == "__main__":
    main()
