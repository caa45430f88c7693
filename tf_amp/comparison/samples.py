"""Inputs to compare models on."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf_amp.comparison.callables import Arrays
from tf_amp.model_files import ModelError

_SIZE = 32
"""The length of an unknown dimension other than the first."""
_TOKENS = 8
"""Random integers are below this: nobody tells how many an embedding has."""


def random_samples(
    inputs: Mapping[str, tf.TensorSpec], *, seed: int, batch: int, count: int
) -> Iterator[Arrays]:
    """Random values by signature: normal floats, integers from 0 to 7, booleans.

    Args:
        inputs: name -> shape and dtype.
        seed: of the generator; the same gives the same.
        batch: the length of an unknown first dimension.
        count: how many samples.

    Raises:
        ModelError: an input is a string, or of a rank that is not known.
    """
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield {name: _random(name, inputs[name], rng, batch) for name in sorted(inputs)}


def _random(name: str, spec: tf.TensorSpec, rng: np.random.Generator, batch: int) -> np.ndarray:
    if spec.shape.rank is None or not (
        spec.dtype.is_floating or spec.dtype.is_integer or spec.dtype.is_bool
    ):
        raise ModelError(
            f"Nothing random can be made for the input {name!r} of {spec.dtype.name} and shape "
            f"{spec.shape}. Give samples: an .npz file, or module:function."
        )
    free = [batch, *[_SIZE] * spec.shape.rank]
    shape = [free[min(i, 1)] if n is None else n for i, n in enumerate(spec.shape.as_list())]
    if spec.dtype.is_floating:
        return rng.standard_normal(shape).astype(np.float32)
    if spec.dtype.is_bool:
        return rng.integers(2, size=shape).astype(bool)
    return rng.integers(_TOKENS, size=shape).astype(spec.dtype.as_numpy_dtype)


def read_samples(source: str) -> Iterable[Arrays]:
    """Samples from a file or a Python function.

    Args:
        source: an `.npz` file with an array for each input, of which there is one sample; or
            "module:function" of a function without arguments that gives dicts, one for a sample.

    Raises:
        ModelError: there is no such file or function, or it gives something else.
    """
    if source.endswith(".npz"):
        try:
            with np.load(source, allow_pickle=False) as stored:
                return [dict(stored)]
        except (OSError, ValueError) as error:
            raise ModelError(f"{source!r} cannot be read as arrays: {error}") from error
    module, _, function = source.partition(":")
    if not function or Path(source).exists():
        raise ModelError(f"Samples are an .npz file or module:function. Received: {source!r}.")
    sys.path.insert(0, os.getcwd())
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ModelError(f"The samples {source!r} cannot be loaded: {error}") from error
    finally:
        sys.path.remove(os.getcwd())
    return _checked(source, made)


def _checked(source: str, made: Any) -> Iterator[Arrays]:
    for sample in made:
        if not isinstance(sample, Mapping):
            raise ModelError(
                f"{source!r} must give dicts from input names to arrays. Received a value of type "
                f"{type(sample).__name__}."
            )
        yield {name: np.asarray(value) for name, value in sample.items()}
