"""A figure of line charts side by side: by matplotlib where it is installed, otherwise as SVG."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 520, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 36, 48
_TICKS = 5


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve. The x of a value is its position; an empty label is left out of the legend."""

    label: str
    colour: str
    values: Sequence[float]
    dashed: bool = False


@dataclasses.dataclass(frozen=True)
class Panel:
    """One chart: its curves share both axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]


def write_figure(stem: Path, panels: Sequence[Panel]) -> Path:
    """Writes a figure to `stem` with the suffix .png, or .svg without matplotlib.

    Returns:
        The file written.
    """
    stem.parent.mkdir(parents=True, exist_ok=True)
    try:
        from matplotlib import figure
    except ImportError:
        path = stem.with_suffix(".svg")
        path.write_text(_svg(panels), encoding="utf-8")
        return path
    drawing = figure.Figure(figsize=(6 * len(panels), 4), layout="constrained")
    for axes, panel in zip(drawing.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for line in panel.lines:
            style = "--" if line.dashed else "-"
            label = line.label or "_"
            axes.plot(line.values, style, color=line.colour, label=label, linewidth=1)
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        axes.legend()
    path = stem.with_suffix(".png")
    drawing.savefig(path, dpi=130)
    return path


def _svg(panels: Sequence[Panel]) -> str:
    body = "\n".join(
        f'<g transform="translate({index * _WIDTH},0)">\n' + "\n".join(_chart(panel)) + "\n</g>"
        for index, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH * len(panels)}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _chart(panel: Panel) -> Iterator[str]:
    values = [value for line in panel.lines for value in line.values]
    count = max((len(line.values) for line in panel.lines), default=2)
    low, high = min(values, default=0.0), max(values, default=1.0)
    x = _scale(0, max(count - 1, 1), _LEFT, _WIDTH - _RIGHT)
    y = _scale(low, high if high > low else low + 1, _HEIGHT - _BOTTOM, _TOP)
    for tick in range(_TICKS + 1):
        at_x, at_y = tick * (count - 1) / _TICKS, low + tick * (high - low) / _TICKS
        yield _text(x(at_x), _HEIGHT - _BOTTOM + 16, f"{at_x:.0f}", "middle")
        yield _text(_LEFT - 6, y(at_y) + 4, f"{at_y:.3g}", "end")
        yield (
            f'<path d="M{_LEFT} {y(at_y):.1f}H{_WIDTH - _RIGHT}" stroke="#ddd" stroke-width="1"/>'
        )
    yield _text(_WIDTH / 2, 20, panel.title, "middle")
    yield _text(_WIDTH / 2, _HEIGHT - 12, panel.x_label, "middle")
    yield (
        f'<text transform="translate(14,{_HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(panel.y_label)}</text>"
    )
    for line in panel.lines:
        points = " ".join(f"{x(at):.1f},{y(value):.1f}" for at, value in enumerate(line.values))
        yield (
            f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="1.2"'
            f"{_dashes(line)}/>"
        )
    for row, line in enumerate(line for line in panel.lines if line.label):
        at = _TOP + 14 + 16 * row
        start = _WIDTH - _RIGHT - 110
        yield (
            f'<path d="M{start} {at - 4}h24" stroke="{line.colour}" stroke-width="2"'
            f"{_dashes(line)}/>"
        )
        yield _text(start + 30, at, line.label, "start")


def _dashes(line: Line) -> str:
    return ' stroke-dasharray="5 3"' if line.dashed else ""


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _scale(start: float, end: float, first: float, last: float) -> Callable[[float], float]:
    return lambda value: first + (value - start) / (end - start) * (last - first)
