"""What a graph tells the Python that built it, and what it does in any other process.

A host function (`tf.numpy_function`) lives in one process, and no longer than the graph that it was
made for. A training step is exported all the same, as a `.meta` file or a SavedModel; asked for in
another process, the function ends the step ("Could not find callback"). So each one gets an empty
file in TensorFlow's own memory (`ram://`), which goes when the function does, or the one whom it
tells, and which no other process has. Graphs look for the file before they call.
"""

from __future__ import annotations

import contextlib
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context

_Owner = TypeVar("_Owner")
_QUIET: list[None] = []
"""One element for each `nobody_told` that lasts. TensorFlow calls from threads of its own."""


@contextlib.contextmanager
def nobody_told() -> Iterator[None]:
    """Graphs that run meanwhile tell nothing: steps on copies of variables are none of training."""
    _QUIET.append(None)
    try:
        yield
    finally:
        _QUIET.pop()


def call_where_built(
    function: Callable[..., bool],
    owner: _Owner,
    inputs: Sequence[tf.Tensor],
    elsewhere: Callable[[], tf.Tensor],
) -> tf.Tensor:
    """Calls a function of this process from a graph, or does something else in another process.

    Args:
        function: Takes the owner and NumPy values of the inputs; returns a bool. TensorFlow keeps
            it, and what it holds, for as long as the outermost graph: that of eager code for good.
        owner: Is not kept; once it is gone, the graph does what it does in another process.
        inputs: Tensors on any device. The first is a number that the graph computes.
        elsewhere: Makes a scalar bool tensor, computed where the function does not exist.

    Returns:
        A scalar bool tensor on the CPU: what either of them returned.
    """
    stem = f"ram://tf_amp/{uuid.uuid4().hex}_"
    file = f"{stem}0"
    with tf.io.gfile.GFile(file, "w") as new:
        new.write("")
    reference = weakref.ref(owner)

    def call(*values: Any) -> bool:
        if _QUIET:
            return True
        found = reference()
        return found is not None and function(found, *values)

    remove = weakref.finalize(call, tf.io.gfile.remove, file)  # does so once
    remove.atexit = weakref.finalize(owner, remove).atexit = False
    # Host functions and files exist on CPUs only, wherever the step itself is placed. In a cluster
    # `numpy_function` goes to the process that asks for it, and so must the search.
    with contextlib.ExitStack() as devices:
        devices.enter_context(tf.device("/CPU:0"))
        if tf.compat.v1.executing_eagerly_outside_functions():
            devices.enter_context(tf.device(context.context().host_address_space()))
        # A name that is not constant: what TensorFlow computes of constants, it computes once.
        zero = tf.strings.as_string(tf.cast(inputs[0] * 0, tf.int64))
        found = tf.size(tf.raw_ops.MatchingFiles(pattern=tf.strings.join([stem, zero]))) > 0
        return tf.cond(found, lambda: tf.numpy_function(call, inputs, tf.bool), elsewhere)
