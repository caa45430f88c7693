"""Batch normalization with stored statistics, as `tf.nn.batch_normalization` writes it.

    scale = Rsqrt(variance + epsilon) * gamma        y = x * scale + (beta - mean * scale)

becomes one FusedBatchNormV3, or goes into the convolution before it (`folded_batch_norm`) where
that is faster: in bfloat16 on a CPU. gamma or beta may be missing. Of a layer that is frozen while
others are trained the forward half alone is replaced; the gradient reads what it read before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import numpy as np

from graph_passes.patterns.edits import GraphEdits, NearMiss
from graph_passes.patterns.folded_batch_norm import (
    Convolution,
    find_convolution,
    fold_batch_norm,
)
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.patterns.search import ADDS, PARAMETERS
from graph_passes.view import FLOAT, Shape

OP = "FusedBatchNormV3"
_STORED = (*PARAMETERS, "Const", "Placeholder")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredBatchNorm:
    """One batch normalization with stored statistics.

    Attributes:
        x: tensor, the input [batch, height, width, channels].
        mean: tensor [channels].
        variance: tensor [channels].
        gamma: tensor [channels], None where there is no scale.
        beta: tensor [channels], None where there is no offset.
        epsilon: what is added to the variance.
        output: node that makes y.
        scale: tensor of Rsqrt(variance + epsilon) * gamma.
        offset: tensor of beta - mean * scale.
    """

    x: str
    mean: str
    variance: str
    gamma: str | None = None
    beta: str | None = None
    epsilon: float
    output: int
    scale: str
    offset: str


def fuse_stored_batch_norms(
    edits: GraphEdits, preserve: Collection[str], *, least_epsilon: float, fold: bool
) -> None:
    """Replaces each recognized batch normalization with stored statistics by one op.

    Args:
        edits: receives the changes, the units and the near misses.
        least_epsilon: the smallest that the kernels of the device take.
        fold: whether one behind a convolution may be folded into that.
        preserve: names of nodes that must stay.
    """
    matcher = edits.matcher
    for number in edits.view.of_op("Rsqrt"):
        name = matcher.node(number).name
        try:
            unit = _find(matcher, number)
            if unit is not None:
                convolution = find_convolution(matcher, unit.x, preserve) if fold else None
                _replace(edits, unit, preserve, convolution, least_epsilon)
        except NoMatchError as miss:
            edits.misses.append(NearMiss(name, str(miss)))


def _find(m: Matcher, rsqrt: int) -> StoredBatchNorm | None:
    """The unit that an Rsqrt belongs to; None where it takes no root of a stored variance."""
    add = m.maker(m.tensor(rsqrt, 0))
    if m.op(add) not in ADDS or len(m.inputs(add)) != 2:
        return None
    root, epsilon = sorted(m.inputs(add), key=lambda t: m.op(m.maker(t)) == "Const")
    variance = _stored(m, root)
    if variance is None or m.op(m.maker(epsilon)) != "Const":
        return None
    for scale, gamma in _scales(m, rsqrt):
        for output, offset, centre, beta in _outputs(m, scale):
            product = m.maker(m.other_input(output, m.output(offset)))
            x = m.other_input(product, m.output(scale))
            mean = m.tensor(m.maker(centre), 0) if beta is None else centre
            parts = {"mean": mean, "gamma": gamma, "beta": beta}
            named = {name: tensor for name, tensor in parts.items() if tensor is not None}
            stored = {name: found for name, t in named.items() if (found := _stored(m, t))}
            if len(stored) < len(named):
                continue
            value = m.constant(epsilon)
            if value.size != 1:
                raise NoMatchError("epsilon is not one number")
            return StoredBatchNorm(
                x=x,
                variance=variance,
                epsilon=float(value.flat[0]),
                output=output,
                scale=m.output(scale),
                offset=m.output(offset),
                **stored,
            )
    return None


def _stored(m: Matcher, tensor: str) -> str | None:
    """The tensor [channels] of a variable or constant, None for what is none.

    Where the axis is given as a number, Keras reshapes it to [1, 1, 1, channels].
    """
    number = m.maker(tensor)
    if m.op(number) == "Reshape" and m.op(m.maker(m.tensor(number, 1))) == "Const":
        shape = m.constant(m.tensor(number, 1)).ravel().tolist()
        if shape[:-1] == [1] * (len(shape) - 1):
            tensor = m.tensor(number, 0)
            number = m.maker(tensor)
    return tensor if m.op(number) in _STORED else None


def _scales(m: Matcher, rsqrt: int) -> Iterator[tuple[int, str | None]]:
    """What may be the scale of x: the Rsqrt times gamma, or the Rsqrt itself."""
    own = m.output(rsqrt)
    for reader in m.readers(rsqrt):
        if m.op(reader) == "Mul" and m.inputs(reader).count(own) == 1:
            yield reader, m.other_input(reader, own)
    yield rsqrt, None


def _outputs(m: Matcher, scale: int) -> Iterator[tuple[int, int, str, str | None]]:
    """The sums that may be y: (node, that of the offset, what scale multiplies in it, beta)."""
    own = m.output(scale)
    products = [n for n in m.readers(scale) if m.op(n) == "Mul" and m.inputs(n).count(own) == 1]
    for shift in products:
        centre = m.other_input(shift, own)
        offsets: list[tuple[int, str | None]] = [
            (n, m.tensor(n, 0))
            for n in m.readers(shift)
            if m.op(n) == "Sub" and m.tensor(n, 1) == m.output(shift)
        ]
        if m.op(m.maker(centre)) == "Neg":
            offsets.append((shift, None))
        for offset, beta in offsets:
            for output in m.readers(offset):
                if m.op(output) in ADDS and m.inputs(output).count(m.output(offset)) == 1:
                    other = m.maker(m.other_input(output, m.output(offset)))
                    if other in products and other != shift:
                        yield output, offset, centre, beta


def _replace(
    edits: GraphEdits,
    unit: StoredBatchNorm,
    preserve: Collection[str],
    convolution: Convolution | None,
    least_epsilon: float,
) -> None:
    view = edits.view
    output = view.nodes[unit.output]
    shape, channels = view.shape(unit.x), view.shape(unit.variance)
    if shape is None or len(shape) != 4 or channels is None or len(channels) != 1:
        raise NoMatchError("nothing shows that x has rank 4 and the statistics rank 1")
    width = channels[0]
    if width is None or shape[3] not in (None, width):
        raise NoMatchError("the number of channels is not known")
    if output.name in preserve:
        raise NoMatchError(f"{output.name!r} is to be preserved")
    shape = (*shape[:3], width)
    if convolution is None or not fold_batch_norm(
        edits, convolution, unit.output, unit.scale, unit.offset, shape
    ):
        if unit.epsilon < least_epsilon:
            raise NoMatchError(f"epsilon {unit.epsilon:g} is below {least_epsilon:g}")
        _fuse(edits, unit, shape, width)
    edits.units.append(f"batch-norm: {output.name}")


def _fuse(edits: GraphEdits, unit: StoredBatchNorm, shape: Shape, width: int) -> None:
    output = edits.view.nodes[unit.output]
    stem = f"{output.name}/{OP}"

    def filled(name: str, value: float) -> str:
        array = np.full(width, value, np.float32)
        return edits.add_constant(f"{stem}/{name}", array, output.device, unit.x)

    inputs = (
        unit.x,
        unit.gamma or filled("ones", 1.0),
        unit.beta or filled("zeros", 0.0),
        unit.mean,
        unit.variance,
    )
    fused = edits.add(OP, stem, inputs, output.device, {"T": FLOAT, "U": FLOAT}, [shape])
    fused.attr["epsilon"].f = unit.epsilon
    fused.attr["data_format"].s = b"NHWC"
    fused.attr["is_training"].b = False
    edits.redirect[edits.output(output.name, output.op)] = edits.output(stem, OP)
