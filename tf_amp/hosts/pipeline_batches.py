"""The batch that a data set or its iterator is about to give, where the data set or Keras says it.

What a function finds out at its first call comes too late for that call, and TensorFlow optimizes
every variant of a function that runs. So a variant for assumed sizes should not run at all where
the size can be told beforehand. Nothing is taken from an iterator for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorflow.python.data.ops import dataset_ops, iterator_ops
from tensorflow.python.framework import tensor_util

from tf_amp.hosts.function_names import keras_frame

if TYPE_CHECKING:
    from tf_amp.patches import Patches


# Their elements are those of data sets within, or rows of the batches that they get.
_OF_OTHER_ROWS = frozenset(
    {
        *("FlatMap", "Interleave", "ParallelInterleave", "LegacyParallelInterleave"),
        *("GroupByReducer", "GroupByWindow", "Rebatch", "Unbatch", "Window"),
    }
)


def has_other_rows(kind: str) -> bool:
    """Whether a step of a pipeline gives other rows than the batches that it gets.

    Args:
        kind: its op, or its class in Python.
    """
    return kind.lstrip("_").partition("Dataset")[0] in _OF_OTHER_ROWS


class PipelineBatches:
    """Remembers data sets, and which of them an iterator goes through."""

    def __init__(self) -> None:
        # By the id of the tensor that each holds, which lives as long as it.
        self._iterators: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._data_sets: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def install(self, patches: Patches) -> None:
        """Starts to remember."""

        def make(create: Callable[..., None]) -> Callable[..., None]:
            def create_iterator(iterator: Any, dataset: Any) -> None:
                create(iterator, dataset)
                self._iterators[id(iterator._iterator_resource)] = iterator

            return create_iterator

        def make_init(init: Callable[..., None]) -> Callable[..., None]:
            def init_data_set(data_set: Any, variant_tensor: Any) -> None:
                init(data_set, variant_tensor)
                self._data_sets[id(variant_tensor)] = data_set

            return init_data_set

        patches.replace(iterator_ops.OwnedIterator, "_create_iterator", make)
        patches.replace(dataset_ops.DatasetV2, "__init__", make_init)

    def size(self, inputs: Sequence[Any]) -> int | None:
        """The rows that the next batch is likely to have; a last batch may have fewer.

        Args:
            inputs: the flat inputs of a function that an iterator or a data set is among.

        Returns:
            The batch size of the data set; of an iterator whose data set has none, that of the
            Keras method that calls. None where that is not known.
        """
        for tensor in inputs:
            iterator = self._iterators.get(id(tensor))
            if iterator is not None:
                # What Keras calls may go through a data set of its own, as a callback does.
                return _of_data_set(iterator._dataset) or _of_keras()
            data_set = self._data_sets.get(id(tensor))
            if data_set is not None:
                return _of_data_set(data_set)
        return None


def _of_keras() -> int | None:
    frame = keras_frame()
    size = frame.f_locals.get("batch_size") if frame else None
    return size if isinstance(size, int) else None


def _of_data_set(data_set: Any) -> int | None:
    """The batch size of the last step of a pipeline that has one."""
    steps = [data_set]
    while steps:
        step = steps.pop(0)
        size = getattr(step, "_batch_size", None)
        if size is not None:
            # Data sets of other libraries keep a number of Python, or something else by that name.
            known = np.asarray(tensor_util.constant_value(size))
            is_size = known.shape == () and known.dtype.kind in "iu" and known > 0
            return int(known) if is_size else None
        if not has_other_rows(type(step).__name__):
            steps += getattr(step, "_inputs", list)()
    return None
