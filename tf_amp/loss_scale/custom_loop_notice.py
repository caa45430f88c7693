"""Says that a custom training loop trains without loss scaling, and how to change that."""

from __future__ import annotations

import functools
import logging
from typing import Any

import tensorflow as tf

from tf_amp.env_variables import DTYPE, ENABLE_LOSS_SCALING
from tf_amp.loss_scale.seen_graphs import gradients_are_given, is_scaled_by_others, note
from tf_amp.patches import Patches

_LOGGER = logging.getLogger("tf_amp.loss_scale")

_NO_SCALE = f"bfloat16 needs no scale: {DTYPE}=bfloat16"
NOT_WRAPPED = (
    "A custom training loop applies gradients with %s, which is not wrapped: its loss is "
    "not scaled, and where it computes in float16 small gradients are lost. A loop must be changed "
    "by hand: optimizer = tf_amp.loss_scale.wrap_optimizer(optimizer), then take the gradients of "
    "optimizer.scale_loss(loss) inside the GradientTape; minimize(), where there is one, does so "
    f"by itself. Where the loop is a library's, {_NO_SCALE}."
)
OWN_STEP = (
    "The model's own train_step applies gradients with %s of a loss that is not scaled, and small "
    "float16 gradients are lost. Take the gradients of self.optimizer.scale_loss(loss) inside the "
    "GradientTape. Where a tf.function of their own takes them, give compile() "
    "tf_amp.loss_scale.wrap_optimizer(optimizer) besides."
)
OF_COMPILE = (
    "A custom training loop applies gradients with %s, the optimizer of compile(), which scales "
    "the loss in train_step alone: small float16 gradients are lost. Give the loop an optimizer of "
    "its own, tf_amp.loss_scale.wrap_optimizer(...), or compile() such a one where train_step is a "
    "tf.function itself or calls one that does this, and take the gradients of "
    "optimizer.scale_loss(loss) inside the GradientTape."
)
BY_MINIMIZE = (
    "A custom training loop applies gradients with %s, the optimizer of compile(), of a loss that "
    "is not scaled, and small float16 gradients are lost. Call optimizer.minimize(loss, variables, "
    "tape=tape) in place of tape.gradient() and apply_gradients(): it scales. Where gradients are "
    "clipped or accumulated in between, give compile() "
    "tf_amp.loss_scale.wrap_optimizer(optimizer), take the gradients of "
    "optimizer.scale_loss(loss), and clip what optimizer.unscale(gradients) gives."
)
_WHERE_IT_CANNOT = (
    f"Where it cannot, as with tape.jacobian(), {_NO_SCALE}. Or scale there by hand: manager = "
    "LossScaleManager(StaticLossScale(1024)) of tf_amp.loss_scale, the gradients of "
    "manager.multiply(loss), then manager.unscale(gradients) before they are clipped; "
    f"{ENABLE_LOSS_SCALING}=0 then says that nothing else is to be scaled."
)
OWN_GRADIENTS = (
    "The optimizer %s of compile() computes gradients by a method of its own that does not call "
    "that of tf_keras, which scales: small float16 gradients are lost. Have it take them by "
    f"super() and the method's name. {_WHERE_IT_CANNOT}"
)
OWN_GRADIENTS_IN_A_LOOP = (
    "A custom training loop applies gradients with %s, which is not wrapped: its loss is not "
    "scaled, and small float16 gradients are lost. Its class computes gradients by a method of its "
    "own. If that takes them by super() and the method's name, minimize() of "
    "tf_amp.loss_scale.wrap_optimizer(optimizer) scales; a loss that is scaled before would be "
    f"clipped there while it is. {_WHERE_IT_CANNOT}"
)


class CustomLoopNotice:
    """Gives each notice once for each set of hooks.

    Attributes:
        waits: Whether it is given only once it is known that what runs trains in float16.
    """

    waits = False

    def __init__(self) -> None:
        self._patches: Patches | None = None
        self._given: set[str] = set()

    def begin(self, patches: Patches) -> None:
        """Takes a new set of hooks for the one that sees such loops."""
        self._patches = patches
        self._given.clear()

    @property
    def active(self) -> bool:
        """Whether the hooks are on."""
        return self._patches is not None and self._patches.active

    def give(self, optimizer: Any, text: str = NOT_WRAPPED) -> None:
        """Says, the first time, what a loop is to do that applies gradients of an unscaled loss.

        Where it waits, it is noted at the graph that is being built, and `UnscaledNotice` has it
        said once it is known that the graph trains in float16 and that nothing scales there. What
        runs eagerly is not converted, but gradients may come from a function that is.

        Args:
            optimizer: The optimizer, to which nobody here gave a loss scale, or not for this loop.
            text: One of the notices of this module.
        """
        say = functools.partial(self._say, text, type(optimizer).__name__)
        if tf.executing_eagerly():
            if gradients_are_given():
                say()
        elif is_scaled_by_others():
            return  # which gradients are those of that loss, is seen in the graph alone
        elif self.waits:
            note(text, say)
        else:
            say()

    def _say(self, text: str, name: str) -> None:
        if text not in self._given:
            self._given.add(text)
            _LOGGER.warning(text, name)
