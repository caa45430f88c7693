"""The size for which a session's graph is planned where its batch is not known.

TensorFlow has a graph optimized once for each set of feeds and fetches, inside the first call that
needs it: what that call feeds shows the size. Where nothing is fed, the data set of an iterator
tells the batch if the program's graph holds it as a constant.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from tensorflow.core.framework import graph_pb2, node_def_pb2
from tensorflow.python.framework import op_def_registry, tensor_util

from graph_passes.policy.config import UNKNOWN_DIMENSION
from tf_amp.hosts.function_names import SIZES_NEAR
from tf_amp.hosts.function_size_sources import Source, unknown_axes, widest
from tf_amp.hosts.pipeline_batches import has_other_rows

if TYPE_CHECKING:
    from tf_amp.hosts.session_plugin import GraphItem

LOGGER = logging.getLogger("tf_amp.hosts.session")

_UNTOLD = f" (its batch is not known: planned for {UNKNOWN_DIMENSION} rows)"
_GET_NEXT = frozenset({"IteratorGetNext", "IteratorGetNextSync"})
_DEQUEUE = frozenset({"QueueDequeueUpTo", "QueueDequeueUpToV2"})
_GIVEN = _GET_NEXT | _DEQUEUE | {"Placeholder", "PlaceholderV2", "PlaceholderWithDefault"}

_Find: TypeAlias = Callable[[str], "node_def_pb2.NodeDef | None"]


def size_of(graph: graph_pb2.GraphDef, item: GraphItem, built: Any) -> tuple[int, str]:
    """Finds the size to plan a graph for.

    Args:
        graph: the graph, pruned to what is fetched.
        item: the graph as Grappler handed it over.
        built: the graph of the program that it is of, None if it is not known.

    Returns:
        The length that counts for an unknown dimension, and what the graph's name ends with:
        nothing where all that the graph is given is known, or nothing about it.
    """
    size = None
    try:
        source = _find_source(graph, item)
        if source is None:
            return UNKNOWN_DIMENSION, ""
        size = _size_shown(source, item, built)
    except Exception:  # then it is planned as if nothing told the size
        LOGGER.debug("The size that a session's graph runs with was not found.", exc_info=True)
    return (UNKNOWN_DIMENSION, _UNTOLD) if size is None else (size, f"{SIZES_NEAR}{size}")


def _find_source(graph: graph_pb2.GraphDef, item: GraphItem) -> Source | None:
    """The largest tensor that is fed, if none is that is given, and not known in full."""
    if (shapes := item.shapes) is None:
        return None
    fed = []
    for tensor, given in item.fed.items():
        name, _, port = tensor.rpartition(":")
        shape = dict(enumerate(shapes(name))).get(int(port))
        # Of a tensor of any rank the last axis is hardly ever a batch.
        axes = tuple(range(len(given) - 1)) if shape is None else unknown_axes(shape)
        if axes and (shape is None or len(shape) == len(given)):
            fed.append(Source(axes, tensor=tensor))
    if fed:
        return max(fed, key=lambda source: math.prod(item.fed[source.tensor]))
    return widest(
        (shape, Source(unknown_axes(shape), tensor=f"{node.name}:{port}"))
        for node in graph.node
        if node.op in _GIVEN
        for port, shape in enumerate(shapes(node.name))
    )


def _size_shown(source: Source, item: GraphItem, built: Any) -> int | None:
    if source.tensor in item.fed:
        return source.size_of(item.fed[source.tensor])
    if built is None or source.unknown != (0,):
        return None
    reader = built.get_operation_by_name(source.tensor.rpartition(":")[0])
    if reader.type in _DEQUEUE:
        return _constant(reader.inputs[1].op.node_def)
    return _batch_read(reader, built) if reader.type in _GET_NEXT else None


def _batch_read(reader: Any, built: Any) -> int | None:
    """The batch of the data set that the iterator of an op goes through."""
    iterator = reader.inputs[0]
    if iterator.op.type == "OneShotIterator":
        factory = built._get_function(iterator.op.get_attr("dataset_factory").name).definition
        nodes = {node.name: node for node in factory.node_def}
        return _batch_made(next(iter(factory.ret.values())), nodes.get)

    def find(name: str) -> node_def_pb2.NodeDef | None:
        # Data sets and batch sizes are scalars; what data sets hold may be large.
        op = built.get_operation_by_name(name)
        return op.node_def if op.outputs[0].shape.rank == 0 else None

    initializers = (op for op in iterator.consumers() if op.type == "MakeIterator")
    made = (_batch_made(op.inputs[0].op.name, find) for op in initializers)
    return next((batch for batch in made if batch), None)


def _batch_made(tensor: str, find: _Find) -> int | None:
    """The batch size of the last step of a pipeline that has one."""
    steps = [tensor]
    while steps:
        node = find(steps.pop(0).partition(":")[0])
        definition = op_def_registry.get(node.op) if node else None
        if node is None or definition is None or has_other_rows(node.op):
            continue
        if any(argument.name == "batch_size" for argument in definition.input_arg):
            # Between the two are what the function of a MapAndBatchDataset captures.
            captured = len(node.attr["Targuments"].list.type)
            return _constant(find(node.input[1 + captured].partition(":")[0]))
        steps += (read for read in node.input if not read.startswith("^"))
    return None


def _constant(node: node_def_pb2.NodeDef | None) -> int | None:
    if node is None or node.op != "Const":
        return None
    return int(tensor_util.MakeNdarray(node.attr["value"].tensor)) or None
