"""Inputs from files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tf_amp.comparison.callables import Arrays
from tf_amp.comparison.samples import read_samples, samples_for
from tf_amp.model_files import ModelError

ROWS = 7


def feature(values: Any) -> tf.train.Feature:
    values = list(np.ravel(values))
    if isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if isinstance(values[0], np.floating):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    options = tf.io.TFRecordOptions("GZIP" if path.suffix == ".gz" else "")
    with tf.io.TFRecordWriter(str(path), options) as writer:
        for row in rows:
            features = tf.train.Features(feature={k: feature(v) for k, v in row.items()})
            writer.write(tf.train.Example(features=features).SerializeToString())
    return str(path)


def rows() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {
            "image": rng.random((2, 3)).astype(np.float32),
            "tokens": rng.integers(9, size=4),
            "text": [f"row {number}".encode()],
            "not_asked_for": [1],
        }
        for number in range(ROWS)
    ]


def spec(shape: list, dtype: tf.DType = tf.float32) -> tf.TensorSpec:
    return tf.TensorSpec(shape, dtype)


INPUTS = {
    "image": spec([None, 2, 3]),
    "tokens": spec([None, None], tf.int32),
    "text": spec([None, 1], tf.string),
}


@pytest.mark.parametrize("name", ["x.tfrecord", "x.tfrecord.gz", "train-00000-of-00001"])
def test_features_become_inputs_of_their_names(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / name, rows())
    found = list(samples_for(read_samples(source, batch=3), INPUTS))
    assert [len(one["image"]) for one in found] == [3, 3, 1]
    for key in INPUTS:
        given = np.stack([np.asarray(row[key]) for row in rows()])
        assert np.array_equal(np.concatenate([one[key] for one in found]), given)
        assert found[0][key].dtype == INPUTS[key].dtype.as_numpy_dtype
    assert len(list(samples_for(read_samples(source, batch=3, count=1), INPUTS))) == 1


def test_integers_serve_floats_and_a_fixed_batch_is_kept(tmp_path: Path) -> None:
    source = write(tmp_path / "x.tfrecord", rows())
    samples = read_samples(source, batch=3)
    found = list(samples_for(samples, {"tokens": spec([5, 2, 2])}))
    assert [one["tokens"].shape for one in found] == [(5, 2, 2)]
    assert found[0]["tokens"].dtype == np.float32
    assert len(list(samples_for(samples, {"tokens": spec([None, 4])}))) == 3  # read anew


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"x": spec([None, 2])}, "lacks the feature 'x'.* It has: image, not_asked_for, te"),
        ({"image": spec([None, 5])}, r"has 6 values of 'image'.* the shape \(5,\)"),
        ({"image": spec([None, 6], tf.int32)}, "'image' as float_list, and the input is int32"),
        ({"text": spec([None, 1])}, "'text' as bytes_list, and the input is float32. Where it"),
        ({"image": spec([])}, "records cannot be its rows"),
        ({"image": spec([None, None, None])}, "has 6 values of 'image'"),
    ],
)
def test_features_that_do_not_fit(tmp_path: Path, inputs: dict, said: str) -> None:
    source = write(tmp_path / "x.tfrecord", rows())
    with pytest.raises(ModelError, match=said):
        list(samples_for(read_samples(source), inputs))


def test_rows_of_several_lengths(tmp_path: Path) -> None:
    source = write(tmp_path / "x", [{"tokens": [1, 2]}, {"tokens": [1]}])
    inputs = {"tokens": spec([None, None], tf.int64)}
    with pytest.raises(ModelError, match="'tokens' in several lengths"):
        list(samples_for(read_samples(source), inputs))
    found = samples_for(read_samples(source, batch=1), inputs)
    assert [one["tokens"].tolist() for one in found] == [[[1, 2]], [[1]]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no records at all", r"is no file of tf\.train\.Example records"),
        (b"", "There are no samples"),
    ],
)
def test_files_that_hold_no_records(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ModelError, match=said):
        list(samples_for(read_samples(str(tmp_path / "x")), INPUTS))


@pytest.mark.parametrize(
    ("samples", "passes"),
    [
        ([{"x": np.zeros((0, 3)), "training": np.array(False)}], False),
        ([{"x": np.zeros((0, 3))}, {"x": np.zeros((1, 3))}], True),
        ([{"x": np.zeros((2, 3)), "no boxes": np.zeros((0, 4))}], True),
        ([{"count": np.array(3)}], True),
        ([{}], True),
    ],
)
def test_samples_without_rows_tell_nothing(samples: list[Arrays], passes: bool) -> None:
    if passes:
        assert list(samples_for(samples, {})) == samples
        return
    with pytest.raises(ModelError, match="have no rows"):
        list(samples_for(samples, {}))


def test_records_of_another_message(tmp_path: Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "x")) as writer:
        writer.write(b"\xff\xff\xff")
    with pytest.raises(ModelError, match=r"is no file of tf\.train\.Example records"):
        list(samples_for(read_samples(str(tmp_path / "x")), INPUTS))


@pytest.mark.parametrize(
    "source",
    ["no.npz", "no_module_of_that_name:f", "json", "json:none", "json:codecs"],
)
def test_samples_that_cannot_be_read(source: str) -> None:
    with pytest.raises(ModelError):
        list(read_samples(source))


def test_an_error_of_a_function_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "function_that_fails.py").write_text("def batches(): return None.shape\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AttributeError, match="'NoneType' object"):
        read_samples("function_that_fails:batches")


def test_a_script_does_not_read_the_command_line_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script_with_arguments.py").write_text(
        "import argparse\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--rows', type=int, default=2)\n"
        "given = parser.parse_args()\n"
        "def batches(): return [{'x': [0.0] * given.rows}]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tf-amp", "diagnose", "--dtype", "float16"])
    (batch,) = read_samples("script_with_arguments:batches")
    assert len(batch["x"]) == 2
    assert sys.argv == ["tf-amp", "diagnose", "--dtype", "float16"]
