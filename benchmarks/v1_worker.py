"""One process of `v1_training.py`: one v1 graph in one variant, stepping when it is told to."""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from typing import Any

from variants import DTYPES, FLOAT32, VARIANTS, amp_status, prepare
from worker_channel import Message, serve

_WARM_UP_STEPS = 3
_ONEDNN_OR_FUSED = re.compile("^_(MklNative|Mkl)?(Fused)?")
_MATH = ("MatMul", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")


class V1Worker:
    """Builds a workload on the first request and trains it in one session on the others."""

    def __init__(self, workload: str, variant: str, dtype: str) -> None:
        self._names = workload, variant, dtype
        self._workload: Any = None
        self._session: Any = None
        self._step = 0

    def handle(self, request: Message) -> Message:
        """Answers one request: "start", "run" (with `steps`) or "finish"."""
        if request["do"] == "start":
            return self._start()
        if request["do"] == "run":
            return self._run(request["steps"])
        return self._finish()

    def _start(self) -> Message:
        """Opens the session, warms up; answers with what the partition graphs show."""
        workload, variant, dtype = self._names
        prepare(variant, dtype)
        # TensorFlow may be imported only after the variant is in force.
        import tensorflow as tf
        from v1_workloads import WORKLOADS

        v1 = tf.compat.v1
        v1.disable_v2_behavior()
        self._workload = WORKLOADS[workload]()
        self._session = v1.Session()
        self._session.run(v1.global_variables_initializer())
        metadata = v1.RunMetadata()
        self._session.run(
            [self._workload.loss, self._workload.train_op],
            self._workload.batch(0),
            options=v1.RunOptions(output_partition_graphs=True),
            run_metadata=metadata,
        )
        self._step = 1
        self._run(_WARM_UP_STEPS - 1)
        answer: Message = {"math": _math_by_dtype(metadata), "casts": _casts(metadata)}
        if variant == "tf_amp":
            answer["amp"] = {key: amp_status()[key] for key in ("graphs_rewritten", "hosts")}
        return answer

    def _run(self, steps: int) -> Message:
        seconds, losses = [], []
        for _ in range(steps):
            feed = self._workload.batch(self._step)
            started = time.perf_counter()
            loss, _ = self._session.run([self._workload.loss, self._workload.train_op], feed)
            seconds.append(time.perf_counter() - started)
            losses.append(float(loss))
            self._step += 1
        return {"seconds": seconds, "losses": losses}

    def _finish(self) -> Message:
        evaluation = self._session.run(self._workload.evaluation, self._workload.held_out)
        self._session.close()
        return {"held_out_loss": float(evaluation), "steps": self._step}


def _math_by_dtype(metadata: Any) -> dict[str, int]:
    """Counts matrix and convolution nodes, fused or not, by the dtype they run in."""
    from tensorflow.dtypes import as_dtype

    counts: Counter[str] = Counter()
    for graph in metadata.partition_graphs:
        for node in graph.node:
            if _ONEDNN_OR_FUSED.sub("", node.op).removesuffix("WithBias") in _MATH:
                counts[as_dtype(node.attr["T"].type).name] += 1
    return dict(counts)


def _casts(metadata: Any) -> int:
    return sum(node.op == "Cast" for graph in metadata.partition_graphs for node in graph.node)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--dtype", choices=(*DTYPES, FLOAT32), required=True)
    arguments = parser.parse_args()
    serve(V1Worker(arguments.workload, arguments.variant, arguments.dtype).handle)


if __name__ == "__main__":
    main()
