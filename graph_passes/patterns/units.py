"""All patterns, applied to one graph before it is painted."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping

from graph_passes.config import PrecisionConfig
from graph_passes.copying import Proto, copy_graph
from graph_passes.eligibility import find_ineligible, node_name
from graph_passes.kernels import KernelSupport, kernel_support
from graph_passes.op_lists import load_op_lists
from graph_passes.patterns.batch_norm import MIN_EPSILON
from graph_passes.patterns.batch_norm_inference import fuse_stored_batch_norms
from graph_passes.patterns.bias_sums import multiply_by_ones, use_bias_gradients
from graph_passes.patterns.bounded_values import lower_bounded_values
from graph_passes.patterns.broadcast_sums import leave_out_idle_sums
from graph_passes.patterns.edits import GraphEdits, NearMiss
from graph_passes.patterns.float32_units import Float32Unit, keep_inside
from graph_passes.patterns.fused_batch_norm import RULE as BATCH_NORM
from graph_passes.patterns.fused_batch_norm import fuse_batch_norms, has_fused_kernels
from graph_passes.patterns.fused_layer_norm import RULE as FUSED_LAYER_NORM
from graph_passes.patterns.fused_layer_norm import fuse_layer_norms
from graph_passes.patterns.gradient_sums import merge_weight_gradients
from graph_passes.patterns.low_products import LowProducts
from graph_passes.patterns.norms import CENTRED, UNCENTRED, find_norms
from graph_passes.patterns.ones_product import ones_products_pay
from graph_passes.patterns.softmax_axes import RULE as SOFTMAX
from graph_passes.patterns.softmax_axes import find_softmaxes
from graph_passes.view import GraphView, Shape


@dataclasses.dataclass(frozen=True)
class Fusion:
    """The outcome of looking for units.

    Attributes:
        original: the graph that was searched.
        view: the view of the new graph, that of the original where nothing was replaced.
        units: "pattern: node" of each subgraph that was replaced.
        misses: what came close.
        shapes: static shapes of the outputs of new nodes.
        listed: node -> the list that it counts as being on, as in `GraphEdits`.
    """

    original: Proto  # type: ignore[valid-type]
    view: GraphView
    units: tuple[str, ...] = ()
    misses: tuple[NearMiss, ...] = ()
    shapes: Mapping[str, tuple[Shape | None, ...]] = dataclasses.field(default_factory=dict)
    listed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def proto(self) -> Proto:  # type: ignore[type-var]
        """The new graph, the original where nothing was replaced."""
        return copy_graph(self.original, self.view) if self.view.is_edited else self.original


def find_units(
    proto: Proto, view: GraphView, config: PrecisionConfig, preserve: Collection[str]
) -> Fusion:
    """Replaces the subgraphs that the patterns in force recognize.

    Nothing is done in a graph without an op of the allow list: there is nothing to gain.

    Args:
        proto: the GraphDef or FunctionDef; it is not changed.
        view: its view.
        config: says which patterns are in force.
        preserve: names of nodes or tensors that must stay.

    Returns:
        The new graph, what was replaced, and near misses.
    """
    lists = load_op_lists(config)
    ops = view.ops
    if config.parity or not any(lists.list_of(op) == "allow" for op in ops):
        return Fusion(proto, view)
    kept = {node_name(reference) for reference in preserve}
    support = kernel_support(config.device, config.target)
    edits = GraphEdits(view)
    products = lists.ops("allow")
    units = _fuse_batch_norms(edits, kept, config, support, products) if "Rsqrt" in ops else []
    units += find_softmaxes(edits) if config.has_rule(SOFTMAX) and "Log" in ops else []
    # Sums that feed what flows back to x must not be rounded.
    summed = kept.union(view.nodes[number].name for unit in units for number in unit.inside)
    units += _fuse_norms(edits, kept, config, support) if "Rsqrt" in ops else []
    if config.has_rule("idle-sum") and "BroadcastGradientArgs" in ops:
        leave_out_idle_sums(edits, kept)
    if config.has_rule("weight-gradient") and "Sum" in ops:
        merge_weight_gradients(edits, kept)
    if config.has_rule("bias-gradient") and lists.list_of("BiasAddGrad") == "infer":
        use_bias_gradients(edits, summed)
    if config.has_rule("ones-product") and ones_products_pay(config, lists):
        ineligible = find_ineligible(view, preserve, config)
        multiply_by_ones(edits, summed, LowProducts(edits.matcher, lists, support, ineligible))
    lower_bounded_values(edits, kept, config, lists)
    keep_inside(edits, units)  # after all that lists nodes inside, whose lists it replaces
    if not edits.units:
        return Fusion(proto, view, misses=tuple(edits.misses))
    if view.is_function:
        kept.update(proto.control_ret.values())
    new = edits.apply(kept)
    listed = {name: where for name, where in edits.listed.items() if name in new.index}
    return Fusion(proto, new, tuple(edits.units), tuple(edits.misses), edits.shapes, listed)


def _fuse_batch_norms(
    edits: GraphEdits,
    kept: Collection[str],
    config: PrecisionConfig,
    support: KernelSupport,
    products: Collection[str],
) -> list[Float32Unit]:
    """Replaces batch normalizations by fused ops where that can be; returns those that stay."""
    if not config.has_rule(BATCH_NORM):
        return []
    has_kernels, least = has_fused_kernels(support), MIN_EPSILON[config.device]
    left = fuse_batch_norms(
        edits, kept, least_epsilon=least, has_kernels=has_kernels, products=products
    )
    if has_kernels:
        fold = (config.device, config.target_dtype) == ("CPU", "bfloat16")
        left += fuse_stored_batch_norms(
            edits, kept, least_epsilon=least, fold=fold, products=products
        )
    return left


def _fuse_norms(
    edits: GraphEdits, kept: Collection[str], config: PrecisionConfig, support: KernelSupport
) -> list[Float32Unit]:
    """Replaces normalizations by fused ops where there are such; returns those that stay."""
    # A compiler that fuses element-wise ops has no use for fused kernels.
    fuses = config.device == "GPU" and not config.fused and config.has_rule(FUSED_LAYER_NORM)
    rules = [rule for rule in (CENTRED, UNCENTRED) if config.has_rule(rule)]
    if not rules and not fuses:
        return []
    norms = find_norms(edits, edits.matcher)
    if fuses and has_fused_kernels(support):
        norms = fuse_layer_norms(edits, edits.matcher, norms, kept)
    return [
        Float32Unit(norm.rule, norm.forward.output, norm.inside)
        for norm in norms
        if norm.rule in rules
    ]
