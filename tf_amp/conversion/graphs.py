"""One graph with its library, converted under the names by which others know it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator

from tensorflow.core.framework.function_pb2 import FunctionDef, FunctionDefLibrary
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.protobuf import meta_graph_pb2, struct_pb2
from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef
from tensorflow.core.protobuf.saved_object_graph_pb2 import CapturedTensor

import graph_passes
from graph_passes import FunctionRemarks, PrecisionConfig
from graph_passes.ir.eligibility import node_name
from graph_passes.ir.function_references import FunctionReferences
from tf_amp.hosts.offline import InferredShapes
from tf_amp.model_files import ModelError, ends

_NOTED = "_input_shapes"
_FLOAT32 = "__float32"
"""Behind the name of a function that is as it was before."""


@dataclasses.dataclass(frozen=True)
class ConvertedGraph:
    """A graph after its conversion.

    Attributes:
        graph_def: the graph, the given one where nothing was to convert.
        remarks: what was decided.
        changed: whether anything was converted.
    """

    graph_def: GraphDef
    remarks: FunctionRemarks
    changed: bool


def convert_meta_graph(
    meta: MetaGraphDef, config: PrecisionConfig, name: str, fetched: Collection[str] = ()
) -> ConvertedGraph:
    """Converts the graph of a MetaGraph, in place; signatures, collections and objects stay.

    Args:
        meta: the MetaGraph.
        config: what to convert to.
        name: the graph's name, for people.
        fetched: nodes that are fed or fetched, where no signature tells; by default its ends.

    Raises:
        ModelError: the graph is invalid, or was not converted because something failed.
    """
    preserve = {node_name(name) for name in _named_tensors(meta)}
    if not meta.signature_def:
        preserve.update(fetched or ends(meta.graph_def))
    objects = meta.object_graph_def
    roots = set(objects.concrete_functions) - {""}
    # Those that a `tf.custom_gradient` takes from where it was called.
    captured = [n.captured_tensor for n in objects.nodes if n.HasField("captured_tensor")]
    held = {one.concrete_function for one in captured}
    done = convert_graph(meta.graph_def, config, name, preserve=preserve, roots=roots, held=held)
    if done.changed:
        originals = [f for f in meta.graph_def.library.function if f.signature.name in held]
        _hold(done.graph_def.library, captured, originals)
        meta.graph_def.CopyFrom(done.graph_def)
        refresh_op_list(meta)
    return done


def _hold(
    library: FunctionDefLibrary,
    captured: Iterable[CapturedTensor],
    originals: Iterable[FunctionDef],
) -> None:
    """Has each captured tensor be in the function that it is looked for in when a model is loaded.

    A function that lost it, as a unit took the place of what made it, stays beside as it was.
    """
    new = {function.signature.name: function for function in library.function}
    before = {function.signature.name: function for function in originals}
    for one in captured:
        name = one.concrete_function
        if name in new and node_name(one.name) not in _makers(new[name]):
            kept = f"{name}{_FLOAT32}"
            if kept not in new:
                new[kept] = library.function.add()
                new[kept].CopyFrom(before[name])
                new[kept].signature.name = kept
            one.concrete_function = kept


def _makers(function: FunctionDef) -> set[str]:
    """The nodes and arguments of a function."""
    return {made.name for made in (*function.node_def, *function.signature.input_arg)}


def convert_graph(
    graph: GraphDef,
    config: PrecisionConfig,
    name: str,
    *,
    preserve: Collection[str],
    roots: Collection[str] = (),
    held: Collection[str] = (),
) -> ConvertedGraph:
    """Converts a graph and the functions that it or others call.

    Args:
        graph: the graph; it is not changed.
        config: what to convert to.
        name: the graph's name, for people.
        preserve: nodes that are fed or fetched.
        roots: functions that are called from elsewhere: they keep name and signature.
        held: functions that are known elsewhere, and stay with all that they call.

    Raises:
        ModelError: the graph is invalid, or was not converted because something failed.
    """
    before = FunctionReferences(graph)
    roots = before.library.keys() & roots
    shapes = InferredShapes(graph)
    result = graph_passes.rewrite_graph_def(
        graph,
        config,
        preserve=preserve,
        shapes=shapes.of_graph,
        function_shapes=shapes.of_function,
        roots=roots,
    )
    if result.failure is not None:
        raise ModelError(f"The graph {name!r} cannot be converted: {result.failure}.")
    remarks = result.remarks(name)
    changed = result.changed and any(r.kind == "converted" for r in remarks.remarks)
    if not changed:
        return ConvertedGraph(graph, remarks, changed=False)
    new: GraphDef = result.proto  # type: ignore[assignment]
    # What was planned with its callers was copied for them.
    every = ("", *roots)
    called = before.reachable(every)
    # TensorFlow loads no function that lacks what it calls, though nobody calls it.
    known = {*held, *(g.gradient_func for g in graph.library.registered_gradients)}
    others = before.library.keys() - (called - known)
    idle = called - FunctionReferences(new).reachable(every) - before.reachable(others)
    kept = [f for f in new.library.function if f.signature.name not in idle]
    if len(kept) < len(new.library.function):
        library = type(new.library)()
        library.CopyFrom(new.library)
        del library.function[:]
        library.function.extend(kept)
        new.library.CopyFrom(library)
    for function in new.library.function:
        shapes_noted = function.attr[_NOTED].list.shape if _NOTED in function.attr else ()
        if len(shapes_noted) not in (0, len(function.signature.input_arg)):
            del function.attr[_NOTED]  # a loop takes more now
    return ConvertedGraph(new, remarks, changed=True)


def refresh_op_list(meta: MetaGraphDef) -> None:
    """Writes the list of the ops that a MetaGraph has, where it holds one."""
    from tensorflow.python.framework.meta_graph import stripped_op_list_for_graph

    if meta.meta_info_def.stripped_op_list.op:
        meta.meta_info_def.stripped_op_list.CopyFrom(stripped_op_list_for_graph(meta.graph_def))


def _named_tensors(meta: MetaGraphDef) -> Iterator[str]:
    """The tensors and nodes that a MetaGraph names outside its graph."""
    for signature in meta.signature_def.values():
        for info in (*signature.inputs.values(), *signature.outputs.values()):
            yield from names_in(info)
    saver = meta.saver_def
    yield from (saver.filename_tensor_name, saver.save_tensor_name, saver.restore_op_name)
    yield from (asset.tensor_info.name for asset in meta.asset_file_def)
    for collection in meta.collection_def.values():
        yield from collection.node_list.value
        for packed in collection.bytes_list.value:
            yield from _names_of_variable(packed)


def names_in(info: meta_graph_pb2.TensorInfo) -> Iterable[str]:
    """The tensors of an input or output of a signature: of a sparse or ragged one several."""
    kind = info.WhichOneof("encoding")
    if kind == "coo_sparse":
        sparse = info.coo_sparse
        return (
            sparse.values_tensor_name,
            sparse.indices_tensor_name,
            sparse.dense_shape_tensor_name,
        )
    if kind == "composite_tensor":
        return (part.name for part in info.composite_tensor.components)
    return (info.name,)


def _names_of_variable(packed: bytes) -> Iterable[str]:
    """The tensors that a variable of a collection names, none for what is no variable."""
    from google.protobuf.message import DecodeError
    from tensorflow.core.framework.variable_pb2 import VariableDef

    try:
        variable = VariableDef.FromString(packed)
    except DecodeError:
        return ()
    return (
        variable.variable_name,
        variable.snapshot_name,
        variable.initializer_name,
        variable.initial_value_name,
    )


def signature_functions(meta: MetaGraphDef) -> dict[str, str]:
    """The functions that serve the signatures of an object graph: signature -> function."""
    nodes = meta.object_graph_def.nodes
    found: dict[str, str] = {}
    if not nodes:
        return found
    for child in nodes[0].children:
        if child.local_name == "signatures" and 0 < child.node_id < len(nodes):
            for entry in nodes[child.node_id].children:
                if 0 < entry.node_id < len(nodes):
                    function = nodes[entry.node_id].bare_concrete_function
                    found[entry.local_name] = function.concrete_function_name
    return found


def retype_specs(value: struct_pb2.StructuredValue, source: int, target: int) -> None:
    """Changes the dtype of the tensors that a structure describes, in place."""
    kind = value.WhichOneof("kind")
    if kind == "tensor_spec_value":
        if value.tensor_spec_value.dtype == source:
            value.tensor_spec_value.dtype = target
    elif kind in ("tuple_value", "list_value"):
        for inner in getattr(value, kind).values:
            retype_specs(inner, source, target)
    elif kind == "dict_value":
        for inner in value.dict_value.fields.values():
            retype_specs(inner, source, target)
    elif kind == "named_tuple_value":
        for pair in value.named_tuple_value.values:
            retype_specs(pair.value, source, target)
