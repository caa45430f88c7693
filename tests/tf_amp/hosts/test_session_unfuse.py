"""Fused nodes: taken apart for the pass, put back where nothing was changed."""

from __future__ import annotations

from typing import Any

import pytest
from cpu_units import HAS_BFLOAT16_UNITS
from hypothesis import given, settings
from hypothesis import strategies as st
from session_facts import RunPython, facts_of
from tensorflow.core.framework import graph_pb2, types_pb2

from tf_amp.hosts.session_unfuse import unfuse

# Case -> what the remapper makes of it without AMP, and with AMP in its second round.
FUSED = {
    "bias": "FusedMatMul[BiasAdd]",
    "relu": "FusedMatMul[BiasAdd,Relu]",
    "tanh": "FusedMatMul[BiasAdd,Tanh]",
    "leaky": "FusedMatMul[BiasAdd,LeakyRelu]",
    "gelu": "FusedMatMul[BiasAdd,GeluExact]",
    "conv_relu6": "FusedConv2D[BiasAdd,Relu6]",
    "batch_norm": "FusedBatchNormEx[Relu]",
    "batch_norm_statistics": "FusedBatchNormEx[Relu]",
    "depthwise": "FusedDepthwiseConv2dNative[BiasAdd,Relu]",
    "conv3d": "FusedConv3D[BiasAdd,Elu]",
    "bias_of_rank_2": "FusedMatMul[BiasAdd,Relu]",
    "bias_of_rank_4": "FusedConv2D[BiasAdd,Relu]",
    "scores": "FusedBatchMatMulV2[Mul,Add]",
}
NOT_FUSED_BEFORE = ("gelu_approximate", "batch_norm_residual", "batch_norm_gradient")


@pytest.fixture(scope="module")
def facts(run_python: RunPython) -> dict[str, dict[str, Any]]:
    # Where a CPU has no AVX-512, TensorFlow leaves oneDNN, which these kernels are of, off.
    return facts_of(run_python, "session_unfuse_cases.main()", {"TF_ENABLE_ONEDNN_OPTS": "1"})


@pytest.mark.parametrize("case", FUSED)
def test_second_round_fuses_in_the_target_dtype(facts: Any, case: str) -> None:
    assert facts[case]["plain"] == [f"{FUSED[case]}:float32"]
    _check_low(facts[case], FUSED[case])


def test_convolution_with_frozen_batch_norm_runs_low(facts: Any) -> None:
    assert facts["conv_batch_norm"]["plain"] == ["FusedConv2D[FusedBatchNorm,Relu]:float32"]
    _check_low(facts["conv_batch_norm"], "FusedBatchNormEx[Relu]")


def _check_low(found: dict[str, Any], fused: str) -> None:
    """Asserts that a step is fused in bfloat16, or left apart where oneDNN has no such kernel."""
    if HAS_BFLOAT16_UNITS or found["low"]:
        assert found["low"] == [f"{fused}:bfloat16"]
    assert found["low_ops"]
    assert all(op.endswith(":bfloat16") for op in found["low_ops"])


@pytest.mark.parametrize("case", [*FUSED, "conv_batch_norm", *NOT_FUSED_BEFORE])
def test_values_and_untouched_graphs(facts: Any, case: str) -> None:
    found = facts[case]
    assert 0 < found["error"] < 0.02
    assert 0 < found["half_error"] < 0.004
    assert (found["restored"], found["exact"]) == (True, True)


@pytest.mark.parametrize(
    "case",
    ["relu", "gelu", "conv_relu6", "conv_batch_norm", "bias_of_rank_2", "bias_of_rank_4"],
)
def test_float16_on_a_cpu_is_left_to_kernels_that_run(facts: Any, case: str) -> None:
    assert facts[case]["half_matrix_ops"][0].endswith("float16")


def _node(graph: Any, name: str, op: str, inputs: list[str], **attributes: Any) -> str:
    node = graph.node.add(name=name, op=op, input=inputs)
    node.attr["T"].type = types_pb2.DT_FLOAT
    for key, value in attributes.items():
        if isinstance(value, list):
            node.attr[key].list.s.extend(item.encode() for item in value)
        elif isinstance(value, bool):
            node.attr[key].b = value
        elif isinstance(value, int):
            node.attr[key].i = value
        else:
            node.attr[key].s = value.encode()
    return name


CHAINS = st.lists(
    st.sampled_from(["BiasAdd", "Add", "Relu", "LeakyRelu", "GeluExact", "FusedBatchNorm"]),
    min_size=1,
    max_size=3,
)
KINDS = st.sampled_from(["_FusedMatMul", "_FusedConv2D", "_FusedBatchNormEx", "Plain", "Gradient"])


@st.composite
def fused_graphs(draw: st.DrawFn) -> graph_pb2.GraphDef:
    """A chain of fused and plain nodes, each reading any output before it."""
    graph = graph_pb2.GraphDef()
    outputs = [_node(graph, f"x{i}", "Placeholder", []) for i in range(3)]

    def some() -> str:
        return draw(st.sampled_from(outputs))

    for i in range(draw(st.integers(1, 6))):
        kind, name = draw(KINDS), f"n{i}"
        controls = [f"^{some().split(':')[0]}"] if draw(st.booleans()) else []
        if kind == "Plain":
            _node(graph, name, "AddV2", [some(), some(), *controls])
        elif kind == "_FusedBatchNormEx":
            side = draw(st.integers(0, 1))
            mode = draw(st.sampled_from(["Identity", "Relu"]))
            inputs = [some() for _ in range(5 + side)]
            _node(
                graph,
                name,
                kind,
                inputs + controls,
                num_side_inputs=side,
                activation_mode=mode,
                is_training=True,
            )
            outputs += [f"{name}:{port}" for port in range(1, 6)]
        elif kind == "Gradient":
            mode = draw(st.sampled_from(["Identity", "Relu"]))
            inputs = [some() for _ in range(8)]
            _node(graph, name, "_FusedBatchNormGradEx", inputs + controls, activation_mode=mode)
            outputs += [f"{name}:{port}" for port in (1, 2, 5)]
        else:
            steps = draw(CHAINS)
            count = sum({"BiasAdd": 1, "Add": 1, "FusedBatchNorm": 4}.get(s, 0) for s in steps)
            inputs = [some() for _ in range(2 + count)]
            _node(graph, name, kind, inputs + controls, fused_ops=steps, num_args=count)
        outputs.append(name)
    return graph


def _check_resolves(graph: graph_pb2.GraphDef) -> None:
    """Every input exists, names are unique, and the node order is still topological."""
    seen: set[str] = set()
    for node in graph.node:
        for name in node.input:
            assert name.lstrip("^").split(":")[0] in seen, (node.name, name)
        assert node.name not in seen
        seen.add(node.name)


@settings(max_examples=150, deadline=None)
@given(graph=fused_graphs())
def test_putting_back_undoes_taking_apart(graph: graph_pb2.GraphDef) -> None:
    before = graph.SerializeToString(deterministic=True)
    apart = unfuse(graph)
    assert graph.SerializeToString(deterministic=True) == before
    assert not any(node.op.startswith("_Fused") for node in apart.graph.node)
    _check_resolves(apart.graph)
    assert apart.put_back(apart.graph) == graph


@settings(max_examples=150, deadline=None)
@given(graph=fused_graphs(), data=st.data())
def test_changed_groups_stay_apart_and_the_graph_stays_whole(
    graph: graph_pb2.GraphDef, data: st.DataObject
) -> None:
    apart = unfuse(graph)
    rewritten = graph_pb2.GraphDef()
    rewritten.CopyFrom(apart.graph)
    changed = data.draw(st.sets(st.sampled_from([node.name for node in rewritten.node])))
    for node in rewritten.node:
        if node.name in changed:
            node.attr["T"].type = types_pb2.DT_BFLOAT16
    restored = apart.put_back(rewritten)
    _check_resolves(restored)
    names = {node.name for node in restored.node}
    assert {node.name for node in graph.node} <= names
    assert changed <= names


@settings(max_examples=100, deadline=None)
@given(graph=fused_graphs(), data=st.data())
def test_preserved_outputs_keep_their_value(graph: graph_pb2.GraphDef, data: st.DataObject) -> None:
    """A preserved node ends with the op it ended with: batch norms stay whole."""
    preserve = data.draw(st.sets(st.sampled_from([node.name for node in graph.node])))
    apart = unfuse(graph, preserve)
    nodes = {node.name: node for node in apart.graph.node}
    for node in graph.node:
        if node.name in preserve and "BatchNorm" in node.op:
            assert nodes[node.name].op == node.op
            assert node.name in apart.whole


def test_a_graph_without_fused_nodes_is_the_same_object() -> None:
    graph = graph_pb2.GraphDef()
    _node(graph, "x", "Placeholder", [])
    apart = unfuse(graph)
    assert apart.graph is graph
    assert apart.put_back(graph) is graph


@pytest.mark.parametrize(
    "steps", [["Softmax"], ["BiasAdd", "SomethingNew"], ["BiasAdd", "BiasAdd"]]
)
def test_unknown_chains_stay_whole(steps: list[str]) -> None:
    graph = graph_pb2.GraphDef()
    for name in ("a", "b", "bias"):
        _node(graph, name, "Placeholder", [])
    _node(graph, "fused", "_FusedMatMul", ["a", "b", "bias"], fused_ops=steps, num_args=1)
    apart = unfuse(graph)
    assert apart.graph is graph
    assert apart.whole == ("fused",)


def test_gelu_in_a_loop_stays_whole() -> None:
    graph = graph_pb2.GraphDef()
    for name in ("a", "b", "bias"):
        _node(graph, name, "Enter", [])
    steps = ["BiasAdd", "GeluExact"]
    _node(graph, "fused", "_FusedMatMul", ["a", "b", "bias"], fused_ops=steps, num_args=1)
    assert unfuse(graph).whole == ("fused",)


def test_batch_norm_readers_follow_the_activation() -> None:
    graph = graph_pb2.GraphDef()
    _node(graph, "x", "Placeholder", [])
    _node(graph, "norm", "_FusedBatchNormEx", ["x"] * 5, activation_mode="Relu", num_side_inputs=0)
    _node(graph, "reader", "AddV2", ["norm", "norm:1"])
    _node(graph, "explicit", "AddV2", ["norm:0", "norm:2", "^norm"])
    nodes = {node.name: node for node in unfuse(graph).graph.node}
    relu = "norm/TfAmpUnfused1Relu"
    assert nodes[relu].op == "Relu"
    assert list(nodes[relu].input) == ["norm"]
    assert list(nodes["reader"].input) == [relu, "norm:1"]
    assert list(nodes["explicit"].input) == [relu, "norm:2", "^norm"]


def test_devices_colocation_and_control_inputs_are_kept() -> None:
    graph = graph_pb2.GraphDef()
    for name in ("a", "b", "bias", "before"):
        _node(graph, name, "Placeholder", [])
    inputs = ["a", "b", "bias", "^before"]
    _node(graph, "fused", "_FusedMatMul", inputs, fused_ops=["BiasAdd"], num_args=1)
    graph.node[-1].device = "/device:GPU:0"
    graph.node[-1].attr["_class"].list.s.append(b"loc:@a")
    first, last = unfuse(graph).graph.node[-2:]
    assert list(first.input) == ["a", "b", "^before"]
    assert list(last.input) == [first.name, "bias"]
    assert {first.device, last.device} == {"/device:GPU:0"}
    assert list(first.attr["_class"].list.s) == [b"loc:@a"]
