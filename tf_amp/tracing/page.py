"""The page: one HTML file that needs no network, for people who would rather look."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import importlib.resources
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from graph_passes import FunctionRemarks, Remark
from tf_amp import __version__
from tf_amp.tracing.blockers import Search
from tf_amp.tracing.columns import columns, packed, shapes_text
from tf_amp.tracing.figures import Figures, figures_of, of_nodes, why
from tf_amp.tracing.jobs import Job, JobFunction
from tf_amp.tracing.text import gain, in_bytes, in_flops, in_seconds, not_tried, percent, states
from tf_amp.tracing.trace import Trace, in_force

_MATRIX_UNIT, _TILE = 8, 128
_PRODUCTS_SHOWN = 30
_COURSE_FROM = 3


@dataclasses.dataclass(frozen=True)
class _Section:
    """What the page tells of one job."""

    job: Job
    search: Search | None
    number_of_first: int

    @functools.cached_property
    def figures(self) -> Figures:
        return figures_of(graph.remarks for graph in in_force(self.job.graphs))

    @property
    def shown(self) -> list[tuple[int, JobFunction]]:
        """The functions in which something was decided, with their numbers on the page."""
        numbered = enumerate(self.job.functions, self.number_of_first)
        return [(n, f) for n, f in numbered if f.figures.products or f.figures.casts or f.failure]

    @property
    def settings(self) -> list[tuple[str, str]]:
        """What was in force, for people."""
        process = self.job.first.process
        settings = process.get("settings", {})
        names = ("reason", "why", "level", "cost_table", "list_edits", "loss_scaling_reason")
        told = [(name.replace("_", " "), settings.get(name)) for name in names]
        told += process.get("variables", {}).items()
        told += [(f"version of {name}", v) for name, v in process.get("versions", {}).items()]
        told += [(f"hardware: {k}", v) for k, v in process.get("hardware", {}).items()]
        plain = ((k, ", ".join(map(str, v)) if isinstance(v, list) else v) for k, v in told)
        return [(name, str(value)) for name, value in plain if value not in ("", None)]

    @property
    def products(self) -> list[tuple[str, Figures]]:
        """Op types of products, those with the most arithmetic first."""
        of_op: dict[str, list[FunctionRemarks]] = {}
        for graph in in_force(self.job.graphs):
            products = [remark for remark in graph.remarks.remarks if remark.is_product]
            for op in dict.fromkeys(remark.op for remark in products):
                those = tuple(remark for remark in products if remark.op == op)
                found = dataclasses.replace(graph.remarks, remarks=those)
                of_op.setdefault(op, []).append(found)
        counted = [(op, figures_of(found)) for op, found in of_op.items()]
        return sorted(counted, key=lambda pair: -pair[1].flops)

    @property
    def unaligned(self) -> list[tuple[str, str, str, int, int, str]]:
        """Products whose sides do not suit the matrix units of a GPU, those with most work first.

        Each is: op, sides, shape, how many, their arithmetic, what is wrong.
        """
        if all(graph.config.device != "GPU" for graph in self.job.graphs):
            return []
        number: Counter[tuple[str, str, str, str]] = Counter()
        flops: Counter[tuple[str, str, str, str]] = Counter()
        for remark in self._products():
            wrong = "; ".join(_misfits(remark.sides))
            if wrong:
                sides = " x ".join("?" if side is None else str(side) for side in remark.sides)
                key = remark.op, sides, shapes_text(remark), wrong
                number[key] += 1
                flops[key] += remark.flops or 0
        worst = sorted(number, key=lambda key: -flops[key])[:_PRODUCTS_SHOWN]
        return [(*key[:3], number[key], flops[key], key[3]) for key in worst]

    @property
    def loss_scales(self) -> list[tuple[str, str]]:
        """Each loss scale with its rank, and its state at the end."""
        return [(_of_rank(t, name), told) for t in self.job.traces for name, told in states(t)]

    @property
    def scale_events(self) -> list[tuple[str, list[Mapping[str, Any]], int, str]]:
        """Each loss scale with its events, the steps that it skipped, and points of its course.

        The points are those of an SVG line in a box of 100 x 40.
        """
        found: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
        for trace in self.job.traces:
            for event in trace.scale_events:
                key = _of_rank(trace, event["name"]), event["loss_scale"]
                found.setdefault(key, []).append(event)
        return [
            (name, events, sum(event["steps"] or 0 for event in events), _course(events))
            for (name, _), events in found.items()
        ]

    def _products(self) -> Iterator[Remark]:
        for graph in self.job.graphs:
            yield from of_nodes(remark for remark in graph.remarks.remarks if remark.is_product)


def _of_rank(trace: Trace, name: str) -> str:
    return " ".join(filter(None, (trace.rank, name)))


def _course(events: Sequence[Mapping[str, Any]]) -> str:
    """The scale behind each event, by its logarithm; "" where that is no line."""
    if len(events) < _COURSE_FROM:
        return ""
    scales = [math.log2(max(event["to"], 2.0**-40)) for event in events]
    low, high = min(scales), max(scales)
    width, height = 100 / len(scales), 36 / ((high - low) or 1)
    points = []
    for number, scale in enumerate(scales):
        y = 38 - (scale - low) * height
        points += [f"{number * width:.2f},{y:.2f}", f"{(number + 1) * width:.2f},{y:.2f}"]
    return " ".join(points)


def _misfits(sides: Sequence[int | None]) -> Iterator[str]:
    """What keeps the matrix units of a GPU from working at full speed on such sides."""
    odd = [str(side) for side in sides if side is not None and side % _MATRIX_UNIT]
    if odd:
        yield f"{' and '.join(odd)}: no multiple of {_MATRIX_UNIT}"
    # Channels of a convolution are no sides of the product that it becomes.
    small = [side for side in sides if side is not None and side < _TILE and len(sides) == 3]
    if small and not odd:
        yield f"{min(small)}: less than a tile of {_TILE}"


def page(jobs: Iterable[tuple[Job, Search | None]]) -> str:
    """Makes the page.

    Args:
        jobs: what to tell of, each with what blocks most; None if that was not asked for.

    Returns:
        HTML, self-contained. Whatever stands in names of nodes or functions is text in it.
    """
    sections: list[_Section] = []
    graphs: list[Any] = []
    for job, search in jobs:
        sections.append(_Section(job, search, len(graphs)))
        graphs += job.graphs
    data = columns(graphs)
    data["graphs"] = [
        {"name": g.remarks.name, "dtype": g.config.target_dtype, "nodes": g.remarks.total_nodes}
        for g in graphs
    ]
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return template("page.html.jinja").render(
        sections=sections,
        title=", ".join(dict.fromkeys(section.job.name for section in sections)),
        remarks=sum(len(graph.remarks.remarks) for graph in graphs),
        # Nothing but this very script runs, whatever the names in a graph hold.
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        f"script-src 'sha256-{digest}'",
        script=Markup(script),
        data=packed(data),
        why=why,
    )


def template(name: str) -> jinja2.Template:
    """A template of the package, to which the filters for figures, style and version are known."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (gain, in_bytes, in_flops, in_seconds, not_tried, percent)
    environment.filters |= {function.__name__: function for function in filters}
    environment.globals |= {"style": Markup(_resource("page.css")), "version": __version__}
    return environment.from_string(_resource(name))


def _resource(name: str) -> str:
    return (
        importlib.resources.files("tf_amp.tracing").joinpath("page_files", name).read_text("utf-8")
    )
