"""Restores a float32 checkpoint of a v1 `Saver` into a graph that scales its loss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_amp.loss_scale.state import STATE_COLLECTION

_LOGGER = logging.getLogger("tf_amp.loss_scale")


def make_tolerant_restore(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `Saver.restore` that lets the state of a loss scale be missing from a checkpoint.

    What is missing keeps the value it has, or gets its initial one. The values that are there are
    read here and fed in place of the graph's restore operations, because a graph that is
    finalized, as in a `MonitoredSession`, takes no new operation.

    Args:
        original: `Saver.restore`.
    """

    def restore(self: Any, sess: Any, save_path: Any) -> Any:
        graph = getattr(sess, "graph", None)  # without a session a saver restores eagerly
        state = [] if graph is None else graph.get_collection(STATE_COLLECTION)
        if not state or not tf.io.gfile.exists(f"{save_path}.index"):
            return original(self, sess, save_path)
        reader = tf.train.load_checkpoint(save_path)
        missing = [v for v in state if not reader.has_tensor(v.op.name)]
        reads = _restore_reads(graph, self.saver_def.restore_op_name) if missing else []
        if not missing or not reads:
            return original(self, sess, save_path)
        initial = {v.op.name: sess.run(v.initializer.inputs[1]) for v in missing}
        feed = {}
        with tf.Graph().as_default(), tf.compat.v1.Session() as reading:
            for operation in reads:
                names, slices = sess.run(operation.inputs[1:3])
                for name, part, output in zip(names, slices, operation.outputs, strict=True):
                    value = initial.pop(name.decode(), None)
                    if value is None:
                        # A partition of a variable is a slice of what the checkpoint has.
                        read = tf.raw_ops.RestoreV2(
                            prefix=save_path,
                            tensor_names=[name],
                            shape_and_slices=[part],
                            dtypes=[output.dtype],
                        )
                        (value,) = reading.run(read)
                    feed[output] = value
        sess.run(self.saver_def.restore_op_name, feed)
        if len(initial) < len(missing):  # a saver of other variables leaves the scale as it is
            _LOGGER.info(
                "Restored %s, which has no loss scale: the scale starts at its initial value.",
                save_path,
            )
        return None

    return restore


def _restore_reads(graph: tf.Graph, restore_op_name: str) -> list[tf.Operation]:
    """The operations that read the checkpoint on behalf of a restore operation."""
    pending = [graph.as_graph_element(restore_op_name, allow_tensor=False)]
    seen = set(pending)
    reads = []
    while pending:
        operation = pending.pop()
        if operation.type == "RestoreV2":
            reads.append(operation)
            continue
        for source in [*operation.control_inputs, *(x.op for x in operation.inputs)]:
            if source not in seen:
                seen.add(source)
                pending.append(source)
    return reads
