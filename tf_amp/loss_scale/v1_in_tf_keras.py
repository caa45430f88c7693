"""Loss scaling of a `tf.compat.v1.train` optimizer that tf_keras' `compile` is given.

`compile` puts it into a `TFOptimizer`, which takes gradients by a tape, past the method of the
optimizer in which the loss is scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_amp.loss_scale.v1_optimizer import (
    V1LossScaleOptimizer,
    wrap_automatically,
    wrapper_in_charge,
)
from tf_amp.patches import Patches

_Method = Callable[..., Any]


def hook(patches: Patches, *, wraps: bool) -> None:
    """Hooks tf_keras' `TFOptimizer`.

    Args:
        patches: Takes the hooks off again.
        wraps: Whether an optimizer without a loss scale gets one.
    """
    from tf_keras.src.optimizers.optimizer_v1 import TFOptimizer

    def make_init(original: _Method) -> _Method:
        def init(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(self, optimizer, *args, **kwargs)
            if wraps:
                wrap_automatically(optimizer, patches)
            wrapper = _wrapper_in(self)
            if wrapper is not None:
                self.manager = wrapper.manager
                if tf.executing_eagerly():  # within the strategy's scope, which a step is not
                    wrapper.manager.create_variables()

        return init

    patches.replace(TFOptimizer, "__init__", make_init)
    patches.replace(TFOptimizer, "minimize", _make_minimize)


def _wrapper_in(optimizer: Any) -> V1LossScaleOptimizer | None:
    inner = optimizer.optimizer
    return inner if isinstance(inner, V1LossScaleOptimizer) else wrapper_in_charge(inner)


def _make_minimize(original: _Method) -> _Method:
    """The step of `fit`."""

    def minimize(
        self: Any, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> Any:
        wrapper = _wrapper_in(self)
        if wrapper is None or tape is None or callable(loss) or not var_list:
            return original(self, loss, var_list, grad_loss, tape)
        variables = tf.nest.flatten(var_list)

        def compute(seed: Any) -> list[tuple[Any, Any]]:
            return list(zip(tape.gradient(loss, variables, seed), variables, strict=True))

        # What comes after the tape is not recorded: the scale comes in where gradients begin.
        seed = tf.ones_like(loss) if grad_loss is None else grad_loss
        return self.apply_gradients(wrapper.compute_gradients_by(compute, seed))

    return minimize
