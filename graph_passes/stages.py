"""The stages of the pass, in order, on one graph: units, paint, plan, apply, verify."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Mapping

from tensorflow.core.framework import graph_pb2, types_pb2

from graph_passes import batch_norm, cast_cut, cost_rule, painting, recurrences, tensor_lists
from graph_passes.application import Applied, apply_plan
from graph_passes.bounded_rsqrt import release_bounded_rsqrts
from graph_passes.call_graph import Graph
from graph_passes.canvas import ALLOW, Canvas
from graph_passes.config import PrecisionConfig
from graph_passes.constant_folding import paint_constants
from graph_passes.constants import deny_out_of_range
from graph_passes.eligibility import find_ineligible
from graph_passes.kernels import kernel_support
from graph_passes.kinds import KindTable
from graph_passes.losses import keep_losses
from graph_passes.op_lists import OpLists, load_op_lists
from graph_passes.patterns.units import Fusion, find_units
from graph_passes.planning import Plan, make_plan
from graph_passes.reasons import Reason
from graph_passes.variables import protect_variable_updates
from graph_passes.verification import verify
from graph_passes.view import GraphView, Shapes, view_function, view_graph

NOTHING_LISTED: Mapping[str, str] = types.MappingProxyType({})


def no_library(_: str) -> None:
    """The library of a graph that calls no function."""


def paint(
    view: GraphView,
    config: PrecisionConfig,
    preserve: Collection[str],
    listed: Mapping[str, str] = NOTHING_LISTED,
) -> Canvas:
    """Colours a graph: all stages, in order; `listed` is what units say of single nodes."""
    lists = load_op_lists(config)
    target = config.target
    support = kernel_support(config.device, target)
    ineligible = find_ineligible(view, preserve, config)
    canvas = Canvas(view, config, lists, support, target, ineligible)
    canvas.relist(listed)
    if not _anything_to_do(canvas, lists):
        return canvas
    clusters, implicit_edges, unsafe = tensor_lists.find_clusters(canvas)
    canvas.connect(implicit_edges)
    canvas.deny(unsafe, Reason.UNSAFE_CLUSTER)
    if config.has_rule("variable-update"):
        protect_variable_updates(canvas)
    if config.has_rule("loss"):
        keep_losses(canvas)
    if config.has_rule("bounded-rsqrt"):
        release_bounded_rsqrts(canvas)
    out_of_range: list[int] = []
    if config.has_rule("constant-range") and target == types_pb2.DT_HALF:
        out_of_range = deny_out_of_range(canvas)

    painting.paint_allow_list(canvas)
    painting.propagate_deny(canvas, out_of_range)
    tensor_lists.match_cluster_colours(canvas, clusters)
    painting.paint_between_allow(canvas)
    painting.paint_infer_after_allow(canvas)
    painting.flood_clear(canvas)
    if not config.parity:
        joined = painting.paint_infer_after_clear(canvas, behind_units=cast_cut.is_in_force(config))
        if not cast_cut.is_in_force(config):
            painting.erase_useless(canvas, joined)
    painting.erase_unsupported(canvas)
    tensor_lists.match_cluster_colours(canvas, clusters)
    recurrences.match_loop_edges(canvas)
    if cast_cut.is_in_force(config):
        cast_cut.place_casts(canvas, clusters)
    elif config.has_rule("cost"):
        cost_rule.keep_fast_ones(canvas, clusters)
    painting.match_existing_casts(canvas)
    if config.has_rule("constant-folding"):
        paint_constants(canvas)
    canvas.disconnect()
    return canvas


def _anything_to_do(canvas: Canvas, lists: OpLists) -> bool:
    return lists.force_all or bool(((canvas.listed == ALLOW) & canvas.eligible).any())


def is_idle(ops: Iterable[str], lists: OpLists) -> bool:
    """Whether a graph has no op that is converted for its own sake, nor one that is denied."""
    return not lists.force_all and not any(lists.list_of(op) in ("allow", "deny") for op in ops)


def prepare(
    proto: Graph,
    config: PrecisionConfig,
    preserve: Collection[str],
    kinds: KindTable,
    shapes: Shapes | None,
) -> tuple[GraphView, Fusion]:
    """The graph with its units in place, and its view; `kinds` those of all graphs with it."""
    graph, view = proto, _view(proto, shapes, kinds)
    if not view.ops.isdisjoint(batch_norm.SUCCESSOR):
        graph = _with_new_batch_norms(proto)
        view = _view(graph, shapes, kinds)
    fusion = find_units(graph, view, config, preserve)
    if fusion.view is not view:
        fusion.view.require_matching_dtypes()
    return fusion.view, fusion


def _view(graph: Graph, shapes: Shapes | None, kinds: KindTable) -> GraphView:
    if isinstance(graph, graph_pb2.GraphDef):
        return view_graph(graph, shapes, kinds)
    return view_function(graph, shapes, kinds)


def convert(
    graph: Graph,
    view: GraphView,
    preserve: Collection[str],
    config: PrecisionConfig,
    listed: Mapping[str, str],
) -> tuple[Plan, Applied | None]:
    """Paints the graph and carries the plan out, where there is anything to do."""
    plan = make_plan(paint(view, config, preserve, listed))
    if not plan.low:
        return plan, None
    applied = apply_plan(plan, graph)
    verify(plan, applied, graph)
    return plan, applied


def _with_new_batch_norms(proto: Graph) -> Graph:
    copy = type(proto)()
    copy.CopyFrom(proto)  # type: ignore[arg-type]
    nodes = copy.node if isinstance(copy, graph_pb2.GraphDef) else copy.node_def
    batch_norm.raise_batch_norms(nodes)
    return copy
