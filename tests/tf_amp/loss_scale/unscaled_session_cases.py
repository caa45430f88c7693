"""v1 graphs that train in float16; imported inside the subprocess of their tests.

Each is run with AMP installed anew, since sessions share one warning.
"""

from __future__ import annotations

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


def by_adam_scaled_by_tensorflow(loss: Any, variables: list[Any]) -> Any:
    optimizer = loss_scale_optimizer.MixedPrecisionLossScaleOptimizer(
        v1.train.AdamOptimizer(RATE), loss_scale.DynamicLossScale()
    )
    return optimizer.minimize(loss, var_list=variables)


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
    theirs = by_adam_scaled_by_tensorflow
    print("of TensorFlow", run(theirs), run(theirs, imported=True, scaled=False))
