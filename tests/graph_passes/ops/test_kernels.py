from __future__ import annotations

import pytest
from graph_text import graph
from tensorflow.core.framework import kernel_def_pb2, node_def_pb2, types_pb2

from graph_passes.ops import kernels
from graph_passes.ops.kernels import KernelSupport, missing_kernels_note, registered_gpu_kernels
from graph_passes.ops.node_types import NodeTypeTable
from graph_passes.ops.op_types import Slot

HALF, BFLOAT16 = types_pb2.DT_HALF, types_pb2.DT_BFLOAT16


def has_kernel(device: str, dtype: int, node: node_def_pb2.NodeDef, slot: Slot) -> bool:
    (node_type,) = NodeTypeTable(lambda _: None).node_types_of([node])
    return KernelSupport(device, dtype).supports(node_type, node_type.layout.slots.index(slot))


@pytest.mark.parametrize(
    ("device", "dtype", "line", "slot", "expected"),
    [
        ("GPU", HALF, "MatMul(x, x)", Slot("T"), True),
        ("CPU", BFLOAT16, "MatMul(x, x)", Slot("T"), True),
        ("GPU", HALF, "Cholesky(x)", Slot("T"), False),
        ("GPU", HALF, "Erfinv(x)", Slot("T"), False),  # the op admits it, but no kernel has it
        ("CPU", BFLOAT16, "Cholesky(x)", Slot("T"), False),
        ("GPU", HALF, "Identity(x)", Slot("T"), True),
        ("GPU", HALF, "IdentityN(x, n)", Slot("T", 0), True),
        ("GPU", HALF, "Shape(x)", Slot("T"), True),
        ("GPU", HALF, "Where(x)", Slot("", fixed=types_pb2.DT_INT64), False),
        ("TPU", HALF, "Relu(x)", Slot("T"), False),
    ],
)
def test_kernels_of_the_build(
    device: str, dtype: int, line: str, slot: Slot, expected: bool
) -> None:
    node = graph(f"x = Const(0.5, [4, 4])\nn = Const(1, [4])\nnode = {line}").node[-1]
    assert has_kernel(device, dtype, node, slot) == expected


def test_other_attributes_of_the_node_count() -> None:
    """A kernel may take a dtype for one attribute only together with another."""
    node = graph("x = Const(0.5, [4])\nnode = GatherV2(x, [1, 2], 0)").node[-1]
    assert has_kernel("GPU", HALF, node, Slot("Tparams"))
    node.attr["Tindices"].type = types_pb2.DT_STRING
    assert not has_kernel("GPU", HALF, node, Slot("Tparams"))


def test_gpu_kernels_are_registered_without_a_gpu() -> None:
    assert registered_gpu_kernels() > 300


def test_a_build_without_gpu_kernels_says_so(monkeypatch):
    assert missing_kernels_note("GPU") is None
    cpu_alone = kernel_def_pb2.KernelList()
    cpu_alone.kernel.add(op="MatMul", device_type="CPU")
    monkeypatch.setattr(kernels.kernels, "get_all_registered_kernels", lambda: cpu_alone)
    monkeypatch.setattr(kernels, "_devices_of", lambda op: {"CPU": ((),)})
    note = missing_kernels_note("GPU")
    assert note is not None
    assert "0 op types" in note
    assert "tensorflow-cpu" in note
    assert missing_kernels_note("CPU") is None


def test_kernels_of_a_library_that_was_loaded_late_are_found(monkeypatch):
    late = kernel_def_pb2.KernelList()
    late.kernel.add(op="LateOp", device_type="CPU")
    assert not kernels.kernels.get_registered_kernels_for_op("LateOp").kernel
    monkeypatch.setattr(kernels.kernels, "get_registered_kernels_for_op", lambda op: late)
    assert kernels._kernels_of("LateOp", "CPU")
    kernels._devices_of.cache_clear()
