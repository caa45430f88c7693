"""What a rewrite did, for people and for programs."""

from __future__ import annotations

import functools
import types
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.coloring.plan import Plan
from graph_passes.coloring.state import ALLOW
from graph_passes.emit.apply import Applied
from graph_passes.functions.inlining import MARK
from graph_passes.ops.op_types import stands_for
from graph_passes.ops.reasons import Reason
from graph_passes.plan_remarks import Lines, no_lines, remarks_of_casts, remarks_of_plan
from graph_passes.policy.op_lists import product_ops
from graph_passes.policy.rules import Rule
from graph_passes.remarks import FunctionRemarks, Remark
from graph_passes.units.fusion import Fusion
from graph_passes.units.reduction.ones_product import is_ones_product

NO_MATCHES: Mapping[Rule, int] = types.MappingProxyType({})
# Dtypes of floating-point ops that the rewrite leaves as they are.
_NOT_FLOAT32 = {
    types_pb2.DT_DOUBLE: "in float64, and only float32 is converted",
    types_pb2.DT_HALF: "the program itself has it in float16",
    types_pb2.DT_BFLOAT16: "the program itself has it in bfloat16",
}


class Report:
    """The outcome of one rewrite. Immutable; details are worked out when asked for.

    Args:
        plan: what was planned; for a graph in which there is nothing to convert or to deny, how to
            find out what a plan would say, None of an invalid graph.
        called_apart: the functions that calls name which are no part of the plan.

    Attributes:
        target_dtype: "float16" or "bfloat16".
        device: "GPU" or "CPU".
        total_nodes: nodes of the graph and of the functions that were planned together with it.
        planned_with: the names of those functions; all others have reports of their own, and so has
            one that is called from outside of the plan too.
        converted_nodes: nodes with at least one type attribute in the target dtype now.
        casts_to_low: Casts added to the target dtype.
        casts_to_float32: Casts added back to float32.
        notes: what the author of list edits should know.
        fused_units: the subgraphs replaced as units: "pattern: node" of each.
        fused: how many of them each pattern has.
        near_misses: subgraphs that look like a pattern, each with what is amiss.
        matched: rule of the user -> how many nodes meet its criteria, for those that any does.
    """

    def __init__(
        self,
        *,
        target_dtype: str,
        device: str,
        total_nodes: int,
        planned_with: frozenset[str] = frozenset(),
        called_apart: frozenset[str] = frozenset(),
        notes: tuple[str, ...] = (),
        plan: Plan | Callable[[], Plan | None] | None = None,
        applied: Applied | None = None,
        fusion: Fusion | None = None,
        matched: Mapping[Rule, int] = NO_MATCHES,
    ) -> None:
        self.target_dtype = target_dtype
        self.device = device
        self.total_nodes = total_nodes
        self._in_plan, self._called_apart = planned_with, called_apart
        self.notes = notes
        self.fused_units = fusion.units if fusion else ()
        self.fused = Counter(unit.partition(": ")[0] for unit in self.fused_units)
        self.near_misses = fusion.misses if fusion else ()
        self.matched = matched
        self._given_plan = plan
        self._casts: Mapping[str, int] = applied.casts if applied else {}
        self.converted_nodes = self.casts_to_float32 = 0
        if isinstance(plan, Plan):
            self.converted_nodes = _nodes(plan, plan.coloring.is_low)
            self.casts_to_float32 = sum(plan.coloring.low[of] for of in self._casts.values())
        self.casts_to_low = len(self._casts) - self.casts_to_float32

    @functools.cached_property
    def _plan(self) -> Plan | None:
        return self._given_plan() if callable(self._given_plan) else self._given_plan

    @functools.cached_property
    def eligible_nodes(self) -> int:
        """How many nodes have a float32 type attribute that might be converted."""
        plan = self._plan
        if plan is None:
            return 0
        return _nodes(plan, plan.coloring.eligible & plan.coloring.view.is_float)

    @functools.cached_property
    def planned_with(self) -> frozenset[str]:
        """See above. By one name, what must be float32 in the plan is so outside of it too."""
        return self._in_plan - (self._called_apart - self.keeps_values_in)

    @functools.cached_property
    def keeps_values_in(self) -> frozenset[str]:
        """The functions planned with it of which something is float32 for its values' sake."""
        if not (self._in_plan and isinstance(self._given_plan, Plan)):
            return frozenset()
        why, view = self._given_plan.coloring.why, self._given_plan.coloring.view
        kept = [reason for reason in Reason if reason.keeps_values]
        found = np.flatnonzero(np.isin(np.frombuffer(why, np.uint8), kept)).tolist()
        functions = {view.node_of(vertex).name.partition(MARK)[0] for vertex in found}
        return self._in_plan & functions

    @functools.cached_property
    def attributes(self) -> Counter[tuple[str, Reason]]:
        """How many float32 type attributes there are, by op type and reason, in node order."""
        plan = self._plan
        if plan is None:
            return Counter()
        view = plan.coloring.view
        vertices = np.flatnonzero(view.is_float & (np.asarray(view.vertex_nodes) >= 0)).tolist()
        return Counter((view.op_of(vertex), plan.reason(vertex)) for vertex in vertices)

    @functools.cached_property
    def products(self) -> Counter[tuple[str, Reason]]:
        """How many matrix products and convolutions there are, by op type and reason.

        They are what is on the allow list, as shipped or now: what a rewrite is made for. Products
        that take the place of sums are none of the program's.
        """
        found: Counter[tuple[str, Reason]] = Counter()
        if isinstance(self._given_plan, Plan):  # else the graph has nothing to convert
            plan, view = self._given_plan, self._given_plan.coloring.view
            known = view.is_vertex_of(lambda node_type: node_type.op in product_ops())
            found_at = np.flatnonzero(((plan.coloring.list_codes == ALLOW) | known) & view.is_float)
            first_of_node = {view.vertex_nodes[v]: v for v in reversed(found_at.tolist())}
            for number, vertex in first_of_node.items():
                if not is_ones_product(view.names[number]):
                    found[stands_for(view.op_of(vertex)), plan.reason(vertex)] += 1
        return found

    def first_reason(self) -> str:
        """Why nothing was converted, in one phrase."""
        # What the costs kept back was about to be converted, so it is the nearest reason. Ops
        # that only stayed with a product that stayed say nothing: the product is named.
        for reason in (Reason.SLOWER_HERE, Reason.SLOWER_UNDER_XLA):
            if slower := self._most_common(reason):
                where = "here" if reason is Reason.SLOWER_HERE else "under XLA here"
                return (
                    f"the cost table says that {self.target_dtype} is slower {where} for {slower}"
                )
        kept = Counter({key: n for key, n in self.attributes.items() if self._is_allowed(key[0])})
        missing = self._most_common(Reason.NO_KERNEL)
        for (op, reason), count in kept.most_common(1):
            if reason is not Reason.NO_KERNEL:
                return f"{op} x{count}, of the allow list: {reason.text}"
            missing = f"{op} x{count}"
        if missing:
            return f"no {self.device} kernel in {self.target_dtype} for {missing}"
        if other := self.in_other_dtypes():
            return other
        if not self.eligible_nodes:
            return "no node has a float32 type attribute that may change"
        ops: Counter[str] = Counter()
        for (op, _), count in self.attributes.items():
            ops[op] += count
        seen = ", ".join(f"{op} x{count}" for op, count in ops.most_common(3))
        return f"no op of the allow list is present; float32 ops seen: {seen}"

    def _most_common(self, reason: Reason) -> str:
        """The op that a reason holds for most often, of the allow list if any, and how often."""
        counts = Counter({op: n for (op, why), n in self.attributes.items() if why is reason})
        products = Counter({op: n for op, n in counts.items() if self._is_allowed(op)})
        return "".join(f"{op} x{count}" for op, count in (products or counts).most_common(1))

    def in_other_dtypes(self) -> str:
        """Which op of the allow list is most often not in float32, and what it is in; else ""."""
        if self._plan is None:
            return ""
        view = self._plan.coloring.view
        found = {
            (number, _NOT_FLOAT32[dtype])
            for number, dtype in zip(view.vertex_nodes, view.dtypes, strict=True)
            if number >= 0 and dtype in _NOT_FLOAT32
        }
        ops = ((view.nodes[number].op, why) for number, why in found)
        counts = Counter((op, why) for op, why in ops if self._is_allowed(op))
        return "".join(
            f"{op} x{count}, of the allow list: {why}" for (op, why), count in counts.most_common(1)
        )

    def _is_allowed(self, op: str) -> bool:
        return self._plan is not None and self._plan.coloring.lists.list_of(op) == "allow"

    def remarks(
        self,
        name: str = "",
        *,
        failure: str | None = None,
        lines: Lines = no_lines,
        products_only: bool = False,
    ) -> FunctionRemarks:
        """Everything that was decided, one remark each; this works it out anew at each call.

        Args:
            name: what the graph is called, for people.
            failure: why the rewrite was given up, None where it was not.
            lines: gives the Python lines of a node.
            products_only: whether to leave out type attributes of what is not on the allow list,
                which are most of the work.
        """
        plan = self._plan
        found = [Remark(kind="note", reason=note) for note in self.notes]
        for text in self.fused_units:
            rule, _, node = text.partition(": ")
            found.append(Remark(kind="unit", rule=rule, node=node, lines=lines("", node)))
        for miss in self.near_misses:
            where = lines("", miss.node)
            found.append(Remark(kind="near_miss", node=miss.node, reason=miss.why, lines=where))
        if plan is not None:
            found.extend(remarks_of_plan(plan, lines, products_only=products_only))
            found.extend(remarks_of_casts(plan, self._casts, lines))
        config = None if plan is None else plan.coloring.config
        return FunctionRemarks(
            name=name,
            target_dtype=self.target_dtype,
            device=self.device,
            total_nodes=self.total_nodes,
            failure=failure,
            unknown_dimension=config.unknown_dimension if config else None,
            compiled=bool(config and config.fused),
            remarks=tuple(found),
        )

    def summary(self) -> str:
        """One line: how much was converted, with how many Casts."""
        return (
            f"converted {self.converted_nodes}/{self.total_nodes} nodes to {self.target_dtype} "
            f"with {len(self._casts)} casts"
        )


def _nodes(plan: Plan, mask: np.ndarray) -> int:
    """How many nodes have a vertex of the mask."""
    owners = np.asarray(plan.coloring.view.vertex_nodes)[mask]  # in the order of the nodes
    return min(len(owners), 1) + int(np.count_nonzero(owners[1:] != owners[:-1]))
