from __future__ import annotations

import pytest
from graph_text import graph

from graph_passes import PrecisionConfig, Reason
from graph_passes.ir.eligibility import find_ineligible, node_name
from graph_passes.ir.view import view_body


@pytest.mark.parametrize("reference", ["name", "name:0", "name:12", "^name"])
def test_node_that_a_reference_names(reference: str) -> None:
    assert node_name(reference) == "name"


def ineligible(text: str, device: str, *preserve: str) -> dict[str, Reason]:
    view = view_body(graph(text))
    found = find_ineligible(view, preserve, PrecisionConfig(device=device))
    return {view.nodes[number].name: reason for number, reason in found.items()}


@pytest.mark.parametrize(
    ("device", "place", "eligible"),
    [
        ("GPU", "", True),
        ("GPU", "/device:GPU:0", True),
        ("GPU", "/job:worker/replica:0/task:1/device:GPU:3", True),
        ("GPU", "/gpu:0", True),
        ("GPU", "/device:CPU:0", False),
        ("CPU", "/device:CPU:0", True),
        ("CPU", "/job:gpu_workers/task:0/device:CPU:0", True),
        ("CPU", "/device:GPU:0", False),
        ("GPU", "/device:TPU:0", False),
        # TensorFlow chooses a device of the task.
        ("GPU", "/job:worker", True),
        ("CPU", "/job:worker/replica:0/task:1", True),
    ],
)
def test_device_of_a_node(device: str, place: str, eligible: bool) -> None:
    found = ineligible(f"x = Const(0.5, [4]) @ '{place}'", device)
    assert found == ({} if eligible else {"x": Reason.OTHER_DEVICE})


def test_where_there_is_no_other_device_all_is_on_this_one() -> None:
    view = view_body(graph("x = Const(0.5, [4]) @ '/device:GPU:0'"))
    config = PrecisionConfig(target_dtype="bfloat16", device="CPU", only_device=True)
    assert find_ineligible(view, (), config) == {}


def test_preserved_nodes_may_be_named_as_tensors_and_need_not_exist() -> None:
    found = ineligible("x = Const(0.5, [4])\ny = Relu(x)\nz = Relu(y)", "GPU", "y:0", "^z", "other")
    assert found == {"y": Reason.PRESERVED, "z": Reason.PRESERVED}


def test_signature_of_a_function_is_preserved() -> None:
    function = graph("def f(x: float32):\n    y = Relu(x)\n    return y").library.function[0]
    view = view_body(function)
    found = find_ineligible(view, (), PrecisionConfig())
    assert [view.nodes[number].op for number in found] == ["_Arg", "_Retval"]
