"""v1 optimizers with a `compute_gradients` of their own. All of it runs in subprocesses."""

from __future__ import annotations

import ast

import pytest

LOSS_SCALING = {"TF_ENABLE_AUTO_MIXED_PRECISION_LOSS_SCALING": "1"}
SCRIPT = """
import tf_amp.autoload
tf_amp.autoload.activate()
import tensorflow.compat.v1 as tf
tf.disable_eager_execution()
SGD = tf.train.GradientDescentOptimizer

class Around(tf.train.Optimizer):
    "Made of an optimizer; changes the loss and the gradients."
    def __init__(self, optimizer, of_loss=lambda x: x, of_gradient=lambda x: x):
        super().__init__(False, "Around")
        self._optimizer, self._of_loss, self._of_gradient = optimizer, of_loss, of_gradient
    def compute_gradients(self, loss, *args, **kwargs):
        pairs = self._optimizer.compute_gradients(self._of_loss(loss), *args, **kwargs)
        return [(self._of_gradient(g), v) for g, v in pairs]
    def apply_gradients(self, *args, **kwargs):
        return self._optimizer.apply_gradients(*args, **kwargs)
class Derived(SGD):
    "Scales what its own base class does."
    def compute_gradients(self, loss, *args, **kwargs):
        pairs = super().compute_gradients(128.0 * loss, *args, **kwargs)
        return [(g / 128.0, v) for g, v in pairs]
class Clipping(SGD):
    def compute_gradients(self, *args, **kwargs):
        pairs = super().compute_gradients(*args, **kwargs)
        return [(tf.clip_by_norm(g, 3.0), v) for g, v in pairs]

def scaled(optimizer):
    return Around(optimizer, lambda x: 128.0 * x, lambda g: g / 128.0)
def by_variable(optimizer):
    s = tf.get_variable("s", initializer=128.0)
    return Around(optimizer, lambda x: x * s, lambda g: g / s)

def upstream(make):
    "What the gradient of the loss begins with, and the variable after two steps."
    seen = []
    @tf.custom_gradient
    def spy(y):
        def grad(upstream):
            seen.append(upstream)
            return upstream
        return tf.identity(y), grad
    with tf.Graph().as_default(), tf.Session() as session:
        v = tf.get_variable("v", initializer=1.0)
        # As large a factor as a scale, but nobody divides by it.
        op = make().minimize(100.0 * spy(v * 0.04))
        session.run(tf.global_variables_initializer())
        first = float(session.run(seen[-1])) / 100
        for _ in range(2):
            session.run(op)
        return first, round(float(session.run(v)), 4)
CASES = {
    "plain": lambda: Around(SGD(0.125)),
    "copied": lambda: Around(SGD(0.125), tf.identity),
    "doubled": lambda: Around(SGD(0.125), lambda x: 2.0 * x, lambda g: g / 2.0),
    "clipping": lambda: Clipping(0.125),
    "scaled": lambda: scaled(SGD(0.125)),
    "scaled inside": lambda: Around(scaled(SGD(0.125))),
    "scaled outside": lambda: scaled(Around(SGD(0.125))),
    "divided": lambda: Around(SGD(0.125), lambda x: x / (1 / 128), lambda g: g / 128.0),
    "with a penalty": lambda: Around(SGD(0.125), lambda x: (x + 0.5) * 128, lambda g: g / 128),
    "by a variable": lambda: by_variable(SGD(0.125)),
    "derived": lambda: Derived(0.125),
}
print({name: upstream(make) for name, make in CASES.items()})
"""
OURS = {"plain": 1, "copied": 1, "doubled": 2, "clipping": 1}
RATE = 0.125


@pytest.fixture(scope="module")
def done(run_forked):
    return run_forked(SCRIPT, LOSS_SCALING)


def test_each_loss_is_scaled_once(done) -> None:
    found = ast.literal_eval(done.stdout)
    factors = {name: first for name, (first, _) in found.items()}
    expected = dict.fromkeys(found, 128.0)
    expected |= {name: 32768.0 * factor for name, factor in OURS.items()}
    assert factors == expected


def test_all_of_them_train(done) -> None:
    found = ast.literal_eval(done.stdout)
    after = {name: value for name, (_, value) in found.items()}
    clipped = after.pop("clipping")
    assert set(after.values()) == {1 - 2 * RATE * 4}
    # The gradient that is clipped is not a scaled one.
    assert clipped == 1 - 2 * RATE * 3


def test_it_is_said_which_scale_by_themselves(done) -> None:
    said = [line for line in done.stderr.splitlines() if "scales the loss by itself" in line]
    assert len(said) == 7
    assert "The optimizer Around scales the loss by itself, and tf_amp leaves it alone" in said[0]
    assert "A custom training loop" not in done.stderr
