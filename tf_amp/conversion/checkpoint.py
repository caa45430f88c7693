"""The variables of a SavedModel on disk, some of them in another dtype."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from tf_amp.model_files import ModelError

_SHARD = 256 << 20
_UNREADABLE = (tf.errors.OpError, ValueError, RuntimeError, IndexError)
_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


class Checkpoint:
    """The tensors of a checkpoint, read one by one.

    Args:
        prefix: the common beginning of its files.

    Raises:
        ModelError: there is none.
    """

    def __init__(self, prefix: Path) -> None:
        self._prefix = prefix
        try:
            self._reader = tf.train.load_checkpoint(str(prefix))
        except _UNREADABLE as error:
            raise ModelError(f"The variables {str(prefix)!r} cannot be read: {error}") from error
        self.dtypes: dict[str, tf.DType] = dict(self._reader.get_variable_to_dtype_map())
        self._shapes: dict[str, list[int]] = self._reader.get_variable_to_shape_map()

    def size(self, key: str) -> int:
        """The bytes of a tensor, 0 of strings."""
        return int(np.prod(self._shapes[key], dtype=np.int64)) * self.dtypes[key].size

    def read(self, key: str) -> Any:
        """A tensor, as an array of numpy.

        Raises:
            ModelError: the files are damaged.
        """
        try:
            return self._reader.get_tensor(key)
        except _UNREADABLE as error:
            raise ModelError(
                f"The variable {key!r} in {str(self._prefix)!r} cannot be read: {error}"
            ) from error

    def object_graph(self) -> TrackableObjectGraph | None:
        """How objects lead to tensors, None in a checkpoint of TensorFlow 1."""
        if _OBJECT_GRAPH not in self.dtypes:
            return None
        return TrackableObjectGraph.FromString(self.read(_OBJECT_GRAPH))

    def shards(self) -> Iterator[list[str]]:
        """All keys, in groups of which each fits into memory."""
        group: list[str] = []
        size = 0
        for key in sorted(self.dtypes):
            if group and size + self.size(key) > _SHARD:
                yield group
                group, size = [], 0
            group.append(key)
            size += self.size(key)
        yield group


def rewrite_checkpoint(prefix: Path, new: Path, keys: Collection[str], target: int) -> None:
    """Writes a checkpoint with some tensors in another dtype.

    Args:
        prefix: that of the original.
        new: that of the result, in a directory that exists.
        keys: the tensors to change.
        target: their new dtype, a value of `types_pb2.DataType`.

    Raises:
        ModelError: the original is damaged.
    """
    checkpoint, dtype = Checkpoint(prefix), tf.as_dtype(target)
    parts: list[str] = []
    parts_folder = new.with_name("parts")
    with tf.device("/CPU:0"):
        for number, group in enumerate(checkpoint.shards()):
            tensors = [
                tf.cast(value, dtype) if key in keys else tf.constant(value, checkpoint.dtypes[key])
                for key in group
                for value in [checkpoint.read(key)]
            ]
            parts.append(str(parts_folder / f"part-{number}"))
            tf.raw_ops.SaveV2(
                prefix=parts[-1],
                tensor_names=group,
                shape_and_slices=[""] * len(group),
                tensors=tensors,
            )
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=parts, destination_prefix=str(new), delete_old_dirs=True
        )
    shutil.rmtree(parts_folder, ignore_errors=True)
