"""Counts over remarks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tensorflow.python.framework import op_def_registry

from graph_passes import FunctionRemarks, Remark
from graph_passes.placement.byte_cost import CAST_BYTES, MOVES_NOTHING
from graph_passes.policy.config import UNKNOWN_DIMENSION
from tf_amp import tally

LOW, FLOAT32 = 2, 4
"""Bytes of an element in the target dtype and in float32."""
SLOWER = {reason.name.lower(): told for reason, told in tally.SLOWER.items()}
"""Rule of a remark -> the reason that a cost table gives, in few words."""
_KEPT_ELSEWHERE = frozenset(("Const", "Placeholder", "ReadVariableOp", "VariableV2", "Variable"))


@dataclasses.dataclass(frozen=True)
class Figures:
    """What remarks add up to.

    Attributes:
        products_low: matrix products and convolutions in the target dtype.
        products: all of them.
        flops_low: arithmetic of those in the target dtype.
        flops: arithmetic of all of which the shapes are known.
        casts: Casts that were added.
        cast_bytes: what those move whose shapes are known.
        cast_bytes_to_float32: the part of it that casts back to float32.
        activation_bytes: what the nodes of known shapes and the Casts make.
        activation_bytes_float32: the same in float32, without Casts.
        seconds: the estimated time of the nodes and Casts that a cost table knows.
        seconds_float32: that of the same nodes in float32.
        kept: (op type, why) of the products that stay float32, and how many.
    """

    products_low: int
    products: int
    flops_low: int
    flops: int
    casts: int
    cast_bytes: int
    cast_bytes_to_float32: int
    activation_bytes: int
    activation_bytes_float32: int
    seconds: float
    seconds_float32: float
    kept: Counter[tuple[str, str]]

    @property
    def products_kept(self) -> int:
        """Products that stay float32."""
        return self.products - self.products_low

    @property
    def flops_share(self) -> float | None:
        """The share of the known arithmetic that is in the target dtype; None without any."""
        return self.flops_low / self.flops if self.flops else None


def figures_of(graphs: Iterable[FunctionRemarks]) -> Figures:
    """Counts over graphs."""
    casts: list[Remark] = []
    products: list[Remark] = []
    elements = Counter[bool]()  # in the target dtype, in float32
    timed: list[Remark] = []
    for graph in graphs:
        casts += (r for r in graph.remarks if r.kind == "cast")
        timed += of_nodes(r for r in graph.remarks if r.seconds is not None)
        for remark in graph.remarks:
            elements[remark.kind == "converted"] += elements_made(remark, graph.unknown_dimension)
        products += of_nodes(r for r in graph.remarks if r.is_product)
    low = [r for r in products if r.kind == "converted"]
    cast_bytes = sum(r.bytes or 0 for r in casts)
    back = sum(r.bytes or 0 for r in casts if r.rule == "to_float32")
    return Figures(
        products_low=len(low),
        products=len(products),
        flops_low=sum(r.flops or 0 for r in low),
        flops=sum(r.flops or 0 for r in products),
        casts=len(casts),
        cast_bytes=cast_bytes,
        cast_bytes_to_float32=back,
        activation_bytes=(
            LOW * elements[True]
            + FLOAT32 * elements[False]
            + back * FLOAT32 // CAST_BYTES
            + (cast_bytes - back) * LOW // CAST_BYTES
        ),
        activation_bytes_float32=FLOAT32 * elements.total(),
        seconds=sum(r.seconds or 0 for r in timed),
        seconds_float32=sum(r.seconds_float32 or 0 for r in timed),
        kept=Counter((r.op, why(r)) for r in products if r.kind == "kept"),
    )


def of_nodes(remarks: Iterable[Remark]) -> list[Remark]:
    """One remark for each node: of a function that is called twice, each node counts twice.

    A product has one type attribute, or several that change together.
    """
    turns = Counter[tuple[str, str, str]]()
    found: dict[tuple[str, str, int], Remark] = {}
    for remark in remarks:
        turns[remark.function, remark.node, remark.attr] += 1
        turn = turns[remark.function, remark.node, remark.attr]
        found[remark.function, remark.node, turn] = remark
    return list(found.values())


def plain(figures: Figures) -> dict[str, Any]:
    """Figures as JSON-ready values."""
    kept = [{"op": op, "why": why, "count": n} for (op, why), n in figures.kept.most_common()]
    return {**dataclasses.asdict(figures), "kept": kept}


def why(remark: Remark) -> str:
    """Why a vertex is as it is, in few words."""
    if remark.blocked_by:
        return f"behind {remark.blocked_by}"
    return SLOWER.get(remark.rule, remark.reason)


def elements_made(remark: Remark, unknown_dimension: int | None = None) -> int:
    """How many elements of the type attribute a node makes, by the shapes that are known.

    Args:
        remark: on a type attribute.
        unknown_dimension: the length that counts for one that is not known.

    Returns:
        The number; 0 for what makes nothing new: variables, constants, views of other tensors.
    """
    if remark.kind not in ("converted", "kept") or remark.op in MOVES_NOTHING | _KEPT_ELSEWHERE:
        return 0
    unknown = UNKNOWN_DIMENSION if unknown_dimension is None else unknown_dimension
    return sum(
        math.prod(unknown if size is None else size for size in remark.shapes[port] or ())
        for port in _ports(remark.op, remark.attr, len(remark.shapes))
        if remark.shapes[port] is not None
    )


@functools.cache
def _ports(op: str, attr: str, outputs: int) -> tuple[int, ...]:
    """The outputs of an op that have the dtype of an attribute.

    Of calls and loops none: the nodes in their bodies make them.
    """
    definition = op_def_registry.get(op)
    made = list(definition.output_arg) if definition else []
    if len(made) == 1 and made[0].number_attr:
        return tuple(range(outputs)) if made[0].type_attr == attr else ()
    return tuple(p for p, o in enumerate(made) if o.type_attr == attr and p < outputs)
