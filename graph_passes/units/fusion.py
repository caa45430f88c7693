"""All patterns, applied to one graph before it is painted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping

from tensorflow.core.framework import function_pb2

from graph_passes.ir.copying import Proto, copy_graph
from graph_passes.ir.graph_view import GraphView, Shape
from graph_passes.ops.kernels import kernel_support
from graph_passes.policy.config import PrecisionConfig
from graph_passes.policy.op_lists import load_op_lists, product_ops
from graph_passes.policy.rules import Rule
from graph_passes.rewriter.editor import GraphEdits, NearMiss
from graph_passes.units.activation import gelu, local_derivative
from graph_passes.units.attention import bounded_constants, mask, softmax_gradient
from graph_passes.units.loss import cross_entropy
from graph_passes.units.normalization.fused_batch_norm import fuse_batch_norms
from graph_passes.units.normalization.fused_layer_norm import RULE as FUSED_LAYER_NORM
from graph_passes.units.normalization.fused_layer_norm import fuse_layer_norms
from graph_passes.units.normalization.norms import CENTRED, OF_BATCH, UNCENTRED
from graph_passes.units.product import filter_gradient, onednn_kernels, product_tail
from graph_passes.units.reduction import (
    bias_sums,
    broadcast_sums,
    gradient_sums,
    tile_gradient,
    unread,
)
from graph_passes.units.unit_pass import UnitPass, UnitSearch
from graph_passes.units.update import fused_updates


@dataclasses.dataclass(frozen=True)
class Fusion:
    """The outcome of looking for units.

    Attributes:
        original: the graph that was searched.
        view: the view of the new graph, that of the original where nothing was replaced.
        units: "rule: node" of each subgraph that was replaced.
        misses: what came close.
        shapes: static shapes of the outputs of new nodes.
        node_lists: node -> the list that it counts as being on, as in `GraphEdits`.
        rules: node of the original -> the rule of the user that decides it.
        alone: whether some of the units are of use where nothing is converted.
    """

    original: Proto  # type: ignore[valid-type]
    view: GraphView
    units: tuple[str, ...] = ()
    misses: tuple[NearMiss, ...] = ()
    shapes: Mapping[str, tuple[Shape | None, ...]] = dataclasses.field(default_factory=dict)
    node_lists: Mapping[str, str] = dataclasses.field(default_factory=dict)
    rules: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
    alone: bool = False

    @functools.cached_property
    def proto(self) -> Proto:  # type: ignore[type-var]
        """The new graph, the original where nothing was replaced."""
        return copy_graph(self.original, self.view) if self.view.is_edited else self.original


def find_units(
    proto: Proto,
    view: GraphView,
    config: PrecisionConfig,
    preserve: Collection[str],
    observe: Callable[[str, Proto], None] | None = None,
) -> Fusion:
    """Replaces the subgraphs that the patterns in force recognize.

    In a graph without an op of the allow list there is mostly nothing to gain.

    Args:
        proto: the GraphDef or FunctionDef; it is not changed.
        view: its view.
        config: says which patterns are in force.
        preserve: names of nodes or tensors that must stay.
        observe: is told of each pass, by its rule, and of the graph as it has left it.
    """
    lists = load_op_lists(config)
    works = not config.converts or any(lists.list_of(op) == "allow" for op in view.ops)
    effects: Collection[str] = proto.control_ret.values() if view.is_function else ()
    passes = [each for each in passes_in_force(config) if works or each.alone]
    passes = [each for each in passes if not (each.ops and view.ops.isdisjoint(each.ops))]
    edits = GraphEdits(view, preserve, effects, permitted(proto, config))
    search = UnitSearch(edits, config, lists, kernel_support(config.device, config.target))
    alone, lost = False, set[str]()
    for each in passes:
        run = functools.partial(each.run, search)
        if not lost.isdisjoint(each.requires) or not search.edits.survives(each.rule, run):
            lost.update(each.ensures)
        alone = alone or (each.alone and bool(search.edits.units))
        if observe is not None:
            observe(each.rule, copy_graph(proto, search.edits.preview()))
    edits = search.edits
    if config.converts:  # else lists mean nothing
        search.keep_inside()
    new = edits.apply()
    alone = alone or (new.is_edited and not config.converts)
    node_lists = {n: where for n, where in edits.node_lists.items() if n in new.index}
    units, misses = tuple(edits.units), tuple(edits.misses)
    return Fusion(proto, new, units, misses, edits.shapes, node_lists, alone=alone)


def permitted(proto: Proto, config: PrecisionConfig) -> Callable[[str, str], bool]:
    """Tells of a unit's rule and node, in a graph, whether a selection has it, if there is one."""
    selection = config.selection
    if selection is None:
        return lambda _rule, _node: True
    root, units = selection.root, selection.units
    name = proto.signature.name if isinstance(proto, function_pb2.FunctionDef) else ""
    where = "" if name == root else f"{name}/"
    return lambda rule, node: (rule, root, f"{where}{node}") in units


def passes_in_force(config: PrecisionConfig) -> list[UnitPass]:
    """The passes that a configuration asks for, in order."""
    passes = [each for each in UNIT_PASSES if config.has_rule(each.rule)]
    return [each for each in passes if not (each.in_float32 and config.converts)]


@functools.lru_cache(maxsize=64)
def ops_at_work(config: PrecisionConfig) -> frozenset[str]:
    """The ops without any of which no plan and no unit changes a graph, or has products to tell."""
    lists = load_op_lists(config)
    passes = passes_in_force(config)
    if not config.converts:
        return frozenset(op for each in passes for op in each.ops)
    alone = [op for each in passes if each.alone for op in each.ops]
    return frozenset((*lists.ops("allow"), *lists.ops("deny"), *alone, *product_ops()))


def _keep_norms(rule: str, search: UnitSearch) -> None:
    for norm in search.norms:
        if norm.rule == rule:
            # The statistics of a batch are sums over leading axes, as gradients of biases are.
            of_batch = norm.forward.statistics.is_of_batch
            search.keep_float32(rule, norm.forward.output, norm.inside, is_exact=of_batch)


UNIT_PASSES = (
    UnitPass(unread.NODES, unread.leave_out_unread_nodes, ops=()),
    UnitPass(fused_updates.RULE, fused_updates.fuse_updates, ops=fused_updates.OPS, alone=True),
    UnitPass(OF_BATCH, fuse_batch_norms, ops=("Rsqrt",), ensures=("exact sums",)),
    UnitPass(FUSED_LAYER_NORM, fuse_layer_norms, ops=("Rsqrt",), ensures=("fused norms",)),
    UnitPass(
        CENTRED, functools.partial(_keep_norms, CENTRED), ops=("Rsqrt",), requires=("fused norms",)
    ),
    UnitPass(
        UNCENTRED,
        functools.partial(_keep_norms, UNCENTRED),
        ops=("Rsqrt",),
        ensures=("exact sums",),
    ),
    UnitPass(
        broadcast_sums.RULE,
        broadcast_sums.leave_out_idle_sums,
        ops=("BroadcastGradientArgs",),
        requires=("fused norms",),
        ensures=("idle sums",),
    ),
    UnitPass(
        gradient_sums.RULE,
        gradient_sums.merge_weight_gradients,
        ops=("Sum",),
        requires=("idle sums",),
    ),
    UnitPass(
        bias_sums.BIAS_GRADIENT,
        bias_sums.use_bias_gradients,
        ops=("Sum",),
        requires=("exact sums", "fused norms", "idle sums"),
    ),
    UnitPass(tile_gradient.RULE, tile_gradient.add_few_copies, ops=tile_gradient.OPS),
    UnitPass(filter_gradient.RULE, filter_gradient.merge_bias_gradients, ops=filter_gradient.OPS),
    UnitPass(
        bias_sums.ONES_PRODUCT,
        bias_sums.multiply_by_ones,
        ops=("Sum", "BiasAddGrad"),
        requires=("exact sums", "fused norms", "idle sums"),
    ),
    UnitPass(product_tail.RULE, product_tail.place_tails, ops=product_tail.OPS),
    UnitPass(cross_entropy.RULE, cross_entropy.split_cross_entropies, ops=cross_entropy.OPS),
    UnitPass(bounded_constants.RULE, bounded_constants.bound_constants, ops=bounded_constants.OPS),
    UnitPass(mask.RULE, mask.bound_masks, ops=("Softmax",)),
    UnitPass(
        softmax_gradient.RULE,
        softmax_gradient.lower_softmax_gradients,
        ops=("Softmax",),
        requires=("idle sums",),
    ),
    UnitPass(gelu.RULE, gelu.lower_gelus, ops=("Tanh", "Erf", "Erfc"), ensures=("lists",)),
    UnitPass(
        local_derivative.RULE,
        local_derivative.use_local_derivatives,
        ops=local_derivative.OPS,
        requires=("lists",),
    ),
    UnitPass(unread.SUMS, unread.pass_unread_sums, ops=unread.REDUCTIONS, requires=("lists",)),
    UnitPass(
        onednn_kernels.RULE,
        onednn_kernels.name_kernels,
        ops=onednn_kernels.OPS,
        in_float32=True,
    ),
)
"""The passes in the order in which they run; what a pass requires, passes before it ensure."""
