"""Functions in the dtypes that their callers need.

The bodies of a call tree are planned with their callers, so that loop state, activations that a
forward function saves for its gradient and elements of tensor lists stay in the target dtype from
one function to the next. The functions of the library are never changed: every body that comes
out different is a new function. The main graph's own signature stays as it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping

from tensorflow.core.framework import function_pb2, graph_pb2

from graph_passes.application import Applied
from graph_passes.call_graph import Library, Region
from graph_passes.call_verification import verify_calls
from graph_passes.joining import join, take_apart
from graph_passes.patterns.units import Fusion
from graph_passes.planning import Plan
from graph_passes.view import GraphView, Shapes

Convert = Callable[
    [graph_pb2.GraphDef, GraphView, Collection[str], Mapping[str, str]],
    tuple[Plan, Applied | None],
]


@dataclasses.dataclass(frozen=True)
class ConvertedTree:
    """A call tree that was planned as a whole.

    Attributes:
        root: the new tree, None where nothing is to be changed.
        plan: what was planned for the joined graph.
        applied: the joined graph after the rewrite, None where nothing is to be changed.
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
        convert: plans a graph, given its view, what to preserve and nodes with a list of their own,
            and carries the plan out.
        fusions: for each body the units found in it; all views have one table of kinds.
        shapes: for each body the static shapes of its tensors, where they are known.
    """
    joined = join(root)
    # What has changed since units were found in it is read from the joined graph.
    views = {r: found.view for r, found in fusions.items() if found.proto is r.proto}
    view = joined.view(views, shapes)
    own_lists = {
        joined.prefixes[region] + node: list_name
        for region, found in fusions.items()
        for node, list_name in found.listed.items()
    }
    plan, applied = convert(joined.proto, view, (*preserve, *joined.boundary), own_lists)
    if applied is None:
        return ConvertedTree(None, plan, None)
    return ConvertedTree(take_apart(root, joined, applied), plan, applied)


def name_functions(root: Region, library: Library) -> tuple[function_pb2.FunctionDef, ...]:
    """Makes functions of the bodies of a tree.

    A body equal to the library's function keeps that function; any other becomes a function whose
    name ends in a digest of the body, so that equal bodies share one.

    Args:
        root: the tree, with functions under their names in the library; changed in place.
        library: gives the original function of a name.

    Returns:
        The new functions; those that others call come first.

    Raises:
        VerificationError: a calling node does not agree with a function that it calls, or the
            dtypes within a body do not match.
    """
    names: dict[Region, str] = {}
    functions: dict[str, function_pb2.FunctionDef] = {}
    called: dict[str, function_pb2.FunctionDef] = {}
    for region in reversed(list(root.walk())):
        if region.calls:
            nodes = {node.name: node for node in region.nodes}
            for call in region.calls:
                for callee in call.callees:
                    attr, position = callee.callee_of
                    value = nodes[call.node].attr[attr]
                    func = value.list.func[position] if value.list.func else value.func
                    func.name = names[callee]
        if region is root:
            break
        body: function_pb2.FunctionDef = region.proto  # type: ignore[assignment]
        name = body.signature.name
        if body != library(name):
            digest = hashlib.sha256(body.SerializeToString(deterministic=True)).hexdigest()
            body.signature.name = f"{name}_amp_{digest[:12]}"
            functions[body.signature.name] = body
        names[region] = body.signature.name
        called[body.signature.name] = body
    verify_calls(root, called, library)
    return tuple(functions.values())
