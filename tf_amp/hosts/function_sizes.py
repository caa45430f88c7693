"""Functions traced with an unknown batch are planned again for the sizes they are called with.

Nearly every dataset is batched without `drop_remainder`, and what is worth converting depends on
the rows. A call shows them: by the shape of an argument, or by what an iterator gave, whose shape
the function then returns as one more output; before its first call, its data set or Keras may tell
what an iterator will give, which is all that can be known of batches that a loop reads. For each
class of sizes that lasts, the runtime gets a variant of the function under a name of its own. Only
calls from Python choose among variants; whatever copies the function, or calls it by its name,
finds what was planned first. Where functions run in other processes the first call
alone is looked at, since to read what it returns is to wait for it.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from tensorflow.core.framework import function_pb2
from tensorflow.python.eager.polymorphic_function import attributes
from tensorflow.python.framework import errors

from graph_passes.policy.config import UNKNOWN_DIMENSION
from tf_amp.hosts.function_redirects import call_anew
from tf_amp.hosts.function_size_sources import Source

if TYPE_CHECKING:
    from graph_passes import PrecisionConfig, RewriteResult
    from tf_amp.hosts.function_calls import TracedFunction

Plan: TypeAlias = "Callable[[int], RewriteResult]"
"""Plans a function for a size of what is not known."""
Add: TypeAlias = Callable[[tuple[function_pb2.FunctionDef, ...]], None]
"""Makes functions known to the runtime."""
Expect: TypeAlias = Callable[[Sequence[Any]], "int | None"]
"""Tells the size that a call will show, from its inputs, where that is known beforehand."""
Try: TypeAlias = Callable[[bytes, int], None]
"""Is told the name of a variant, and its size."""

_SUFFIX = "__tf_amp_size_"
_IMPLEMENTS = "api_implements"
"""Attribute of functions that TensorFlow replaces by others."""
_RATIO = 4
"""Sizes within this ratio of one another share a variant."""
_CLASSES = (-3, 5)
_LASTING = 2
"""Calls in a row by which a class of sizes, but for the first, shows that it lasts."""


def plan_anew(
    traced: TracedFunction,
    result: RewriteResult,
    config: PrecisionConfig,
    has_plan: Callable[[str], bool],
) -> tuple[RewriteResult, list[RewriteResult]]:
    """Has a function call others that were planned for the same size, where they have plans alone.

    Args:
        traced: the function as it was traced.
        result: the function, planned for the size.
        config: plans for the size.
        has_plan: whether a function of some name was looked at, as the body of a loop over a data
            set is, and what prepares data is not.

    Returns:
        The function with other calls where that is needed, and what became of the others.
    """

    def wanted(name: str, float32: function_pb2.FunctionDef) -> bool:
        if attributes.TF_DATA_FUNCTION in float32.attr and not has_plan(name):
            return False
        return _IMPLEMENTS not in float32.attr

    suffix = f"{_SUFFIX}{config.unknown_dimension}"
    return call_anew(traced, result, config, wanted, suffix, traced.find)


@dataclasses.dataclass(frozen=True)
class Sized:
    """What it takes to plan a function for the sizes that it will be called with.

    Attributes:
        source: what shows the size.
        size: for which it is planned: `UNKNOWN_DIMENSION`, or what was told of its first call.
        planned: gives what was planned for that, as the runtime has it: to keep it would take
            megabytes.
        plan: plans it for another size.
        add: adds a variant, which lives as long as the function.
        try_out: is told of each variant and its size; None lets sizes with one plan share it.
        say: is called at each call by which the size is known.
        expect: is asked at the first call where an iterator shows the size, and at each where
            nothing does.
        once: whether what the first call shows is for good.
    """

    source: Source
    size: int
    planned: Callable[[], function_pb2.FunctionDef]
    plan: Plan
    add: Add
    try_out: Try | None
    say: Callable[[], None]
    expect: Expect
    once: bool


class FunctionSizes:
    """Chooses, at calls from Python, among the variants of functions.

    Args:
        say_fault: is told the name of a function that could not be planned again, and why.
    """

    def __init__(self, say_fault: Callable[[str, Exception], None]) -> None:
        self._say_fault = say_fault
        self._by_name: dict[bytes, _SizedFunction] = {}

    def watch(self, function: Any, sized: Sized) -> None:
        """Lets a function be planned for the sizes that it will be called with.

        Args:
            function: the AtomicFunction; what is kept of it goes with it.
            sized: how to plan it.
        """
        name = function.name
        self._by_name[name] = _SizedFunction(name, sized)
        weakref.finalize(function, self._by_name.pop, name, None)

    def call(
        self,
        run: Callable[[bytes, Sequence[Any], int], Any],
        name: bytes,
        inputs: Sequence[Any],
        outputs: int,
    ) -> Any:
        """Calls a function, or the variant of it for the size of what it gets.

        Args:
            run: calls the function of a name.
            name: the function's name.
            inputs: its flat inputs.
            outputs: how many outputs it has.

        Returns:
            What the function returns: a list, None instead of an empty one.
        """
        sized = self._by_name.get(name)
        if sized is None:
            return run(name, inputs, outputs)
        try:
            chosen, shows = sized.choose(inputs)
        except Exception as error:  # a fault of ours must not stop the user's program
            self._give_up(name, error)
            return run(name, inputs, outputs)
        if not shows:
            return run(chosen, inputs, outputs)
        *found, shape = run(chosen, inputs, outputs + 1)
        try:
            seen = shape.numpy().tolist()
        except errors.OpError:  # another process is gone: whoever waits for the results is told
            return found or None
        try:
            sized.see(seen)
        except Exception as error:
            self._give_up(name, error)
        return found or None

    def _give_up(self, name: bytes, error: Exception) -> None:
        self._by_name.pop(name, None)
        self._say_fault(name.decode(), error)


class _SizedFunction:
    """The variants of the function of a name."""

    def __init__(self, name: bytes, of: Sized) -> None:
        self._name, self._of, self._shows = name, of, bool(of.source.tensor)
        self._goes_through = of.source.argument is None and not self._shows
        # A handler of a signal or of the log may call the function while this thread plans it.
        self._lock = threading.RLock()
        self._is_planning = False
        self._first = _class_of(of.size)
        # Class of sizes -> variant, None where it is that for the first size.
        self._names: dict[int, bytes | None] = {}
        self._for_first: bytes | None = None
        self._sizes: dict[int, int] = {}  # class -> the size that was seen last
        # Whether the first class is planned for a size that nothing tells or shows.
        self._is_assumed = of.size == UNKNOWN_DIMENSION
        self._served: int | None = None
        self._seen, self._in_a_row = 0, 0
        # A size whose next call decides nothing, and what it calls: most calls are such.
        self._calm: tuple[int, bytes] | None = None

    def choose(self, inputs: Sequence[Any]) -> tuple[bytes, bool]:
        """The variant to call: for the class of sizes in force, or nearest to it.

        Returns:
            Its name, and whether it returns, behind its outputs, the shape that shows the size.
        """
        size, calm = None if self._is_settled else self._size_of(inputs), self._calm
        if calm is not None and size in (None, calm[0]):
            return calm[1], self._shows
        with self._lock:
            if size is not None:
                self._note(size)
            chosen = self._serve(), self._shows
        self._tell()
        return chosen

    def _size_of(self, inputs: Sequence[Any]) -> int | None:
        """The size that a call shows beforehand."""
        source = self._of.source
        if source.argument is not None:
            return source.size_of(inputs[source.argument].shape)
        if not source.tensor:
            # What nobody tells stays as it is planned, which is to be said.
            return self._of.expect(inputs) or (UNKNOWN_DIMENSION if self._served is None else None)
        is_first = self._served is None and not self._of.once
        return self._of.expect(inputs) if is_first and source.unknown == (0,) else None

    def see(self, shape: Sequence[int]) -> None:
        """Takes note of the shape that a call returned, and plans at once for the next call."""
        size, calm = self._of.source.size_of(shape), self._calm
        if calm is not None and size == calm[0]:
            return
        with self._lock:
            if self._is_settled:
                return
            self._note(size)
            if self._of.once:
                self._shows = False
                self._for_first = self._name
            self._serve()
        self._tell()

    def _tell(self) -> None:
        """Says what runs, without the lock: who hears it may wait for a thread that wants it."""
        if self._served is not None and not self._is_planning:
            self._of.say()

    @property
    def _is_settled(self) -> bool:
        return self._of.once and self._served is not None

    def _note(self, size: int) -> None:
        seen = _class_of(size)
        self._sizes[seen] = size
        self._in_a_row = self._in_a_row + 1 if seen == self._seen else 1
        self._seen = seen
        # What an iterator gave says little of what it will: an epoch ends in a small batch.
        if not self._shows or self._served is None or self._in_a_row >= _LASTING:
            self._served = seen

    def _serve(self) -> bytes:
        names, first = self._names, self._first
        served = first if self._served is None else self._served
        size = self._sizes.get(served, self._of.size)
        # Where nothing shows the size a call goes through batches that tell it, maybe an epoch.
        is_waited_for = self._goes_through or (self._is_assumed and not names)
        is_new = served not in (first, *names) and (is_waited_for or self._in_a_row >= _LASTING)
        is_near = served == first and self._is_assumed and size != UNKNOWN_DIMENSION
        if (is_new or is_near) and not self._is_planning:
            self._is_planning = True
            try:
                result = self._of.plan(size)
            finally:
                self._is_planning = False
            self._is_assumed = self._is_assumed and not is_near
            names[served] = None
            apart = self._of.try_out is not None or result.proto != self._of.planned()
            if result.failure is None and apart:
                names[served] = self._variant(size, result.proto, result.extra_functions)  # type: ignore[arg-type]
        nearest = min((first, *names), key=lambda known: abs(known - served))
        chosen = names.get(nearest) or self._as_first()
        lasts = served == self._seen and self._in_a_row >= _LASTING and not self._is_planning
        self._calm = (size, chosen) if lasts else None
        return chosen

    def _as_first(self) -> bytes:
        """What is called where no other plan is better, made when it is first needed."""
        if self._for_first is None and self._shows:
            self._for_first = self._variant(self._of.size, self._of.planned())
        elif self._for_first is None:
            self._for_first = self._name
            if self._of.try_out is not None:
                self._of.try_out(self._name, self._of.size)
        return self._for_first

    def _variant(
        self,
        size: int,
        planned: function_pb2.FunctionDef,
        called: tuple[function_pb2.FunctionDef, ...] = (),
    ) -> bytes:
        """Adds what was planned for a size to the runtime; returns its name there."""
        shown = self._of.source.shown_by(planned) if self._shows else planned
        name = add_variant(shown, f"{self._name.decode()}{_SUFFIX}{size}", self._of.add, called)
        if self._of.try_out is not None:
            self._of.try_out(name, size)
        return name


def _class_of(size: int) -> int:
    least, most = _CLASSES
    return min(max(round(math.log(size / UNKNOWN_DIMENSION, _RATIO)), least), most)


def add_variant(
    definition: function_pb2.FunctionDef,
    name: str,
    add: Add,
    called: tuple[function_pb2.FunctionDef, ...] = (),
) -> bytes:
    """Adds a function under another name to the runtime, with functions that it calls.

    Args:
        definition: the function; it is not changed.
        name: its new name.
        add: makes functions known to the runtime.
        called: what it calls and the runtime may lack.

    Returns:
        The name.
    """
    variant = function_pb2.FunctionDef()
    variant.CopyFrom(definition)
    variant.signature.name = name
    add((*called, variant))
    return name.encode()
