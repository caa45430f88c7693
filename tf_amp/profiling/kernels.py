"""Where the time of steps went, from what TensorFlow's profiler has noted of them."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from graph_passes.placement.byte_cost import MOVES_NOTHING
from graph_passes.policy.op_lists import product_ops

STEP = "tf_amp_step"
"""The name under which a step is noted."""

PRODUCTS, OTHER, CASTS, MOVES = "products", "other compute", "casts", "memory moves"
INPUT, COMPILED = "input", "compiled by XLA"
CLASSES = (PRODUCTS, OTHER, CASTS, MOVES, INPUT, COMPILED)

_KERNEL = re.compile(r"([^:]+):([A-Z_]\w*)")
# What a step waits in for its batch, on a thread of its own.
_WAITS = "IteratorGetNextOp::DoCompute"
_PIPELINE = "tf_data_"
_PICOSECOND = 1e-12
# What oneDNN and the remapper put in place of the graph's own ops.
_REPLACED = ("_Mkl", "_Fused")
_VARIANT = re.compile("^_(Mkl)?(Native)?(Fused)?")
_COPIES = MOVES_NOTHING | {
    *("BroadcastTo", "Concat", "ConcatV2", "Const", "Copy", "Fill", "Gather", "GatherNd"),
    *("GatherV2", "InvertPermutation", "MirrorPad", "OnesLike", "Pack", "Pad", "PadV2"),
    *("ReadVariableOp", "ResourceGather", "ReverseV2", "ScatterNd", "Slice", "Split", "SplitV"),
    *("StridedSlice", "StridedSliceGrad", "Tile", "Transpose", "Unpack", "ZerosLike", "_Arg"),
    *("_HostRecv", "_HostSend", "_Recv", "_Retval", "_Send"),
}
_COPIED = ("Memcpy", "Memset", "TensorArray", "TensorList")
_XLA = ("Xla", "_Xla")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One run of a kernel.

    Attributes:
        node: the node's name, with those of the calls that lead to it.
        op: its op type, as the runtime has it.
        start: when it began, in seconds.
        end: when it ended.
        lane: the thread or stream that it ran in.
        on_device: whether that is one of an accelerator.
    """

    node: str
    op: str
    start: float
    end: float
    lane: int
    on_device: bool = False


@dataclasses.dataclass(frozen=True)
class Profiled:
    """What was noted.

    Attributes:
        steps: beginning and end of each step, in seconds, in order.
        kernels: those of the steps, and not those of input pipelines.
    """

    steps: tuple[tuple[float, float], ...]
    kernels: tuple[Kernel, ...]


def read_profile(directory: Path) -> Profiled:
    """Reads what TensorFlow's profiler has written.

    Args:
        directory: what the profiler was started with.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    steps: list[tuple[float, float]] = []
    kernels: list[Kernel] = []
    lanes = 0
    for file in sorted(directory.rglob("*.xplane.pb")):
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
        for plane in space.planes:
            on_device = plane.name.startswith("/device:")
            for line in plane.lines:
                lanes += 1
                # The kernels of a pipeline run beside the step, which waits in one place alone.
                of_pipeline = line.name.startswith(_PIPELINE)
                for name, start, end in _events(plane, line, on_device):
                    found = _KERNEL.fullmatch(name)
                    if name == STEP:
                        steps.append((start, end))
                    elif name == _WAITS:
                        kernels.append(Kernel("", "IteratorGetNext", start, end, lanes))
                    elif found and not of_pipeline:
                        kernels.append(Kernel(found[1], found[2], start, end, lanes, on_device))
    return Profiled(tuple(sorted(steps)), tuple(kernels))


def _events(plane: Any, line: Any, on_device: bool) -> Iterator[tuple[str, float, float]]:
    """The events of a line: name, beginning and end.

    A kernel of a device has a name of its own, and that of the op that it is of in a note.
    """
    names = {number: event.name for number, event in plane.event_metadata.items()}
    notes = {number: note.name for number, note in plane.stat_metadata.items()}
    for event in line.events:
        name = names[event.metadata_id]
        if on_device:
            name = f"{name}:{name}" if name.startswith("Mem") else name
            for stat in event.stats:
                if notes[stat.metadata_id] == "tf_op":
                    name = stat.str_value or notes.get(stat.ref_value, name)
        start = line.timestamp_ns * 1e-9 + event.offset_ps * _PICOSECOND
        yield name, start, start + event.duration_ps * _PICOSECOND


def kernel_seconds(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Op type -> seconds of its kernels; those that run beside one another count in full."""
    seconds: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        seconds[kernel.op] += kernel.end - kernel.start
    return seconds


def shares_of_steps(profiled: Profiled) -> dict[tuple[str, str], float]:
    """Divides the time of the steps among the kernels that were at work.

    At each moment, those that are at work have equal parts of it; a kernel that another one runs
    inside of has none, and those of the host have none while one of a device is at work.

    Returns:
        (node, op type) -> seconds, of all steps together. What is missing to their time is when no
        kernel was at work.
    """
    changes: list[tuple[float, bool, Kernel]] = []
    by_lane: dict[int, list[Kernel]] = {}
    for kernel in profiled.kernels:
        by_lane.setdefault(kernel.lane, []).append(kernel)
    for kernels in by_lane.values():
        for start, end, kernel in _innermost(kernels):
            for low, high in profiled.steps:
                if start < high and low < end:
                    changes.append((max(start, low), True, kernel))
                    changes.append((min(end, high), False, kernel))
    changes.sort(key=lambda change: change[:2])
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    at_work: Counter[Kernel] = Counter()
    before = 0.0
    for now, begins, kernel in changes:
        if at_work and now > before:
            counted = [k for k in at_work if k.on_device] or list(at_work)
            for one in counted:
                seconds[one.node, one.op] += (now - before) / len(counted)
        at_work[kernel] += 1 if begins else -1
        if not at_work[kernel]:
            del at_work[kernel]
        before = now
    return seconds


def _innermost(kernels: Sequence[Kernel]) -> Iterator[tuple[float, float, Kernel]]:
    """The stretches of one lane in which a kernel is the innermost one: beginning, end, kernel."""
    open_ones: list[Kernel] = []
    now = 0.0

    def until(time: float) -> Iterator[tuple[float, float, Kernel]]:
        nonlocal now
        while open_ones:
            last = open_ones[-1]
            end = min(last.end, time)
            if end > now:
                yield now, end, last
                now = end
            if last.end > time:
                return
            open_ones.pop()

    for kernel in sorted(kernels, key=lambda kernel: (kernel.start, -kernel.end)):
        yield from until(kernel.start)
        now = kernel.start
        open_ones.append(kernel)
    yield from until(float("inf"))


def plain_op(op: str) -> str:
    """The op type in the graph that became one of oneDNN's or the remapper's."""
    return _VARIANT.sub("", op) if op.startswith(_REPLACED) else op


def class_of(op: str) -> str:
    """Which of `CLASSES` an op type belongs to, as the runtime names it."""
    plain = plain_op(op)
    if op.startswith(_XLA):
        return COMPILED
    if plain.startswith(tuple(product_ops())):
        return PRODUCTS
    if plain == "Cast":
        return CASTS
    if plain.startswith("IteratorGetNext"):
        return INPUT
    return MOVES if op in _COPIES or op.startswith(_COPIED) else OTHER
