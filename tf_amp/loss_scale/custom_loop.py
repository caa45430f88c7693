"""The methods a custom training loop calls, the same on every wrapped optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tf_amp.loss_scale.manager import LossScaleManager
from tf_amp.loss_scale.protocol import StepProtocol
from tf_amp.loss_scale.underflow import VariableUnderflow, measure_underflow


class CustomLoopMethods:
    """A mixin of the wrapped optimizers, which set `manager` and `_protocol`."""

    manager: LossScaleManager
    _protocol: StepProtocol

    @property
    def loss_scale(self) -> tf.Tensor:
        """The current loss scale, a scalar float32 tensor."""
        return self.manager.scale

    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the scale; see `LossScaleManager.scale_loss`."""
        return self.manager.scale_loss(loss)

    def unscale(self, gradients: Sequence[Any]) -> list[Any]:
        """Divides gradients by the scale, for loops that look at them before applying them.

        Optional: `apply_gradients` unscales by itself when this was not called. Clip the result
        of this method, never scaled gradients.

        Args:
            gradients: The gradients of a scaled loss; None stays None, sparse ones stay sparse.

        Returns:
            The gradients in the same order.

        Raises:
            LossScaleProtocolError: If it is called twice in one step.
        """
        self._protocol.gradients_unscaled()
        return self.manager.unscale(gradients)

    def get_scaled_loss(self, loss: Any) -> Any:
        """The name Keras 2 has for `scale_loss`."""
        return self.scale_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """The name Keras 2 has for `unscale`."""
        return self.unscale(grads)

    def measure_underflow(
        self, grads_and_vars: Iterable[tuple[Any, Any]]
    ) -> tuple[VariableUnderflow, ...]:
        """How much of each gradient float16 would flush to zero at the current scale.

        Args:
            grads_and_vars: Pairs of an unscaled float32 gradient and its variable.
        """
        return measure_underflow(grads_and_vars, self.manager.scale)

    def _unscaled(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients of `apply_gradients`, unscaled unless the loop did that already."""
        if self._protocol.gradients_need_unscaling(eagerly=tf.executing_eagerly()):
            return self.manager.unscale(gradients)
        return list(gradients)
