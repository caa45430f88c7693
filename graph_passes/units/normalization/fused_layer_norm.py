"""Puts TensorFlow's fused kernels in the place of layer normalizations on a GPU.

A layer normalization is a batch normalization of [1, rows, size, 1] in which every row is a
channel: `FusedBatchNormV3` with a scale of 1 and an offset of 0 makes the normalized rows, in and
out in the target dtype, with statistics in float32. The stored scale and offset are applied
behind it. TensorFlow's own Keras layers do the same on GPUs.

The gradients of scale and offset are sums over rows, by `BiasAddGrad`, which adds up in float32 on
a GPU.
"""

from __future__ import annotations

import numpy as np

from graph_passes.ir.graph_view import elements
from graph_passes.rewriter.algebra import symbol
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.rewriter.matcher import NoMatchError
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.normalization.forward import Norm, misplaced
from graph_passes.units.normalization.fused_batch_norm import FORWARD, has_fused_kernels
from graph_passes.units.normalization.images import Images
from graph_passes.units.normalization.norms import CENTRED, FoundNorm
from graph_passes.units.unit_pass import UnitSearch

RULE = "fused-layer-norm"


def fuse_layer_norms(search: UnitSearch) -> None:
    """Replaces layer normalizations over the last axes, with their gradients, by fused ops."""
    config = search.config
    # A compiler that fuses element-wise ops has no use for fused kernels.
    if config.device == "GPU" and not config.fused and has_fused_kernels(search.support):
        # No fused op leaves the mean in.
        search.norms[:] = [
            n for n in search.norms if n.rule != CENTRED or not _fuse(search.edits, n)
        ]


def _fuse(edits: GraphEdits, found: FoundNorm) -> bool:
    output = found.forward.output
    return edits.propose(RULE, output, _write, found, stem=f"{edits.view.names[output]}/{FORWARD}")


def _write(new: Replacement, found: FoundNorm) -> None:
    norm, gradient, op = found.forward, found.gradient, new.op
    rows, size = _rows_and_size(norm)
    if (stray := misplaced(new.matcher, norm)) is not None:
        raise NoMatchError(f"{stray!r} varies along an axis of the statistics")
    images = Images((rows, size), axis=0)
    common = images.attributes(found, "GPU")
    x = images.enter(new, "x", norm.x)
    ones, zeros = _filled(new, "ones", x, 1.0, rows), _filled(new, "zeros", x, 0.0, rows)
    empty = new.constant(np.zeros(0, np.float32), name="empty", beside=x)
    made, _, _, *saved = op.FusedBatchNormV3(x, ones, zeros, empty, empty, name="", **common)
    normalized = output = images.leave(new, "normalized", made, norm.x)
    if norm.gamma is not None:
        output = op.Mul(output, norm.gamma, name="scaled", shape=norm.shape)
    if norm.beta is not None:
        output = op.AddV2(output, norm.beta, name="shifted", shape=norm.shape)
    new.replace(norm.output, output)
    if gradient is not None:
        dy = gradient.dy
        if gradient.dx is not None:
            scaled = dy
            if norm.gamma is not None:
                scaled = op.Mul(dy, norm.gamma, name="dy_scaled", shape=norm.shape)
            inputs = (images.enter(new, "dy", scaled), x, ones, *saved)
            made = op.FusedBatchNormGradV3(*inputs, name="Grad", **common)[0]
            gradient.redirect_dx(new, images.leave(new, "dx", made, norm.x))
        d_gamma, d_beta = _parameter_sums(norm)
        for number in d_gamma:
            weighted = op.Mul(dy, normalized, name="weighted", shape=norm.shape)
            _write_sum(new, norm, number, weighted)
        for number in d_beta:
            _write_sum(new, norm, number, dy)
    new.take_shapes_of(norm.x, sorted(found.inside - {norm.output}))


def _rows_and_size(norm: Norm) -> tuple[int | None, int]:
    """How many statistics there are, and over how many elements, side by side, each is taken."""
    if norm.shape is None:
        raise NoMatchError(f"the shape of {norm.x!r} is not known")
    first = len(norm.shape) - len(norm.axes)
    if norm.axes != tuple(range(first, len(norm.shape))) or not first:
        raise NoMatchError("the statistics are not taken over the last axes")
    size = elements(norm.shape[first:])
    if size is None:
        raise NoMatchError("the size of a statistic's axes is not known")
    return elements(norm.shape[:first]), size


def _parameter_sums(norm: Norm) -> tuple[list[int], list[int]]:
    """The sums over all axes before those of the statistics: gradients of gamma, and of beta."""
    leading = norm.algebra.axes.counted(range(len(norm.shape or ()) - len(norm.axes)))
    d, r, x, m = (symbol(name) for name in "drxm")
    sums = norm.algebra.outer_sums.items()
    gamma = [n for n, (value, axes) in sums if axes == leading and value == d * r * (x - m)]
    beta = [n for n, (value, axes) in sums if axes == leading and value == d]
    return sorted(gamma), sorted(beta)


def _write_sum(new: Replacement, norm: Norm, number: int, tensor: str) -> None:
    """Replaces a sum over all rows."""
    if new.matcher.output(number) in new.accepted.redirect:
        return  # two units share dy, and with it its sum
    rows, size = _rows_and_size(norm)
    stem, new.stem = new.stem, f"{new.view.names[number]}/BiasAddGrad"
    if len(norm.axes) > 1:
        tensor = new.reshape(tensor, (rows, size), name="rows")
        # Else its reader would not follow what is low.
        new.node_lists[f"{new.stem}/rows"] = "infer"
    made = new.op.BiasAddGrad(tensor, name="", shape=(size,))
    shape = new.matcher.shape(number)
    if shape is None:
        raise NoMatchError(f"the shape of {new.view.names[number]!r} is not known")
    new.replace(number, new.reshape(made, tuple(shape), name="shaped"))
    new.stem = stem


def _filled(new: Replacement, name: str, images: str, value: float, rows: int | None) -> str:
    """A tensor [rows] of one value."""
    if rows is not None:
        return new.constant(value, name=name, beside=images, shape=(rows,))
    length = new.length(images, 1, name=f"{name}/rows")
    one = new.constant(value, name=f"{name}/value", beside=images)
    return new.op.Fill(length, one, name=name, shape=(None,))
