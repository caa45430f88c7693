"""The stages of the pass on one graph: units, the stages that paint, plan, apply."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from tensorflow.core.framework import types_pb2

from graph_passes.coloring import painting, tensor_lists
from graph_passes.coloring.assertions import keep_asserted
from graph_passes.coloring.comparisons import paint_comparisons
from graph_passes.coloring.constant_folding import paint_constants
from graph_passes.coloring.constant_operands import keep_constant_operands
from graph_passes.coloring.constant_range import deny_out_of_range
from graph_passes.coloring.coordinates import keep_coordinates
from graph_passes.coloring.decompositions import keep_decompositions
from graph_passes.coloring.distances import keep_distances
from graph_passes.coloring.losses import keep_losses
from graph_passes.coloring.periods import keep_periods
from graph_passes.coloring.plan import Plan, make_plan
from graph_passes.coloring.poolings import match_poolings
from graph_passes.coloring.positions import keep_positions
from graph_passes.coloring.recurrences import keep_recurrences
from graph_passes.coloring.results import keep_results
from graph_passes.coloring.saturation import keep_saturated
from graph_passes.coloring.small_steps import keep_small_steps
from graph_passes.coloring.state import ALLOW, Coloring
from graph_passes.coloring.v1_loops import match_loop_edges
from graph_passes.coloring.variable_updates import protect_variable_updates
from graph_passes.emit.apply import Applied, apply_plan
from graph_passes.functions.inlining import split_prefix
from graph_passes.ir.constants import NO_CONSTANTS, Constants
from graph_passes.ir.copying import Graph, nodes_of
from graph_passes.ir.eligibility import find_ineligible
from graph_passes.ir.graph_view import ARGUMENT, FLOAT, INLINED_ARGUMENT, RESULT, GraphView
from graph_passes.ir.rule_matching import NO_DECISIONS, Decisions
from graph_passes.ops.reasons import Reason
from graph_passes.placement.byte_cost import place_casts
from graph_passes.placement.time_cost import keep_fast_ones
from graph_passes.policy.config import RULES, PrecisionConfig, Selection
from graph_passes.policy.rules import Rule
from graph_passes.units.fusion import Fusion, find_units
from graph_passes.units.normalization import upgrade_batch_norm

# They carry what others make: alone they change nothing.
_FOLLOWING = frozenset(("Const", "Cast", ARGUMENT, RESULT, INLINED_ARGUMENT))
NO_NODE_LISTS: Mapping[str, str] = types.MappingProxyType({})
NO_RULES: Mapping[str, Rule] = types.MappingProxyType({})

Observer: TypeAlias = Callable[[str, Graph | Coloring], None]
"""Is told the name of each stage that has run and what it has made: a graph, or its colours, which
later stages change. The passes of "units" are told by their rules. With functions that are planned
together, these run once for each body."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of painting.

    Attributes:
        name: its name. Where `RULES` has it, `PrecisionConfig.disabled_rules` switches it off.
        run: what it does.
        requires: what must hold before, in words that earlier stages ensure.
        ensures: what holds behind it.
        when: further conditions on the configuration.
    """

    name: str
    run: Callable[[Coloring], None]
    requires: tuple[str, ...] = ()
    ensures: tuple[str, ...] = ()
    when: Callable[[PrecisionConfig], bool] = lambda _: True

    def applies(self, config: PrecisionConfig) -> bool:
        """Whether it is part of the pass."""
        return (self.name not in RULES or config.has_rule(self.name)) and self.when(config)


_AGREED = ("lists agree", "loops agree")
STAGES = (
    Stage("tensor-lists", tensor_lists.find_clusters, (), ("edges", "clusters")),
    Stage("variable-update", protect_variable_updates, ("edges",)),
    Stage("small-step", keep_small_steps, ("edges",)),
    Stage("recurrence", keep_recurrences, ("edges",)),
    Stage("loss", keep_losses, ("edges",)),
    Stage("result", keep_results, ("edges",)),
    Stage("assertion", keep_asserted, ("edges",)),
    Stage("decomposition", keep_decompositions, ("edges",)),
    Stage("distance", keep_distances, ("edges",)),
    Stage("constant-operand", keep_constant_operands, ("edges",)),
    Stage("position", keep_positions, ("edges",)),
    Stage("saturation", keep_saturated, ("edges",)),
    Stage("period", keep_periods, ("edges",)),
    Stage("coordinate", keep_coordinates, ("edges",)),
    Stage("rules", Coloring.move_by_rules),
    Stage(
        "constant-range",
        deny_out_of_range,
        ("edges",),
        when=lambda config: config.target == types_pb2.DT_HALF,
    ),
    Stage("allow", painting.paint_allow_list, ("edges",), ("allow",)),
    Stage("deny", painting.propagate_deny, ("allow",), ("deny",)),
    Stage("lists-between", tensor_lists.match_cluster_colours, ("clusters", "deny")),
    Stage("between-allow", painting.paint_between_allow, ("deny",)),
    Stage("infer-after-allow", painting.paint_infer_after_allow, ("deny",)),
    Stage("clear", painting.flood_clear, ("deny",), ("clear",)),
    Stage(
        "infer-after-clear",
        painting.paint_infer_after_clear,
        ("clear",),
        ("followers",),
        when=lambda config: not config.parity,
    ),
    Stage(
        "useless-followers",
        painting.erase_useless,
        ("followers",),
        when=lambda config: not (config.parity or config.weighs_bytes),
    ),
    Stage("kernels", painting.erase_unsupported, ("clear",), ("kernels",)),
    Stage(
        "lists-after", tensor_lists.match_cluster_colours, ("clusters", "kernels"), ("lists agree",)
    ),
    Stage("max-pool", match_poolings, ("kernels",), ("clusters",)),
    Stage("v1-loops", match_loop_edges, ("kernels",), ("loops agree",)),
    Stage("cast-cut", place_casts, _AGREED, when=lambda config: config.weighs_bytes),
    Stage("cost", keep_fast_ones, _AGREED, when=lambda config: not config.weighs_bytes),
    Stage("comparison", paint_comparisons, ("kernels",)),
    Stage("existing-casts", painting.match_existing_casts, ("kernels",)),
    Stage("constant-folding", paint_constants, ("kernels",)),
)
"""The stages that paint, in order. Before them units are replaced (`units.fusion`); behind them
come plan, apply and verify."""


def paint(
    view: GraphView,
    config: PrecisionConfig,
    preserve: Collection[str],
    node_lists: Mapping[str, str] = NO_NODE_LISTS,
    observe: Observer | None = None,
    rules: Mapping[str, Rule] = NO_RULES,
    constants: Constants = NO_CONSTANTS,
) -> Coloring:
    """Colours a graph: all stages, in order.

    Args:
        view: the graph.
        config: the mode and the lists.
        preserve: names of nodes or tensors that must stay.
        node_lists: what units say of single nodes.
        observe: is told of each stage.
        rules: node -> the rule of the user that decides it.
        constants: its arguments that are constants.
    """
    coloring = Coloring(view, config, find_ineligible(view, preserve, config), constants)
    coloring.relist(node_lists)
    coloring.obey(rules)
    if config.selection is not None:
        _keep_unselected(coloring, config.selection)
    starts = (coloring.list_codes == ALLOW) & coloring.eligible
    allowed = any(rule.action == "allow" for rule in coloring.rules.values())
    works = coloring.lists.force_all or allowed or starts.any()
    if not (config.converts and works):
        return coloring
    for stage in STAGES:
        if stage.applies(config):
            stage.run(coloring)
            if observe is not None:
                observe(stage.name, coloring)
    coloring.disconnect()
    return coloring


def _keep_unselected(coloring: Coloring, selection: Selection) -> None:
    view = coloring.view
    for vertex, dtype in enumerate(view.dtypes):
        number = view.vertex_nodes[vertex]
        if dtype != FLOAT or number < 0 or view.op_of(vertex) in _FOLLOWING:
            continue
        function, node = split_prefix(view.names[number])
        place = function or selection.root, node
        if place not in selection.nodes:
            left_out = place in selection.left_out
            coloring.block((vertex,), Reason.BISECT_LIMIT if left_out else Reason.NEVER_LOW)


def prepare(
    proto: Graph,
    config: PrecisionConfig,
    preserve: Collection[str],
    view_body: Callable[[Graph], GraphView],
    observe: Observer | None = None,
    decide: Callable[[GraphView], Decisions] = lambda _: NO_DECISIONS,
) -> tuple[GraphView, Fusion]:
    """The view of a graph, and the graph with its units in place.

    Args:
        proto: the graph or function; it is not changed.
        config: says which units are looked for.
        preserve: names of nodes or tensors that must stay.
        view_body: makes the view of it.
        observe: is told of the stage "units" and of its passes.
        decide: tells what rules of the user say of its nodes.
    """
    graph, original = proto, view_body(proto)
    view, decisions = original, decide(original)
    if not view.ops.isdisjoint(upgrade_batch_norm.SUCCESSOR):
        graph = copy.deepcopy(proto)
        upgrade_batch_norm.upgrade_batch_norms(nodes_of(graph))
        view = view_body(graph)
    fusion = find_units(graph, view, config, (*preserve, *decisions.kept), observe)
    fusion = dataclasses.replace(fusion, rules=decisions.rules)
    if observe is not None:
        observe("units", fusion.proto)
    return original, fusion


def convert(
    graph: Graph,
    view: GraphView,
    preserve: Collection[str],
    node_lists: Mapping[str, str],
    rules: Mapping[str, Rule] = NO_RULES,
    *,
    config: PrecisionConfig,
    observe: Observer | None = None,
    constants: Constants = NO_CONSTANTS,
) -> tuple[Plan, Applied | None]:
    """Paints the graph and carries the plan out, where there is anything to do."""
    plan = make_plan(paint(view, config, preserve, node_lists, observe, rules, constants))
    if not plan.low:
        return plan, None
    applied = apply_plan(plan, graph)
    if observe is not None:
        observe("apply", applied.proto)
    return plan, applied
