"""The pass, for a GraphDef with its functions and for one function with those it calls."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection

from tensorflow.core.framework import function_pb2, graph_pb2

from graph_passes.collector import collector_paused
from graph_passes.functions.call_tree import Library, no_library
from graph_passes.ir.constants import FunctionConstants, no_constants
from graph_passes.ir.function_references import FunctionReferences
from graph_passes.ir.graph_view import (
    FunctionDevices,
    FunctionShapes,
    Shapes,
    no_devices,
    no_shapes,
)
from graph_passes.pipeline import Observer
from graph_passes.plan_remarks import Lines, no_lines
from graph_passes.policy.config import PrecisionConfig
from graph_passes.result import RewriteResult
from graph_passes.tree_rewrite import TreeRewriter


@collector_paused()
def rewrite_graph_def(
    graph_def: graph_pb2.GraphDef,
    config: PrecisionConfig,
    *,
    preserve: Collection[str] = (),
    shapes: Shapes | None = None,
    function_shapes: FunctionShapes = no_shapes,
    function_constants: FunctionConstants = no_constants,
    lines: Lines = no_lines,
    roots: Collection[str] = (),
    observe: Observer | None = None,
) -> RewriteResult:
    """Rewrites a graph and those functions of its library that it still calls then.

    Functions that are planned with their callers get copies. What none but such callers called
    stays as it is, and so do the functions of tf.data pipelines with all that those call.

    Args:
        graph_def: the graph; it is not changed.
        config: dtype, device, lists and mode.
        preserve: names of the nodes or tensors that are fed, fetched or otherwise to be left as
            they are.
        shapes: static shapes of the main graph's tensors; some patterns need them as proof.
        function_shapes: gives those of a function's body by the function's name.
        function_constants: gives those arguments of a function that are the same at every call.
        lines: gives the Python lines that made a node, for rules that ask for them.
        roots: names of functions of the library that others than the graph call, too. They keep
            name and signature.
        observe: is told of every stage, see `pipeline.Observer`.

    Returns:
        The result. A graph that cannot be rewritten is given back as it is, with `failure` set;
        nothing is raised for it.
    """
    references = FunctionReferences(graph_def)
    library = references.library.get if references.library else no_library
    rewrite = TreeRewriter(
        config, library, function_shapes, lines, observe, constants=function_constants
    )
    left_alone = references.of_pipelines()
    tree_of = rewrite.trees(graph_def, references.reachable(("", *roots)))
    main = rewrite.rewrite(tree_of(graph_def), preserve, shapes)
    if main.failure is not None:
        return main
    results: dict[str, RewriteResult] = {}
    pending = references.called_apart(main.nodes(), main.report.planned_with).union(roots)
    while pending:
        name = pending.pop()
        function = references.library[name]
        # Grappler hands over signatures of functions without their bodies.
        if name in results or name in left_alone or not function.node_def:
            continue
        result = rewrite.rewrite(tree_of(function), (), function_shapes(name))
        if result.failure is not None:
            return dataclasses.replace(result, proto=graph_def)
        results[name] = result
        pending |= references.called_apart(result.nodes(), result.report.planned_with)
    reports = {name: results[name].report for name in sorted(results)}
    if not any(result.changed for result in results.values()) and not main.extra_functions:
        return dataclasses.replace(main, function_reports=reports)
    new: graph_pb2.GraphDef = main.proto if main.changed else copy.deepcopy(graph_def)  # type: ignore[assignment]
    extra = {added.signature.name: added for added in main.extra_functions}
    for function in new.library.function:
        result = results.get(function.signature.name, main)
        if result is not main and result.changed:
            function.CopyFrom(result.proto)
            extra.update({added.signature.name: added for added in result.extra_functions})
    for added in extra.values():
        new.library.function.add().CopyFrom(added)
    return dataclasses.replace(
        main, proto=new, changed=True, extra_functions=(), function_reports=reports
    )


@collector_paused()
def rewrite_function_def(
    function_def: function_pb2.FunctionDef,
    config: PrecisionConfig,
    *,
    library: Library = no_library,
    shapes: Shapes | None = None,
    function_shapes: FunctionShapes = no_shapes,
    function_constants: FunctionConstants = no_constants,
    devices: FunctionDevices = no_devices,
    name: str = "",
    lines: Lines = no_lines,
) -> RewriteResult:
    """Rewrites the body of one function; its signature stays as it is.

    Args:
        function_def: the function; it is not changed.
        config: dtype, device, lists and mode.
        library: gives the definition of a function by name, None for an unknown one; asked for
            ops that are calls by the function's name.
        shapes: static shapes of the body's tensors; some patterns need them as proof.
        function_shapes: gives those of the functions it calls by their names.
        function_constants: gives those of its arguments that are the same at every call, by its
            name.
        devices: of the variables among its arguments and those of the functions it calls.
        name: what the function is called besides, for rules on functions: "one_step (fit)".
        lines: gives the Python lines that made a node, for rules that ask for them.

    Returns:
        The result, as `rewrite_graph_def`.
    """
    main = function_def.signature.name
    rewrite = TreeRewriter(
        config, library, function_shapes, lines, None, main, name, devices, function_constants
    )
    return rewrite.rewrite(rewrite.trees(function_def)(function_def), (), shapes)
