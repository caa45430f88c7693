"""Which nodes may be converted at all."""

from __future__ import annotations

from collections.abc import Collection

from graph_passes.config import PrecisionConfig
from graph_passes.reasons import Reason
from graph_passes.view import GraphView

_BOUNDARY_OPS = frozenset(("_Arg", "_Retval"))


def node_name(reference: str) -> str:
    """The node that `name`, `name:0` or `^name` refers to."""
    return reference.lstrip("^").partition(":")[0]


def find_ineligible(
    view: GraphView, preserve: Collection[str], config: PrecisionConfig
) -> dict[int, Reason]:
    """The nodes that must stay as they are, each with the reason.

    Args:
        view: the graph.
        preserve: names of nodes (or tensors) that are fed, fetched or kept for another cause.
        config: names the device whose nodes may be converted.

    Returns:
        Node number -> `Reason.PRESERVED` or `Reason.OTHER_DEVICE`.
    """
    ineligible: dict[int, Reason] = {}
    wanted = config.device.lower()
    for device, numbers in view.devices.items():
        if wanted not in device.rpartition("/")[2].lower():
            ineligible.update(dict.fromkeys(numbers, Reason.OTHER_DEVICE))
    if view.is_function:
        boundary = view.of_kind(lambda kind: kind.op in _BOUNDARY_OPS)
        ineligible.update(dict.fromkeys(boundary, Reason.PRESERVED))
    for reference in preserve:
        known = view.index.get(reference)  # most are plain names, which need no taking apart
        if known is None:
            known = view.index.get(node_name(reference))
        if known is not None:
            ineligible[known] = Reason.PRESERVED
    return ineligible
