"""What calls of functions decide: the plan for their sizes, and whether a rewrite is faster."""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tensorflow.core.framework import function_pb2
from tensorflow.python.eager import context as context_lib

from graph_passes import rewrite_function_def
from graph_passes.plan_remarks import lines_within
from tf_amp.compiled import is_compiled
from tf_amp.hosts.conversion_numbers import ConversionNumbers
from tf_amp.hosts.function_debug_info import source_lines
from tf_amp.hosts.function_devices import captured_constants, variable_devices
from tf_amp.hosts.function_kernels import kept_in_kernels
from tf_amp.hosts.function_redirects import Find, call_as_planned
from tf_amp.hosts.function_shapes import called_shapes, traced_shapes
from tf_amp.hosts.function_size_sources import Source, find_source
from tf_amp.hosts.function_sizes import FunctionSizes, Sized, add_variant, plan_anew
from tf_amp.hosts.function_tf_data import call_originals
from tf_amp.hosts.function_trials import (
    Contest,
    FunctionTrials,
    digest_of,
    trials_directory,
)
from tf_amp.hosts.other_workers import has_other_workers, runs_elsewhere
from tf_amp.hosts.pipeline_batches import PipelineBatches

if TYPE_CHECKING:
    from graph_passes import PrecisionConfig, RewriteResult
    from graph_passes.ir.graph_view import FunctionShapes, Shapes
    from graph_passes.plan_remarks import Lines
    from tf_amp.hosts.function_counts import CountedFunction
    from tf_amp.hosts.function_originals import Originals
    from tf_amp.installation import Installation
    from tf_amp.patches import Patches

_log = logging.getLogger("tf_amp")


@dataclasses.dataclass(frozen=True)
class TracedFunction:
    """A function as it was traced, with what it takes to rewrite it.

    Attributes:
        definition: the FunctionDef.
        graph: the FuncGraph.
        context: the eager context that holds it.
        find: gives the definition of a function that it calls, None for what is planned apart.
        title: its name, for people.
        numbers: rewrites up to the bisect limit.
        originals: what was rewritten.
        waits: whether a function is rewritten once it is called by itself.
    """

    definition: function_pb2.FunctionDef
    graph: Any
    context: context_lib.Context
    find: Find
    title: str
    numbers: ConversionNumbers
    originals: Originals
    waits: Callable[[str], bool]

    @functools.cached_property
    def shapes(self) -> Shapes:
        """Static shapes of its tensors."""
        return traced_shapes(self.graph, self.definition)

    @functools.cached_property
    def source(self) -> Source | None:
        """What shows, at a call, the size that its tracing did not know."""
        return find_source(self.definition, self.shapes, self.find)

    @functools.cached_property
    def function_shapes(self) -> FunctionShapes:
        """Those of the functions that it calls."""
        return called_shapes(self.graph._functions)

    @functools.cached_property
    def lines(self) -> Lines:
        """The Python lines of its nodes, and of the functions that it calls."""
        return source_lines(self.graph)

    def rewrite(
        self, config: PrecisionConfig, callee: function_pb2.FunctionDef | None = None
    ) -> RewriteResult:
        """Rewrites it, or a function that it calls."""
        name = callee.signature.name if callee else ""
        rewrite = functools.partial(
            rewrite_function_def,
            callee or self.definition,
            library=self.find,
            shapes=self.function_shapes(name) if callee else self.shapes,
            function_shapes=self.function_shapes,
            function_constants=captured_constants(self.graph, self.definition),
            devices=variable_devices(self.graph, self.definition),
            name=self.title,
            lines=lines_within(self.lines, name) if callee else self.lines,
        )
        result = self.numbers.rewrite(lambda config: rewrite(config=config), config)
        return call_as_planned(result, self.context, self.originals, self.waits)


class FunctionCalls:
    """Chooses what runs at the calls of functions from Python.

    Args:
        installation: says how often to try, and is told of faults.
    """

    def __init__(self, installation: Installation) -> None:
        say_fault = functools.partial(installation.record_fault, "function")
        self._sizes = FunctionSizes(say_fault)
        self._batches = PipelineBatches()
        steps = installation.settings.trial_steps
        self._trials = FunctionTrials(steps, trials_directory(), say_fault)

    def install(self, patches: Patches) -> None:
        """Starts to remember data sets and what iterators go through."""
        self._batches.install(patches)

    def call(
        self,
        run: Callable[[bytes, Sequence[Any], int], Any],
        name: bytes,
        inputs: Sequence[Any],
        outputs: int,
    ) -> Any:
        """Calls a function, or what is to run in its place; `FunctionSizes.call` tells the rest."""
        if self._trials.steps:
            run = functools.partial(self._trials.call, run)
        return self._sizes.call(run, name, inputs, outputs)

    def told(self, traced: TracedFunction, inputs: Sequence[Any] | None) -> int | None:
        """The size that a call is known to have beforehand, None if it is not known.

        Args:
            traced: the function.
            inputs: the flat inputs of the call; None if there is none.
        """
        if inputs is None or runs_elsewhere(traced.context) or (source := traced.source) is None:
            return None
        if source.argument is not None:
            return source.size_of(inputs[source.argument].shape)
        return self._batches.size(inputs) if source.unknown == (0,) else None

    def watch(
        self,
        function: Any,
        traced: TracedFunction,
        config: PrecisionConfig,
        counted: CountedFunction,
        look: Callable[[RewriteResult], None],
    ) -> bool:
        """Lets the calls of a function decide what was not known when it was traced.

        Args:
            function: the AtomicFunction.
            traced: what it takes to rewrite it.
            config: with which it was rewritten.
            counted: is told what is planned for a size, and for which size float32 proves faster.
            look: is shown what is planned for a size.

        Returns:
            Whether its first call will show for which size it is planned. `counted` then says it.
        """
        source = None
        if config.cost_table is not None and not is_compiled(traced.definition):
            source = traced.source
        if source is None and not self._trials.steps:
            return False
        if (kept := kept_in_kernels(traced.definition, traced.find)) is not None:
            missed = ["planned again for its batch"] if source is not None else []
            missed += ["tried"] if self._trials.steps else []
            _log.log(
                logging.INFO if counted.is_announced else logging.DEBUG,
                "%s is not %s: %s.",
                traced.title,
                " or ".join(missed),
                kept,
            )
            return False
        # In other processes, where functions may run, nothing can be timed.
        elsewhere = runs_elsewhere(traced.context)
        tries = self._trials.steps > 0 and not elsewhere and not has_other_workers(traced.context)
        if self._trials.steps and not tries:
            _log.log(
                logging.INFO if counted.is_announced else logging.DEBUG,
                "%s is not tried: its job has other processes, for which no call can wait.",
                traced.title,
            )
        attach = functools.partial(traced.originals.attach, traced.context, function.name)

        def plan(size: int) -> RewriteResult:
            again = dataclasses.replace(config, unknown_dimension=size)
            planned, callees = plan_anew(traced, traced.rewrite(again), again, counted.has_plan)
            counted.record_again(planned, callees, size)
            look(planned)
            return planned

        try_out = functools.partial(
            self._try_out, weakref.ref(function), traced, config, source, attach, counted
        )
        if source is not None:
            sized = Sized(
                source=source,
                size=config.unknown_dimension,
                planned=functools.partial(traced.context.get_function_def, function.name),
                plan=plan,
                add=attach,
                try_out=try_out if tries else None,
                say=counted.say,
                expect=self._batches.size,
                once=elsewhere,
            )
            self._sizes.watch(function, sized)
        elif tries:
            try_out(function.name, 0)
        return source is not None

    def _try_out(
        self,
        of: weakref.ref[Any],
        traced: TracedFunction,
        config: PrecisionConfig,
        source: Source | None,
        attach: Callable[[tuple[function_pb2.FunctionDef, ...]], None],
        counted: CountedFunction,
        name: bytes,
        size: int,
    ) -> None:
        """Has the variant of a name, planned for a size, tried against float32 if it differs."""

        def add_float32() -> bytes:
            alone = call_originals(
                traced.definition, traced.context, traced.originals, traced.waits
            )
            definition, called = alone or (traced.definition, ())
            if source is not None:
                definition = source.shown_by(definition)
            return add_variant(definition, f"{name.decode()}__float32", attach, called)

        function = of()
        if function is not None and counted.converts(size):
            digest = functools.partial(digest_of, traced.definition, traced.find, config, size)
            lost = functools.partial(counted.lose, size)
            contest = Contest(traced.title, config.target_dtype, add_float32, digest, lost)
            self._trials.watch(function, name, contest)
