"""The float32 originals of rewritten functions, and the TensorFlow members that must see them.

The runtime looks a function up by its name and so runs the rewritten definition. Whatever copies a
function out of the runtime instead (another graph, a SavedModel, a frozen graph, the gradient of a
loaded `While`) has to get the original, or an exported model would carry our casts and a
gradient would be built from a graph that was already rewritten.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from tensorflow.core.framework import function_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import context as context_lib
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import c_api_util, errors

from tf_amp.hosts import function_debug_info
from tf_amp.hosts.function_redirects import definition_in
from tf_amp.patches import Patches

_ORIGINALS = "tf_amp_originals"


@dataclasses.dataclass(frozen=True)
class Original:
    """What a function was before it was rewritten.

    Attributes:
        c_function: the runtime's own object of the float32 function; it carries stack traces.
        extra_functions: names of the functions that the rewritten definition calls and that
            exist for its sake alone.
    """

    c_function: c_api_util.ScopedTFFunction
    extra_functions: tuple[str, ...] = ()

    def definition(self) -> function_pb2.FunctionDef:
        """Returns the float32 definition, decoded anew on every call."""
        definition = function_pb2.FunctionDef()
        with c_api_util.tf_buffer() as buffer, self.c_function.get() as c_function:
            pywrap_tf_session.TF_FunctionToFunctionDef(c_function, buffer)
            definition.ParseFromString(pywrap_tf_session.TF_GetBuffer(buffer))
        return definition


class Originals:
    """The originals of every function swapped in this process, by runtime scope and name.

    A process may replace its eager context, after which names start again: the scope id of the
    context is part of the key.
    """

    def __init__(self) -> None:
        # The garbage collector may remove a function, and so call `forget`, at any point.
        self._lock = threading.RLock()
        self._patches = Patches()
        self._add = context_lib.Context.add_function_def
        self._remove = context_lib.Context.remove_function
        self._by_key: dict[tuple[int, bytes], Original] = {}
        self._extra_uses: Counter[tuple[int, str]] = Counter()

    def find(self, context: context_lib.Context, name: str | bytes) -> Original | None:
        """Returns the original of a rewritten function, None for any other function."""
        # Asked on every graph construction: nothing swapped must cost nothing.
        if not self._by_key:
            return None
        return self._by_key.get((context.function_scope_id, _as_bytes(name)))

    def definition(
        self, context: context_lib.Context, name: str
    ) -> function_pb2.FunctionDef | None:
        """Returns the float32 definition of any function, None for a name that is no function's."""
        original = self.find(context, name)
        return definition_in(context, name) if original is None else original.definition()

    def swap(
        self,
        context: context_lib.Context,
        replacement: function_pb2.FunctionDef,
        extra_functions: tuple[function_pb2.FunctionDef, ...] = (),
    ) -> None:
        """Makes the runtime run `replacement` in place of the function of the same name.

        Args:
            context: the eager context that holds the function.
            replacement: the new definition; name and signature are those of the old one.
            extra_functions: definitions that the replacement calls and that the context may not
                have yet. They are removed again when the last function that brought them is.

        Raises:
            tensorflow.errors.OpError: the runtime refused a definition. The function is then
                what it was before.
        """
        name = _as_bytes(replacement.signature.name)
        original = Original(
            context.get_c_function(name), tuple(f.signature.name for f in extra_functions)
        )
        with self._lock:
            self._add_extra(context, extra_functions)
            try:
                self._remove_all(context, name)
                self._add(context, replacement)
            except BaseException:  # of an interrupt too: without it the name would call nothing
                self._remove_all(context, name)
                self._add(context, original.definition())
                self._drop_extra(context, original.extra_functions)
                raise
            self._by_key[context.function_scope_id, name] = original

    def attach(
        self,
        context: context_lib.Context,
        name: str | bytes,
        functions: tuple[function_pb2.FunctionDef, ...],
    ) -> None:
        """Adds functions to the runtime that live as long as another one does.

        Args:
            context: the eager context that holds that one.
            name: its name; it need not have been swapped.
            functions: definitions that the context may not have yet.
        """
        key = context.function_scope_id, _as_bytes(name)
        added = tuple(function.signature.name for function in functions)
        with self._lock:
            known = self._by_key.get(key) or Original(context.get_c_function(key[1]))
            self._add_extra(context, functions)
            self._by_key[key] = dataclasses.replace(
                known, extra_functions=(*known.extra_functions, *added)
            )

    def restore_all(self, context: context_lib.Context) -> None:
        """Makes the runtime run every original again.

        Functions that XLA has already compiled keep their compiled code; everything that is
        traced from now on calls float32 functions. What kernels count, as the numbers drawn by a
        seed, begins anew.
        """
        restored = False
        with self._lock:
            for (scope, name), original in list(self._by_key.items()):
                if scope == context.function_scope_id and context.has_function(name):
                    definition = original.definition()
                    self._remove(context, name)
                    self._add(context, definition)
                    restored = True
        if restored:
            # A caller that has run keeps what was inlined into it.
            context.clear_kernel_cache()

    def forget(self, context: context_lib.Context, name: str | bytes) -> None:
        """Drops what is kept of a function that the runtime has removed."""
        if not self._by_key:
            return
        with self._lock:
            original = self._by_key.pop((context.function_scope_id, _as_bytes(name)), None)
            if original is not None:
                self._drop_extra(context, original.extra_functions)

    def hook(self) -> None:
        """Makes TensorFlow's members see the originals."""
        context, function = context_lib.Context, atomic_function.AtomicFunction
        self._patches.replace(context, "add_function_def", self._make_add)
        self._patches.replace(context, "remove_function", self._make_remove)
        self._patches.replace(function, "_c_func", self._make_c_func)
        self._patches.replace(function, "graph_debug_info", self._make_debug_info)
        self._patches.replace(
            atomic_function.InterpolateRuntimeError, "__exit__", _make_leave_with_traced_names
        )

    def unhook_unless_needed(self) -> None:
        """Takes the hooks off if no function was rewritten."""
        if not self._by_key:
            self._patches.undo()

    def _make_add(self, add: Callable[..., None]) -> Callable[..., None]:
        def add_function_def(context: context_lib.Context, fdef: function_pb2.FunctionDef) -> None:
            # `wrap_function` adds what its graph calls again. The runtime takes a repeated
            # definition for granted, but not one that differs from what the rewrite left there.
            original = self.find(context, fdef.signature.name)
            if original is None or original.definition() != fdef:
                add(context, fdef)

        return add_function_def

    def _make_remove(self, remove: Callable[..., None]) -> Callable[..., None]:
        def remove_function(context: context_lib.Context, name: str | bytes) -> None:
            remove(context, name)
            self.forget(context, name)

        return remove_function

    def _make_c_func(self, c_func: Callable[..., Any]) -> Callable[..., Any]:
        def original_c_func(function: Any) -> Any:
            original = self.find(function._bound_context, function.name)
            return c_func(function) if original is None else original.c_function

        return original_c_func

    def _make_debug_info(self, debug_info: Callable[..., Any]) -> Callable[..., Any]:
        def original_debug_info(function: Any) -> Any:
            # The runtime drops the stack traces of a definition that was added as a proto.
            if self.find(function._bound_context, function.name) is None:
                return debug_info(function)
            return function_debug_info.rebuild(function, fallback=debug_info)

        return original_debug_info

    def _remove_all(self, context: context_lib.Context, name: bytes) -> None:
        while context.has_function(name):  # the runtime counts a repeated definition
            self._remove(context, name)

    def _add_extra(
        self,
        context: context_lib.Context,
        definitions: tuple[function_pb2.FunctionDef, ...],
    ) -> None:
        for definition in definitions:
            name = definition.signature.name
            if not context.has_function(name):
                self._add(context, definition)
            self._extra_uses[context.function_scope_id, name] += 1

    def _drop_extra(self, context: context_lib.Context, names: tuple[str, ...]) -> None:
        for name in names:
            key = (context.function_scope_id, name)
            self._extra_uses[key] -= 1
            if not self._extra_uses[key]:
                del self._extra_uses[key]
                if context.has_function(name):
                    self._remove(context, name)


def installed() -> Originals:
    """Returns the originals of this process, hooking TensorFlow's members on the first call.

    The hooks stay as long as a rewritten function is known: it must be exported as float32 after
    `disable` too.
    """
    found = getattr(context_lib.Context.remove_function, _ORIGINALS, None)
    if found is not None:
        return found
    originals = Originals()
    try:
        originals.hook()
    except BaseException:
        originals.unhook_unless_needed()
        raise
    setattr(context_lib.Context.remove_function, _ORIGINALS, originals)
    return originals


def _make_leave_with_traced_names(leave: Callable[..., Any]) -> Callable[..., Any]:
    def leave_with_traced_names(self: Any, typ: Any, exc: Any, tb: Any) -> Any:
        if isinstance(exc, errors.OpError):
            exc._message = function_debug_info.name_originals(exc.message, self._func)
        return leave(self, typ, exc, tb)

    return leave_with_traced_names


def _as_bytes(name: str | bytes) -> bytes:
    return name.encode() if isinstance(name, str) else name
