"""The two steps of a workload as functions of tensors, in the variant of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

CAPABILITY = (9, 0)
"""The compute capability of the GPU that is planned for: Hopper."""


@contextlib.contextmanager
def planned_for_gpu() -> Iterator[None]:
    """What tf_amp is switched on within is planned for a GPU, which this machine need not have."""
    found = {"return_value": [CAPABILITY]}
    with (
        mock.patch("tf_amp.hardware.probe_gpu_capabilities", **found),
        mock.patch("tf_amp.cost_tables.probe_gpu_capabilities", **found),
    ):
        yield


def prepare_variant(variant: str, dtype: str) -> None:
    """Puts this process into a variant; call it before TensorFlow is imported.

    Args:
        variant: "float32", "tf_amp", "keras_policy" or "upstream".
        dtype: the target dtype of those that have one.
    """
    from variants import prepare

    if variant == "tf_amp":
        with planned_for_gpu():
            prepare(variant, dtype)
        return
    # What TensorFlow's own pass is asked for by hand needs no option.
    prepare("float32" if variant == "upstream" else variant, dtype)


def complete(model: Any, variant: str, dtype: str) -> None:
    """Gives a compiled model what is missing to train as its user would.

    In float16 the optimizer has a dynamic loss scale: ours where tf_amp gives it one by itself,
    Keras' with Keras' policy, which does so too, and with TensorFlow's own pass, whose users have
    to ask for one.
    """
    import keras

    if variant == "upstream" and dtype == "float16":
        scaled = keras.optimizers.LossScaleOptimizer(model.optimizer)
        model.compile(scaled, model.loss, jit_compile=True)
    model.optimizer.build(model.trainable_variables)


def step_function(model: Any, mode: str, *, compiled: bool, mean_loss: bool = True) -> Any:
    """A `tf.function` of one step: of images or tokens, and in training of labels.

    Args:
        model: a compiled Keras model.
        mode: "training" or "inference".
        compiled: whether XLA compiles it.
        mean_loss: whether a training step gives the mean loss of all steps so far, as Keras does,
            or its own.
    """
    import tensorflow as tf

    def training(inputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        if not mean_loss:
            model.reset_metrics()
        return model.train_step((inputs, labels))["loss"]

    def inference(inputs: tf.Tensor) -> tf.Tensor:
        return model(inputs, training=False)

    step = training if mode == "training" else inference
    return tf.function(step, autograph=False, jit_compile=compiled or None)
