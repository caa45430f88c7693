"""The optimizers under test: every family a TensorFlow user has, behind one small interface."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

FAMILIES = ("keras", "tf_keras", "tf_keras_legacy", "v1")


@dataclasses.dataclass(frozen=True)
class Toolbox:
    """Makes optimizers and variables of one family."""

    family: str

    def sgd(self, learning_rate: float = 0.5, **kwargs: Any) -> Any:
        if self.family == "v1":
            if "momentum" in kwargs:
                return tf.compat.v1.train.MomentumOptimizer(learning_rate, kwargs["momentum"])
            return tf.compat.v1.train.GradientDescentOptimizer(learning_rate)
        return self._optimizers().SGD(learning_rate, **kwargs)

    def adam(self, learning_rate: float = 0.1, **kwargs: Any) -> Any:
        if self.family == "v1":
            return tf.compat.v1.train.AdamOptimizer(learning_rate)
        return self._optimizers().Adam(learning_rate, **kwargs)

    def _optimizers(self) -> Any:
        return {
            "keras": keras.optimizers,
            "tf_keras": tf_keras.optimizers,
            "tf_keras_legacy": tf_keras.optimizers.legacy,
        }[self.family]

    def variable(self, value: Any) -> Any:
        value = np.asarray(value, np.float32)
        return (
            keras.Variable(value, name="w")
            if self.family == "keras"
            else tf.Variable(value, name="w")
        )

    def tensor(self, variable: Any) -> tf.Variable:
        """What a GradientTape watches."""
        return variable.value if self.family == "keras" else variable

    def optimizer_values(self, inner: Any) -> list[np.ndarray]:
        """All variables of an optimizer: slots, counters, averages."""
        variables = inner.variables() if callable(inner.variables) else inner.variables
        return [np.asarray(v.numpy() if hasattr(v, "numpy") else v) for v in variables]


@pytest.fixture(params=FAMILIES)
def toolbox(request: pytest.FixtureRequest) -> Toolbox:
    return Toolbox(request.param)


@pytest.fixture(params=["eager", "function", "xla"])
def compiled(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """How a step is run."""
    if request.param == "eager":
        return lambda function: function
    return tf.function(jit_compile=request.param == "xla")
