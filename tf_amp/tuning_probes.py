"""What `tf_amp.tuning` measures: op types, each with shapes from small to large."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from graph_passes.policy.cost_table import (
    BROADCAST,
    CHANNELS_FIRST,
    CHANNELS_FIRST_DEEP,
    CHANNELS_FIRST_POINTWISE,
    GROUPED,
    GROUPED_WIDE,
    POINTWISE,
    RAGGED,
    STRIDED,
    TRANSPOSED,
    WIDE,
    WIDE_STRIDED,
    Measure,
    is_channels_first,
)


class Low(NamedTuple):
    """A tensor of random numbers in the dtype that is measured."""

    shape: tuple[int, ...]


class Full(NamedTuple):
    """A tensor of random numbers that is float32 whatever is measured."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One op with inputs of one size.

    Attributes:
        size: elements of the largest tensor, or floating-point operations.
        arguments: argument name of the raw op -> a `Low`, a `Full`, a list of them, or a value.
    """

    size: int
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Probe:
    """One row of a cost table.

    Attributes:
        op: the op type.
        variant: the variant of it, "" for none.
        measure: what the sizes of the cases count.
        cases: in ascending order of size.
    """

    op: str
    variant: str
    measure: Measure
    cases: tuple[Case, ...]

    @property
    def key(self) -> str:
        """The row's key in the table."""
        return f"{self.op}/{self.variant}" if self.variant else self.op


ELEMENTS = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
"""Sizes of element-wise ops: from what a cache holds to four times what a core's cache holds."""

_DEPTHWISE = ((4, 128), (8, 256), (16, 256), (64, 96))
_WIDE_FILTER = 5
# Of the groups of ResNeXt; those of ConvNeXt have one channel.
_GROUPED, _A_GROUP = ((4, 256), (8, 256), (16, 256), (32, 128)), 4
_FIRST_FEW = ((8, 32), (16, 32), (32, 32), (64, 32))
_FIRST_DEEP = ((8, 128), (16, 128), (32, 128))
_FIRST_POINTWISE = ((32, 16), (32, 32), (32, 64), (32, 128), (32, 256))
_VOLUMES = ((4, 16), (8, 32), (8, 64))
_CHANNELS = 64
_RAGGED_CHANNELS = 72
_BATCH = 16

# (rows, depth, columns) by variant. A matrix read by columns is packed for float32, which takes as
# long for 16 rows as for 512: with few rows and many columns that would be all that is measured.
# On two cores both dtypes take as long for 2^26 flops, but not for half or twice as many.
_MATRICES = {
    "": ((16, 64, 64), (32, 256, 256), (256, 256, 256), (128, 512, 1024), (512, 1024, 1024)),
    TRANSPOSED: ((16, 64, 64), (64, 256, 256), (128, 512, 512), (512, 1024, 1024)),
}

# The arguments, all of one shape -> the ops that have them.
_SAME_SHAPE = {
    ("x",): "Abs Cos Erf Erfc Exp Floor Log Log1p Neg OnesLike Reciprocal Rsqrt Sigmoid Sign Sin "
    "Sqrt Square Tanh ZerosLike",
    ("features",): "Elu LeakyRelu Relu Relu6 Selu Softplus Softsign",
    ("logits",): "LogSoftmax Softmax",
    ("t",): "L2Loss",
    ("gradients", "features"): "LeakyReluGrad Relu6Grad ReluGrad SoftplusGrad SoftsignGrad",
    ("gradients", "outputs"): "EluGrad SeluGrad",
    ("y", "dy"): "ReciprocalGrad RsqrtGrad SigmoidGrad SqrtGrad TanhGrad",
    ("x", "y"): "AddV2 DivNoNan Maximum Minimum Mul RealDiv SquaredDifference Sub",
}


def probes() -> tuple[Probe, ...]:
    """Returns everything that is measured, in a fixed order."""
    return (
        *_element_wise(),
        *_moves_and_sums(),
        *_images(),
        *_products(),
        *_einsums(),
        *_convolutions(_DEPTHWISE),
        *_convolution("DepthwiseConv2dNative", _WIDE_FILTER, 1, WIDE, _DEPTHWISE),
        *_convolution("DepthwiseConv2dNative", _WIDE_FILTER, 2, WIDE_STRIDED, _DEPTHWISE),
        *_convolution("Conv2D", 3, 1, GROUPED, _GROUPED, _A_GROUP),
        *_convolution("Conv2D", 7, 1, GROUPED_WIDE, _GROUPED, 1),
        *_volumes(),
        *_convolution("Conv2D", 3, 1, CHANNELS_FIRST, _FIRST_FEW),
        *_convolution("Conv2D", 3, 1, CHANNELS_FIRST_DEEP, _FIRST_DEEP),
        *_convolution("Conv2D", 1, 1, CHANNELS_FIRST_POINTWISE, _FIRST_POINTWISE),
        *_convolution("DepthwiseConv2dNative", 3, 1, CHANNELS_FIRST, _DEPTHWISE),
        *_convolution("Conv3D", 3, 1, CHANNELS_FIRST, _VOLUMES),
    )


def compiled_probes() -> tuple[Probe, ...]:
    """Returns what is measured in functions that XLA compiles, in a fixed order.

    XLA fuses everything else, so that it has no costs of its own.
    """
    # A compiled depthwise convolution of the largest size takes seconds.
    return (*_products(), *_einsums(), *_convolutions(_DEPTHWISE[:3]), *_volumes())


def _matrix(size: int) -> tuple[int, int]:
    return size // _CHANNELS, _CHANNELS


def _by_elements(op: str, make: Callable[[int], dict[str, Any]], variant: str = "") -> Probe:
    """A probe whose arguments a function makes from the number of elements."""
    return Probe(op, variant, "elements", tuple(Case(size, make(size)) for size in ELEMENTS))


def _equal(names: tuple[str, ...], size: int) -> dict[str, Any]:
    """Arguments that are all of one shape."""
    return dict.fromkeys(names, Low(_matrix(size)))


def _element_wise() -> Iterator[Probe]:
    for names, ops in _SAME_SHAPE.items():
        for op in ops.split():
            yield _by_elements(op, functools.partial(_equal, names))
            if names == ("x", "y"):
                yield _by_elements(
                    op, lambda n: {"x": Low(_matrix(n)), "y": Low((_CHANNELS,))}, BROADCAST
                )
    yield _by_elements("AddN", lambda n: {"inputs": [Low(_matrix(n))] * 3})
    yield _by_elements("BiasAdd", lambda n: {"value": Low(_matrix(n)), "bias": Low((_CHANNELS,))})
    yield _by_elements(
        "SelectV2",
        lambda n: {
            "condition": [True, False] * (_CHANNELS // 2),
            "t": Low(_matrix(n)),
            "e": Low(_matrix(n)),
        },
    )


def _moves_and_sums() -> Iterator[Probe]:
    yield _by_elements("BiasAddGrad", lambda n: {"out_backprop": Low(_matrix(n))})
    for op in ("Sum", "Mean", "Max"):
        yield _by_elements(op, lambda n: {"input": Low(_matrix(n)), "axis": 1})
    yield _by_elements(
        "Transpose", lambda n: {"x": Low((8, n // (8 * _CHANNELS), _CHANNELS)), "perm": [0, 2, 1]}
    )
    yield _by_elements("ConcatV2", lambda n: {"values": [Low(_matrix(n // 2))] * 2, "axis": 1})
    yield _by_elements("Split", lambda n: {"axis": 1, "value": Low(_matrix(n)), "num_split": 4})
    yield _by_elements("Pack", lambda n: {"values": [Low(_matrix(n // 4))] * 4, "axis": 1})
    yield _by_elements("Pad", lambda n: {"input": Low(_matrix(n)), "paddings": [[1, 1], [0, 0]]})
    yield _by_elements(
        "Slice",
        lambda n: {"input": Low(_matrix(n)), "begin": [0, 0], "size": [-1, _CHANNELS // 2]},
    )
    yield _by_elements(
        "StridedSlice",
        lambda n: {
            "input": Low(_matrix(n)),
            "begin": [0, 0],
            "end": [n // _CHANNELS, _CHANNELS // 2],
            "strides": [1, 1],
        },
    )
    yield _by_elements(
        "GatherV2",
        lambda n: {
            "params": Low(_matrix(n)),
            "indices": list(range(0, n // _CHANNELS, 2)),
            "axis": 0,
        },
    )
    yield _by_elements(
        "TensorScatterUpdate",
        lambda n: {"tensor": Low(_matrix(n)), "indices": [[0, 0], [1, 1]], "updates": Low((2,))},
    )
    yield _by_elements("Tile", lambda n: {"input": Low(_matrix(n // 4)), "multiples": [4, 1]})
    yield _by_elements(
        "BroadcastTo", lambda n: {"input": Low((_CHANNELS,)), "shape": list(_matrix(n))}
    )


def _image(size: int, scale: int = 1) -> tuple[int, int, int, int]:
    side = math.isqrt(size // (_BATCH * _CHANNELS))
    return _BATCH, side // scale, side // scale, _CHANNELS


def _images() -> Iterator[Probe]:
    window = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1], "padding": "VALID"}
    yield _by_elements("MaxPool", lambda n: {"input": Low(_image(n)), **window})
    yield _by_elements("AvgPool", lambda n: {"value": Low(_image(n)), **window})
    yield _by_elements(
        "MaxPoolGrad",
        lambda n: {
            "orig_input": Low(_image(n)),
            "orig_output": Low(_image(n, 2)),
            "grad": Low(_image(n, 2)),
            **window,
        },
    )
    yield _by_elements(
        "AvgPoolGrad",
        lambda n: {"orig_input_shape": list(_image(n)), "grad": Low(_image(n, 2)), **window},
    )
    yield from _norms("", _CHANNELS)
    yield from _norms(RAGGED, _RAGGED_CHANNELS)
    yield _by_elements(
        "ResizeNearestNeighbor",
        lambda n: {"images": Low(_image(n, 2)), "size": list(_image(n)[1:3])},
    )


def _norms(variant: str, channels: int) -> Iterator[Probe]:
    each, empty = Full((channels,)), Full((0,))
    forward, backward = [], []
    for elements in ELEMENTS:
        image = (*_image(elements)[:3], channels)
        common = {"x": Low(image), "scale": each}
        statistics = {"offset": each, "mean": empty, "variance": empty}
        saved = {"reserve_space_1": each, "reserve_space_2": each, "reserve_space_3": empty}
        forward.append(Case(math.prod(image), {**common, **statistics}))
        backward.append(Case(math.prod(image), {"y_backprop": Low(image), **common, **saved}))
    yield Probe("FusedBatchNormV3", variant, "elements", tuple(forward))
    yield Probe("FusedBatchNormGradV3", variant, "elements", tuple(backward))


def _products() -> Iterator[Probe]:
    for variant, sizes in _MATRICES.items():
        turned = variant == TRANSPOSED
        cases = (
            Case(
                2 * m * k * n,
                {"a": Low((m, k)), "b": Low((n, k) if turned else (k, n)), "transpose_b": turned},
            )
            for m, k, n in sizes
        )
        yield Probe("MatMul", variant, "flops", tuple(cases))
    stacks = ((16, 16, 16, 16), (48, 32, 64, 32), (48, 128, 64, 128), (48, 256, 64, 256))
    for op in ("BatchMatMulV2", "BatchMatMul"):
        yield Probe(
            op,
            "",
            "flops",
            tuple(
                Case(2 * b * m * k * n, {"x": Low((b, m, k)), "y": Low((b, k, n))})
                for b, m, k, n in stacks
            ),
        )


def _einsums() -> Iterator[Probe]:
    sizes = ((8, 16, 64, 64), (16, 64, 128, 128), (32, 128, 256, 256))
    cases = (
        Case(
            2 * b * m * k * n,
            {"inputs": [Low((b, m, k)), Low((k, n))], "equation": "bmk,kn->bmn"},
        )
        for b, m, k, n in sizes
    )
    yield Probe("Einsum", "", "flops", tuple(cases))


def _convolutions(depthwise: tuple[tuple[int, int], ...]) -> Iterator[Probe]:
    dense = ((4, 32), (8, 64), (16, 128), (32, 128))
    pointwise = ((4, 64), (8, 128), (16, 256), (32, 256))
    yield from _convolution("Conv2D", 3, 1, "", dense)
    yield from _convolution("Conv2D", 1, 1, POINTWISE, pointwise)
    yield from _convolution("Conv2D", 3, 2, STRIDED, dense)
    yield from _convolution("DepthwiseConv2dNative", 3, 1, "", depthwise)
    yield from _convolution("DepthwiseConv2dNative", 3, 2, STRIDED, depthwise)


def _volumes() -> Iterator[Probe]:
    yield from _convolution("Conv3D", 3, 1, "", _VOLUMES)


def _convolution(
    op: str,
    kernel: int,
    stride: int,
    variant: str,
    sizes: tuple[tuple[int, int], ...],
    group: int | None = None,
) -> Iterator[Probe]:
    """The three ops of a convolution, for (side of the image, channels) pairs.

    A group is of all channels by default, and the multiplier of a depthwise convolution 1.
    """
    axes = 3 if op == "Conv3D" else 2
    attrs: dict[str, Any] = {"strides": [1, *[stride] * axes, 1], "padding": "SAME"}
    is_first = is_channels_first(variant)
    if is_first:
        attrs["strides"] = [1, 1, *[stride] * axes]
        attrs["data_format"] = "NCDHW" if axes == 3 else "NCHW"
    forward, to_input, to_filter = [], [], []
    for side, channels in sizes:
        each = 1 if op.startswith("Depthwise") else group or channels
        x, y = (
            (_BATCH, *([channels, *sides] if is_first else [*sides, channels]))
            for sides in ([side] * axes, [side // stride] * axes)
        )
        ends = (each, channels) if group else (channels, each)
        weights = (*[kernel] * axes, *ends)
        flops = 2 * math.prod(y) * kernel**axes * each
        forward.append(Case(flops, {"input": Low(x), "filter": Low(weights), **attrs}))
        to_input.append(
            Case(
                flops,
                {"input_sizes": list(x), "filter": Low(weights), "out_backprop": Low(y), **attrs},
            )
        )
        to_filter.append(
            Case(
                flops,
                {"input": Low(x), "filter_sizes": list(weights), "out_backprop": Low(y), **attrs},
            )
        )
    yield Probe(op, variant, "flops", tuple(forward))
    version = "V2" if axes == 3 else ""
    yield Probe(f"{op}BackpropInput{version}", variant, "flops", tuple(to_input))
    yield Probe(f"{op}BackpropFilter{version}", variant, "flops", tuple(to_filter))
