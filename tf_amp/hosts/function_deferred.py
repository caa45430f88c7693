"""Functions wait for their rewrite until they run, as most that are traced never do.

Of those traced inside another one the function at the top is planned together with what it calls,
so most of them, such as branches, loop bodies and forward functions, never run under their own
names: to rewrite each when it is made would be work for nothing, and all that it calls would be
planned again with every caller. The first trace of a `tf.function` that makes variables, such as
a training step whose optimizer makes its slots, is followed by the one that runs. A SavedModel
holds a function for each layer and mode, of which few are called, and what is exported runs
elsewhere. And a call may tell the size of batches that the trace did not know. So functions wait
until they are called by themselves, or a rewritten function calls one by its name.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tensorflow.python.eager import context as context_lib

from tf_amp.patches import Patches


class DeferredFunctions:
    """The functions of one installation that wait.

    Args:
        rewrite: Rewrites one, and gets the inputs of a call of it by itself, else None. Returns
            what says so. Neither may raise an `Exception`.
    """

    def __init__(self, rewrite: Callable[[Any, Sequence[Any] | None], Callable[[], None]]) -> None:
        self._rewrite = rewrite
        self._waiting: weakref.WeakValueDictionary[tuple[int, bytes], Any]
        self._waiting = weakref.WeakValueDictionary()
        self._under_way: set[tuple[int, bytes]] = set()
        self._to_say: list[Callable[[], None]] = []
        # Who calls a function that another thread is rewriting has to wait for it.
        self._lock = threading.RLock()

    def install(self, patches: Patches) -> None:
        """Starts to rewrite functions that are compiled for a look."""

        def make_ir(original: Callable[..., Any]) -> Callable[..., Any]:
            def get_compiler_ir(context: Any, *args: Any, **kwargs: Any) -> Any:
                inputs = (*kwargs.get("flat_args", ()), *kwargs.get("captured_inputs", ()))
                self.rewrite(context, kwargs.get("function_name", ""), inputs)
                return original(context, *args, **kwargs)

            return get_compiler_ir

        patches.replace(context_lib.Context, "get_compiler_ir", make_ir)

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
                self._to_say.append(self._rewrite(function, inputs))
            finally:
                self._under_way.remove(key)
            # An interrupt leaves it waiting for the next call.
            self._waiting.pop(key, None)
            if self._under_way:  # a function that calls this one
                return
            to_say, self._to_say = self._to_say, []
        # Without the lock: who hears it may wait for a thread that wants it.
        for say in to_say:
            say()


def _key(context: context_lib.Context, name: str | bytes) -> tuple[int, bytes]:
    return context.function_scope_id, name.encode() if isinstance(name, str) else name
