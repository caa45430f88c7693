"""Arithmetic on losses and gradients: scale, unscale, check for non-finite values, underflow."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

_LOGGER = logging.getLogger("tf_amp.loss_scale")

# The kinds a gradient can be of.
FINITE, INFINITE, NOT_A_NUMBER = 0, 1, 2
KIND_NAMES = {FINITE: "finite", INFINITE: "inf", NOT_A_NUMBER: "NaN"}
_KINDS = len(KIND_NAMES)


def select(condition: tf.Tensor, if_true: Any, if_false: Any) -> tf.Tensor:
    """`tf.where` that gives a Python number the dtype of the tensor beside it.

    Args:
        condition: Scalar bool tensor.
        if_true: Scalar tensor or Python number.
        if_false: Scalar tensor or Python number.

    Returns:
        A scalar tensor.
    """
    dtype = next((x.dtype for x in (if_true, if_false) if tf.is_tensor(x)), None)
    return tf.where(
        condition, tf.convert_to_tensor(if_true, dtype), tf.convert_to_tensor(if_false, dtype)
    )


def scale(loss: Any, factor: tf.Tensor) -> Any:
    """Multiplies a loss, or each loss of a nested structure, by the loss scale.

    Args:
        loss: Floating-point tensors of any shape, or a callable returning such.
        factor: Scalar float32 tensor.

    Returns:
        The same structure, or a callable. A float16 or bfloat16 loss comes back as float32: a
        scale of 2^15 alone takes half of what float16 can hold.
    """
    if callable(loss):
        return lambda: scale(loss(), factor)
    return tf.nest.map_structure(lambda one: _in_float32(one) * _cast(factor, one), loss)


def unscale(gradients: Sequence[Any], factor: tf.Tensor) -> list[Any]:
    """Divides gradients by the loss scale.

    Division and not multiplication by the reciprocal: the reciprocal of a large scale is a
    denormal number, which many processors flush to zero.

    Args:
        gradients: Tensors or `tf.IndexedSlices` of any shape and floating-point dtype, or None.
        factor: Scalar float32 tensor.

    Returns:
        The gradients in the same order and dtype. `tf.IndexedSlices` stay sparse, None stays None.
    """
    return [_unscale_one(gradient, factor) for gradient in gradients]


def all_finite(gradients: Sequence[Any]) -> tf.Tensor:
    """Whether every element of every gradient is finite.

    Args:
        gradients: Tensors, `tf.IndexedSlices`, or None, which counts as finite.

    Returns:
        A scalar bool tensor.
    """
    flags = [tf.reduce_all(tf.math.is_finite(_summed(g))) for g in gradients if g is not None]
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)


def culprit_code(gradients: Sequence[Any]) -> tf.Tensor:
    """Which gradient is the first that is not finite, and whether it holds a NaN.

    Args:
        gradients: Tensors, `tf.IndexedSlices`, or None.

    Returns:
        A scalar int64 tensor for `decode_culprit`; below zero when all gradients are finite.
    """
    kinds = [tf.zeros([], tf.int64) if g is None else _kind(_summed(g)) for g in gradients]
    if not kinds:
        return tf.constant(-1, tf.int64)
    stacked = tf.stack(kinds)
    # argmax of a 0/1 vector is the index of the first 1.
    first = tf.argmax(tf.cast(stacked > FINITE, tf.int32), output_type=tf.int64)
    return select(tf.reduce_max(stacked) > FINITE, first * _KINDS + tf.gather(stacked, first), -1)


def decode_culprit(code: int, names: Sequence[str]) -> tuple[str, str] | None:
    """The variable name and kind behind a `culprit_code`.

    Args:
        code: The value of `culprit_code`.
        names: The names of the variables, in the order of the gradients.

    Returns:
        For example `("dense/kernel", "inf")`, or None when the code names no gradient.
    """
    if code < 0 or code // _KINDS >= len(names):
        return None
    return names[code // _KINDS], KIND_NAMES[code % _KINDS]


def variable_name(variable: Any) -> str:
    """The name a user knows a variable by, for example `dense/kernel`; a string is one already."""
    if isinstance(variable, str):
        return variable
    path = getattr(variable, "path", None)
    # A tensor has none where it was made eagerly; the optimizer says what is wrong with it.
    return str(path if path else getattr(variable, "name", "a tensor")).removesuffix(":0")


def in_xla_context() -> bool:
    """Whether the graph being built will be compiled by XLA as a whole (`jit_compile=True`)."""
    from tensorflow.python.ops import control_flow_util

    if tf.executing_eagerly():
        return False
    graph = tf.compat.v1.get_default_graph()
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def _in_float32(tensor: Any) -> tf.Tensor:
    tensor = tf.convert_to_tensor(tensor)
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor


def _cast(factor: tf.Tensor, like: Any) -> tf.Tensor:
    return tf.cast(factor, _in_float32(like).dtype)


def _unscale_one(gradient: Any, factor: tf.Tensor) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            _unscale_one(gradient.values, factor), gradient.indices, gradient.dense_shape
        )
    gradient = tf.convert_to_tensor(gradient)
    if gradient.dtype == tf.float16:
        _warn_about_float16()
    # The rewrite keeps this division in float32, whoever reads the result: in float16 what the
    # scale has saved would be lost.
    divide = tf.divide if gradient.dtype.is_complex else tf.math.divide_no_nan
    return tf.cast(divide(_in_float32(gradient), _cast(factor, gradient)), gradient.dtype)


@functools.cache
def _warn_about_float16() -> None:
    _LOGGER.warning(
        "A gradient is float16, so dividing it by the loss scale can flush it to zero again. "
        "Keep the variables in float32; tf_amp casts them where a float16 value is wanted."
    )


def _summed(gradient: Any) -> tf.Tensor:
    """The values to check: of complex ones both parts, of float16 slices sums over equal indices.

    Two finite float16 rows of one index can add up to inf when the optimizer sums them.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        return _real(gradient)
    values = gradient.values
    if values.dtype != tf.float16 or in_xla_context():
        return _real(values)
    unique, positions = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(values, positions, tf.size(unique))


def _real(values: Any) -> tf.Tensor:
    values = tf.convert_to_tensor(values)
    if not values.dtype.is_complex:
        return values
    return tf.stack([tf.math.real(values), tf.math.imag(values)])


def _kind(values: tf.Tensor) -> tf.Tensor:
    has_nan = tf.cast(tf.reduce_any(tf.math.is_nan(values)), tf.int64)
    has_inf = tf.cast(tf.reduce_any(tf.math.is_inf(values)), tf.int64)
    return tf.maximum(has_nan * NOT_A_NUMBER, has_inf * INFINITE)


# The smallest positive float16 is 2^-24. Rounding to nearest takes anything up to half of it,
# the tie included, to zero.
LARGEST_FLUSHED = 2.0**-25


@dataclasses.dataclass(frozen=True)
class VariableUnderflow:
    """The underflow of one variable's gradient.

    Attributes:
        name: The variable's name.
        elements: How many elements the gradient has: of a sparse one those that are stored, of a
            complex one both parts.
        zero: How many are zero in float32 already, for example behind a ReLU.
        flushed: How many are not zero, but would be in float16 at the scale.
        scale_needed: The smallest power of two that would keep every element, or None if there
            is none to keep.
    """

    name: str
    elements: int
    zero: int
    flushed: int
    scale_needed: float | None

    @property
    def share(self) -> float:
        """The share of the elements that would be flushed, between 0 and 1."""
        return self.flushed / self.elements if self.elements else 0.0


def measure_underflow(
    grads_and_vars: Iterable[tuple[Any, Any]], scale: Any = 1.0
) -> tuple[VariableUnderflow, ...]:
    """Counts, per variable, the gradient elements that float16 would flush to zero.

    Meant for a step now and then, not for each: it reads the gradients to the host. The gradients
    must be float32 gradients of float32 computation, since an element that was flushed already
    looks like any other zero.

    Args:
        grads_and_vars: Pairs of an unscaled float32 gradient (or None, which is left out) and its
            variable, or the name of it.
        scale: The loss scale to judge by; a number or a scalar tensor. Default 1, no scaling.

    Returns:
        One `VariableUnderflow` for each gradient, in the same order.

    Raises:
        RuntimeError: If called while a graph is being built.
    """
    if not tf.executing_eagerly():
        raise RuntimeError(
            "measure_underflow() reads gradients to the host, so it cannot run inside a "
            "tf.function or a v1 graph. Return the gradients from the function and measure them "
            "outside."
        )
    return tuple(
        _measure_one(gradient, variable_name(variable), float(scale))
        for gradient, variable in grads_and_vars
        if gradient is not None
    )


def _measure_one(gradient: Any, name: str, scale: float) -> VariableUnderflow:
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    # In float64 the product is exact, so that the comparison decides as float16 rounding would.
    magnitudes = tf.abs(tf.cast(_real(values), tf.float64))
    nonzero = magnitudes[magnitudes > 0]
    flushed = tf.reduce_sum(tf.cast(nonzero * scale <= LARGEST_FLUSHED, tf.int64))
    elements, kept = int(tf.size(magnitudes)), int(tf.size(nonzero))
    needed = None
    if kept:
        smallest = float(tf.reduce_min(nonzero))
        needed = 1.0
        while smallest * needed <= LARGEST_FLUSHED:
            needed *= 2.0
    return VariableUnderflow(name, elements, elements - kept, int(flushed), needed)
