"""What counts as a loss scale; `unscaled_cases` has the programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, types_pb2

from tf_amp.loss_scale.data_flow import Program
from tf_amp.loss_scale.unscaled import trains_unscaled

v1 = tf.compat.v1
Write = Callable[[Any], Any]


def no_function(name: str) -> None:
    del name


def graph_of(scale: Any, write: Callable[[Any, Any, Any], Any], *, half: bool = True) -> bool:
    """Whether a step trains unscaled that multiplies its loss and writes something."""
    with tf.Graph().as_default() as graph:
        w = v1.get_variable("w", [8, 8], use_resource=True)
        own = v1.get_variable("own", [], use_resource=True)
        factor = scale(own) if callable(scale) else scale
        loss = tf.reduce_sum(tf.ones([4, 8]) @ w) * factor
        write(w, tf.gradients(loss, w)[0], own)
    traced = graph.as_graph_def()
    running = graph_pb2.GraphDef()
    running.CopyFrom(traced)
    for node in running.node if half else ():
        if node.op == "MatMul" and node.name.startswith("gradients/"):
            node.attr["T"].type = types_pb2.DT_HALF
    return trains_unscaled(Program(traced, no_function), Program(running, no_function))


def variable(own: Any) -> Any:
    return own


def descend(by: Callable[[Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    return lambda w, gradient, own: w.assign_sub(by(gradient, own))


SCALING = [
    (1024.0, lambda g, own: g / 1024.0),
    (1000.0, lambda g, own: 0.1 * (g / 1000.0)),
    (1024.0, lambda g, own: g * (0.5**10)),
    (variable, lambda g, own: g / own),
    (variable, lambda g, own: g * (0.1 / own)),
    (variable, lambda g, own: g * tf.math.reciprocal(own)),
]


@pytest.mark.parametrize(("scale", "by"), SCALING)
def test_what_scales(scale: Any, by: Any) -> None:
    assert not graph_of(scale, descend(by))


NOT_SCALING = [
    (1.0, lambda g, own: 0.1 * g),
    (1024.0, lambda g, own: 0.1 * g),
    (2.0, lambda g, own: g / 2.0),
    (10.0, lambda g, own: 0.1 * g),  # a learning rate
    (variable, lambda g, own: own * g),
    (variable, lambda g, own: g / (1.0 + own)),
    (1.0, lambda g, own: g / own),
]


@pytest.mark.parametrize(("scale", "by"), NOT_SCALING)
def test_what_does_not(scale: Any, by: Any) -> None:
    assert graph_of(scale, descend(by))


def test_each_write_counts() -> None:
    def write(w: Any, gradient: Any, own: Any) -> None:
        w.assign_sub(gradient / own)
        w.assign_sub(gradient)

    assert graph_of(variable, write)


def test_only_float16_gradients_count() -> None:
    assert not graph_of(1.0, descend(lambda g, own: g), half=False)


def test_what_is_written_to_other_variables_is_no_training() -> None:
    assert not graph_of(1.0, lambda w, g, own: own.assign(tf.reduce_sum(g)))
