"""The pass, for a GraphDef with its functions and for one function with those it calls."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from tensorflow.core.framework import function_pb2, graph_pb2

from graph_passes.application import Applied
from graph_passes.call_graph import Graph, Library, Region, build_call_tree, kinds_with
from graph_passes.calls import reachable_functions
from graph_passes.collector import collector_paused
from graph_passes.config import PrecisionConfig
from graph_passes.hoisting import hoist_casts
from graph_passes.loop_sum_moves import prepare_tree
from graph_passes.op_lists import load_op_lists
from graph_passes.patterns.edits import NearMiss
from graph_passes.patterns.units import Fusion
from graph_passes.planning import Plan, make_plan
from graph_passes.report import Report
from graph_passes.signatures import convert_tree, name_functions
from graph_passes.stages import convert, is_idle, no_library, paint, prepare
from graph_passes.view import FunctionShapes, Shape, Shapes, extend_shapes, no_shapes

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RewriteResult:
    """What a rewrite gives back.

    Attributes:
        proto: the rewritten graph, or the caller's own where nothing changed or something failed.
        report: what was done and why.
        changed: whether `proto` differs from the original.
        failure: why the rewrite was given up, None where it was not.
        rejected: the graph that failed a post-condition, for inspection.
        extra_functions: functions that a rewritten function calls and that its library lacks; each
            stands behind those it calls itself. A rewritten GraphDef has them in its library.
    """

    proto: Graph
    report: Report
    changed: bool = False
    failure: str | None = None
    rejected: Graph | None = None
    extra_functions: tuple[function_pb2.FunctionDef, ...] = ()

    @property
    def graph_def(self) -> Graph:
        """The same as `proto`."""
        return self.proto

    def copy(self) -> Graph:
        """A copy of `proto` for others to change."""
        new = type(self.proto)()
        new.CopyFrom(self.proto)  # type: ignore[arg-type]
        return new


@collector_paused()
def rewrite_graph_def(
    graph_def: graph_pb2.GraphDef,
    config: PrecisionConfig,
    *,
    preserve: Collection[str] = (),
    shapes: Shapes | None = None,
    function_shapes: FunctionShapes = no_shapes,
) -> RewriteResult:
    """Rewrites a graph and, each for itself, the functions of its library.

    Args:
        graph_def: the graph; it is not changed.
        config: dtype, device, lists and mode.
        preserve: names of the nodes or tensors that are fed, fetched or otherwise to be left as
            they are.
        shapes: static shapes of the main graph's tensors; some patterns need them as proof.
        function_shapes: gives those of a function's body by the function's name.

    Returns:
        The result. A graph that cannot be rewritten is given back as it is, with `failure` set;
        nothing is raised for it.
    """
    library = {function.signature.name: function for function in graph_def.library.function}
    if not library:
        return _rewrite(graph_def, config, preserve, no_library, shapes)
    main = _rewrite_with_calls(graph_def, config, preserve, library.get, shapes, function_shapes)
    if main.failure is not None:
        return main
    new: graph_pb2.GraphDef = main.proto  # type: ignore[assignment]
    changed = main.changed  # until then it is the caller's own
    extra = {function.signature.name: function for function in main.extra_functions}
    reachable = reachable_functions(new, extra.values())
    for position, function in enumerate(graph_def.library.function):
        name = function.signature.name
        if name not in reachable or not function.node_def:
            continue  # nothing runs it, or only its signature is here, as Grappler hands it over
        result = _rewrite_with_calls(
            function, config, (), library.get, function_shapes(name), function_shapes
        )
        if result.failure is not None:
            return dataclasses.replace(result, proto=graph_def)
        if result.changed:
            if not changed:
                new, changed = main.copy(), True  # type: ignore[assignment]
            new.library.function[position].CopyFrom(result.proto)  # type: ignore[arg-type]
            extra.update({added.signature.name: added for added in result.extra_functions})
    if not changed:
        return main
    new.library.function.extend(extra.values())
    return dataclasses.replace(main, proto=new, changed=True, extra_functions=())


@collector_paused()
def rewrite_function_def(
    function_def: function_pb2.FunctionDef,
    config: PrecisionConfig,
    *,
    library: Library = no_library,
    shapes: Shapes | None = None,
    function_shapes: FunctionShapes = no_shapes,
) -> RewriteResult:
    """Rewrites the body of one function; its signature stays as it is.

    Args:
        function_def: the function; it is not changed.
        config: dtype, device, lists and mode.
        library: gives the definition of a function by name, None for an unknown one; asked for
            ops that are calls by the function's name.
        shapes: static shapes of the body's tensors; some patterns need them as proof.
        function_shapes: gives those of the functions it calls by their names.

    Returns:
        The result, as `rewrite_graph_def`.
    """
    return _rewrite_with_calls(function_def, config, (), library, shapes, function_shapes)


def _rewrite_with_calls(
    proto: Graph,
    config: PrecisionConfig,
    preserve: Collection[str],
    library: Library,
    shapes: Shapes | None,
    function_shapes: FunctionShapes,
) -> RewriteResult:
    """Rewrites a graph, together with the functions it calls where that is worth it."""
    if config.has_rule("function-signatures") or config.has_rule("loop-hoisting"):
        lists = load_op_lists(config)
        tree = build_call_tree(proto, library, lambda op: lists.list_of(op) == "allow")
        if tree.calls:
            try:
                return _rewrite_tree(tree, config, preserve, library, shapes, function_shapes)
            except Exception:
                _LOGGER.warning(
                    "The functions that a graph calls are rewritten one by one, because planning "
                    "them together failed. This is a fault of tf_amp, please report it.",
                    exc_info=True,
                )
    return _rewrite(proto, config, preserve, library, shapes)


def _rewrite_tree(
    tree: Region,
    config: PrecisionConfig,
    preserve: Collection[str],
    library: Library,
    shapes: Shapes | None,
    function_shapes: FunctionShapes,
) -> RewriteResult:
    """Rewrites a call tree.

    Raises:
        Exception: something is amiss with the tree or with the outcome.
    """
    kinds = kinds_with(library)

    def details(region: Region) -> tuple[Collection[str], Shapes | None]:
        if region.is_main:
            return preserve, shapes
        return (), function_shapes(region.proto.signature.name)  # type: ignore[union-attr]

    def prepare_body(
        region: Region, body: Graph, added: Mapping[str, Sequence[Shape | None]]
    ) -> Fusion:
        kept, sizes = details(region)
        return prepare(body, config, kept, kinds, extend_shapes(sizes, added))[1]

    if config.has_rule("function-signatures"):
        fused, fusions = prepare_tree(tree, config, preserve, prepare_body)
        converted = convert_tree(
            fused,
            preserve,
            lambda graph, view, kept, listed: convert(graph, view, kept, config, listed),
            fusions,
            {r: extend_shapes(details(r)[1], fusion.shapes) for r, fusion in fusions.items()},
        )
        new, total = converted.root, sum(len(region.nodes) for region in tree.walk())
        notes = load_op_lists(config).notes
        found = _found_in_all(fused, fusions)
        report = _report(config, total, notes, converted.plan, converted.applied, found)
        if new is None:
            return RewriteResult(proto=tree.proto, report=report)
    else:
        results = {}
        for region in tree.walk():
            kept, sizes = details(region)
            results[region] = _rewrite(region.proto, config, kept, library, sizes)
        report = results[tree].report
        new = tree.with_bodies(lambda region: results[region].copy())
    if config.has_rule("loop-hoisting"):
        hoist_casts(new, config.target)
    functions = name_functions(new, library)
    return RewriteResult(proto=new.proto, report=report, changed=True, extra_functions=functions)


def _found_in_all(main: Region, fusions: Mapping[Region, Fusion]) -> Fusion:
    """The main graph's outcome with the units and near misses of all bodies.

    Names of nodes in functions have the function's name before them.
    """
    units: list[str] = []
    misses: list[NearMiss] = []
    for region, fusion in fusions.items():
        where = "" if region.is_main else f"{region.proto.signature.name}/"  # type: ignore[union-attr]
        units.extend(unit.replace(": ", f": {where}", 1) for unit in fusion.units)
        misses.extend(dataclasses.replace(m, node=f"{where}{m.node}") for m in fusion.misses)
    # Calls of one function have bodies of their own, in which the same was found.
    return dataclasses.replace(
        fusions[main], units=tuple(dict.fromkeys(units)), misses=tuple(dict.fromkeys(misses))
    )


def _rewrite(
    proto: Graph,
    config: PrecisionConfig,
    preserve: Collection[str],
    library: Library,
    shapes: Shapes | None = None,
) -> RewriteResult:
    nodes = Region(proto).nodes
    lists = load_op_lists(config)
    report = functools.partial(_report, config, len(nodes), lists.notes)
    if is_idle((node.op for node in nodes), lists):
        why = functools.partial(_plan_in_vain, proto, config, preserve, library, shapes)
        return RewriteResult(proto=proto, report=report(why))
    try:
        view, fusion = prepare(proto, config, preserve, kinds_with(library), shapes)
        plan, applied = convert(fusion.original, view, preserve, config, fusion.listed)
        done = report(plan, applied, fusion)
    except Exception as error:
        _LOGGER.debug("A graph was left as it is.", exc_info=True)
        return RewriteResult(
            proto=proto,
            report=report(),
            failure=f"{type(error).__name__}: {error}",
            rejected=getattr(error, "rejected", None),
        )
    if applied is None:
        return RewriteResult(proto=proto, report=done)
    return RewriteResult(proto=applied.proto, report=done, changed=True)


def _plan_in_vain(
    proto: Graph,
    config: PrecisionConfig,
    preserve: Collection[str],
    library: Library,
    shapes: Shapes | None,
) -> Plan | None:
    """What a plan says of a graph in which there is nothing to convert, None of an invalid one."""
    try:
        view, fusion = prepare(proto, config, preserve, kinds_with(library), shapes)
        return make_plan(paint(view, config, preserve, fusion.listed))
    except Exception:
        _LOGGER.debug("A graph was left as it is.", exc_info=True)
        return None


def _report(
    config: PrecisionConfig,
    total: int,
    notes: tuple[str, ...],
    plan: Plan | Callable[[], Plan | None] | None = None,
    applied: Applied | None = None,
    fusion: Fusion | None = None,
) -> Report:
    return Report(
        target_dtype=config.target_dtype,
        device=config.device,
        total_nodes=total,
        notes=notes,
        plan=plan,
        applied=applied,
        fusion=fusion,
    )
