from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

from tf_amp.loss_scale import DynamicLossScale, LossScaleManager, wrap_optimizer
from tf_amp.loss_scale.clip_notice import clipped_within


def make(toolbox) -> tuple[Any, Any]:
    variable = toolbox.variable([1.0, 2.0])
    return wrap_optimizer(toolbox.sgd(1.0), DynamicLossScale(initial=8.0)), variable


def take_step(toolbox, optimizer, variable, change=tf.identity, clip=list) -> None:
    """Trains with a loss that something changes, and gradients that something clips."""
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(tf.reduce_sum(change(toolbox.tensor(variable))))
    gradients = clip(tape.gradient(loss, [toolbox.tensor(variable)]))
    optimizer.apply_gradients(zip(gradients, [variable], strict=True))


CLIPS = {
    "global norm": lambda gradients: tf.clip_by_global_norm(gradients, 1.0)[0],
    "norm": lambda gradients: [tf.clip_by_norm(gradient, 1.0) for gradient in gradients],
    "value": lambda gradients: [tf.clip_by_value(gradient, -1.0, 1.0) for gradient in gradients],
    "keras": lambda gradients: [keras.ops.clip(gradient, -1.0, 1.0) for gradient in gradients],
    "each example's": lambda gradients: [_mean_of_clipped(gradient) for gradient in gradients],
}


def _mean_of_clipped(gradient: tf.Tensor) -> tf.Tensor:
    """What differential privacy asks for: clipped one by one, averaged, with noise."""
    examples = tf.stack([gradient, gradient])
    clipped = tf.vectorized_map(lambda one: tf.clip_by_norm(one, 1.0), examples)
    return tf.reduce_mean(clipped, 0) + tf.random.normal(gradient.shape, stddev=0.0)


# Where a clip is looked for is one place: each of them, and each optimizer.
@pytest.mark.parametrize(
    ("toolbox", "clip"),
    [
        *(("keras", clip) for clip in CLIPS),
        *((family, "global norm") for family in ("tf_keras", "tf_keras_legacy", "v1")),
    ],
    indirect=["toolbox"],
)
@pytest.mark.parametrize("unscaled", [True, False])
def test_scaled_gradients_that_are_clipped_are_told_once(
    toolbox, caplog: pytest.LogCaptureFixture, clip: str, unscaled: bool
) -> None:
    optimizer, variable = make(toolbox)

    def clipped(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        return CLIPS[clip](optimizer.unscale(gradients) if unscaled else gradients)

    def step() -> None:
        take_step(toolbox, optimizer, variable, clip=clipped)

    tf.function(step)()
    tf.function(step)()
    said = [message for message in caplog.messages if "Gradients were clipped by" in message]
    assert len(said) == (not unscaled)


def test_gradients_of_what_is_clipped_are_none_that_are(
    toolbox, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer, variable = make(toolbox)

    @tf.function
    def step() -> None:
        take_step(toolbox, optimizer, variable, lambda x: tf.clip_by_value(x, -5.0, 5.0))

    step()
    assert toolbox.tensor(variable).numpy().tolist() == [0.0, 1.0]
    assert not [message for message in caplog.messages if "clipped" in message]


def _clipped_while_scaled(manager: LossScaleManager, dy: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_norm(dy, 1.0)


def _clipped_by_value(manager: LossScaleManager, dy: tf.Tensor) -> tf.Tensor:
    return keras.ops.clip(dy, -1.0, 1.0)


def _clipped_unscaled(manager: LossScaleManager, dy: tf.Tensor) -> tf.Tensor:
    return manager.multiply(tf.clip_by_norm(manager.unscale([dy])[0], 1.0))


@pytest.mark.parametrize(
    ("clip", "told"),
    [(_clipped_while_scaled, 1), (_clipped_by_value, 1), (_clipped_unscaled, 0)],
)
@pytest.mark.parametrize("toolbox", ["keras", "tf_keras"], indirect=True)
def test_a_gradient_of_the_programs_own_that_clips_is_told_once(
    toolbox, caplog: pytest.LogCaptureFixture, clip: Any, told: int
) -> None:
    optimizer, variable = make(toolbox)

    @tf.custom_gradient
    def clipping(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda dy: clip(optimizer.manager, dy)

    def step() -> None:
        take_step(toolbox, optimizer, variable, lambda x: clipping(3.0 * x))

    tf.function(step)()
    tf.function(step)()
    said = [message for message in caplog.messages if "tf.custom_gradient" in message]
    assert len(said) == told
    if not told:
        moved = toolbox.tensor(variable).numpy() - [1.0, 2.0]
        assert moved == pytest.approx([-3 * 2**0.5] * 2)


def _clip(x: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_value(x, -1.0, 1.0)


# x is multiplied by the scale s before, and y is not.
@pytest.mark.parametrize(
    ("made", "clip"),
    [
        (lambda x, y, s: 3.0 * _clip(x), "clip_by_value"),
        (lambda x, y, s: tf.clip_by_norm(x, 1.0) + y, "clip_by_norm"),
        (lambda x, y, s: tf.IndexedSlices(_clip(x), [0]), "clip_by_value"),
        (lambda x, y, s: x * _clip(y), ""),
        (lambda x, y, s: s * _clip(x / s), ""),
        (lambda x, y, s: s * _clip(y + tf.sign(x)), ""),
        (lambda x, y, s: (_clip(x), 2.0 * x)[1], ""),
        (lambda x, y, s: None, ""),
    ],
)
def test_what_clips_inside_is_found_behind_the_scale(made: Any, clip: str) -> None:
    with tf.Graph().as_default():
        loss, y = tf.ones([2]), tf.ones([2])
        scale = tf.constant(8.0)
        gradient = made(loss * scale, y, scale)
        assert clipped_within([gradient], scale) == clip
