"""What a program of the field trials is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Running:
    """A program that has built its model and its data.

    Attributes:
        step: Takes one step, an epoch of `fit` or a round of a custom loop; returns its loss. The
            first one traces.
        outputs: Computes what the program is for: predictions, samples, a model loaded again.
            Name -> a tensor, or a list or dict of some. They are compared with float32's.
    """

    step: Callable[[], Any]
    outputs: Callable[[], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Program:
    """One program. Nothing of its package is imported before `build` is called.

    Attributes:
        name: "package/what".
        needs: Modules that must be installed.
        build: Builds the model and its data, with all seeds set.
        environment: Variables that its package asks for.
        may_warn: A regular expression for warnings of tf_amp's that are right for this program.
    """

    name: str
    needs: tuple[str, ...]
    build: Callable[[], Running]
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    may_warn: str | None = None


LEGACY_KERAS: Mapping[str, str] = {"TF_USE_LEGACY_KERAS": "1"}
"""What a package asks for that knows `tf.keras` only as Keras 2."""


def fitted(model: Any, data: Any, examples: Any) -> Running:
    """Returns a compiled model that is trained on a data set, and predicts.

    Args:
        model: Of Keras 3 or tf_keras.
        data: A `tf.data.Dataset` of batches, with labels.
        examples: What `predict` is given.
    """
    return Running(
        step=lambda: model.fit(data, verbose=0).history["loss"][-1],
        outputs=lambda: {"predict": model.predict(examples, batch_size=2, verbose=0)},
    )
