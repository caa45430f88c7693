"""The sizes of work in small functions."""

from __future__ import annotations

import functools

import tensorflow as tf

from graph_passes.ir.view import view_body
from graph_passes.placement.work_sizes import WorkSizes
from tf_amp.hosts.function_shapes import static_shapes


def sizes_of(function, *shapes):
    """The sizes of a function's graph, and the numbers of its nodes by name."""
    specs = [tf.TensorSpec(shape) for shape in shapes]
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    view = view_body(graph.as_graph_def(), static_shapes(graph))
    return WorkSizes(view), view.index


def convolution_and_gradients(op, weights, stride=1, *, side=8, data_format="NHWC"):
    """The sizes of the three ops of a convolution of 8 x 8 pixels, and the number of each."""
    depthwise = op.startswith("Depthwise")

    def image(count: int, length: int, channels: int) -> tuple[int, ...]:
        if data_format == "NCHW":
            return (count, channels, length, length)
        return (count, length, length, channels)

    common = {
        "strides": image(1, stride, 1),
        "padding": "SAME",
        "data_format": data_format,
        "name": "y",
    }
    shape = image(2, side, weights[2] if depthwise else 32)
    made = image(2, -(-side // stride), weights[2] if depthwise else weights[3])
    forward, to_input, to_filter = (
        functools.partial(getattr(tf.raw_ops, op + end), **common)
        for end in ("", "BackpropInput", "BackpropFilter")
    )
    for function, one, other in (
        (lambda x, w: forward(input=x, filter=w), shape, weights),
        (lambda w, dy: to_input(input_sizes=shape, filter=w, out_backprop=dy), weights, made),
        (lambda x, dy: to_filter(input=x, filter_sizes=weights, out_backprop=dy), shape, made),
    ):
        sizes, index = sizes_of(function, one, other)
        yield sizes, index["y"]
