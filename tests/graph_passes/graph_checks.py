"""Post-conditions of a rewrite, checked without any code of the pass.

TensorFlow's own importer is the judge of dtypes: it refuses a graph in which the two ends of an
edge disagree, or whose nodes have attributes that their op does not admit.
"""

from __future__ import annotations

from collections import Counter

import graph_diff
import tensorflow as tf
from tensorflow.core.framework import function_pb2, graph_pb2, node_def_pb2, types_pb2
from tensorflow.python.framework import function_def_to_graph, kernels, op_def_registry

FLOAT_DTYPES = {types_pb2.DT_FLOAT, types_pb2.DT_HALF, types_pb2.DT_BFLOAT16}


def check(
    before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, *, device: str, preserve: tuple[str, ...]
) -> None:
    """Asserts all post-conditions of a rewrite for a device type."""
    assert_importable(after)
    assert_calls_agree(after)
    assert_kept(before, after, preserve)
    assert_kernels(before, after, device)
    assert_casts_needed(before, after)


def assert_importable(graph_def: graph_pb2.GraphDef) -> None:
    """The main graph and each function's body are graphs that TensorFlow accepts."""
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
    for function in graph_def.library.function:
        body, _ = function_def_to_graph.function_def_to_graph_def(function)
        body.library.CopyFrom(graph_def.library)
        with tf.Graph().as_default():
            tf.graph_util.import_graph_def(body, name="")


def assert_calls_agree(graph_def: graph_pb2.GraphDef) -> None:
    """The operands and results of a node that runs functions have the functions' dtypes."""
    signatures = {f.signature.name: f.signature for f in graph_def.library.function}
    for node in graph_diff.all_nodes(graph_def).values():
        if node.op == "SymbolicGradient":  # it has the gradients' signature, not the function's
            continue
        called = [v.func.name for v in node.attr.values() if v.WhichOneof("value") == "func"]
        called += [f.name for value in node.attr.values() for f in value.list.func]
        for name in called:
            if name not in signatures:
                continue
            taken = [arg.type for arg in signatures[name].input_arg]
            made = [arg.type for arg in signatures[name].output_arg]
            given = {"T", "Tin", "Tout"} & set(node.attr)
            wants = {attr: list(node.attr[attr].list.type) for attr in given}
            assert wants.get("T", taken) == taken, f"{node.name} does not fit {name}"
            assert wants.get("Tin", taken) == taken, f"{node.name} does not fit {name}"
            if node.attr["cond"].func.name != name:
                assert wants.get("T", made) == made, f"{node.name} does not fit {name}"
                assert wants.get("Tout", made) == made, f"{node.name} does not fit {name}"


def assert_kept(
    before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, preserve: tuple[str, ...]
) -> None:
    """No node is lost; control inputs, devices, preserved nodes and signatures stay."""
    old, new = graph_diff.all_nodes(before), graph_diff.all_nodes(after)
    assert old.keys() <= new.keys()
    for key, node in old.items():
        now = new[key]
        assert now.device == node.device
        assert [i for i in now.input if i[0] == "^"] == [i for i in node.input if i[0] == "^"]
        assert len(now.input) == len(node.input)
        assert set(now.attr) >= set(node.attr)
    changed = {(slot.function, slot.node) for slot in graph_diff.retyped(before, after)}
    assert not changed & {("", name) for name in preserve}
    assert [f.signature for f in after.library.function] == [
        f.signature for f in before.library.function
    ]
    assert [dict(f.control_ret) for f in after.library.function] == [
        dict(f.control_ret) for f in before.library.function
    ]


def assert_kernels(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef, device: str) -> None:
    """Every retyped node has a kernel on the device type for all its attributes."""
    nodes = graph_diff.all_nodes(after)
    for slot in graph_diff.retyped(before, after):
        node = nodes[slot.function, slot.node]
        assert has_kernel(node, device), f"{slot} ({node.op}) has no kernel on the {device}"


def has_kernel(node: node_def_pb2.NodeDef, device: str) -> bool:
    """Whether some kernel registered for the device type takes the node's attributes."""
    registered = kernels.get_registered_kernels_for_op(node.op).kernel
    here = [k for k in registered if k.device_type == device and not k.label]
    here = here or [k for k in registered if k.device_type == "DEFAULT"]
    defaults = {attr.name: attr.default_value for attr in op_def_registry.get(node.op).attr}
    for kernel in here:
        for constraint in kernel.constraint:
            name = constraint.name
            value = node.attr[name] if name in node.attr else defaults[name]
            types = set(value.list.type) or {value.type}
            legal = set(constraint.allowed_values.list.type)
            if legal and not types <= legal:
                break
        else:
            return True
    return False


def assert_casts_needed(before: graph_pb2.GraphDef, after: graph_pb2.GraphDef) -> None:
    """Only Casts are added; each is read, changes the dtype, is the only one of its kind for its
    tensor, has its producer's device, and feeds no Cast back."""
    _assert_casts_needed(before.node, after.node)
    for old, new in zip(before.library.function, after.library.function, strict=True):
        _assert_casts_needed(old.node_def, new.node_def, new)


def _assert_casts_needed(
    before: list[node_def_pb2.NodeDef],
    after: list[node_def_pb2.NodeDef],
    function: function_pb2.FunctionDef | None = None,
) -> None:
    names = {node.name for node in before}
    nodes = {node.name: node for node in after}
    assert len(nodes) == len(after), "two nodes have one name"
    casts = [node for node in after if node.name not in names]
    read = {name.partition(":")[0] for node in after for name in node.input}
    read |= {tensor.partition(":")[0] for tensor in (function.ret.values() if function else ())}
    for cast in casts:
        assert cast.op == "Cast"
        assert cast.name in read, f"nothing reads {cast.name}"
        source, target = cast.attr["SrcT"].type, cast.attr["DstT"].type
        assert source != target
        assert {source, target} <= FLOAT_DTYPES
        producer = nodes.get(cast.input[0].partition(":")[0])
        if producer is not None:
            assert cast.device == producer.device
            assert producer not in casts, f"{cast.name} casts what {producer.name} cast"
    twice = Counter((_tensor(cast.input[0]), cast.attr["DstT"].type) for cast in casts)
    assert not [key for key, count in twice.items() if count > 1]


def _tensor(name: str) -> str:
    return name.removesuffix(":0") if name.count(":") == 1 else name
