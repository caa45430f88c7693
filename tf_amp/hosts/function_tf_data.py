"""Keeps the functions of tf.data pipelines exactly as they would be without AMP.

Input pipelines run on the CPU and prepare data, so lower precision there is noise without gain.
Their functions carry an attribute, but what is nested in them (cond branches, loop bodies, other
tf.functions) does not and is traced first. The program may call that too, and has it rewritten
then: pipelines call copies of it.

A loop over a dataset in a tf.function is no pipeline, although TensorFlow makes one of it
(tensorflow/python/data/ops/dataset_autograph.py): what it runs is the program, such as a training
step, and is rewritten as any other part of that function. The thread that builds one is marked.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from tensorflow.core.framework import function_pb2
from tensorflow.python.data.ops import dataset_autograph, structured_function
from tensorflow.python.eager import context as context_lib
from tensorflow.python.eager.polymorphic_function import attributes

from tf_amp.hosts.function_redirects import definition_in, redirect_calls

if TYPE_CHECKING:
    from tf_amp.hosts.function_originals import Originals
    from tf_amp.patches import Patches

_FLOAT32_SUFFIX = "__tf_amp_float32"


class LoopMark:
    """Marks the thread that is building the body of a loop over a dataset."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def install(self, patches: Patches) -> None:
        """Starts to mark."""
        mark = self._thread

        def make(init: Callable[..., None]) -> Callable[..., None]:
            def marking_init(self: Any, *args: Any, **kwargs: Any) -> None:
                outer = getattr(mark, "is_body", False)
                function = args[0] if args else kwargs.get("func")
                mark.is_body = getattr(function, "__module__", "") == dataset_autograph.__name__
                try:
                    init(self, *args, **kwargs)
                finally:
                    mark.is_body = outer

            return marking_init

        patches.replace(structured_function.StructuredFunctionWrapper, "__init__", make)

    def is_of_pipeline(self, attrs: Collection[str]) -> bool:
        """Whether a function just traced by this thread, with these attributes, is a pipeline's."""
        return attributes.TF_DATA_FUNCTION in attrs and not getattr(self._thread, "is_body", False)


def call_originals(
    definition: function_pb2.FunctionDef,
    context: context_lib.Context,
    originals: Originals,
    waits: Callable[[str], bool],
) -> tuple[function_pb2.FunctionDef, tuple[function_pb2.FunctionDef, ...]] | None:
    """Makes a function of a pipeline call the float32 originals of functions that are rewritten.

    The model may have called a preprocessing function first, or may do so later. The runtime
    would run the rewritten one, so the originals are added under names of their own.

    Args:
        definition: the function of the pipeline; it is not changed.
        context: the eager context that holds the functions it calls.
        originals: what was rewritten.
        waits: whether a function is rewritten once it is called by itself.

    Returns:
        The function with calls to the originals, and those under their new names; None if it calls
        nothing that is rewritten.
    """
    running = functools.partial(definition_in, context)

    def replacement(name: str) -> function_pb2.FunctionDef | None:
        original = originals.find(context, name)
        if original is None:
            return running(name) if waits(name) else None
        return original.definition()

    return redirect_calls(definition, running, replacement, _FLOAT32_SUFFIX)
