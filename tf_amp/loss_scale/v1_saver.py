"""Restores a float32 checkpoint of a v1 `Saver` into a graph that scales its loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tf_amp.loss_scale.state import state_variables

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
        state = [] if graph is None else state_variables(graph)
        if not state or not tf.io.gfile.exists(f"{save_path}.index"):
            return original(self, sess, save_path)
        reader = tf.train.load_checkpoint(save_path)
        missing = [v for v in state if not reader.has_tensor(v.op.name)]
        reads = _restore_reads(graph, self.saver_def.restore_op_name) if missing else []
        if not missing or not reads:
            return original(self, sess, save_path)
        initial = {v.op.name: sess.run(v.initializer.inputs[1]) for v in missing}
        state_feed: dict[tf.Tensor, Any] = {}
        feed: dict[tf.Tensor, Any] = {}
        for operation in reads:
            names, slices = sess.run(operation.inputs[1:3])
            there = {}
            for output, name, part in zip(operation.outputs, names, slices, strict=True):
                if name.decode() in initial:
                    state_feed[output] = initial[name.decode()]
                else:
                    there[output] = name, part
            feed |= _read(save_path, there)
        sess.run(self.saver_def.restore_op_name, feed | state_feed)
        if state_feed:  # a saver of other variables leaves the scale as it is
            _LOGGER.info(
                "Restored %s, which has no loss scale: the scale starts at its initial value.",
                save_path,
            )
        return None

    return restore


def _read(
    save_path: Any, slices: Mapping[tf.Tensor, tuple[bytes, bytes]]
) -> dict[tf.Tensor, np.ndarray]:
    """Reads what a checkpoint has of tensors, given the name and the slice of each.

    The slice is that of a partition; "" is all of a variable.
    """
    if not slices:
        return {}
    names, parts = zip(*slices.values(), strict=True)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        values = tf.raw_ops.RestoreV2(
            prefix=save_path,
            tensor_names=names,
            shape_and_slices=parts,
            dtypes=[tensor.dtype for tensor in slices],
        )
        return dict(zip(slices, session.run(values), strict=True))


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
