"""Static shapes of session graphs, from TensorFlow's inference."""

from __future__ import annotations

from typing import Any

import pytest
from session_facts import RunPython, facts_of


@pytest.fixture(scope="module")
def shapes(run_forked: RunPython) -> dict[str, Any]:
    return facts_of(run_forked, "session_plugin_cases.main('shapes')")["shapes"]


def test_shapes_of_all_outputs_with_unknown_dimensions(shapes: dict[str, Any]) -> None:
    x, product, split, nobody = shapes["found"]["usual:0"]
    assert (x, product) == ([[None, 8]], [[None, 4]])
    assert split == [[None, 2], [None, 2]]
    assert nobody == []


def test_a_fed_node_may_have_any_shape(shapes: dict[str, Any]) -> None:
    _, product, split, _ = shapes["found"]["inner:0"]
    assert product == [None]
    assert all(shape is None or shape[0] is None for shape in split)


def test_nothing_is_known_after_the_callback(shapes: dict[str, Any]) -> None:
    assert shapes["late"] == []
