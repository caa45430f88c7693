"""What is said of loops that do not scale the loss. All of it runs in subprocesses."""

from __future__ import annotations

import ast

import pytest
from environments import FLOAT16

SCRIPT = """
import logging, sys
import tf_amp.autoload
tf_amp.autoload.activate()
import numpy as np, tensorflow as tf, keras, tf_keras
from tf_amp import installation
from tf_amp.env_config import read_settings
from tf_amp.loss_scale import wrap_optimizer
library, legacy = (keras, False) if sys.argv[1] == "keras" else (tf_keras, "legacy" in sys.argv[1])
optimizers = library.optimizers.legacy if legacy else library.optimizers
own_class = (keras.optimizers if library is keras else tf_keras.mixed_precision).LossScaleOptimizer
x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")

class Model(library.Model):
    def __init__(self):
        super().__init__()
        self.first, self.last = library.layers.Dense(64), library.layers.Dense(64)
    def call(self, x):
        return self.last(tf.nn.relu(self.first(x)))
    def take(self, x, scale=lambda loss: loss):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_mean(self(x) ** 2)
            scaled = scale(loss)
        return loss, scaled, tape
    def update(self, optimizer, gradients):
        optimizer.apply_gradients(list(zip(gradients, self.trainable_weights)))

def made(cls=Model):
    model = cls()
    model(x)
    return model, model.trainable_weights
def own_step(self, x):
    loss, _, tape = self.take(x)
    self.update(self.optimizer, tape.gradient(loss, self.trainable_weights))
    return {"loss": loss}
def own_step_that_scales(self, x):
    if library is keras:
        loss, scaled, tape = self.take(x, self.optimizer.scale_loss)
        self.update(self.optimizer, tape.gradient(scaled, self.trainable_weights))
    else:
        loss, _, tape = self.take(x)
        self.optimizer.minimize(loss, self.trainable_weights, tape=tape)
    return {"loss": loss}
def own_step_in_a_branch(self, x):
    weights = self.trainable_weights
    def gradients():
        loss, scaled, tape = self.take(x, self.optimizer.scale_loss)
        return loss, *tape.gradient(scaled, weights)
    def zeros():
        return 0.0, *map(tf.zeros_like, weights)
    loss, *found = tf.cond(tf.reduce_all(tf.math.is_finite(x)), gradients, zeros)
    self.update(self.optimizer, found)
    return {"loss": loss}
def own_step_by_a_function(self, x):
    @tf.function
    def gradients():
        loss, scaled, tape = self.take(x, self.optimizer.scale_loss)
        return loss, tape.gradient(scaled, self.trainable_weights)
    loss, found = gradients()
    self.update(self.optimizer, found)
    return {"loss": loss}
def own_optimizers(self, x):
    loss, _, tape = self.take(x)
    self.update(self.own, tape.gradient(loss, self.trainable_weights))
    return {"loss": loss}

if library is tf_keras:
    class OwnGradients(optimizers.SGD):
        "Clips the gradient of each example, before it adds them up."
        def _compute_gradients(self, loss, var_list, grad_loss=None, tape=None):
            with tape:
                parts = tf.reduce_mean(tf.reshape(loss, [8, -1]), 1)
            rows = tape.jacobian(parts, var_list)
            return [(tf.reduce_mean(tf.clip_by_norm(r, 1.0, list(range(1, len(r.shape)))), 0), v)
                    for r, v in zip(rows, var_list)]
        compute_gradients = lambda self, loss, var_list, tape: self._compute_gradients(
            loss, var_list, tape=tape)
def fit_by(optimizer):
    model, _ = made()
    before = [weight.copy() for weight in model.get_weights()]
    model.compile(optimizer, library.losses.MeanSquaredError(reduction="none"), jit_compile=False)
    model.fit(x, x, batch_size=64, verbose=0)
    assert all(abs(a - b).max() > 1e-4 for a, b in zip(model.get_weights()[::2], before[::2]))

def fit(train_step, **compiled):
    model, _ = made(type("Own", (Model,), {"train_step": train_step}))
    model.own = optimizers.SGD()
    model.compile(**{"optimizer": optimizers.Adam(), "jit_compile": False, **compiled})
    model.fit(x, verbose=0)
def eager_loop():
    model, weights = made()
    loss, _, tape = model.take(x)
    model.update(optimizers.SGD(), tape.gradient(loss, weights))
def eager_beside_functions():
    model, _ = made()
    tf.function(lambda: model(x))()
    fit(own_step_that_scales)
    eager_loop()
def given_by_a_function():
    model, weights = made()
    @tf.function
    def gradients():
        loss, _, tape = model.take(x)
        return tape.gradient(loss, weights)
    model.update(optimizers.SGD(), gradients())
def loop(optimizer):
    model, weights = made()
    @tf.function
    def step():
        loss, _, tape = model.take(x)
        model.update(optimizer, tape.gradient(loss, weights))
    step()
def float32_loop():
    weight, optimizer = tf.Variable(tf.ones([64])), optimizers.SGD()
    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((weight * x) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
    step()
def applied_by_a_function():
    model, weights = made()
    optimizer = optimizers.SGD()
    @tf.function
    def gradients():
        loss, _, tape = model.take(x)
        return tape.gradient(loss, weights)
    tf.function(lambda found: model.update(optimizer, found))(gradients())
def one_of_two_wrapped():
    model, weights = made()
    wrapped, other = wrap_optimizer(optimizers.Adam()), optimizers.SGD()
    @tf.function
    def step():
        loss, scaled, tape = model.take(x, wrapped.scale_loss)
        found, theirs = tape.gradient(scaled, weights), tape.gradient(loss, weights)
        wrapped.apply_gradients(list(zip(found[:2], weights[:2])))
        other.apply_gradients(list(zip(theirs[2:], weights[2:])))
    step()
def of_a_function():
    model, weights = made()
    forward = tf.function(lambda: tf.reduce_mean(model(x) ** 2))
    with tf.GradientTape() as tape:
        loss = forward()
    model.update(optimizers.SGD(), tape.gradient(loss, weights))
def loop_of_a_compiled_model():
    model, _ = made()
    model.compile(optimizers.Adam())
    tf.function(lambda: own_step(model, x))()
def scaled_by_hand(optimizer, by=1 / 128, keyword=False):
    model, weights = made()
    if hasattr(optimizer, "build"):
        optimizer.build(weights)
    @tf.function
    def step():
        _, scaled, tape = model.take(x, lambda loss: 128.0 * loss)
        gradients = [by * gradient for gradient in tape.gradient(scaled, weights)]
        pairs = zip(gradients, weights)
        if keyword:
            optimizer.apply_gradients(grads_and_vars=pairs)
        else:
            optimizer.apply_gradients(pairs)
    before = [weight.copy() for weight in model.get_weights()]
    step()
    assert all(abs(a - b).max() > 1e-5 for a, b in zip(model.get_weights(), before))
def two_optimizers(of_one_loss):
    model, weights = made()
    scaler, other = own_class(optimizers.Adam()), optimizers.SGD()
    @tf.function
    def step():
        scale = scaler.scale_loss if library is keras else scaler.get_scaled_loss
        loss, scaled, tape = model.take(x, scale)
        mine = tape.gradient(scaled, weights)
        if library is keras:
            unscaled = [gradient / scaler.dynamic_scale for gradient in mine]
        else:
            mine = unscaled = scaler.get_unscaled_gradients(mine)
        theirs = unscaled if of_one_loss else tape.gradient(loss, weights)
        other.apply_gradients(list(zip(theirs[:2], weights[:2])))
        scaler.apply_gradients(list(zip(mine[2:], weights[2:])))
    if library is keras:
        scaler.build(weights[2:])
        other.build(weights[:2])
    step()

said = []
class Listener(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("tf_amp.loss_scale").addHandler(Listener())
def heard(function, *args, **kwargs):
    installation.uninstall()
    installation.install(read_settings(), source=installation.ENVIRONMENT)
    said.clear()
    function(*args, **kwargs)
    return list(said)
print({
    "eager": heard(eager_loop),
    "eager fit": heard(fit, own_step, run_eagerly=True),
    "beside functions": heard(eager_beside_functions),
    "own step": heard(fit, own_step),
    "that scales": heard(fit, own_step_that_scales),
    "in a branch": heard(fit, own_step_in_a_branch) if library is keras else [],
    "by a function": heard(fit, own_step_by_a_function) if library is keras else [],
    "by a function, wrapped": [] if library is not keras else heard(
        fit, own_step_by_a_function, optimizer=wrap_optimizer(optimizers.Adam())
    ),
    "own optimizers": heard(fit, own_optimizers),
    "loop": heard(loop_of_a_compiled_model),
    "by hand": heard(scaled_by_hand, optimizers.SGD()),
    "by hand, by keyword": heard(scaled_by_hand, optimizers.SGD(), keyword=True),
    "by hand, v1": [] if library is keras else heard(
        scaled_by_hand, tf.compat.v1.train.GradientDescentOptimizer(0.01)
    ),
    "by hand, not back": heard(scaled_by_hand, optimizers.SGD(), 0.1),
    "one loss": heard(two_optimizers, True),
    "two losses": heard(two_optimizers, False),
    "one wrapped": heard(one_of_two_wrapped),
    "in float32": heard(float32_loop),
    "given": heard(given_by_a_function),
    "given to a function": heard(applied_by_a_function),
    "of a function": heard(of_a_function),
    "own gradients": [] if library is keras else heard(fit_by, OwnGradients(1.0)),
    "own gradients in a loop": [] if library is keras else heard(loop, OwnGradients(1.0)),
})
"""
ANNOUNCED = (
    "Loss scaling: the optimizer Adam of compile() scales its loss by a dynamic loss scale (32768 "
    "at first, doubled after 2000 finite steps, halved after one that is not)."
)
NOT_WRAPPED = "A custom training loop applies gradients with SGD, which is not wrapped"


@pytest.fixture(
    scope="module",
    params=[
        "keras",
        pytest.param("tf_keras", marks=pytest.mark.slow),
        pytest.param("tf_keras legacy", marks=pytest.mark.slow),
    ],
)
def library(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def heard(run_forked, library: str) -> dict[str, list[str]]:
    return ast.literal_eval(run_forked(SCRIPT, FLOAT16, args=(library,)).stdout)


def test_what_runs_eagerly_is_not_told(heard) -> None:
    assert heard["eager"] == heard["eager fit"] == []
    assert heard["beside functions"] == [ANNOUNCED]


def test_gradients_of_a_converted_function_are_told_of(heard) -> None:
    for name in ("given", "given to a function", "of a function"):
        (line,) = heard[name]
        assert line.startswith(NOT_WRAPPED)
        assert "a library's, bfloat16 needs no scale: TF_AUTO_MIXED_PRECISION_GRAPH" in line


def test_what_trains_in_float32_is_not_told(heard) -> None:
    """A loop is told once it is known what runs, and not as it is traced."""
    assert heard["in float32"] == []


def test_a_step_of_the_models_own(heard, library: str) -> None:
    """Nothing is announced that does not happen, and the remedy is one."""
    (line,) = heard["own step"]
    if library == "keras":
        assert line.startswith("The model's own train_step applies gradients with Adam of a loss")
        assert "self.optimizer.scale_loss(loss)" in line
    else:
        assert "applies gradients with Adam, the optimizer of compile(), of a loss that" in line
        assert "optimizer.minimize(loss, variables, tape=tape)" in line
    assert heard["that scales"] == [ANNOUNCED]


def test_a_step_that_scales_in_a_branch(heard, library: str) -> None:
    """A branch is traced with the step that it is a part of."""
    if library != "keras":
        pytest.skip("optimizers of tf_keras have minimize()")
    assert heard["in a branch"] == [ANNOUNCED]


def test_a_step_whose_gradients_a_function_takes(heard, library: str) -> None:
    """It may be called elsewhere, so that nothing scales there, and the remedy is another."""
    if library != "keras":
        pytest.skip("optimizers of tf_keras have minimize()")
    (line,) = heard["by a function"]
    assert "Where a tf.function of their own takes them, give compile()" in line
    assert heard["by a function, wrapped"] == []


def test_an_optimizer_of_compile_that_nobody_uses_is_not_announced(heard) -> None:
    (line,) = heard["own optimizers"]
    assert line.startswith(NOT_WRAPPED)


def test_a_loop_with_the_optimizer_of_compile(heard, library: str) -> None:
    (line,) = heard["loop"]
    assert "applies gradients with Adam, the optimizer of compile()" in line
    assert ("wrap_optimizer" if library == "keras" else "optimizer.minimize") in line


def test_a_loop_that_scales_by_hand(heard) -> None:
    """It divides by what it multiplied the loss by, and its gradients, read once, all train."""
    assert heard["by hand"] == heard["by hand, by keyword"] == heard["by hand, v1"] == []
    (line,) = heard["by hand, not back"]
    assert line.startswith(NOT_WRAPPED)


def test_of_two_optimizers_one_scales(heard) -> None:
    """What counts is the loss that the gradients are of."""
    assert heard["one loss"] == []
    (line,) = heard["one wrapped"]
    assert line.startswith(NOT_WRAPPED)
    (line,) = heard["two losses"]
    assert line.startswith("'step' trains in float16, and no loss scale of tf_amp's is in it")


def test_an_optimizer_that_computes_gradients_by_itself(heard, library: str) -> None:
    """Its loss is not scaled, so that what it clips is what it clips in float32."""
    if library == "keras":
        pytest.skip("optimizers of Keras 3 compute no gradients")
    (line,) = heard["own gradients"]
    assert line.startswith("The optimizer OwnGradients of compile() computes gradients by a method")
    assert "super()" in line and "DTYPE=bfloat16" in line and "LOSS_SCALING=0" in line


def test_a_loop_of_an_optimizer_that_takes_gradients_by_itself(heard, library: str) -> None:
    """It is not told to scale the loss: what the class clips would be scaled."""
    if library == "keras":
        pytest.skip("optimizers of Keras 3 compute no gradients")
    (line,) = heard["own gradients in a loop"]
    assert line.startswith("A custom training loop applies gradients with OwnGradients")
    assert "scale_loss" not in line and "minimize()" in line and "DTYPE=bfloat16" in line
