"""Which nodes may be converted at all."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from tensorflow.core.framework import types_pb2

from graph_passes.ir.convolutions import refused_off_onednn
from graph_passes.ir.graph_view import ARGUMENT, RESULT, GraphView
from graph_passes.ops.reasons import Reason
from graph_passes.policy.config import PrecisionConfig

_WITHOUT_DEVICE = ("job:", "replica:", "task:")
"""How what names no device ends."""


def node_name(reference: str) -> str:
    """The node that `name`, `name:0` or `^name` refers to."""
    return reference.lstrip("^").partition(":")[0]


def numbers_of(view: GraphView, references: Iterable[str]) -> list[int]:
    """The nodes of a view that names of nodes or tensors refer to; others are left out."""
    find = view.index.get
    numbers = []
    for reference in references:
        number = find(reference)  # most are plain names, which need no taking apart
        if number is None:
            number = find(node_name(reference))
        if number is not None:
            numbers.append(number)
    return numbers


def find_ineligible(
    view: GraphView, preserve: Collection[str], config: PrecisionConfig
) -> dict[int, Reason]:
    """The nodes that must stay as they are, each with the reason.

    Args:
        view: the graph.
        preserve: names of nodes (or tensors) that are fed, fetched or kept for another cause.
        config: names the device whose nodes may be converted.

    Returns:
        Node number -> `Reason.PRESERVED`, `Reason.OTHER_DEVICE` or `Reason.NO_KERNEL`.
    """
    ineligible: dict[int, Reason] = {}
    if config.device == "CPU" and config.target == types_pb2.DT_HALF and not config.parity:
        ineligible.update(dict.fromkeys(refused_off_onednn(view), Reason.NO_KERNEL))
    wanted = config.device.lower()
    for device, numbers in view.devices.items():
        place = device.rpartition("/")[2].lower()
        # Of a job or a task TensorFlow chooses the device, as where none is named; its own pass
        # counts that as another device.
        is_open = place.startswith(_WITHOUT_DEVICE) and not config.parity
        if not (wanted in place or is_open or config.only_device):
            ineligible.update(dict.fromkeys(numbers, Reason.OTHER_DEVICE))
    if view.is_function:
        ineligible.update(dict.fromkeys(view.of_op(ARGUMENT, RESULT), Reason.PRESERVED))
    ineligible.update(dict.fromkeys(numbers_of(view, preserve), Reason.PRESERVED))
    return ineligible
