"""Scopes for code: what is traced inside them stays float32, or goes low, whatever the lists say.

A scope marks the nodes that are made inside it by an attribute, `rule_matching.MARK`, which the
pass reads as a rule and everybody else ignores. So the mark travels with the graph: into functions
that are traced inside, into loops and branches, into SavedModels. TensorFlow itself hands such
attributes on to neither: from the first scope on five of its functions do, so that functions take
the mark of the graph in which they are traced, gradients that of what they are the gradient of, and
what `tf.vectorized_map` makes of an op for all rows that of the op.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager import execute, record
from tensorflow.python.framework import func_graph, ops, registry
from tensorflow.python.util import tf_stack

from graph_passes.ir.rule_matching import MARK, write_mark
from graph_passes.policy.rules import RuleAction
from tf_amp.compatibility import SCOPES, obstacle
from tf_amp.hosts.function_debug_info import user_lines
from tf_amp.patches import Patches

_log = logging.getLogger("tf_amp")


@autograph.do_not_convert
def keep_float32(why: str = "") -> contextlib.AbstractContextManager[None]:
    """Keeps what is traced inside in float32, its gradients too.

        with tf_amp.keep_float32("the logits overflow float16"):
            logits = tf.matmul(features, weights)

    What counts is the code that runs while a function is traced, or a v1 graph is built: that of a
    layer's `call`, say. A `tf.function` that was traced before stays as it was traced then. In a
    functional Keras model the layers are called anew later, outside of the scope: there, put the
    scope into a layer, or use a rule on layers. Without AMP it does nothing.

    Args:
        why: the reason, which `tf-amp explain` shows at each of the nodes.

    Returns:
        A context manager, which is a decorator as well.
    """
    return _scope("keep_float32", why)


@autograph.do_not_convert
def allow(why: str = "") -> contextlib.AbstractContextManager[None]:
    """Puts the ops that are traced inside on the allow list, their gradients too.

    Otherwise as `keep_float32`. An op goes low where it has a kernel for the target dtype; what is
    assigned to a variable, and what is inside a normalization or a loss that the pass knows,
    stays float32.

    Args:
        why: the reason, which `tf-amp explain` shows at each of the nodes.

    Returns:
        A context manager, which is a decorator as well.
    """
    return _scope("allow", why)


@contextlib.contextmanager
def _scope(action: RuleAction, why: str) -> Iterator[None]:
    where = user_lines(tf_stack.extract_stack())[:1] or ("",)
    mark = write_mark(action, where[0], why)
    with _marked(mark) if _hands_marks_on() else contextlib.nullcontext():
        yield


def _marked(mark: bytes) -> contextlib.AbstractContextManager[None]:
    """Marks what is added to the current graph."""
    value = attr_value_pb2.AttrValue(s=mark)
    scope: contextlib.AbstractContextManager[None] = ops.get_default_graph()._attr_scope(
        {MARK: value}
    )
    return scope


@functools.cache
def _hands_marks_on() -> bool:
    """Makes functions and gradients take marks; False where this TensorFlow cannot."""
    found = obstacle(SCOPES)
    if found is None and not hasattr(ops.Graph(), "_attr_scope_map"):
        found = "Graphs of this TensorFlow have no _attr_scope_map"
    if found is not None:
        _log.warning(
            "%s. So tf_amp.keep_float32 and tf_amp.allow do nothing; rules on names do not depend "
            "on that.",
            found,
        )
        return False
    patches = Patches()
    patches.replace(func_graph.FuncGraph, "__init__", _init_func_graph)
    patches.replace(execute, "record_gradient", _record_gradient)
    patches.replace(registry.Registry, "lookup", _lookup)
    patches.replace(record, "record_operation", _record_operation)
    patches.replace(ops.Graph, "_original_op", _original_op)
    return True


def _init_func_graph(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        mark = ops.get_default_graph()._attr_scope_map.get(MARK)
        if mark is not None:
            self._attr_scope_map[MARK] = mark

    return init


def _record_gradient(original: Callable[..., None]) -> Callable[..., None]:
    def record_gradient(op_name: str, inputs: Any, attrs: tuple[Any, ...], outputs: Any) -> None:
        mark = ops.get_default_graph()._attr_scope_map.get(MARK)
        if mark is not None:
            attrs = (*attrs, MARK, mark.s)
        original(op_name, inputs, attrs, outputs)

    return record_gradient


def _lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    def lookup(self: Any, name: str) -> Any:
        found = original(self, name)
        if found is None or self is not ops._gradient_registry:
            return found

        @functools.wraps(found)
        def gradient(op: Any, *gradients: Any) -> Any:
            mark = _mark_of(op)
            if mark is None:
                return found(op, *gradients)
            with _marked(mark):
                return found(op, *gradients)

        return gradient

    return lookup


def _record_operation(original: Callable[..., None]) -> Callable[..., None]:
    """A gradient that the program defines is looked up nowhere, and has an op of no kind."""

    def record_operation(
        op_type: str,
        output_tensors: Any,
        input_tensors: Any,
        backward_function: Callable[..., Any],
        forward_function: Any = None,
    ) -> None:
        mark = ops.get_default_graph()._attr_scope_map.get(MARK)

        def gradient(*gradients: Any) -> Any:
            with _marked(mark.s):
                return backward_function(*gradients)

        backward = backward_function if mark is None else gradient
        original(op_type, output_tensors, input_tensors, backward, forward_function)

    return record_operation


def _original_op(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def original_op(graph: Any, op: Any) -> Iterator[None]:
        mark = _mark_of(op)
        with original(graph, op), contextlib.nullcontext() if mark is None else _marked(mark):
            yield

    return original_op


def _mark_of(op: Any) -> bytes | None:
    """The mark of an op, or of what a tape has recorded of one."""
    if isinstance(op, ops.Operation):
        try:
            return op.get_attr(MARK)  # type: ignore[no-any-return]
        except ValueError:
            return None
    recorded = getattr(op, "attrs", ())
    return dict(zip(recorded[::2], recorded[1::2], strict=False)).get(MARK)
