"""Which kernels this TensorFlow build has, asked of its registry.

The `tensorflow` wheel registers its GPU kernels on machines without a GPU as well, so a plan for a
GPU can be made anywhere; `tensorflow-cpu` registers few of them and plans little for a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence, Set

from tensorflow.core.framework import types_pb2
from tensorflow.python.framework import kernels

from graph_passes.ops.node_types import NodeType

ONE_DTYPE_OPS = frozenset(("MaxPool3DGrad",))
"""Ops of several type attributes that have no kernel in which one alone is lower."""

_DEFAULT = "DEFAULT"
"""The device type of kernels that serve every device without one of its own."""

ONEDNN_LABEL = b"MklNameChangeOp"
"""The attr `_kernel` of ops that oneDNN's kernels alone run; those of no other op have it."""

_NOTHING = frozenset((types_pb2.DT_INVALID,))


_Constraints = tuple[tuple[str, frozenset[int]], ...]
"""What a kernel asks of a node: attributes, each with its legal dtypes."""


@functools.cache
def _devices_of(op: str) -> dict[str, list[_Constraints]]:
    """Device type -> the constraints of each kernel of an op."""
    found: dict[str, list[_Constraints]] = {}
    for kernel in kernels.get_registered_kernels_for_op(op).kernel:
        if kernel.label not in ("", ONEDNN_LABEL.decode()):
            continue  # chosen by a `_kernel` attr only
        constraints = tuple(
            (constraint.name, frozenset(constraint.allowed_values.list.type))
            for constraint in kernel.constraint
            if constraint.allowed_values.list.type
        )
        found.setdefault(kernel.device_type, []).append(constraints)
    return found


def _kernels_of(op: str, device: str) -> Sequence[_Constraints]:
    devices = _devices_of(op)
    return devices.get(device) or devices.get(_DEFAULT) or ()


def has_kernel(op: str, device: str) -> bool:
    """Whether an op has a kernel of any dtype for a device type."""
    return bool(_kernels_of(op, device))


def registered_gpu_kernels() -> int:
    """How many op types have a GPU kernel in this build: few under `tensorflow-cpu`."""
    registered = kernels.get_all_registered_kernels().kernel
    return len({one.op for one in registered if one.device_type == "GPU" and not one.label})


def missing_kernels_note(device: str) -> str | None:
    """What a user must know of a build whose kernels for a device are left out; None for none."""
    if device != "GPU" or _kernels_of("MatMul", "GPU"):
        return None
    return (
        f"this TensorFlow build has GPU kernels for {registered_gpu_kernels()} op types only and "
        "none for MatMul (tensorflow-cpu leaves them out), so a GPU plan converts next to nothing; "
        "install the `tensorflow` wheel, which needs no GPU for planning"
    )


@dataclasses.dataclass(frozen=True, eq=False)
class KernelSupport:
    """Answers, for one device type and target dtype, whether a retyped node has a kernel.

    The rule is TensorFlow's: every constraint of one kernel registered for the device (or for the
    default device where it has none) holds for the node's attrs once the slot is retyped.
    """

    device: str
    dtype: int

    def supports(
        self, node_type: NodeType, position: int, one_dtype: Set[str] = frozenset()
    ) -> bool:
        """Whether nodes of a type could run with the slot at a position in the target dtype.

        Args:
            node_type: their type.
            position: that of the slot.
            one_dtype: ops of which all float32 slots go low together.
        """
        return _supports(self, node_type, position, node_type.op in one_dtype)


@functools.lru_cache(maxsize=1 << 14)
def _supports(
    support: KernelSupport, node_type: NodeType, position: int, is_one_dtype: bool
) -> bool:
    op_type, slots = node_type.op_type, node_type.layout.slots
    retyped = slots[position]
    if op_type is None or not retyped.attr or not op_type.allows(retyped, support.dtype):
        return False
    held: dict[str, set[int]] = {}
    for slot, dtype in zip(slots, node_type.dtypes, strict=True):
        goes_along = is_one_dtype and dtype == types_pb2.DT_FLOAT
        is_retyped = slot == retyped or goes_along
        held.setdefault(slot.attr, set()).add(support.dtype if is_retyped else dtype)
    return any(
        all(held.get(attr, _NOTHING) <= legal for attr, legal in constraints)
        for constraints in _kernels_of(op_type.name, support.device)
    )


@functools.cache
def kernel_support(device: str, dtype: int) -> KernelSupport:
    """The shared answers for one device type and target dtype."""
    return KernelSupport(device, dtype)
