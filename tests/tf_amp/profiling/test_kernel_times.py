"""What is read from a profile, and how the time of steps is divided."""

from __future__ import annotations

from pathlib import Path

import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tf_amp.profiling.kernels import (
    CASTS,
    COMPILED,
    INPUT,
    MOVES,
    OTHER,
    PRODUCTS,
    STEP,
    class_of,
    kernel_seconds,
    plain_op,
    read_profile,
    shares_of_steps,
)

MS = 10**9  # in picoseconds
Event = tuple[str, int, int]


def write(folder: Path, planes: dict[str, dict[str, list[Event]]]) -> None:
    """Writes a profile: plane -> line -> name of an event, beginning and end in ms.

    On a device, the name is that of the op, which stands in a note of a kernel.
    """
    space = xplane_pb2.XSpace()
    for plane_name, lines in planes.items():
        plane = space.planes.add(name=plane_name)
        plane.stat_metadata[1].name = "tf_op"
        for name, events in lines.items():
            line = plane.lines.add(name=name)
            for what, start, end in events:
                number = len(plane.event_metadata) + 1
                event = line.events.add(
                    metadata_id=number, offset_ps=start * MS, duration_ps=(end - start) * MS
                )
                if plane_name.startswith("/device:") and ":" in what:
                    plane.event_metadata[number].name = "gemm_kernel"
                    plane.stat_metadata[number + 1].name = what
                    event.stats.add(metadata_id=1, ref_value=number + 1)
                else:
                    plane.event_metadata[number].name = what
    (folder / "host.xplane.pb").write_bytes(space.SerializeToString())


@pytest.mark.parametrize(
    ("planes", "shares"),
    [
        pytest.param(
            {"/host:CPU": {"python": [(STEP, 0, 10)], "t": [("a:MatMul", 2, 6)]}},
            {("a", "MatMul"): 4},
            id="one kernel",
        ),
        pytest.param(
            {
                "/host:CPU": {
                    "python": [(STEP, 0, 10)],
                    "t": [("a:MatMul", 0, 4)],
                    "u": [("b:Relu", 2, 6)],
                }
            },
            {("a", "MatMul"): 3, ("b", "Relu"): 3},
            id="beside one another: half each",
        ),
        pytest.param(
            {
                "/host:CPU": {
                    "python": [(STEP, 0, 10)],
                    "t": [("c:If", 0, 8), ("c/a:MatMul", 1, 3), ("c/b:Relu", 3, 4)],
                }
            },
            {("c", "If"): 5, ("c/a", "MatMul"): 2, ("c/b", "Relu"): 1},
            id="one inside of another",
        ),
        pytest.param(
            {
                "/host:CPU": {
                    "python": [(STEP, 2, 4), (STEP, 6, 8)],
                    "t": [("a:MatMul", 1, 7), ("a:MatMul", 9, 10)],
                }
            },
            {("a", "MatMul"): 3},
            id="what is not in a step does not count",
        ),
        pytest.param(
            {
                "/host:CPU": {
                    "python": [(STEP, 0, 10)],
                    "tf_data_iterator_get_next/1": [("IteratorGetNextOp::DoCompute", 0, 4)],
                    "tf_data_private_threadpool/2": [("map/Mul:Mul", 0, 9)],
                    "t": [("ThreadpoolListener::Record", 0, 9), ("a:MatMul", 2, 6)],
                }
            },
            {("", "IteratorGetNext"): 3, ("a", "MatMul"): 3},
            id="of the pipeline the wait alone",
        ),
        pytest.param(
            {
                "/device:GPU:0": {"stream": [("a:MatMul", 3, 7), ("MemcpyH2D", 7, 8)]},
                "/host:CPU": {"python": [(STEP, 0, 10)], "t": [("b:Relu", 2, 4)]},
            },
            {("b", "Relu"): 1, ("a", "MatMul"): 4, ("MemcpyH2D", "MemcpyH2D"): 1},
            id="the host beside a device does not count",
        ),
    ],
)
def test_steps_are_divided_among_kernels(
    tmp_path: Path,
    planes: dict[str, dict[str, list[Event]]],
    shares: dict[tuple[str, str], float],
) -> None:
    write(tmp_path, planes)
    found = shares_of_steps(read_profile(tmp_path))
    assert {key: 1e3 * seconds for key, seconds in found.items()} == pytest.approx(shares)


def test_kernels_beside_one_another_count_in_full(tmp_path: Path) -> None:
    write(tmp_path, {"/host:CPU": {"t": [("a:MatMul", 0, 4)], "u": [("b:MatMul", 2, 6)]}})
    assert kernel_seconds(read_profile(tmp_path).kernels) == pytest.approx({"MatMul": 8e-3})


@pytest.mark.parametrize(
    ("op", "plain", "found"),
    [
        ("MatMul", "MatMul", PRODUCTS),
        ("_MklNativeFusedMatMul", "MatMul", PRODUCTS),
        ("_FusedConv2D", "Conv2D", PRODUCTS),
        ("_MklNativeConv2DBackpropFilter", "Conv2DBackpropFilter", PRODUCTS),
        ("_MklFusedBatchMatMulV2", "BatchMatMulV2", PRODUCTS),
        ("Cast", "Cast", CASTS),
        ("IteratorGetNext", "IteratorGetNext", INPUT),
        ("Transpose", "Transpose", MOVES),
        ("_Recv", "_Recv", MOVES),
        ("MemcpyD2H", "MemcpyD2H", MOVES),
        ("TensorListStack", "TensorListStack", MOVES),
        ("_XlaRun", "_XlaRun", COMPILED),
        ("_FusedBatchNormEx", "BatchNormEx", OTHER),
        ("Relu", "Relu", OTHER),
    ],
)
def test_classes(op: str, plain: str, found: str) -> None:
    assert (plain_op(op), class_of(op)) == (plain, found)
