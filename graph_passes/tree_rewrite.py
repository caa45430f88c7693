"""The pass for one graph together with the functions that it calls."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from tensorflow.core.framework import function_pb2

from graph_passes.coloring.decompositions import DECOMPOSITIONS
from graph_passes.coloring.plan import Plan, make_plan
from graph_passes.emit.update_order import await_products
from graph_passes.functions.call_tree import CallTrees, Library, Region, no_library, node_types_with
from graph_passes.functions.grouped_convolutions import RULE as GROUPED_CONVOLUTION
from graph_passes.functions.grouped_convolutions import is_in_force, release_convolutions
from graph_passes.functions.loop_invariants import hoist_casts
from graph_passes.functions.loop_sum_moves import prepare_tree
from graph_passes.functions.specialization import ConvertedTree, convert_tree, name_functions
from graph_passes.functions.verify_calls import verify_tree
from graph_passes.ir.constants import FunctionConstants, no_constants
from graph_passes.ir.convolutions import CONVOLUTIONS
from graph_passes.ir.copying import Graph
from graph_passes.ir.graph_view import (
    FunctionDevices,
    FunctionShapes,
    GraphView,
    Shape,
    Shapes,
    extend_shapes,
    no_devices,
)
from graph_passes.ir.rule_matching import Decisions, decide
from graph_passes.ir.view import view_body
from graph_passes.ops.kernels import kernel_support
from graph_passes.pipeline import Observer, convert, paint, prepare
from graph_passes.plan_remarks import Lines
from graph_passes.policy.config import PrecisionConfig
from graph_passes.policy.op_lists import load_op_lists
from graph_passes.policy.rules import Rule
from graph_passes.report import Report
from graph_passes.result import RewriteResult
from graph_passes.rewriter.editor import NearMiss
from graph_passes.units.fusion import Fusion, ops_at_work, permitted
from graph_passes.units.update.fused_updates import RULE as FUSED_UPDATE

_LOGGER = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TreeRewriter:
    """Rewrites the call trees of the graphs of one library."""

    config: PrecisionConfig
    library: Library
    function_shapes: FunctionShapes
    lines: Lines
    observe: Observer | None
    main: str = ""  # the function that is rewritten, if it is one
    name: str = ""
    devices: FunctionDevices = no_devices
    constants: FunctionConstants = no_constants

    def trees(self, main: Graph, others: Collection[str] = ()) -> Callable[[Graph], Region]:
        """Gives the call tree of a graph; without calls where functions are planned alone."""
        lists = load_op_lists(self.config)
        converts = self.config.converts
        joins = self.config.has_rule("function-signatures" if converts else GROUPED_CONVOLUTION)
        if self.library is no_library or not joins:
            return Region

        def works(op: str) -> bool:
            if not converts:
                return op in CONVOLUTIONS
            return lists.list_of(op) == "allow" or op in DECOMPOSITIONS

        return CallTrees(self.library, works, main, others).build

    def rewrite(
        self, tree: Region, preserve: Collection[str], shapes: Shapes | None
    ) -> RewriteResult:
        """Rewrites a call tree; most have the one region of a graph without calls."""
        lists = load_op_lists(self.config)
        regions = list(tree.walk())
        report = functools.partial(
            Report,
            target_dtype=self.config.target_dtype,
            device=self.config.device,
            total_nodes=sum(len(region.nodes) for region in regions),
            planned_with=frozenset(one.name for one in regions[1:]),
            called_apart=frozenset(name for one in regions for name in one.called_apart())
            if regions[1:]
            else frozenset(),
            notes=lists.notes,
        )
        one = _TreeRewrite(self, tree, preserve, shapes)
        wanted = ops_at_work(self.config)
        works = lists.force_all or tree.calls or any(node.op in wanted for node in tree.nodes)
        try:
            if not works and not one.decisions(tree).allows:
                matched = one.matched()
                done = report(plan=one.plan_in_vain, matched=matched)
                return RewriteResult(proto=tree.proto, report=done)
            converted, fusion = one.convert()
            if converted.root is None:  # what was found is not there
                fusion = dataclasses.replace(fusion, units=())
            applied = converted.applied
            plan = converted.plan if self.config.converts else None
            done = report(plan=plan, applied=applied, fusion=fusion, matched=one.matched())
            if converted.root is None:
                return RewriteResult(proto=tree.proto, report=done)
            functions = one.finish(converted)
            new = converted.root.proto
            return RewriteResult(proto=new, report=done, changed=True, extra_functions=functions)
        except Exception as error:
            _LOGGER.debug("A graph was left as it is.", exc_info=True)
            return RewriteResult(
                proto=tree.proto,
                report=report(),
                failure=f"{type(error).__name__}: {error}",
                rejected=getattr(error, "rejected", None),
            )


class _TreeRewrite:
    """The rewrite of one call tree."""

    def __init__(
        self, common: TreeRewriter, tree: Region, preserve: Collection[str], shapes: Shapes | None
    ) -> None:
        self._common, self._config = common, common.config
        if self._config.selection is not None:
            selection = dataclasses.replace(self._config.selection, root=tree.name)
            self._config = dataclasses.replace(self._config, selection=selection)
        self._preserve, self._shapes = preserve, shapes
        self._node_types = node_types_with(common.library)
        self._shapes_of = functools.cache(common.function_shapes)  # several calls ask for it
        self._plan = functools.partial(
            convert,
            config=self._config,
            observe=common.observe,
            constants=common.constants(tree.name),
        )
        self._originals: dict[int, GraphView] = {}  # by the id of the proto
        self._fused: dict[Region, GraphView] = {}
        self._decisions: dict[int, Decisions] = {}  # by the id of the proto
        self._tree, self._released = tree, dict[Region, tuple[str, ...]]()
        if tree.calls and is_in_force(self._config):
            self._tree, self._released = release_convolutions(
                tree,
                self._config,
                self._shapes_of,
                lambda body, node: permitted(body, self._config)(GROUPED_CONVOLUTION, node),
            )

    def decisions(self, region: Region, view: GraphView | None = None) -> Decisions:
        """What rules say of the nodes of a body as the caller gave it; a view spares a search."""
        known = self._decisions.get(id(region.proto))
        if known is None:
            names = [region.name, self._common.name, self._tree.name]
            inner = "" if region.name == self._common.main else region.name
            lines = functools.partial(self._common.lines, inner)
            nodes = region.nodes
            if view is not None and not self._config.rules:  # marks alone decide
                nodes = [view.nodes[number] for number in view.node_index.marked]
            known = decide(nodes, self._config, names, lines)
            self._decisions[id(region.proto)] = known
        return known

    def matched(self) -> Mapping[Rule, int]:
        """How many nodes each rule matches; those of a function that is called twice count once."""
        found = {id(region.proto): self.decisions(region) for region in self._tree.walk()}
        total: collections.Counter[Rule] = collections.Counter()
        for decisions in found.values():
            total.update(decisions.matched)
        return total

    def _details(self, region: Region) -> tuple[Collection[str], Shapes | None]:
        if region.is_main:
            return self._preserve, self._shapes
        return (), self._shapes_of(region.name)

    def _prepare(
        self, region: Region, body: Graph, added: Mapping[str, Sequence[Shape | None]]
    ) -> Fusion:
        kept, known = self._details(region)
        sizes = extend_shapes(known, added)
        original, fusion = prepare(
            body,
            self._config,
            kept,
            functools.partial(self._view, shapes=sizes),
            self._common.observe,
            functools.partial(self.decisions, region),
        )
        self._originals[id(body)] = original
        return fusion

    def _view(self, body: Graph, shapes: Shapes | None = None) -> GraphView:
        return view_body(body, shapes, self._node_types, self._common.devices)

    def _view_original(self, region: Region) -> GraphView:
        """The view of a body as the caller gave it; one that was edited before has none yet."""
        known = self._originals.get(id(region.proto))
        return known or self._view(region.proto)

    def convert(self) -> tuple[ConvertedTree, Fusion]:
        """Plans the tree and carries the plan out; with it the units of all bodies."""
        fused, fusions = prepare_tree(self._tree, self._config, self._preserve, self._prepare)
        for old, new in zip(self._tree.walk(), fused.walk(), strict=True):
            self._fused[old] = fusions[new].view
            if old in self._released:
                units = [f"{GROUPED_CONVOLUTION}: {node}" for node in self._released[old]]
                fusions[new] = dataclasses.replace(
                    fusions[new], units=(*fusions[new].units, *units), alone=True
                )
        shapes = {r: extend_shapes(self._details(r)[1], f.shapes) for r, f in fusions.items()}
        converted = convert_tree(fused, self._preserve, self._plan, fusions, shapes)
        return converted, _found_in_all(fused, fusions)

    def finish(self, converted: ConvertedTree) -> tuple[function_pb2.FunctionDef, ...]:
        """Hoists casts, orders updates, names the functions of a converted tree and verifies it.

        Returns:
            The new functions.

        Raises:
            VerificationError: a post-condition does not hold.
        """
        root, applied, config = converted.root, converted.applied, self._config
        assert root is not None
        regions = list(zip(self._tree.walk(), root.walk(), strict=True))
        if config.has_rule("loop-hoisting"):
            views = {new: self._fused[old] for old, new in regions}
            hoist_casts(root, config.target, lambda region: views[region].index)
        ordered = self._order_updates(regions)
        functions = name_functions(root, self._common.library)
        verify_tree(
            regions,
            self._view_original,
            self._fused.__getitem__,
            kernel_support(config.device, config.target),
            self._preserve,
            None if self._tree.calls or applied is None else applied.touched | ordered,
        )
        return functions

    def _order_updates(self, regions: Iterable[tuple[Region, Region]]) -> frozenset[int]:
        """Lets updates be made in place; gives the nodes changed in a tree of one region."""
        config, ordered = self._config, frozenset[int]()
        if config.has_rule(FUSED_UPDATE) and config.device == "CPU" and not config.fused:
            for old, new in regions:
                if new.proto is not old.proto:
                    ordered = await_products(self._fused[old], new.proto)
        return ordered

    def plan_in_vain(self) -> Plan | None:
        """What a plan says of a graph with nothing to convert, None where it says nothing."""
        if not self._config.converts:
            return None
        try:
            fusion = self._prepare(self._tree, self._tree.proto, {})
            painted = paint(
                fusion.view, self._config, self._preserve, fusion.node_lists, rules=fusion.rules
            )
            return make_plan(painted)
        except Exception:
            _LOGGER.debug("A graph was left as it is.", exc_info=True)
            return None


def _found_in_all(main: Region, fusions: Mapping[Region, Fusion]) -> Fusion:
    """The main graph's outcome with the units and near misses of all bodies.

    Names of nodes in functions have the function's name before them.
    """
    units: list[str] = []
    misses: list[NearMiss] = []
    for region, fusion in fusions.items():
        where = "" if region.is_main else f"{region.name}/"
        units.extend(unit.replace(": ", f": {where}", 1) for unit in fusion.units)
        misses.extend(dataclasses.replace(m, node=f"{where}{m.node}") for m in fusion.misses)
    # Calls of one function have bodies of their own, in which the same was found.
    return dataclasses.replace(
        fusions[main], units=tuple(dict.fromkeys(units)), misses=tuple(dict.fromkeys(misses))
    )
