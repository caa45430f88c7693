"""What XLA makes of an op on a CPU: its time in float32 and in bfloat16, with XLA and without.

    python benchmarks/xla_ops.py
    python benchmarks/xla_ops.py --only matmul softmax --hlo

The four functions of an op run in turns; the table has the median of the rounds in microseconds,
starting the function included. `--hlo` prints what XLA made of the bfloat16 function.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from results import print_table

Shapes = tuple[tuple[int, ...], ...]
_TURN_S = 0.02
_IMAGES, _FILTER = (16, 28, 28, 64), (3, 3, 64, 64)
_CONVOLUTION = {"strides": [1, 1, 1, 1], "padding": "SAME"}


def _to_input(y: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.Conv2DBackpropInput(
        input_sizes=_IMAGES, filter=weights, out_backprop=y, **_CONVOLUTION
    )


def _to_filter(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.Conv2DBackpropFilter(
        input=x, filter_sizes=_FILTER, out_backprop=y, **_CONVOLUTION
    )


def _depthwise(x: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.DepthwiseConv2dNative(input=x, filter=weights, **_CONVOLUTION)


def _convolution(x: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.Conv2D(input=x, filter=weights, **_CONVOLUTION)


OPS: Mapping[str, tuple[Callable[..., tf.Tensor], tuple[Shapes, ...]]] = {
    "matmul": (
        tf.matmul,
        (((64, 64), (64, 64)), ((128, 512), (512, 512)), ((512, 2048), (2048, 2048))),
    ),
    "batch matmul": (tf.matmul, (((48, 32, 64), (48, 64, 32)), ((48, 128, 64), (48, 64, 128)))),
    "convolution": (_convolution, ((_IMAGES, _FILTER), (_IMAGES, (1, 1, 64, 64)))),
    "convolution to input": (_to_input, ((_IMAGES, _FILTER),)),
    "convolution to filter": (_to_filter, ((_IMAGES, _IMAGES),)),
    "depthwise convolution": (_depthwise, ((_IMAGES, (3, 3, 64, 1)),)),
    "sum": (lambda x: tf.reduce_sum(x, 1), (((1024, 1024),),)),
    "softmax": (tf.nn.softmax, (((4096, 128),),)),
    "add": (tf.add, (((1024, 1024), (1024, 1024)),)),
    "tanh(x * y + x) * y": (lambda x, y: tf.tanh(x * y + x) * y, (((1024, 1024), (1024, 1024)),)),
    "transpose": (lambda x: tf.transpose(x, (0, 2, 1, 3)), (((8, 128, 6, 64),),)),
}
"""Name -> the op and the shapes of its arguments, one tuple for each size."""


def measure(op: Callable[..., tf.Tensor], shapes: Shapes, rounds: int) -> list[float]:
    """Seconds of a call under XLA in float32 and bfloat16, and without XLA in both."""
    random = np.random.default_rng(0)
    full = [tf.constant(random.uniform(0.5, 1.5, shape).astype(np.float32)) for shape in shapes]
    low = [tf.cast(tensor, tf.bfloat16) for tensor in full]
    calls = [_function(op, xla, tensors) for xla in (True, False) for tensors in (full, low)]
    repeats = [max(1, round(_TURN_S / min(_seconds(call, 1) for _ in range(3)))) for call in calls]
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, often, taken in zip(calls, repeats, times, strict=True):
            taken.append(_seconds(call, often))
    return [statistics.median(taken) for taken in times]


def _function(
    op: Callable[..., tf.Tensor], xla: bool, tensors: list[tf.Tensor]
) -> Callable[[], Any]:
    function = tf.function(
        lambda *given: op(*given), autograph=False, jit_compile=xla or None
    ).get_concrete_function(*tensors)
    return functools.partial(function, *tensors)


def _seconds(call: Callable[[], Any], often: int) -> float:
    started = time.perf_counter()
    for _ in range(often):
        result = call()
    result.numpy()
    return (time.perf_counter() - started) / often


def optimized_hlo(op: Callable[..., tf.Tensor], shapes: Shapes) -> str:
    """What XLA makes of the op in bfloat16."""
    tensors = [tf.zeros(shape, tf.bfloat16) for shape in shapes]
    function = tf.function(lambda *given: op(*given), autograph=False, jit_compile=True)
    return str(function.experimental_get_compiler_ir(*tensors)(stage="optimized_hlo"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=OPS, default=OPS, metavar="OP")
    parser.add_argument("--rounds", type=int, default=15, help="turns of every function (15)")
    parser.add_argument("--hlo", action="store_true", help="print the optimized HLO in bfloat16")
    options = parser.parse_args()
    rows: list[list[object]] = []
    for name in options.only:
        op, sizes = OPS[name]
        for shapes in sizes:
            seconds = measure(op, shapes, options.rounds)
            ratios = (f"{seconds[at + 1] / seconds[at]:.2f}" for at in (0, 2))
            times = (f"{each * 1e6:.0f}" for each in seconds)
            rows.append([name, " ".join(map(str, shapes)), *times, *ratios])
            if options.hlo:
                print(optimized_hlo(op, shapes))
    print_table(
        ["op", "shapes", "XLA f32 us", "XLA bf16", "f32 us", "bf16", "XLA bf16/f32", "bf16/f32"],
        rows,
    )


if __name__ == "__main__":
    main()
