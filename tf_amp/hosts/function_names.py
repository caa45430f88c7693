"""Names of traced functions, for people."""

from __future__ import annotations

import re
import sys
import types

from tensorflow.python.eager import context as context_lib
from tensorflow.python.eager.polymorphic_function import atomic_function, attributes

SIZES_NEAR = ", sizes near "
"""Between the name of a function and the size that it was planned again for."""
_KERAS_STEPS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def readable_name(name: str) -> str:
    """Returns the name the user gave to a function.

    Args:
        name: the runtime's name, like "__inference_train_step_118".

    Returns:
        For example "train_step", or "backward of train_step" for its gradient, and "backward of
        backward of train_step" for the gradient of that.
    """
    inner, times = name, 0
    # TensorFlow puts a prefix and a number around the name of what it derives a function from.
    while derived := re.fullmatch(r"__(inference|forward|backward)_(.+)_\d+", inner):
        kind, inner = derived.groups()
        times += kind == "backward"
    if inner is name:
        inner = re.sub(r"_\d+$", "", name)
    return "backward of " * times + inner or name


def traced_function_names() -> list[str]:
    """Returns the readable names of live functions that were traced before now.

    Left out are functions of tf.data, and parts of functions such as loop bodies.
    """
    names = set()
    if (context := context_lib.context_safe()) is None:
        return []
    for scope, name in list(atomic_function.RUNTIME_FUNCTION_REFS):
        if not name.startswith(b"__inference_") or scope != context.function_scope_id:
            continue
        if context.has_function(name):
            definition = context.get_function_def(name)
            if attributes.TF_DATA_FUNCTION not in definition.attr:
                names.add(readable_name(name.decode()))
    return sorted(names)


def keras_step() -> str:
    """Returns the method of a Keras model that is tracing, or "": its functions share one name."""
    frame = keras_frame()
    return frame.f_code.co_name if frame else ""


def keras_frame() -> types.FrameType | None:
    """Returns the frame of the method of a Keras model, such as `fit`, that is being called."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name in _KERAS_STEPS and "keras" in code.co_filename:
            return frame
        frame = frame.f_back
    return None
