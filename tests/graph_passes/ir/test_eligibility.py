from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from graph_text import graph, inferred_shapes
from tensorflow.core.framework import types_pb2

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


STEPS = ", strides=[1, 1, 1, 1], padding='SAME'"
IN_3D = ", strides=[1, 1, 1, 1, 1], padding='SAME'"
DILATED, FIRST = ", dilations=[1, 2, 2, 1]", ", data_format='NCHW'"


@pytest.mark.parametrize(
    ("node", "runs"),
    [
        (f"Conv2D(image, whole{STEPS})", True),
        (f"Conv2D(image, whole{STEPS}{DILATED})", True),
        (f"Conv2D(image, part{STEPS})", True),
        (f"Conv2D(first, whole{STEPS}{FIRST})", False),
        (f"DepthwiseConv2dNative(image, whole{STEPS})", True),
        (f"DepthwiseConv2dNative(image, whole{STEPS}{DILATED})", False),
        (f"Conv2DBackpropInput(sizes, whole, image{STEPS})", True),
        (f"Conv2DBackpropInput(sizes, part, image{STEPS})", False),
        (f"Conv2DBackpropFilter(image, wholes, image{STEPS})", True),
        (f"Conv2DBackpropFilter(image, parts, image{STEPS})", False),
        (f"Conv2DBackpropFilter(image, wholes, image{STEPS}{DILATED})", False),
        (f"Conv3D(volume, cube{IN_3D})", True),
        (f"Conv3D(volume, cube{IN_3D}, dilations=[1, 2, 2, 2, 1])", False),
        (f"AvgPool(first, ksize=[1, 1, 2, 2]{STEPS}{FIRST})", False),
        (f"MaxPool(image, ksize=[1, 2, 2, 1]{STEPS})", True),
        (f"BiasAdd(first, bias{FIRST})", True),
    ],
)
def test_what_only_onednn_runs_on_a_cpu(node: str, runs: bool) -> None:
    """In float16 it does not; what is refused here TensorFlow refuses to run."""
    text = f"""
image = Placeholder(dtype=float32, shape=[2, 12, 12, 16])
first = Placeholder(dtype=float32, shape=[2, 16, 12, 12])
volume = Placeholder(dtype=float32, shape=[2, 4, 4, 4, 16])
whole = Placeholder(dtype=float32, shape=[3, 3, 16, 16])
part = Placeholder(dtype=float32, shape=[3, 3, 8, 16])
cube = Placeholder(dtype=float32, shape=[3, 3, 3, 16, 16])
bias = Placeholder(dtype=float32, shape=[16])
sizes = Const([2, 12, 12, 16], [4])
wholes = Const([3, 3, 16, 16], [4])
parts = Const([3, 3, 8, 16], [4])
y = {node}
"""
    graph_def = graph(text)
    view = view_body(graph_def, inferred_shapes(graph_def))
    config = PrecisionConfig(target_dtype="float16", device="CPU")
    found = find_ineligible(view, (), config)
    assert found == ({} if runs else {view.index["y"]: Reason.NO_KERNEL})
    for other in (
        dataclasses.replace(config, target_dtype="bfloat16"),
        dataclasses.replace(config, device="GPU"),
        dataclasses.replace(config, parity=True),
    ):
        assert find_ineligible(view, (), other) == {}
    for one in graph_def.node:
        for name in ("dtype", "T"):
            if one.attr[name].type == types_pb2.DT_FLOAT:
                one.attr[name].type = types_pb2.DT_HALF
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.graph_util.import_graph_def(graph_def, name="")
        fed = {
            tensor: np.ones(tensor.shape, np.float16)
            for op in tf.compat.v1.get_default_graph().get_operations()
            if op.type == "Placeholder"
            for tensor in op.outputs
        }
        with contextlib.nullcontext() if runs else pytest.raises(tf.errors.OpError):
            session.run("y:0", fed)


def test_signature_of_a_function_is_preserved() -> None:
    function = graph("def f(x: float32):\n    y = Relu(x)\n    return y").library.function[0]
    view = view_body(function)
    found = find_ineligible(view, (), PrecisionConfig())
    assert [view.nodes[number].op for number in found] == ["_Arg", "_Retval"]
