"""Remarks as columns of numbers: small enough for a page with a hundred thousand nodes."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from graph_passes import Remark
from graph_passes.remarks import KINDS
from tf_amp.tracing.text import advice
from tf_amp.tracing.trace import TracedGraph

ROOT = -1


class _Numbered:
    """Values in the order in which they were met first."""

    def __init__(self) -> None:
        self.values: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.values.setdefault(value, len(self.values))


class _Tree:
    """Sequences of strings of which many begin alike, as a tree: a number for each prefix."""

    def __init__(self, strings: _Numbered) -> None:
        self._strings, self._steps = strings, _Numbered()

    def __call__(self, steps: Iterable[str], parent: int = ROOT) -> int:
        for step in steps:
            parent = self._steps((parent, self._strings(step)))
        return parent

    def columns(self) -> dict[str, list[int]]:
        """The tree: of each prefix the one before, and the string that it adds."""
        parents, labels = [list(column) for column in zip(*self._steps.values, strict=True)] or (
            [],
            [],
        )
        return {"parent": parents, "label": labels}


def columns(graphs: Sequence[TracedGraph]) -> dict[str, Any]:
    """The remarks of graphs.

    Args:
        graphs: those to show.

    Returns:
        JSON-ready: `strings`; `scopes`, the name scopes of all graphs as a tree, whose first ones
        are the graphs themselves; `paths`, ways from denied nodes, as a tree too; `kinds`; and
        `rows`, a list for each field with a number for each remark. Text is a number of `strings`,
        -1 where there is none.
    """
    strings = _Numbered()
    scopes, paths = _Tree(strings), _Tree(strings)
    roots = [scopes([f"{number}"]) for number in range(len(graphs))]
    told: dict[tuple[int, str, str, str], str] = {}
    text: Callable[[str], int] = lambda value: strings(value) if value else ROOT  # noqa: E731
    rows: dict[str, list[Any]] = {}
    for number, graph in enumerate(graphs):
        for remark in graph.remarks.remarks:
            *scope, label = remark.node.split("/")
            inside = [f"{remark.function}()"] if remark.function else []
            key = (number, remark.rule, remark.op, remark.blocked_by)
            if key not in told:
                told[key] = " ".join(advice(remark, graph.config))
            fields: Mapping[str, Any] = {
                "graph": number,
                "kind": KINDS.index(remark.kind),
                "scope": scopes([*inside, *scope], roots[number]),
                "label": text(label),
                "op": text(remark.op),
                "list": text(remark.op_list),
                "attr": text(remark.attr),
                "rule": text(remark.rule),
                "reason": text(remark.reason),
                "advice": text(told[key]),
                "path": paths(remark.path),
                "shape": text(shapes_text(remark)),
                "line": text("\n".join(remark.lines)),
                "flops": remark.flops,
                "bytes": remark.bytes,
                "time": None if remark.seconds is None else round(remark.seconds * 1e6, 2),
            }
            for name, value in fields.items():
                rows.setdefault(name, []).append(value)
    return {
        "strings": list(strings.values),
        "kinds": KINDS,
        "scopes": scopes.columns(),
        "paths": paths.columns(),
        "rows": rows,
    }


def shapes_text(remark: Remark) -> str:
    """The shapes of a remark, for people: "32 x ?, 32"."""
    known = (shape for shape in remark.shapes if shape is not None)
    return ", ".join(
        " x ".join("?" if size is None else str(size) for size in shape) or "scalar"
        for shape in known
    )


def packed(data: Any) -> str:
    """JSON, compressed, in the 64 characters that mean nothing in HTML."""
    text = json.dumps(data, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
