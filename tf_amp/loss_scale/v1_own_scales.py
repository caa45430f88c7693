"""Optimizers of TensorFlow 1 whose own `compute_gradients` scales the loss that it hands on."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_amp.loss_scale.unscaled import DIVISIONS, LEAST_SCALE
from tf_amp.patches import Patches

_HAND_ON = frozenset(("Cast", "Identity"))
_VARIABLES = frozenset(("ReadVariableOp", "Variable", "VariableV2"))
_MOST_STEPS = 32
"""More ops than any optimizer scales a loss by."""


class OwnScales:
    """Sees which losses optimizers were given, and which of them were scaled on the way.

    Args:
        patches: Collects what is replaced.
    """

    def __init__(self, patches: Patches) -> None:
        self._patches = patches
        # Of each thread: the optimizers whose `compute_gradients` runs, with their losses.
        self._local = threading.local()

    def watch(self, optimizer_class: type) -> None:
        """Hooks every `compute_gradients` of a class but that of the base class of all."""
        for owner in optimizer_class.__mro__:
            own = inspect.isfunction(owner.__dict__.get("compute_gradients"))
            if own and owner is not tf.compat.v1.train.Optimizer:
                self._patches.replace(owner, "compute_gradients", self._make_compute_gradients)

    def scaler_of(self, loss: Any) -> Any:
        """The running optimizer that scaled a loss before it handed it on, or None."""
        for optimizer, given in reversed(self._running()):
            if loss is not given and _scales(loss, given):
                return optimizer
        return None

    def _running(self) -> list[tuple[Any, Any]]:
        if not hasattr(self._local, "running"):
            self._local.running = []
        running: list[tuple[Any, Any]] = self._local.running
        return running

    def _make_compute_gradients(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compute_gradients(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            loss = args[0] if args else kwargs.get("loss")
            self._running().append((optimizer, loss))
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                self._running().pop()

        return compute_gradients


def _scales(loss: Any, given: Any) -> bool:
    """Whether a loss is a product with a variable, or with constants as large as a scale."""
    factor = 1.0
    pending = [(loss, False)]
    for _ in range(_MOST_STEPS):
        if not pending:
            break
        tensor, divides = pending.pop()
        if tensor is given or not tf.is_symbolic_tensor(tensor):
            continue
        kind, inputs = tensor.op.type, tensor.op.inputs
        constant = tf.get_static_value(tensor) if tensor.shape.rank == 0 else None
        if constant is not None:
            factor = factor / constant if divides else factor * constant
        elif kind == "Mul":
            pending += [(one, divides) for one in inputs]
        elif kind in DIVISIONS:
            pending += [(inputs[0], divides), (inputs[1], not divides)]
        elif kind in _HAND_ON:
            pending.append((inputs[0], divides))
        elif kind in _VARIABLES and tensor.shape.rank == 0 and not divides:
            return True
    return factor >= LEAST_SCALE
