"""Batch normalization with stored statistics, as `tf.nn.batch_normalization` writes it.

    scale = Rsqrt(variance + epsilon) * gamma        y = x * scale + (beta - mean * scale)

of any rank and layout becomes one FusedBatchNormV3, or goes into the convolution before it
(`folded_batch_norm`) where that is faster: in bfloat16 on a CPU. gamma or beta may be missing. So
does the gradient with channels last, whose sums over x * dy cancel; else it is a unit in float32.
That of a layer which is frozen while others are trained has no such sums, and stays as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import numpy as np

from graph_passes.patterns.batch_norm_gradient import Gradient, GradientSearch
from graph_passes.patterns.edits import GraphEdits, NearMiss
from graph_passes.patterns.float32_units import Float32Unit
from graph_passes.patterns.folded_batch_norm import (
    Convolution,
    find_convolution,
    fold_batch_norm,
)
from graph_passes.patterns.fused_batch_norm import BACKWARD, RULE, may_round, redirect_gradients
from graph_passes.patterns.fused_batch_norm import FORWARD as OP
from graph_passes.patterns.images import Images
from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.patterns.search import ADDS, PARAMETERS, Search
from graph_passes.view import FLOAT, GraphView

_STORED = (*PARAMETERS, "Const", "Placeholder")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredBatchNorm:
    """One batch normalization with stored statistics.

    Attributes:
        x: tensor, the input.
        mean: tensor [channels].
        variance: tensor [channels].
        gamma: tensor [channels], None where there is no scale.
        beta: tensor [channels], None where there is no offset.
        epsilon: what is added to the variance.
        output: node that makes y.
        rsqrt: node that makes the inverse deviation.
        scale: tensor of Rsqrt(variance + epsilon) * gamma.
        offset: tensor of beta - mean * scale.
        behind: how many axes of x are behind that of the channels.
    """

    x: str
    mean: str
    variance: str
    gamma: str | None = None
    beta: str | None = None
    epsilon: float
    output: int
    rsqrt: int
    scale: str
    offset: str
    behind: int


def fuse_stored_batch_norms(
    edits: GraphEdits,
    preserve: Collection[str],
    *,
    least_epsilon: float,
    fold: bool,
    products: Collection[str],
) -> list[Float32Unit]:
    """Replaces each recognized batch normalization with stored statistics by one op.

    Args:
        edits: receives the changes, the units and the near misses.
        least_epsilon: the smallest that the kernels of the device take.
        fold: whether one behind a convolution may be folded into that.
        preserve: names of nodes that must stay.
        products: the ops of the allow list.

    Returns:
        The gradients that no fused op can stand for.
    """
    matcher = edits.matcher
    left: list[Float32Unit] = []
    for number in edits.view.of_op("Rsqrt"):
        name = matcher.node(number).name
        try:
            unit = _find(matcher, number)
            if unit is not None:
                convolution = find_convolution(matcher, unit.x, preserve) if fold else None
                _replace(edits, unit, preserve, convolution, least_epsilon, products, left)
        except NoMatchError as miss:
            edits.misses.append(NearMiss(name, str(miss)))
    return left


def _find(m: Matcher, rsqrt: int) -> StoredBatchNorm | None:
    """The unit that an Rsqrt belongs to; None where it takes no root of a stored variance."""
    add = m.source(rsqrt, 0)
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
                rsqrt=rsqrt,
                scale=m.output(scale),
                offset=m.output(offset),
                behind=_axes_behind(m, root),
                **stored,
            )
    return None


def _stored(m: Matcher, tensor: str) -> str | None:
    """The tensor [channels] of a variable or constant, None for what is none.

    Where the axis is given as a number, Keras reshapes it to [1, 1, 1, channels], or as it may be.
    """
    number = m.maker(tensor)
    if m.op(number) == "Reshape" and m.op(m.source(number, 1)) == "Const":
        shape = m.constant(m.tensor(number, 1)).ravel().tolist()
        if sum(size != 1 for size in shape) <= 1:
            tensor = m.tensor(number, 0)
            number = m.maker(tensor)
    return tensor if m.op(number) in _STORED else None


def _axes_behind(m: Matcher, tensor: str) -> int:
    """How many axes the channels of a stored tensor have behind them."""
    number = m.maker(tensor)
    if m.op(number) != "Reshape":
        return 0
    shape = m.constant(m.tensor(number, 1)).ravel().tolist()
    return next((len(shape) - 1 - axis for axis, size in enumerate(shape) if size != 1), 0)


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
    products: Collection[str],
    left: list[Float32Unit],
) -> None:
    view = edits.view
    output = view.nodes[unit.output]
    images = _images(view, unit)
    if output.name in preserve:
        raise NoMatchError(f"{output.name!r} is to be preserved")
    if unit.behind or len(images.shape) != 4:
        convolution = None  # its channels are others
    if convolution is None or not fold_batch_norm(
        edits, convolution, unit.output, unit.scale, unit.offset, images.shape
    ):
        if unit.epsilon < least_epsilon:
            raise NoMatchError(f"epsilon {unit.epsilon:g} is below {least_epsilon:g}")
        images.require_known(filled=True)
        found = _find_gradient(edits.matcher, unit, preserve)
        may_fuse = images.data_format == "NHWC"  # the op takes no other with stored statistics
        if found is None or (may_fuse and may_round(edits.matcher, unit.x, found[0], products)):
            _fuse(edits, unit, images, None if found is None else found[0])
        else:
            _fuse(edits, unit, images, None)
            left.append(Float32Unit(f"{RULE} in float32", unit.output, found[1]))
    edits.units.append(f"{RULE}: {output.name}")


def _images(view: GraphView, unit: StoredBatchNorm) -> Images:
    shape, channels = view.shape(unit.x), view.shape(unit.variance)
    if shape is None or channels is None or len(channels) != 1:
        raise NoMatchError("nothing shows the rank of x and that the statistics have rank 1")
    axis, width = len(shape) - 1 - unit.behind, channels[0]
    if width is None:
        raise NoMatchError("the number of channels is not known")
    if axis < 1 or shape[axis] not in (None, width):
        raise NoMatchError("the statistics are not those of one axis of the input")
    return Images((*shape[:axis], width, *shape[axis + 1 :]), axis)


def _find_gradient(
    m: Matcher, unit: StoredBatchNorm, preserve: Collection[str]
) -> tuple[Gradient, frozenset[int]] | None:
    """The gradient with its nodes, if that of the scale is in it."""
    scale, offset = m.maker(unit.scale), m.maker(unit.offset)
    product = m.maker(m.other_input(unit.output, unit.offset))
    shift = offset if unit.beta is None else m.source(offset, 1)
    forward = {scale, offset, product, shift, *(m.makers(scale) if unit.gamma else ())}
    search = Search(m)
    search.inside |= forward
    backward = GradientSearch(
        search,
        unit.x,
        unit.gamma,
        mean=None,
        rsqrt=unit.rsqrt,
        scale=scale,
        centre=m.other_input(shift, unit.scale),
        has_offset=unit.beta is not None,
    )
    try:
        gradient = backward.find(product)
        search.inside -= forward
        search.require_closed(preserve)
    except NoMatchError:
        return None
    nodes = search.inside | search.open | search.ends | search.replaced
    return None if gradient is None else (gradient, frozenset(nodes))


def _fuse(
    edits: GraphEdits, unit: StoredBatchNorm, images: Images, gradient: Gradient | None
) -> None:
    output = edits.view.nodes[unit.output]
    stem, device = f"{output.name}/{OP}", output.device

    def filled(name: str, value: float) -> str:
        array = np.full(images.channels or 0, value, np.float32)
        return edits.add_constant(f"{stem}/{name}", array, device, unit.x)

    def add(op: str, name: str, inputs: tuple[str, ...]) -> None:
        node = edits.add(op, name, inputs, device, {"T": FLOAT, "U": FLOAT}, [images.sizes])
        node.attr["epsilon"].f = unit.epsilon
        node.attr["data_format"].s = images.data_format.encode()
        node.attr["is_training"].b = False

    x, gamma = images.enter(edits, f"{stem}/x", unit.x, device), unit.gamma or filled("ones", 1.0)
    add(OP, stem, (x, gamma, unit.beta or filled("zeros", 0.0), unit.mean, unit.variance))
    y = images.leave(edits, f"{stem}/y", edits.output(stem, OP), unit.x, device)
    edits.redirect[edits.output(output.name, output.op)] = y
    if gradient is not None:
        dy = images.enter(edits, f"{stem}/dy", gradient.dy, device)
        name = f"{stem}Grad"
        add(BACKWARD, name, (dy, x, gamma, unit.mean, unit.variance, unit.mean))
        redirect_gradients(edits, gradient, images, name, unit.x)
