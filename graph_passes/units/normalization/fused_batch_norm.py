"""Puts TensorFlow's fused kernels in the place of batch normalizations written in primitives.

`FusedBatchNormV3` takes and gives the target dtype while it keeps scale, offset and statistics in
float32 inside, so no float32 island is left between two convolutions. A missing scale is a constant
of ones, a missing offset one of zeros; nothing reads their gradients. What the fused op cannot
stand for, by its epsilon or by what is read inside, stays in primitives as a unit in float32; and
so does the normalization of data, alone or beside what a layer makes, since rounding would come
before the mean is subtracted. On a CPU one of few elements stays in primitives too, since the fused
kernel takes longer; with stored statistics it needs no unit.

With stored statistics, the forward half may go into the convolution before it (`folded_batch_norm`)
where that is faster: in bfloat16 on a CPU. The gradient of a layer that is frozen while others are
trained has no sums over x * dy, and stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.ir.adjacency import walk
from graph_passes.ir.graph_view import ARGUMENT, FLOAT, elements
from graph_passes.ops.kernels import KernelSupport
from graph_passes.ops.op_types import Slot
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.rewriter.emitter import prototype_of
from graph_passes.rewriter.matcher import Matcher, NoMatchError
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.normalization.folded_batch_norm import fold_batch_norm
from graph_passes.units.normalization.forward import Norm, misaligned
from graph_passes.units.normalization.images import Images
from graph_passes.units.normalization.norms import OF_BATCH as RULE
from graph_passes.units.normalization.norms import FoundNorm
from graph_passes.units.unit_pass import UnitSearch

FORWARD = "FusedBatchNormV3"
BACKWARD = "FusedBatchNormGradV3"
_RESHAPES = ("Reshape", "Squeeze", "ExpandDims")
_FEW_ELEMENTS = 1 << 16
"""oneDNN's kernel on a CPU takes 0.1 ms to normalize up to so many elements, and 0.3 beside other
work; primitives in float32 take half of it or less. Training steps of MLPs with three of them, to
float32's, fused and not: 256 x 64 1.64 and 1.07, 512 x 128 1.06 and 0.96, 768 x 128 0.70 and 0.95.
"""
_DATA = (ARGUMENT, "Placeholder", "IteratorGetNext")
"""What gives a function the examples of a batch."""


@functools.lru_cache(maxsize=16)
def has_fused_kernels(support: KernelSupport) -> bool:
    """Whether both fused ops have a kernel for the device and dtype."""
    types = [prototype_of(op, (FLOAT,) * 5).node_type for op in (FORWARD, BACKWARD)]
    return all(support.supports(t, t.layout.slots.index(Slot("T"))) for t in types)


def fuse_batch_norms(search: UnitSearch) -> None:
    """Replaces every batch normalization, with its gradient, by the fused ops.

    One that no fused op can stand for, or the gradient of such, becomes a unit in float32.
    """
    edits, m, products = search.edits, search.edits.matcher, search.lists.ops("allow")
    unknown = search.config.unknown_dimension
    has_kernels = has_fused_kernels(search.support)
    has_bound = search.knows_times or not search.config.converts
    keep = functools.partial(search.keep_float32, f"{RULE} in float32", is_exact=True)
    for found in search.norms:
        if found.rule != RULE:
            continue
        norm, gradient = found.forward, found.gradient
        output, is_stored = norm.output, norm.is_stored
        if is_stored and not search.config.converts:
            continue  # in float32 it is as fast in primitives
        stray = misaligned(m, norm)
        holds_data, holds_products = _made_of(edits, norm.x, products)
        size = elements(norm.shape, unknown) if has_bound and norm.shape else None
        is_slow = size is not None and size <= _FEW_ELEMENTS
        folds = is_stored and search.is_bfloat16_cpu and stray is None
        if has_kernels and not (folds and fold_batch_norm(edits, norm, unknown)) and not is_slow:
            # The op makes a gradient with stored statistics only with channels last.
            is_last = norm.shape is not None and len(norm.shape) - 1 not in norm.axes
            fits = is_last and gradient is not None and gradient.is_proved
            if is_stored and gradient and (holds_data or not fits):
                keep(output, gradient.nodes)
                gradient = None
            unit, stem = FoundNorm(norm, gradient), f"{edits.view.names[output]}/{FORWARD}"
            # dy draws x into the target dtype, or the products that it holds do.
            is_exact = holds_data and (holds_products or gradient is not None)
            if edits.propose(RULE, output, _write, unit, search, stray, is_exact, stem=stem):
                continue
        if not is_stored or (holds_data and holds_products):
            keep(output, found.inside)


def _made_of(edits: GraphEdits, x: str, products: frozenset[str]) -> tuple[bool, bool]:
    """Whether x holds data that went through no product, and whether it holds products."""
    m, view = edits.matcher, edits.view

    def before(tensor: str) -> Sequence[str]:
        maker = m.maker(tensor)
        # A function makes something else of data: a layer, a loop over its rows.
        is_made = m.op(maker) in products or view.node_type(maker).runs_functions
        return () if is_made else m.inputs(maker)

    made_of = {tensor: m.op(m.maker(tensor)) for tensor in walk([x], before)}
    given = [edits.fact(tensor) for tensor, op in made_of.items() if op in _DATA]
    floats = [fact.shape for fact in given if fact.dtype == FLOAT]
    # A vector of known length is a parameter.
    holds_data = any(shape is None or len(shape) > 1 or None in shape for shape in floats)
    return holds_data, not products.isdisjoint(made_of.values())


def _images(m: Matcher, norm: Norm) -> Images:
    """The layout of x."""
    if norm.shape is None:
        raise NoMatchError("nothing shows the rank of the input")
    shape = norm.shape
    kept = [axis for axis in range(len(shape)) if axis not in norm.axes]
    if len(kept) != 1:
        raise NoMatchError(f"the statistics keep {len(kept)} axes, not 1")
    (axis,) = kept
    width, stored = shape[axis], norm.statistics.stored_variance
    if width is None and stored is not None:
        width = elements(m.shape_of(stored) or (None,))
    if width is None:
        raise NoMatchError("the number of channels is not known")
    return Images((*shape[:axis], width, *shape[axis + 1 :]), axis)


def _write(
    new: Replacement, found: FoundNorm, search: UnitSearch, stray: str | None, is_exact: bool
) -> None:
    """Adds the fused ops and redirects what they make."""
    m, norm, gradient = new.matcher, found.forward, found.gradient
    images = _images(m, norm)
    if stray is not None:
        raise NoMatchError(f"{stray!r} varies along an axis of the statistics")
    common = images.attributes(found, search.config.device)
    if is_exact:
        raise NoMatchError(
            "the input is data, which must not be rounded before its mean is subtracted"
        )
    redirect = functools.partial(_redirect, new, found.inside)
    gamma = _vector(new, images, norm.x, "gamma", norm.gamma, 1.0)
    beta = _vector(new, images, norm.x, "beta", norm.beta, 0.0)
    x = images.enter(new, "x", norm.x)
    if norm.is_stored:
        mean = _vector(new, images, norm.x, "mean", norm.stored_mean, 0.0)
        variance = _vector(new, images, norm.x, "variance", norm.statistics.stored_variance, 1.0)
        saved: tuple[str, ...] = (mean, variance, mean)
        y = new.op.FusedBatchNormV3(x, gamma, beta, mean, variance, name="", **common)[0]
        # A gradient that stays reads what is made of the statistics, all of it [channels].
        shaped = {i for n in norm.nodes for i in m.makers(n) if m.op(i) in _RESHAPES}
        new.open |= {n for n in norm.nodes | shaped if not norm.depends_on_x(n)}
    else:
        empty = new.constant(np.zeros(0, np.float32), name="empty", beside=x)
        made = new.op.FusedBatchNormV3(x, gamma, beta, empty, empty, name="", **common)
        y, saved = made[0], made[3:]
        redirect(_shaped(m, norm.statistics.mean), lambda: made[1])
        redirect(
            _shaped(m, norm.statistics.variance),
            lambda: _population_variance(new, norm.x, made[2], gamma),
        )
    new.replace(norm.output, images.leave(new, "y", y, norm.x))
    if gradient is not None:
        dy = images.enter(new, "dy", gradient.dy)
        dx, d_gamma, d_beta, *_ = new.op.FusedBatchNormGradV3(
            dy, x, gamma, *saved, name="Grad", **common
        )
        redirect(gradient.d_gamma, lambda: d_gamma)
        redirect(gradient.d_beta, lambda: d_beta)
        if gradient.dx is not None:
            gradient.redirect_dx(new, images.leave(new, "dx", dx, norm.x))
    new.take_shapes_of(norm.x, sorted(found.inside - {norm.output}))


def _redirect(
    new: Replacement, inside: frozenset[int], numbers: Iterable[int], vector: Callable[[], str]
) -> None:
    """Lets what reads some nodes of equal elements read a tensor [channels].

    One that is reshaped in any case gives way to it as it is; else what is read outside gives
    way to it in the same shape.
    """
    m, numbers = new.matcher, set(numbers)
    new.open |= numbers
    ends = [n for n in numbers if m.op(n) not in _RESHAPES]
    if not ends or any(m.op(reader) != "Reshape" for n in ends for reader in m.readers(n)):
        known = inside | numbers
        ends = [n for n in numbers if not known.issuperset(m.readers(n))]
    for number in sorted(ends, key=new.view.names.__getitem__):
        if m.output(number) in new.accepted.redirect:
            continue  # two units share dy, and with it its sum
        shape = m.shape(number)
        if shape is None:
            raise NoMatchError(f"the shape of {m.view.names[number]!r} is not known")
        made = vector()
        own = new.fact(made).shape
        differs = own is not None and len(own) != len(shape)
        if differs and any(m.op(reader) != "Reshape" for reader in m.readers(number)):
            made = new.reshape(made, shape, name="shaped")
        new.replace(number, made)


def _population_variance(new: Replacement, x: str, variance: str, gamma: str) -> str:
    """Tensor [channels], the variance over n values; the fused op's is over n - 1.

    n is the number of elements of x a channel, found when the graph runs.
    """
    counts = {}
    for name, tensor in (("elements", x), ("channels", gamma)):
        size = new.op.Size(tensor, name=name, out_type=types_pb2.DT_INT64)
        counts[name] = new.op.Cast(size, name=f"{name}_float", DstT=FLOAT)
    inverse = new.op.RealDiv(counts["channels"], counts["elements"], name="inverse_count")
    one = new.constant(np.array(1, np.float32), name="one", beside=variance)
    return new.op.Mul(variance, new.op.Sub(one, inverse, name="factor"), name="variance")


def _vector(
    new: Replacement, images: Images, x: str, name: str, tensor: str | None, value: float
) -> str:
    """A stored tensor as [channels], or a constant where there is none."""
    channels = images.channels
    if tensor is None:
        filled = np.full(channels or 0, value, np.float32)
        return new.constant(filled, name=f"{name}_{value:g}", beside=x)
    tensor = new.matcher.through(tensor, *_RESHAPES)
    shape = new.matcher.stored_shape(tensor)
    if shape is None or elements(shape) != channels:
        raise NoMatchError(f"{tensor!r} of shape {shape} has not one element for each channel")
    if len(shape) == 1:
        return tensor
    return new.reshape(tensor, (channels,), name=name)


def _shaped(m: Matcher, number: int | None) -> set[int]:
    """A node, and the nodes that give its elements in another shape."""
    starts = () if number is None else (number,)
    return set(walk(starts, lambda n: [r for r in m.readers(n) if m.op(r) in _RESHAPES]))
