"""v1 graphs that train in float16; imported inside the subprocess of their tests.

Each is run with AMP installed anew, since sessions share one warning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.training.experimental import loss_scale, loss_scale_optimizer

import tf_amp
from tf_amp import installation
from tf_amp.env_config import read_settings

v1 = tf.compat.v1
RATE = 0.01


def loss_and_variables(*, resource: bool) -> tuple[Any, list[Any]]:
    x = v1.placeholder(tf.float32, [None, 8], name="x")
    with v1.variable_scope("model", use_resource=resource):
        w = v1.get_variable("w", [8, 16])
        b = v1.get_variable("b", [16], initializer=v1.zeros_initializer())
        v = v1.get_variable("v", [16, 4])
    predicted = tf.nn.relu(x @ w + b) @ v
    return tf.reduce_mean(tf.square(predicted - x[:, :4])), [w, b, v]


def by_sgd(loss: Any, variables: list[Any]) -> Any:
    return v1.train.GradientDescentOptimizer(RATE).minimize(loss, var_list=variables)


def by_adam(loss: Any, variables: list[Any]) -> Any:
    return v1.train.AdamOptimizer(RATE).minimize(loss, var_list=variables)


def scaled_by_tensorflow(make: Callable[[], Any]) -> Callable[[Any, list[Any]], Any]:
    def train(loss: Any, variables: list[Any]) -> Any:
        optimizer = loss_scale_optimizer.MixedPrecisionLossScaleOptimizer(
            v1.train.AdamOptimizer(RATE), make()
        )
        return optimizer.minimize(loss, var_list=variables)

    return train


def of_two_optimizers(loss: Any, variables: list[Any]) -> Any:
    """One scales, and the other one applies a part of its gradients."""
    scaling = loss_scale_optimizer.MixedPrecisionLossScaleOptimizer(
        v1.train.AdamOptimizer(RATE), loss_scale.FixedLossScale(128.0)
    )
    pairs = scaling.compute_gradients(loss, variables)
    other = v1.train.GradientDescentOptimizer(RATE)
    return tf.group(other.apply_gradients(pairs[:1]), scaling.apply_gradients(pairs[1:]))


def by_hand(loss: Any, variables: list[Any]) -> Any:
    pairs = zip(variables, tf.gradients(loss, variables), strict=True)
    return tf.group(*(v1.assign_sub(variable, RATE * g) for variable, g in pairs))


def by_hand_scaled(loss: Any, variables: list[Any]) -> Any:
    scale = v1.get_variable("mine", [], initializer=v1.ones_initializer(), trainable=False)
    pairs = zip(variables, tf.gradients(loss * scale, variables), strict=True)
    return tf.group(*(v1.assign_sub(variable, RATE * (g / scale)) for variable, g in pairs))


def switch(*, on: bool) -> None:
    if on:
        installation.install(read_settings(), source=installation.ENVIRONMENT)
    else:
        installation.uninstall()


def run(
    train: Callable[[Any, list[Any]], Any],
    *,
    resource: bool = True,
    imported: bool = False,
    scaled: bool = True,
) -> bool:
    """Trains, and tells whether it was said that nothing scales the loss."""
    switch(on=False)
    switch(on=scaled)
    graph = tf.Graph()
    with graph.as_default():
        step = train(*loss_and_variables(resource=resource)).name
        init = v1.global_variables_initializer().name
        # TensorFlow's own loss-scale optimizer leaves one that cannot be imported.
        meta = v1.train.export_meta_graph(collection_list=[])
    if imported:
        graph = tf.Graph()
        with graph.as_default():
            v1.train.import_meta_graph(meta)
    switch(on=True)
    with v1.Session(graph=graph) as session:
        session.run(init)
        session.run(step, {"x:0": np.ones((16, 8), np.float32)})
    status = tf_amp.status()
    assert status.functions[-1].products_low == 5
    return bool(status.trained_unscaled)


def main() -> None:
    for resource in (True, False):
        for train in (by_sgd, by_adam):
            print(train.__name__, run(train, resource=resource))
            print("imported", run(train, resource=resource, imported=True))
            print("made without", run(train, resource=resource, imported=True, scaled=False))
        print("by hand", run(by_hand, resource=resource), run(by_hand_scaled, resource=resource))
    theirs = scaled_by_tensorflow(loss_scale.DynamicLossScale)
    print("of TensorFlow", run(theirs), run(theirs, imported=True, scaled=False))
    for fixed in (128.0, 1.0):
        make = functools.partial(loss_scale.FixedLossScale, fixed)
        print("fixed", run(scaled_by_tensorflow(make)))
    print("of two", run(of_two_optimizers))
