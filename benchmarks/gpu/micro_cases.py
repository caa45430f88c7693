"""What the rules assume of a GPU, one small program each, in jax.numpy.

A case has several ways to compute the same, or the same in several dtypes. Those with a `key` are
rows of a cost table: the op that TensorFlow has for them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from gpu.batch_norm_op import batch_norm

LOW = ("float16", "bfloat16")
DTYPES = ("float32", *LOW)
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to compute a case.

    Attributes:
        function: of arrays.
        shapes: of its arguments.
        dtypes: of its arguments, one for all or one each.
    """

    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]

    def arguments(self) -> list[tuple[Shape, str]]:
        """Shape and dtype of each argument."""
        each = self.dtypes * len(self.shapes) if len(self.dtypes) == 1 else self.dtypes
        return list(zip(self.shapes, each, strict=True))


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compared in turns.

    Attributes:
        group: what rule or price it is about.
        name: what is computed, with its sizes.
        ways: name -> how.
        key: the row of a cost table that the dtypes of it make, "" for none.
        size: floating-point operations where there is a row, elements elsewhere.
    """

    group: str
    name: str
    ways: Mapping[str, Way]
    key: str = ""
    size: int = 0


def cases(small: bool) -> Iterator[Case]:
    """Every case, in a fixed order; with `small` one size of each, for a look at a CPU."""
    for make in (
        _products,
        _product_sides,
        _convolutions,
        _casts_inside,
        _norms,
        _bias_sums,
        _attention,
        _reductions,
    ):
        yield from make(small)


GROUPS = (
    *("products", "product sides", "convolutions", "casts inside fusions", "norms"),
    *("bias sums", "attention", "reductions"),
)


def _by_dtype(function: Callable[..., Any], *shapes: Shape) -> dict[str, Way]:
    return {dtype: Way(function, shapes, (dtype,)) for dtype in DTYPES}


def _transposed(left: jax.Array, right: jax.Array) -> jax.Array:
    return left @ right.T


def _products(small: bool) -> Iterator[Case]:
    sides = [(64, 256, 256), (256, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048)]
    sides += [(8192, 4096, 4096)]
    for m, k, n in sides[: 2 if small else None]:
        flops, name = 2 * m * k * n, f"{m}x{k}x{n}"
        straight, turned = (
            _by_dtype(jnp.matmul, (m, k), (k, n)),
            _by_dtype(_transposed, (m, k), (n, k)),
        )
        yield Case("products", f"MatMul {name}", straight, "MatMul", flops)
        yield Case("products", f"MatMul transposed {name}", turned, "MatMul/transposed", flops)
    stacks = [(16, 64, 32, 64), (96, 128, 64, 128), (192, 512, 64, 512), (768, 512, 64, 512)]
    for b, m, k, n in stacks[: 2 if small else None]:
        ways = _by_dtype(jnp.matmul, (b, m, k), (b, k, n))
        name = f"BatchMatMul {b}x{m}x{k}x{n}"
        yield Case("products", name, ways, "BatchMatMulV2", 2 * b * m * k * n)
    for b, m, k, n in [(8, 64, 256, 256), (16, 128, 512, 512), (32, 512, 1024, 1024)][
        : 2 if small else None
    ]:
        ways = _by_dtype(functools.partial(jnp.einsum, "bmk,kn->bmn"), (b, m, k), (k, n))
        yield Case(
            "products", f"Einsum bmk,kn->bmn {b}x{m}x{k}x{n}", ways, "Einsum", 2 * b * m * k * n
        )


def _product_sides(small: bool) -> Iterator[Case]:
    side = 256 if small else 4096
    for off in (0, -1, 1, 2, 4, 8)[: 2 if small else None]:
        for name, (m, k, n) in {
            "columns": (side, side, side + off),
            "depth": (side, side + off, side),
        }.items():
            ways = _by_dtype(jnp.matmul, (m, k), (k, n))
            yield Case("product sides", f"{name} {side}{off:+d}", ways)


def _convolution(x: jax.Array, weights: jax.Array, stride: int, groups: int) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    strides = (stride, stride)
    return lax.conv_general_dilated(
        x, weights, strides, "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def _to_input(weights: jax.Array, y: jax.Array, *, shape: Shape, stride: int, groups: int) -> Any:
    like = jax.ShapeDtypeStruct(shape, y.dtype)
    return jax.linear_transpose(lambda x: _convolution(x, weights, stride, groups), like)(y)[0]


def _to_filter(x: jax.Array, y: jax.Array, *, shape: Shape, stride: int, groups: int) -> Any:
    like = jax.ShapeDtypeStruct(shape, y.dtype)
    return jax.linear_transpose(lambda w: _convolution(x, w, stride, groups), like)(y)[0]


def _convolutions(small: bool) -> Iterator[Case]:
    sizes = [(4, 14, 64), (16, 28, 128), (64, 28, 128), (128, 56, 128)][: 1 if small else None]
    for op, kernel, stride, variant in (
        ("Conv2D", 3, 1, ""),
        ("Conv2D", 1, 1, "pointwise"),
        ("Conv2D", 3, 2, "strided"),
        ("DepthwiseConv2dNative", 3, 1, ""),
        ("DepthwiseConv2dNative", 3, 2, "strided"),
    ):
        for batch, side, channels in sizes:
            groups = channels if op.startswith("Depthwise") else 1
            x, y = (batch, side, side, channels), (batch, side // stride, side // stride, channels)
            weights = (kernel, kernel, channels // groups, channels)
            flops = 2 * math.prod(y) * kernel * kernel * (channels // groups)
            fixed = {"stride": stride, "groups": groups}
            functions = {
                op: (functools.partial(_convolution, **fixed), x, weights),
                f"{op}BackpropInput": (
                    functools.partial(_to_input, shape=x, **fixed),
                    weights,
                    y,
                ),
                f"{op}BackpropFilter": (
                    functools.partial(_to_filter, shape=weights, **fixed),
                    x,
                    y,
                ),
            }
            for name, (function, *shapes) in functions.items():
                key = f"{name}/{variant}" if variant else name
                title = f"{key} {batch}x{side}x{side}x{channels}"
                yield Case("convolutions", title, _by_dtype(function, *shapes), key, flops)


def _scaled(x: jax.Array, inside: str | None = None, out: str | None = None) -> jax.Array:
    """An element-wise op that memory bounds, computed in a dtype and given in another."""
    computed = x.astype(inside) if inside else x
    return (jnp.maximum(computed * 1.5 + 0.5, 0)).astype(out or x.dtype)


def _casts_inside(small: bool) -> Iterator[Case]:
    for exponent in (12, 16, 20, 24, 26)[: 2 if small else None]:
        shape = (1 << exponent,)
        ways = {"float32": Way(_scaled, (shape,), ("float32",))}
        for low in LOW:
            inside = functools.partial(_scaled, inside="float32")
            ways[low] = Way(_scaled, (shape,), (low,))
            ways[f"{low} computed in float32"] = Way(inside, (shape,), (low,))
            to_low = functools.partial(_scaled, out=low)
            ways[f"float32 given in {low}"] = Way(to_low, (shape,), ("float32",))
            back = functools.partial(_scaled, inside="float32", out="float32")
            ways[f"{low} given in float32"] = Way(back, (shape,), (low,))
        yield Case("casts inside fusions", f"2^{exponent} elements", ways, size=1 << exponent)


def _normalized(
    x: jax.Array, scale: jax.Array, offset: jax.Array, axes: Shape, inside: str, one_pass: bool
) -> jax.Array:
    wide = x.astype(inside)
    mean = wide.mean(axes, keepdims=True)
    if one_pass:
        variance = (wide * wide).mean(axes, keepdims=True) - mean * mean
    else:
        variance = ((wide - mean) ** 2).mean(axes, keepdims=True)
    normal = (wide - mean) * lax.rsqrt(variance + 1e-3)
    return (normal * scale.astype(inside) + offset.astype(inside)).astype(x.dtype)


def _layer_as_batch_norm(x: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    """A layer normalization through the op of a batch normalization, its rows as channels."""
    rows = x.shape[0]
    ones = jnp.ones((rows,), "float32"), jnp.zeros((rows,), "float32")
    normal = batch_norm(x, *ones, 0, 1e-3)
    return (normal.astype("float32") * scale + offset).astype(x.dtype)


def _with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """The result and the gradients of all arguments, for a gradient like the result."""

    def both(*arguments: jax.Array) -> Any:
        result, back = jax.vjp(function, *arguments)
        return result, back(result)

    return both


def _norms(small: bool) -> Iterator[Case]:
    layer = (64, 128) if small else (16384, 1024)
    image = (4, 8, 8, 16) if small else (128, 56, 56, 64)
    for name, shape, axes, op in (
        ("layer", layer, (1,), _layer_as_batch_norm),
        ("batch", image, (0, 1, 2), lambda x, s, o: batch_norm(x, s, o, 3, 1e-3)),
    ):
        vector = (shape[-1],)
        functions = {
            "primitives": functools.partial(
                _normalized, axes=axes, inside="float32", one_pass=False
            ),
            "primitives, one pass": functools.partial(
                _normalized, axes=axes, inside="float32", one_pass=True
            ),
            "one op": op,
        }
        for suffix, wrap in (("", lambda f: f), (" with gradient", _with_gradient)):
            ways = {
                f"{title} {dtype}": Way(
                    wrap(function), (shape, vector, vector), (dtype, "float32", "float32")
                )
                for title, function in functions.items()
                for dtype in DTYPES
            }
            low = functools.partial(_normalized, axes=axes, inside="bfloat16", one_pass=False)
            arguments = (shape, vector, vector), ("bfloat16", "float32", "float32")
            ways["primitives all bfloat16"] = Way(wrap(low), *arguments)
            yield Case("norms", f"{name} norm {shape}{suffix}", ways)


def _bias_sums(small: bool) -> Iterator[Case]:
    for rows, columns in [(256, 64), (16384, 1024), (131072, 64), (1 << 20, 256)][
        : 1 if small else None
    ]:
        shape = (rows, columns)
        ways = {"Sum float32": Way(lambda x: x.sum(0), (shape,), ("float32",))}
        for low in LOW:
            # What XLA makes of BiasAddGrad: a sum in float32 whose result is the target dtype.
            ways[f"BiasAddGrad {low}"] = Way(lambda x: jnp.sum(x, 0), (shape,), (low,))
            ways[f"Cast and Sum {low}"] = Way(
                lambda x: jnp.sum(x.astype("float32"), 0), (shape,), (low,)
            )
            ways[f"ones product {low}"] = Way(
                lambda x: jnp.ones((1, x.shape[0]), x.dtype) @ x, (shape,), (low,)
            )
        yield Case("bias sums", f"{rows}x{columns}", ways, size=rows * columns)


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, softmax: str, causal: bool
) -> jax.Array:
    """Attention in primitives, of (batch, length, heads, depth), softmax in a dtype."""
    scores = jnp.einsum("blhd,bmhd->bhlm", query, key) * (query.shape[-1] ** -0.5)
    scores = scores.astype(softmax)
    if causal:
        length = query.shape[1]
        mask = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(mask, scores, jnp.finfo(softmax).min)
    weights = jax.nn.softmax(scores, -1).astype(query.dtype)
    return jnp.einsum("bhlm,bmhd->blhd", weights, value)


def _attention(small: bool) -> Iterator[Case]:
    sizes = [(2, 16, 2, 8)] if small else [(64, 128, 12, 64), (16, 512, 12, 64), (8, 2048, 16, 64)]
    for shape in sizes:
        for causal in (False, True):
            functions: dict[str, tuple[Callable[..., Any], str]] = {}
            for dtype in DTYPES:
                wide = functools.partial(_attend, softmax="float32", causal=causal)
                functions[f"primitives {dtype}, softmax float32"] = wide, dtype
            for low in LOW:
                functions[f"unit {low}"] = (
                    functools.partial(_attend, softmax=low, causal=causal),
                    low,
                )
                for implementation in ("xla", "cudnn"):
                    functions[f"dot_product_attention {implementation} {low}"] = (
                        functools.partial(
                            jax.nn.dot_product_attention,
                            is_causal=causal,
                            implementation=implementation,
                        ),
                        low,
                    )
            for suffix, wrap in (("", lambda f: f), (" with gradient", _with_gradient)):
                ways = {
                    title: Way(wrap(function), (shape,) * 3, (dtype,))
                    for title, (function, dtype) in functions.items()
                }
                yield Case("attention", f"{shape}{' causal' * causal}{suffix}", ways)


def _reductions(small: bool) -> Iterator[Case]:
    functions = {
        "Sum": lambda x: x.sum(1),
        "Mean": lambda x: x.mean(1),
        "Max": lambda x: x.max(1),
        "Softmax": lambda x: jax.nn.softmax(x, -1),
        "L2Loss": lambda x: jnp.sum(jnp.square(x.astype("float32"))) / 2,
    }
    for op, function in functions.items():
        for exponent in (12, 16, 20, 24, 26)[: 1 if small else None]:
            shape = (max(1, (1 << exponent) // 1024), 1024)
            ways = _by_dtype(function, shape)
            yield Case("reductions", f"{op} {shape[0]}x{shape[1]}", ways, size=1 << exponent)
