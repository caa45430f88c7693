"""Counts over remarks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable

from graph_passes import FunctionRemarks, Remark


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
        seconds_of_casts: the estimated time of those that a cost table knows.
        kept: (op type, why) of the products that stay float32, and how many.
    """

    products_low: int
    products: int
    flops_low: int
    flops: int
    casts: int
    cast_bytes: int
    seconds_of_casts: float
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
    for graph in graphs:
        casts += (r for r in graph.remarks if r.kind == "cast")
        # A product has one type attribute, or several that change together.
        of_node = {(r.function, r.node): r for r in graph.remarks if r.is_product}
        products += of_node.values()
    low = [r for r in products if r.kind == "converted"]
    return Figures(
        products_low=len(low),
        products=len(products),
        flops_low=sum(r.flops or 0 for r in low),
        flops=sum(r.flops or 0 for r in products),
        casts=len(casts),
        cast_bytes=sum(r.bytes or 0 for r in casts),
        seconds_of_casts=sum(r.seconds or 0 for r in casts),
        kept=Counter((r.op, why(r)) for r in products if r.kind == "kept"),
    )


def why(remark: Remark) -> str:
    """Why a vertex is as it is, in few words."""
    if remark.blocked_by:
        return f"behind {remark.blocked_by}"
    return "slower here" if remark.rule == "slower_here" else remark.reason
