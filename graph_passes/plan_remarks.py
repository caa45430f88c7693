"""Remarks on a plan: one for each float32 type attribute and for each Cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from graph_passes.coloring.plan import Plan
from graph_passes.functions.inlining import split_prefix
from graph_passes.ir.graph_view import ARGUMENT, FLOAT, INLINED_ARGUMENT, RESULT
from graph_passes.ops.op_types import stands_for
from graph_passes.ops.reasons import Reason
from graph_passes.placement.byte_cost import CAST_BYTES
from graph_passes.placement.op_variants import OpVariants
from graph_passes.placement.work_sizes import WorkSizes
from graph_passes.policy.op_lists import LIST_NAMES, product_ops
from graph_passes.remarks import Remark

Lines = Callable[[str, str], tuple[str, ...]]
"""Gives for a function ("" for the graph that was rewritten) and a node the Python lines that made
it, as `Remark.lines`."""


_ENDS = frozenset((ARGUMENT, RESULT, INLINED_ARGUMENT))


def no_lines(_function: str, _node: str) -> tuple[str, ...]:
    """The lines of a graph that no Python code of this process made."""
    return ()


def lines_within(lines: Lines, function: str) -> Lines:
    """The lines where a function that the graph calls is the one that is rewritten."""
    return lambda inner, node: lines(inner or function, node)


def remarks_of_plan(plan: Plan, lines: Lines, *, products_only: bool) -> Iterator[Remark]:
    """Yields a remark for each float32 type attribute, perhaps of products alone, in node order."""
    view, costs = plan.coloring.view, _Estimates(plan)
    for vertex, dtype in enumerate(view.dtypes):
        number = view.vertex_nodes[vertex]
        if dtype != FLOAT or number < 0 or (op := stands_for(view.op_of(vertex))) in _ENDS:
            continue
        code = plan.coloring.list_codes[vertex]
        op_list = LIST_NAMES[code - 1] if code else ""
        if products_only and op_list != "allow" and op not in product_ops():
            continue
        reason = plan.reason(vertex)
        path = plan.path(vertex) if reason is Reason.BEHIND_DENY else ()
        low, float32 = costs.seconds(number)
        function, node = split_prefix(view.names[number])
        rule = plan.coloring.rules.get(number)
        yield Remark(
            kind="converted" if reason.converts else "kept",
            rule=reason.name.lower(),
            function=function,
            node=node,
            op=op,
            op_list=op_list,
            attr=str(view.slot_of(vertex)),
            reason=f"{reason.text} ({rule})" if rule else reason.text,
            path=tuple("/".join(filter(None, split_prefix(name))) for name in path),
            blocked_by=view.op_of(view.base[view.index[path[0]]]) if path else "",
            shapes=tuple(view.output_shapes(number)),
            flops=costs.sizes.flops(number),
            sides=costs.sizes.sides(number),
            seconds=low if reason.converts else float32,
            seconds_float32=float32,
            lines=lines(function, node),
        )


def remarks_of_casts(plan: Plan, casts: Mapping[str, int], lines: Lines) -> Iterator[Remark]:
    """Yields a remark for each Cast of `Applied.casts`, with the lines of what is cast."""
    view, costs = plan.coloring.view, _Estimates(plan)
    for name, vertex in casts.items():
        number, to_low = view.vertex_nodes[vertex], not plan.coloring.low[vertex]
        # "node-port-CastToBf16-0-AutoMixedPrecision"
        port = int(name.rsplit("-", 4)[1])
        shapes = tuple(view.output_shapes(number))[port : port + 1]
        elements = costs.sizes.elements(port * len(view.nodes) + number)
        function, node = split_prefix(name)
        of = split_prefix(view.names[number])
        yield Remark(
            kind="cast",
            rule="to_target" if to_low else "to_float32",
            function=function,
            node=node,
            op="Cast",
            reason=f"casts what {view.op_of(vertex)} {of[1]!r} makes",
            shapes=shapes,
            bytes=None if elements is None else CAST_BYTES * elements,
            seconds=(seconds := costs.cast_seconds(elements, to_low=to_low)),
            seconds_float32=None if seconds is None else 0.0,
            lines=lines(*of),
        )


class _Estimates:
    """What is known of work and time in one graph."""

    def __init__(self, plan: Plan) -> None:
        view, config = plan.coloring.view, plan.coloring.config
        self._table, self.sizes = config.cost_table, WorkSizes(view, config.unknown_dimension)
        self._variants = None if self._table is None else OpVariants(self.sizes, self._table)

    def seconds(self, number: int) -> tuple[float | None, float | None]:
        """The time of a node in the target dtype and in float32, None without a cost table's."""
        cost = None if self._variants is None else self._variants.cost_of(number)[0]
        size = None if cost is None else self.sizes.size(number, cost)
        return (cost.low.at(size), cost.float32.at(size)) if cost and size else (None, None)

    def cast_seconds(self, elements: int | None, *, to_low: bool) -> float | None:
        """The time of a Cast by the cost table."""
        if self._table is None or not elements:
            return None
        return (self._table.to_low if to_low else self._table.to_float32).at(elements)
