"""Times of ops in float32 by TensorFlow's own kernels for CPUs and by those of oneDNN.

    TF_ENABLE_ONEDNN_OPTS=0 python benchmarks/onednn_kernels.py
    TF_ENABLE_ONEDNN_OPTS=0 python benchmarks/onednn_kernels.py --only pooling depthwise

What the rule `onednn-kernel` goes by, and its least sizes. The variable is what a CPU with AVX2
alone does by itself. The two graphs of a size run in turns; the table has the median of the rounds
in milliseconds, and the work: products of numbers, or elements. A pooling is timed with its
gradient.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from results import print_table

from graph_passes.ops.kernels import ONEDNN_LABEL
from graph_passes.ops.op_types import of_onednn

Sizes = tuple[int, ...]
Build = Callable[..., Any]
_TIMED = "timed"


def _stored(*shape: int) -> Any:
    return tf.compat.v1.Variable(tf.random.normal(shape), use_resource=True).value()


def _convolution(op: str, rank: int) -> Build:
    """Of images or volumes: batch, length of a side, channels, filters, filter's side, stride."""

    def build(batch: int, side: int, channels: int, filters: int, width: int, stride: int) -> int:
        made = filters * channels if op.startswith("Depthwise") else filters
        image = batch, *[side] * rank, channels
        result = batch, *[-(-side // stride)] * rank, made
        weights = *[width] * rank, channels, filters
        inputs: dict[str, Any] = {"input": image, "filter": weights, "out_backprop": result}
        if "BackpropInput" in op:
            inputs["input_sizes"] = tf.constant(inputs.pop("input"))
        elif "BackpropFilter" in op:
            inputs["filter_sizes"] = tf.constant(inputs.pop("filter"))
        else:
            del inputs["out_backprop"]
        read = {n: v if isinstance(v, tf.Tensor) else _stored(*v) for n, v in inputs.items()}
        strides = [1, *[stride] * rank, 1]
        getattr(tf.raw_ops, op)(**read, strides=strides, padding="SAME", name=_TIMED)
        terms = width**rank * (1 if op.startswith("Depthwise") else channels)
        return math.prod(result) * terms

    return build


def _normalization(batch: int, side: int, channels: int) -> int:
    shape = batch, side, side, channels
    saved = [_stored(channels) for _ in range(3)]
    tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=_stored(*shape),
        x=_stored(*shape),
        scale=saved[0],
        reserve_space_1=saved[1],
        reserve_space_2=tf.square(saved[2]),
        reserve_space_3=tf.zeros([0]),
        name=_TIMED,
    )
    return math.prod(shape)


def _turned(rows: int, terms: int, columns: int) -> int:
    """The gradient to the input of a dense layer of `terms` units."""
    factors = {"a": _stored(rows, terms), "b": _stored(columns, terms)}
    tf.raw_ops.MatMul(**factors, transpose_b=True, name=_TIMED)
    return rows * terms * columns


def _batched(matrices: int, rows: int, terms: int, columns: int) -> int:
    """Scores of attention."""
    factors = {"x": _stored(matrices, rows, terms), "y": _stored(matrices, columns, terms)}
    tf.raw_ops.BatchMatMulV2(**factors, adj_y=True, name=_TIMED)
    return matrices * rows * terms * columns


def _einsum(batch: int, length: int, heads: int, size: int) -> int:
    """The same as Keras writes them."""
    factors = [_stored(batch, length, heads, size) for _ in range(2)]
    tf.raw_ops.Einsum(inputs=factors, equation="btnh,bsnh->bnts", name=_TIMED)
    return batch * heads * length**2 * size


def _softmax(rows: int, columns: int) -> int:
    tf.raw_ops.Softmax(logits=_stored(rows, columns), name=_TIMED)
    return rows * columns


def _average(batch: int, side: int, channels: int, width: int, stride: int) -> int:
    sizes = {"ksize": [1, width, width, 1], "strides": [1, stride, stride, 1], "padding": "SAME"}
    x = _stored(batch, side, side, channels)
    return math.prod(tf.raw_ops.AvgPool(value=x, name=_TIMED, **sizes).shape)


def _pooling(batch: int, side: int, channels: int, width: int, stride: int) -> int:
    shape = batch, side, side, channels
    sizes = {"ksize": [1, width, width, 1], "strides": [1, stride, stride, 1], "padding": "SAME"}
    x = _stored(*shape)
    y = tf.raw_ops.MaxPool(input=x, name="pooled", **sizes)
    dy = _stored(*y.shape)
    tf.raw_ops.MaxPoolGrad(orig_input=x, orig_output=y, grad=dy, name=_TIMED, **sizes)
    return math.prod(shape)


_IMAGES = [
    (1, 8, 32, 32, 3, 1), (1, 28, 32, 16, 3, 1), (8, 16, 32, 128, 3, 2), (32, 24, 64, 64, 3, 1),
    (32, 24, 256, 64, 1, 1), (32, 3, 512, 512, 3, 1), (4, 128, 32, 32, 3, 1),
]  # fmt: skip
_VOLUMES = [(4, 16, 64, 64, 3, 1), (2, 32, 32, 32, 3, 2)]
_CHANNELS = [
    (1, 14, 96, 1, 3, 1), (8, 14, 96, 1, 3, 1), (8, 28, 96, 1, 5, 1), (32, 48, 96, 1, 3, 1),
    (32, 48, 96, 1, 3, 2), (4, 112, 32, 1, 3, 1),
]  # fmt: skip
OPS: Mapping[str, tuple[Build, list[Sizes]]] = {
    **{
        f"convolution{part}": (_convolution(f"Conv2D{part}", 2), _IMAGES)
        for part in ("", "BackpropInput", "BackpropFilter")
    },
    **{
        f"volumes{part}": (_convolution(f"Conv3D{part}", 3), _VOLUMES)
        for part in ("", "BackpropInputV2", "BackpropFilterV2")
    },
    **{
        f"depthwise{part}": (_convolution(f"DepthwiseConv2dNative{part}", 2), _CHANNELS)
        for part in ("", "BackpropInput", "BackpropFilter")
    },
    "normalization, gradient": (
        _normalization,
        [(8, 8, 32), (16, 8, 64), (8, 32, 32), (32, 48, 96)],
    ),
    "turned product": (
        _turned,
        [(1, 1000, 1000), (64, 96, 96), (16, 256, 256), (128, 512, 512), (512, 3072, 768)],
    ),
    "batched product": (
        _batched,
        [(8, 32, 32, 32), (32, 32, 32, 32), (256, 8, 8, 8), (256, 32, 32, 32), (48, 128, 64, 128)],
    ),
    "einsum": (_einsum, [(1, 32, 4, 32), (4, 128, 12, 64), (16, 197, 12, 64)]),
    "softmax": (_softmax, [(128, 512), (2048, 128), (1024, 512), (24576, 512)]),
    "average": (_average, [(8, 16, 64, 2, 2), (32, 16, 64, 2, 2), (32, 8, 2048, 3, 1)]),
    "pooling": (_pooling, [(8, 16, 16, 2, 2), (32, 4, 512, 2, 2), (32, 56, 64, 3, 2)]),
}
"""Name -> what builds a graph of one size, and the sizes."""


def step(build: Build, sizes: Sizes, *, by_onednn: bool) -> tuple[Callable[[], Any], int]:
    """Makes a graph of an op and returns what runs it once, and its work."""
    with tf.Graph().as_default() as graph:
        work = build(*sizes)
        tf.compat.v1.global_variables_initializer()
    graph_def = graph.as_graph_def()
    for node in graph_def.node if by_onednn else ():
        if node.name in (_TIMED, "pooled"):
            if "MaxPool" in node.op:
                node.attr["workspace_enabled"].b = True
            if node.op == "MaxPoolGrad":
                node.input.append("pooled:1")
            node.op = of_onednn(node.op)
            node.attr["_kernel"].s = ONEDNN_LABEL
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
    session = tf.compat.v1.Session(graph=graph, config=config)
    session.run(graph.get_operation_by_name("init"))
    return session.make_callable(graph.get_operation_by_name(_TIMED)), work


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[""], help="ops whose names begin so")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rows = []
    for name, (build, all_sizes) in OPS.items():
        for sizes in all_sizes if name.startswith(tuple(options.only)) else ():
            pairs = [step(build, sizes, by_onednn=each) for each in (False, True)]
            times: list[list[float]] = [[], []]
            for turn, (taken, (run, _)) in itertools.product(
                range(-2, options.rounds), zip(times, pairs, strict=True)
            ):
                start = time.perf_counter()
                run()
                if turn >= 0:
                    taken.append(1e3 * (time.perf_counter() - start))
            own, onednn = map(statistics.median, times)
            work = f"2^{math.log2(pairs[0][1]):.1f}"
            rows.append([name, sizes, work, f"{own:.2f}", f"{onednn:.2f}", f"{own / onednn:.2f}x"])
    print_table(["op", "sizes", "work", "own kernel", "oneDNN's", "gain"], rows)


if __name__ == "__main__":
    main()
