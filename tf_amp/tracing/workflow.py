"""Remarks as annotations of source lines, in the form that GitHub's workflows read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from graph_passes import FunctionRemarks, Remark
from tf_amp.tracing.figures import of_nodes, why


def workflow_lines(graphs: Iterable[FunctionRemarks]) -> Iterator[str]:
    """A line ``::warning file=model.py,line=42,title=...::...`` for each place and reason.

    What is annotated are the matrix products and convolutions that stay float32, at the innermost
    line of the user's that made them; those that no line is known of have none. A graph that was
    given up is an error.

    Args:
        graphs: the remarks.
    """
    kept: Counter[tuple[str, str, str]] = Counter()
    nodes: dict[tuple[str, str, str], str] = {}
    for graph in graphs:
        if graph.failure is not None:
            title = _property(f"{graph.name} stays float32")
            yield f"::error title={title}::{_message(graph.failure)}"
        for remark in of_nodes(remark for remark in graph.remarks if remark.is_product):
            if remark.kind == "kept":
                key = (_place(remark), remark.op, why(remark))
                kept[key] += 1
                nodes.setdefault(key, f"{remark.node} in {graph.name}")
    for (place, op, reason), count in kept.items():
        title = _property(f"{count} {op} in float32")
        more = f" and {count - 1} more" if count > 1 else ""
        message = _message(f"{reason}: {nodes[place, op, reason]}{more}")
        yield f"::warning {place}title={title}::{message}"


def _place(remark: Remark) -> str:
    file, _, line = remark.lines[0].rpartition(":") if remark.lines else ("", "", "")
    return f"file={_property(file)},line={line}," if file else ""


def _message(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _message(text).replace(":", "%3A").replace(",", "%2C")
