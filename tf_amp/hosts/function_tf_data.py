"""Keeps the functions of tf.data pipelines exactly as they would be without AMP.

Input pipelines run on the CPU and prepare data, so lower precision there is noise without gain.
Their functions carry an attribute, but what is nested in them (cond branches, loop bodies, other
tf.functions) does not and is traced first; the thread that builds the pipeline is therefore marked.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tensorflow.core.framework import attr_value_pb2, function_pb2
from tensorflow.python.data.ops import structured_function
from tensorflow.python.eager import context as context_lib
from tensorflow.python.eager.polymorphic_function import attributes

if TYPE_CHECKING:
    from tf_amp.hosts.function_originals import Originals

_FLOAT32_SUFFIX = "__tf_amp_float32"


class PipelineMark:
    """Marks the thread that is building a tf.data function."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._init = structured_function.StructuredFunctionWrapper.__init__

    def install(self) -> None:
        """Starts to mark."""
        mark, init = self._thread, self._init

        @functools.wraps(init)
        def marking_init(self: Any, *args: Any, **kwargs: Any) -> None:
            depth = getattr(mark, "depth", 0)
            mark.depth = depth + 1
            try:
                init(self, *args, **kwargs)
            finally:
                mark.depth = depth

        structured_function.StructuredFunctionWrapper.__init__ = marking_init

    def uninstall(self) -> None:
        """Puts TensorFlow's own constructor back."""
        structured_function.StructuredFunctionWrapper.__init__ = self._init

    def covers(self, definition: function_pb2.FunctionDef) -> bool:
        """Whether a function just traced by this thread belongs to a tf.data pipeline."""
        return (
            getattr(self._thread, "depth", 0) > 0 or attributes.TF_DATA_FUNCTION in definition.attr
        )


def call_originals(
    definition: function_pb2.FunctionDef, context: context_lib.Context, originals: Originals
) -> tuple[function_pb2.FunctionDef, tuple[function_pb2.FunctionDef, ...]] | None:
    """Makes a function of a pipeline call the float32 originals of functions rewritten before.

    A preprocessing function may have been traced, and rewritten, by the model first. The runtime
    would run the rewritten one, so the originals are added under names of their own.

    Args:
        definition: the function of the pipeline; it is not changed.
        context: the eager context that holds the functions it calls.
        originals: what was rewritten.

    Returns:
        The function with calls to the originals, and those under their new names; None if it calls
        nothing that was rewritten.
    """
    renamed: dict[str, function_pb2.FunctionDef] = {}

    def redirect(caller: function_pb2.FunctionDef) -> function_pb2.FunctionDef | None:
        changed = None
        for name in sorted(set(called_names(caller))):
            target = redirected(name)
            if target is not None:
                if changed is None:
                    changed = function_pb2.FunctionDef()
                    changed.CopyFrom(caller)
                _rename_calls(changed, name, target)
        return changed

    def redirected(name: str) -> str | None:
        if not context.has_function(name):
            return None
        alias = name + _FLOAT32_SUFFIX
        if alias in renamed:
            return alias
        original = originals.find(context, name)
        callee = original.definition() if original else context.get_function_def(name)
        body = redirect(callee)
        if original is None and body is None:
            return None
        copy = function_pb2.FunctionDef()
        copy.CopyFrom(body or callee)
        copy.signature.name = alias
        renamed[alias] = copy
        return alias

    changed = redirect(definition)
    return None if changed is None else (changed, tuple(renamed.values()))


def called_names(definition: function_pb2.FunctionDef) -> Iterator[str]:
    """Yields the names that a function may call by: its op types and its function attributes."""
    for node in definition.node_def:
        yield node.op
        for function in _function_attrs(node.attr.values()):
            yield function.name


def _rename_calls(definition: function_pb2.FunctionDef, old: str, new: str) -> None:
    for node in definition.node_def:
        if node.op == old:
            node.op = new
        for function in _function_attrs(node.attr.values()):
            if function.name == old:
                function.name = new


def _function_attrs(values: Any) -> Iterator[attr_value_pb2.NameAttrList]:
    for value in values:
        kind = value.WhichOneof("value")
        if kind == "func":
            yield value.func
        elif kind == "list":
            yield from value.list.func
