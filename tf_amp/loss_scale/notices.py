"""The notice about a training loop that cannot be given a loss scale from outside."""

from __future__ import annotations

import logging
from typing import Any

_LOGGER = logging.getLogger("tf_amp.loss_scale")


class CustomLoopNotice:
    """Says once that a custom loop trains without loss scaling, and how to change that."""

    def __init__(self) -> None:
        self._given = False

    def give(self, optimizer: Any) -> None:
        """Logs the notice, the first time.

        Args:
            optimizer: The optimizer that is not wrapped.
        """
        if self._given:
            return
        self._given = True
        _LOGGER.warning(
            "A custom training loop applies gradients with %s, which is not wrapped: its loss is "
            "not scaled, and small float16 gradients are lost. A loop must be changed by hand: "
            "optimizer = tf_amp.loss_scale.wrap_optimizer(optimizer), then take the gradients of "
            "optimizer.scale_loss(loss) inside the GradientTape.",
            type(optimizer).__name__,
        )
