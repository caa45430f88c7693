"""Classes of ops: data that names ops of TensorFlow, each once."""

from __future__ import annotations

import pytest
from tensorflow.python.framework import op_def_registry

from graph_passes.policy.op_classes import CLASSES, ops_of
from graph_passes.policy.toml import read_shipped


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_names_ops_of_this_tensorflow_once(name: str) -> None:
    ops = CLASSES[name]
    assert [op for op in ops if op_def_registry.get(op) is None] == []
    assert list(ops) == sorted(ops, key=str.lower) and len(ops_of(name)) == len(ops)


def test_products_are_what_is_allowed_as_shipped() -> None:
    files = [f"lists/{dtype}.toml" for dtype in ("float16", "bfloat16")]
    rows = [row for file in files for row in read_shipped(file).items()]
    assert ops_of("products") == {op for op, row in rows if row["list"] == "allow"}


def test_a_class_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError, match="producs"):
        ops_of("matrix_producs")
