"""TensorFlow's own mixed-precision pass, run alone on a graph, and what parity mode does otherwise.

For float16 that pass plans for a GPU, which it need not find if its own variable for that was set
when the process began to use it; for bfloat16 it plans for a CPU, and that variable must not be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from tensorflow.core.framework import graph_pb2, types_pb2
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2, rewriter_config_pb2
from tensorflow.python.framework import errors, op_def_registry
from tensorflow.python.grappler import tf_optimizer

from graph_passes import PrecisionConfig, rewrite_graph_def
from graph_passes.policy.config import Device, TargetDtype
from tf_amp.tool_error import ToolError

FIELDS = {
    "float16": "auto_mixed_precision",
    "bfloat16": "auto_mixed_precision_onednn_bfloat16",
}
"""Target dtype -> the graph optimizer that is the pass."""
DEVICES: dict[TargetDtype, Device] = {"float16": "GPU", "bfloat16": "CPU"}
"""Target dtype -> the device that the pass plans for."""
FETCHES = "train_op"
"""The collection of a MetaGraphDef that names what is fetched."""
Vertex = tuple[str, str, str]
"""Function ("" for the main graph), node, type attribute."""


class UpstreamError(ToolError):
    """The pass gave no graph: its bfloat16 version makes some graphs with loops invalid."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What two passes make of one graph.

    Attributes:
        type_attributes: how many both results have.
        retyped: how many ours has in another dtype than the graph had.
        casts: how many Casts ours has more than the graph had.
        differences: type attribute -> its dtype in ours and in theirs, "absent" where the node is
            in one result alone.
    """

    type_attributes: int
    retyped: int
    casts: int
    differences: dict[Vertex, tuple[str, str]]


def only(optimizer: str) -> config_pb2.ConfigProto:
    """A configuration in which Grappler runs one optimizer once, on graphs of any size."""
    rewriter = rewriter_config_pb2.RewriterConfig
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    for field in options.DESCRIPTOR.fields:
        if field.enum_type is not None and field.enum_type.name == "Toggle":
            setattr(options, field.name, rewriter.OFF)
    setattr(options, optimizer, rewriter.ON)
    options.memory_optimization = rewriter.NO_MEM_OPT
    options.meta_optimizer_iterations = rewriter.ONE
    options.disable_model_pruning = True
    options.min_graph_nodes = -1
    return config


def with_fetches(
    graph_def: graph_pb2.GraphDef, fetches: Collection[str]
) -> meta_graph_pb2.MetaGraphDef:
    """A graph with the nodes to preserve, in the form that Grappler reads."""
    meta_graph = meta_graph_pb2.MetaGraphDef(graph_def=graph_def)
    meta_graph.collection_def[FETCHES].node_list.value.extend(fetches)
    return meta_graph


def run_upstream(meta_graph: meta_graph_pb2.MetaGraphDef, dtype: str) -> graph_pb2.GraphDef:
    """Runs the pass, every other graph optimizer switched off.

    Args:
        meta_graph: the graph; the collection `FETCHES` names what is fetched.
        dtype: "float16" or "bfloat16".

    Returns:
        The rewritten graph.

    Raises:
        UpstreamError: TensorFlow refused what the pass had made of the graph.
    """
    config = only(FIELDS[dtype])
    # What runs all the same copies branches under names of its own.
    config.graph_options.rewrite_options.disable_tfg_optimizer = True
    try:
        return tf_optimizer.OptimizeGraph(config, meta_graph)  # type: ignore[no-any-return]
    except errors.OpError as error:
        raise UpstreamError(error.message.partition("\n")[0]) from error


def compare(
    graph_def: graph_pb2.GraphDef, fetches: Collection[str], config: PrecisionConfig
) -> Comparison:
    """Compares the plan of parity mode with that of TensorFlow's own pass.

    Args:
        graph_def: the graph.
        fetches: names of nodes that both must preserve.
        config: dtype, device, level and list edits; TensorFlow's pass reads the latter from the
            environment.

    Raises:
        UpstreamError: as `run_upstream`, or our own pass gave up.
    """
    result = rewrite_graph_def(graph_def, config, preserve=fetches)
    if result.failure is not None:
        raise UpstreamError(f"parity mode gave up: {result.failure}")
    theirs = run_upstream(with_fetches(graph_def, fetches), config.target_dtype)
    return difference_of(graph_def, result.proto, theirs)  # type: ignore[arg-type]


def difference_of(
    before: graph_pb2.GraphDef, ours: graph_pb2.GraphDef, theirs: graph_pb2.GraphDef
) -> Comparison:
    """Compares two results of rewriting one graph, by type attributes."""
    old, left, right = (dict(_vertices(graph)) for graph in (before, ours, theirs))
    # Grappler drops functions that nothing calls.
    kept = {"", *(function.signature.name for function in theirs.library.function)}
    left = {key: dtype for key, dtype in left.items() if key[0] in kept}
    differing = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
    return Comparison(
        type_attributes=len(left.keys() & right.keys()),
        retyped=sum(old.get(key, dtype) != dtype for key, dtype in left.items()),
        casts=sum(attr == "SrcT" for *_, attr in left.keys() - old.keys()),
        differences={key: (_name(left.get(key)), _name(right.get(key))) for key in differing},
    )


def _vertices(graph_def: graph_pb2.GraphDef) -> Iterator[tuple[Vertex, int]]:
    """The type attributes of a graph with their dtypes, functions and defaults of ops included."""
    bodies = [("", graph_def.node)]
    bodies += [(f.signature.name, f.node_def) for f in graph_def.library.function]
    for function, nodes in bodies:
        for node in nodes:
            op_def = op_def_registry.get(node.op)
            attrs = {a.name: a.default_value for a in op_def.attr} if op_def else {}
            attrs.update(node.attr)
            for name, value in attrs.items():
                if value.WhichOneof("value") == "type":
                    yield (function, node.name, name), value.type
                for index, dtype in enumerate(value.list.type):
                    yield (function, node.name, f"{name}[{index}]"), dtype


def _name(dtype: int | None) -> str:
    return "absent" if dtype is None else types_pb2.DataType.Name(dtype)[3:].lower()  # type: ignore[arg-type]
