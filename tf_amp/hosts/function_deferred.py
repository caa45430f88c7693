"""Functions that wait for their rewrite, because most of their kind never run.

Of those traced inside another one the function at the top is planned together with what it calls,
so most functions inside it, such as branches, loop bodies and forward functions, never run under
their own names: to rewrite each when it is made would be work for nothing, and all that it calls
would be planned again with every caller. They wait until a rewritten function calls one by its
name, or until it is called by itself.

A `tf.function` that makes variables while it is traced first, such as a training step whose
optimizer makes its slots, is traced once more to be run. The first trace waits until it is called.
So does what gets batches whose size its trace did not know: its call may tell the size. What a
SavedModel holds waits too, a function for each layer and mode, of which few are ever called.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tensorflow.python.eager import context as context_lib
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from tf_amp.patches import Patches


class DeferredFunctions:
    """The functions of one installation that wait.

    Args:
        rewrite: Rewrites one, and gets the inputs of a call of it by itself, else None; must not
            raise an `Exception`.
    """

    def __init__(self, rewrite: Callable[[Any, Sequence[Any] | None], None]) -> None:
        self._rewrite = rewrite
        self._waiting: weakref.WeakValueDictionary[tuple[int, bytes], Any]
        self._waiting = weakref.WeakValueDictionary()
        self._under_way: set[tuple[int, bytes]] = set()
        self._thread = threading.local()
        # Who calls a function that another thread is rewriting has to wait for it.
        self._lock = threading.RLock()

    def install(self, patches: Patches) -> None:
        """Starts to rewrite functions that are compiled for a look."""

        def make_ir(original: Callable[..., Any]) -> Callable[..., Any]:
            def get_compiler_ir(context: Any, *args: Any, **kwargs: Any) -> Any:
                self.rewrite(context, kwargs.get("function_name", ""))
                return original(context, *args, **kwargs)

            return get_compiler_ir

        patches.replace(context_lib.Context, "get_compiler_ir", make_ir)

    @property
    def is_loading(self) -> bool:
        """Whether this thread is inside `loading`."""
        return getattr(self._thread, "is_loading", False)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Says that what this thread traces inside the context is the functions of a SavedModel."""
        outer, self._thread.is_loading = self.is_loading, True
        try:
            yield
        finally:
            self._thread.is_loading = outer

    def add(self, function: Any) -> None:
        """Has an AtomicFunction wait."""
        self._waiting[_key(function._bound_context, function.name)] = function

    def covers(self, context: context_lib.Context, name: str | bytes) -> bool:
        """Whether a function waits."""
        return _key(context, name) in self._waiting

    def rewrite(
        self,
        context: context_lib.Context,
        name: str | bytes,
        inputs: Sequence[Any] | None = None,
    ) -> None:
        """Rewrites a function if it waits; afterwards it does no more.

        Args:
            context: that of the function.
            name: the function's name.
            inputs: the flat inputs of a call of the function by itself, None if that is not why.
        """
        key = _key(context, name)
        if key not in self._waiting:
            return
        with self._lock:
            function = self._waiting.get(key)
            if function is None or key in self._under_way:
                return
            self._under_way.add(key)
            try:
                self._rewrite(function, inputs)
            finally:
                self._under_way.remove(key)
            # An interrupt leaves it waiting for the next call.
            self._waiting.pop(key, None)


def is_traced_once_more() -> bool:
    """Whether the trace that has just ended is the first of a `tf.function` and made variables."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_initialize":
            function = frame.f_locals.get("self")
            if isinstance(function, polymorphic_function.Function):
                return bool(getattr(function, "_created_variables", None))
        frame = frame.f_back
    return False


def _key(context: context_lib.Context, name: str | bytes) -> tuple[int, bytes]:
    return context.function_scope_id, name.encode() if isinstance(name, str) else name
