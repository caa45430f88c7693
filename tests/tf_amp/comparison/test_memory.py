"""What a model takes of memory, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tf_amp.comparison.compare import compare
from tf_amp.comparison.memory import peak_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counted by Linux alone")


def save(path: Path, numbers: int) -> Path:
    """A model with a weight of so many MiB, that makes three tensors as large."""
    module = tf.Module()
    module.weight = tf.Variable(tf.ones([numbers, 2**18]))

    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"y": tf.reduce_sum(tf.exp(module.weight * x), 1)}

    module.call = tf.function(call, input_signature=[tf.TensorSpec([], name="x")])
    tf.saved_model.save(module, str(path), signatures=module.call)
    return path


@pytest.mark.slow
def test_a_larger_model_takes_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_ENABLE_AUTO_MIXED_PRECISION", "1")
    small, large = save(tmp_path / "small", 1), save(tmp_path / "large", 64)
    found = compare(large, large, [{"x": np.float32(1)}], rounds=0, memory=True)
    fed = {"serving_default": {"x": np.float32(1)}}
    few, (many, again) = peak_memory(small, fed), found.memory
    assert few is not None and many is not None and again is not None
    # The weight and the exponential of it, 64 MiB each, and what reading the file takes, less what
    # the small one takes for that.
    assert 1.8 * 63 * 2**20 < many - few < 8 * 63 * 2**20
    assert again == pytest.approx(many, rel=0.25)


def test_what_cannot_be_measured_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "tf_amp"):
        assert peak_memory(tmp_path / "nothing", {}) is None
    assert "The memory of" in caplog.text and "There is no file or directory" in caplog.text
