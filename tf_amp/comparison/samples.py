"""Inputs to compare models on."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from tf_amp.comparison.callables import Arrays
from tf_amp.model_files import ModelError

_SIZE = 32
"""The length of an unknown dimension other than the first."""
_TOKENS = 8
"""Random integers are below this: nobody tells how many an embedding has."""


@dataclasses.dataclass(frozen=True)
class Examples:
    """A file of tf.train.Example records, each of which is a row of a batch.

    Attributes:
        path: the file.
        batch: how many rows make a batch, where a signature leaves that open.
        count: how many batches are taken; None for all.
    """

    path: Path
    batch: int
    count: int | None = None

    def batches(self, inputs: Mapping[str, tf.TensorSpec]) -> Iterator[Arrays]:
        """The features that have the names of inputs, in the shapes and dtypes of these.

        Args:
            inputs: name -> shape, the rows first, and dtype.

        Raises:
            ModelError: the file holds something else, or a feature is missing or does not fit.
        """
        for name, spec in inputs.items():
            if not spec.shape.rank:
                raise ModelError(
                    f"The input {name!r} has the shape {spec.shape}: records cannot be its rows. "
                    "Give an .npz file or module:function."
                )
        fixed = {spec.shape[0] for spec in inputs.values()} - {None}
        size = max(fixed, default=self.batch)
        rows = itertools.islice(self._rows(inputs), self.count and self.count * size)
        told = 0
        while batch := list(itertools.islice(rows, size)):
            if len(batch) < size and fixed and told:
                return
            told += 1
            yield {name: self._stacked(name, [row[name] for row in batch]) for name in inputs}

    def _rows(self, inputs: Mapping[str, tf.TensorSpec]) -> Iterator[Arrays]:
        kind = "GZIP" if self.path.suffix == ".gz" else ""
        records = tf.data.TFRecordDataset(str(self.path), compression_type=kind)
        try:
            for number, record in enumerate(records.as_numpy_iterator()):
                features = tf.train.Example.FromString(record).features.feature
                where = f"record {number} of {str(self.path)!r}"
                yield {name: _of_feature(where, features, name, inputs[name]) for name in inputs}
        except (tf.errors.OpError, DecodeError) as error:
            raise ModelError(
                f"{str(self.path)!r} is no file of tf.train.Example records: {error}"
            ) from error

    def _stacked(self, name: str, rows: list[np.ndarray]) -> np.ndarray:
        try:
            return np.stack(rows)
        except ValueError as error:
            raise ModelError(
                f"The records of {str(self.path)!r} have {name!r} in several lengths, which make "
                "no batch. Take batches of 1, or give module:function."
            ) from error


def _of_feature(
    where: str, features: Mapping[str, Any], name: str, spec: tf.TensorSpec
) -> np.ndarray:
    """A feature as one row of an input."""
    if name not in features:
        raise ModelError(
            f"The {where} lacks the feature {name!r}, an input of the model. It has: "
            f"{', '.join(sorted(features)) or 'none'}."
        )
    kind = features[name].WhichOneof("kind") or "float_list"
    legal = {"bytes_list"} if spec.dtype == tf.string else {"int64_list"}
    if kind not in legal | ({"float_list"} if spec.dtype.is_floating else set()):
        raise ModelError(
            f"The {where} has {name!r} as {kind}, and the input is {spec.dtype.name}. Where it has "
            "to be decoded first, give module:function."
        )
    values = np.array(getattr(features[name], kind).value, spec.dtype.as_numpy_dtype)
    shape = [-1 if n is None else n for n in spec.shape.as_list()[1:]]
    try:
        return values.reshape(shape)
    except ValueError as error:
        raise ModelError(
            f"The {where} has {values.size} values of {name!r}, and a row of the input has the "
            f"shape {spec.shape[1:]}."
        ) from error


Samples: TypeAlias = Iterable[Arrays] | Examples


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
            f"{spec.shape}. Give samples: an .npz or TFRecord file, or module:function."
        )
    free = [batch, *[_SIZE] * spec.shape.rank]
    shape = [free[min(i, 1)] if n is None else n for i, n in enumerate(spec.shape.as_list())]
    if spec.dtype.is_floating:
        return rng.standard_normal(shape).astype(np.float32)
    if spec.dtype.is_bool:
        return rng.integers(2, size=shape).astype(bool)
    return rng.integers(_TOKENS, size=shape).astype(spec.dtype.as_numpy_dtype)


def read_samples(source: str, *, batch: int = 8, count: int | None = None) -> Samples:
    """Samples from a file or a Python function.

    Args:
        source: an `.npz` file with an array for each input, of which there is one sample; a file of
            tf.train.Example records (TFRecord; of gzip where it ends in .gz); or "module:function"
            of a function without arguments that gives dicts, one for a sample.
        batch: how many records make a sample.
        count: of records, how many samples are taken; None for all.

    Raises:
        ModelError: there is no such file or function, or it gives something else.
    """
    if source.endswith(".npz"):
        try:
            with np.load(source, allow_pickle=False) as stored:
                return [dict(stored)]
        except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
            raise ModelError(f"{source!r} cannot be read as arrays: {error}") from error
    if Path(source).is_file():
        return Examples(Path(source), batch, count)
    return _checked(source, call_named(source, "Samples are an .npz or TFRecord file, or"))


def call_named(source: str, otherwise: str) -> Any:
    """What a Python function without arguments gives.

    Args:
        source: "module:function"; modules of the working directory are found too. A script that
            reads its command line as it is imported finds it empty.
        otherwise: what else might stand there, for the message.

    Raises:
        ModelError: there is no such function.
    """
    module, _, function = source.partition(":")
    if not function:
        raise ModelError(f"{otherwise} module:function. There is no file {source!r}.")
    sys.path.insert(0, os.getcwd())
    command_line, sys.argv = sys.argv, [module]
    try:
        try:
            named = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ModelError(f"{source!r} cannot be loaded: {error}") from error
        if not callable(named):
            raise ModelError(f"{source!r} is no function but of type {type(named).__name__}.")
        return named()
    finally:
        sys.path.remove(os.getcwd())
        sys.argv = command_line


def samples_for(
    samples: Samples, inputs: Mapping[str, tf.TensorSpec], count: int | None = None
) -> Iterator[Arrays]:
    """Yields the samples for a signature.

    Args:
        samples: as `read_samples` gives them.
        inputs: what the signature takes: name -> shape and dtype.
        count: how many are taken; None for all.

    Raises:
        ModelError: there are none, or none of them has a row.
    """
    told = with_rows = False
    given = samples.batches(inputs) if isinstance(samples, Examples) else samples
    for sample in itertools.islice(given, count):
        arrays = [value for value in sample.values() if np.ndim(value)]
        told, with_rows = True, with_rows or not arrays or any(map(np.size, arrays))
        yield sample
    if not told:
        raise ModelError("There are no samples.")
    if not with_rows:
        raise ModelError("The samples have no rows.")


def _checked(source: str, made: Any) -> Iterator[Arrays]:
    if not isinstance(made, Iterable) or isinstance(made, Mapping):
        raise ModelError(
            f"{source!r} must give several dicts from input names to arrays, such as a list of "
            f"them. Received one value of type {type(made).__name__}."
        )
    for sample in made:
        if not isinstance(sample, Mapping):
            raise ModelError(
                f"{source!r} must give dicts from input names to arrays. Received a value of type "
                f"{type(sample).__name__}."
            )
        yield {name: np.asarray(value) for name, value in sample.items()}
