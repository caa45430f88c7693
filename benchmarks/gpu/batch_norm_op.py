"""The batch normalization of HLO, which is one op there and which jax.numpy does not have."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

_training = core.Primitive("gpu_batch_norm_training")
_gradient = core.Primitive("gpu_batch_norm_gradient")
_training.multiple_results = _gradient.multiple_results = True


def _shapes(x: Any, scale: Any, *_: Any, **__: Any) -> list[Any]:
    return [x, scale, scale]


def _attributes(feature_index: int, epsilon: float) -> dict[str, Any]:
    return {
        "epsilon": ir.FloatAttr.get(ir.F32Type.get(), epsilon),
        "feature_index": ir.IntegerAttr.get(ir.IntegerType.get_signless(64), feature_index),
    }


def _lower_training(_: Any, x: Any, scale: Any, offset: Any, **fixed: Any) -> Any:
    return stablehlo.BatchNormTrainingOp(x, scale, offset, **_attributes(**fixed)).results


def _lower_gradient(
    _: Any, x: Any, scale: Any, mean: Any, variance: Any, y: Any, **fixed: Any
) -> Any:
    made = stablehlo.BatchNormGradOp(x, scale, mean, variance, y, **_attributes(**fixed))
    return made.results


for _primitive, _lower in ((_training, _lower_training), (_gradient, _lower_gradient)):
    _primitive.def_abstract_eval(_shapes)
    mlir.register_lowering(_primitive, _lower)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def batch_norm(
    x: jax.Array, scale: jax.Array, offset: jax.Array, feature_index: int, epsilon: float
) -> jax.Array:
    """Normalizes by the statistics of the batch, with the op's own gradient.

    TensorFlow's FusedBatchNormV3 becomes this under XLA, the statistics in float32.

    Args:
        x: of any floating-point dtype, which is that of the result.
        scale: float32, as long as the axis of the channels.
        offset: the same.
        feature_index: that axis.
        epsilon: added to the variance.
    """
    return _forward(x, scale, offset, feature_index, epsilon)[0]


def _forward(x: Any, scale: Any, offset: Any, feature_index: int, epsilon: float) -> Any:
    fixed = {"feature_index": feature_index, "epsilon": epsilon}
    y, mean, variance = _training.bind(x.astype("float32"), scale, offset, **fixed)
    return y.astype(x.dtype), (x, scale, mean, variance)


def _backward(feature_index: int, epsilon: float, saved: Any, gradient: Any) -> Any:
    x, scale, mean, variance = saved
    fixed = {"feature_index": feature_index, "epsilon": epsilon}
    wide = (array.astype("float32") for array in (x, gradient))
    first, second = wide
    to_x, to_scale, to_offset = _gradient.bind(first, scale, mean, variance, second, **fixed)
    return to_x.astype(x.dtype), to_scale, to_offset


batch_norm.defvjp(_forward, _backward)
