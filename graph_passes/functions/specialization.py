"""Functions in the dtypes that their callers need.

The bodies of a call tree are planned with their callers, so that loop state, activations that a
forward function saves for its gradient and elements of tensor lists stay in the target dtype from
one function to the next. The functions of the library are never changed: every body that comes
out different is a new function. The main graph's own signature stays as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping

from tensorflow.core.framework import function_pb2

from graph_passes.coloring.plan import Plan
from graph_passes.emit.apply import Applied
from graph_passes.functions.call_tree import Library, Region
from graph_passes.functions.inlining import Inlined, outline
from graph_passes.ir.copying import Graph
from graph_passes.ir.graph_view import GraphView, Shapes
from graph_passes.policy.rules import Rule
from graph_passes.units.fusion import Fusion

Convert = Callable[
    [Graph, GraphView, Collection[str], Mapping[str, str], Mapping[str, Rule]],
    tuple[Plan, Applied | None],
]
"""Plans a graph, given its view, what to preserve, nodes with a list of their own and nodes that
rules of the user decide, and carries the plan out."""


@dataclasses.dataclass(frozen=True)
class ConvertedTree:
    """A call tree that was planned as a whole.

    Attributes:
        root: the new tree, None where nothing is to be changed.
        plan: what was planned for the inlined graph.
        applied: the inlined graph after the rewrite, None where nothing is to be changed.
    """

    root: Region | None
    plan: Plan
    applied: Applied | None


def convert_tree(
    root: Region,
    preserve: Collection[str],
    convert: Convert,
    fusions: Mapping[Region, Fusion],
    shapes: Mapping[Region, Shapes | None],
) -> ConvertedTree:
    """Plans the bodies of a call tree together and carries the plan out.

    Args:
        root: the tree; it is not changed.
        preserve: names of nodes of the main graph that must stay as they are.
        convert: plans one graph.
        fusions: for each body the units found in it; all views have one table of node_types.
        shapes: for each body the static shapes of its tensors, where they are known.
    """
    if not root.calls:  # it is inlined already
        fusion = fusions[root]
        plan, applied = convert(
            fusion.original, fusion.view, preserve, fusion.node_lists, fusion.rules
        )
        proto = applied.proto if applied else fusion.proto if fusion.alone else None
        new = None if proto is None else Region(proto, callee_of=root.callee_of)
        return ConvertedTree(new, plan, applied)
    inlined = Inlined(root)
    view = inlined.view({region: found.view for region, found in fusions.items()}, shapes)
    own_lists = {
        inlined.prefixes[region] + node: list_name
        for region, found in fusions.items()
        for node, list_name in found.node_lists.items()
    }
    rules = {
        inlined.prefixes[region] + node: rule
        for region, found in fusions.items()
        for node, rule in found.rules.items()
    }
    plan, applied = convert(inlined.proto, view, (*preserve, *inlined.boundary), own_lists, rules)
    if applied is not None:
        return ConvertedTree(outline(root, inlined, applied), plan, applied)
    alone = any(found.alone for found in fusions.values())
    new = root.with_bodies(lambda region: copy.deepcopy(region.proto)) if alone else None
    return ConvertedTree(new, plan, None)


def name_functions(root: Region, library: Library) -> tuple[function_pb2.FunctionDef, ...]:
    """Makes functions of the bodies of a tree.

    A body equal to the library's function keeps that function; any other becomes a function whose
    name ends in a digest of the body, so that equal bodies share one.

    Args:
        root: the tree, with functions under their names in the library; changed in place.
        library: gives the original function of a name.

    Returns:
        The new functions; those that others call come first.
    """
    functions: dict[str, function_pb2.FunctionDef] = {}
    for region in reversed(list(root.walk())):
        if region.calls:
            nodes = {node.name: node for node in region.nodes}
            for call in region.calls:
                for callee in call.callees:
                    attr, position = callee.callee_of
                    value = nodes[call.node].attr[attr]
                    func = value.list.func[position] if value.list.func else value.func
                    func.name = callee.name
        if region is root:
            break
        body: function_pb2.FunctionDef = region.proto  # type: ignore[assignment]
        if body != library(body.signature.name):
            digest = hashlib.sha256(body.SerializeToString(deterministic=True)).hexdigest()
            body.signature.name = f"{body.signature.name}_amp_{digest[:12]}"
            functions[body.signature.name] = body
    return tuple(functions.values())
