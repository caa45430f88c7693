"""A comparison as one HTML file that needs no network and runs no script."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tf_amp.comparison.compare import Comparison
from tf_amp.comparison.output_figures import TOP_K, OutputFigures
from tf_amp.tracing.page import template

_LEAST, _MOST = -8, 2
"""The powers of ten that a chart shows at most."""


@dataclasses.dataclass(frozen=True)
class _Bar:
    """One bar, in percent of the chart's width and height."""

    figures: OutputFigures
    x: float
    width: float
    height: float


@dataclasses.dataclass(frozen=True)
class _Chart:
    """The relative errors inside one signature, by their logarithms.

    Attributes:
        signature: the signature's key.
        figures: what is inside, in the order of execution.
        tolerance: the relative error that is allowed, None without a gate.
    """

    signature: str
    figures: Sequence[OutputFigures]
    tolerance: float | None

    @property
    def _range(self) -> tuple[int, int]:
        shown = [f.max_relative for f in self.figures if 0 < f.max_relative < math.inf]
        shown += [self.tolerance] if self.tolerance else []
        powers = [math.log10(value) for value in shown] or [0.0]
        low = min(max(math.floor(min(powers)), _LEAST), _MOST - 1)
        return low, max(min(math.ceil(max(powers)), _MOST), low + 1)

    def _height(self, value: float) -> float:
        low, high = self._range
        if value <= 0:
            return 0.0
        return min(max(100 * (math.log10(value) - low) / (high - low), 1.0), 100.0)

    @property
    def ticks(self) -> list[str]:
        """The powers of ten beside the chart, the largest one first."""
        low, high = self._range
        return [f"{10.0**power:g}" for power in range(high, low - 1, -1)]

    @property
    def allowed(self) -> float | None:
        """The height of the tolerance."""
        return self._height(self.tolerance) if self.tolerance else None

    @property
    def bars(self) -> list[_Bar]:
        """A bar for each; what overflowed has the full height."""
        step = 100 / len(self.figures)
        return [
            _Bar(
                figures,
                number * step + 0.1 * step,
                0.8 * step,
                100.0 if figures.overflowed else self._height(figures.max_relative),
            )
            for number, figures in enumerate(self.figures)
        ]


def page(found: Comparison, first: str, second: str, tolerance: float | None = None) -> str:
    """Makes the page.

    Args:
        found: the comparison.
        first: the name of the model that is right.
        second: that of the one that was judged.
        tolerance: the gate that the outputs have to pass, see `OutputFigures.within`.

    Returns:
        HTML, self-contained. Whatever stands in names of models or nodes is text in it.
    """
    inside: dict[str, list[OutputFigures]] = {}
    for figures in found.boundaries:
        inside.setdefault(figures.signature, []).append(figures)
    agreements = [output.top_1 for output in found.outputs if output.top_1 is not None]
    relative = [output.max_relative for output in found.outputs if output.is_float]
    return template("comparison.html.jinja").render(
        found=found,
        first=first,
        second=second,
        tolerance=tolerance,
        beyond=[] if tolerance is None else found.beyond(tolerance),
        worst=max(relative, default=None),
        agreement=min(agreements, default=None),
        overflowed=sum(1 for o in (*found.outputs, *found.boundaries) if o.overflowed),
        ratios={key: before / after for key, (before, after) in found.seconds.items()},
        charts=[_Chart(key, figures, tolerance) for key, figures in inside.items()],
        top_k=TOP_K,
        policy="default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    )
