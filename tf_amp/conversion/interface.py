"""The dtypes of what a model takes and gives: float32 inputs and outputs in the target dtype."""

from __future__ import annotations

from collections.abc import Collection

from tensorflow.core.framework import types_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef
from tensorflow.python.framework import tensor_util

from graph_passes.functions.call_tree import CALL_KINDS, function_names
from graph_passes.ir.eligibility import node_name
from graph_passes.ops.op_types import registered_op_type
from tf_amp.conversion.bodies import Body, Node, type_of
from tf_amp.conversion.graphs import refresh_op_list, retype_specs, signature_functions
from tf_amp.model_files import ModelError

_FLOAT = types_pb2.DT_FLOAT
_PLACEHOLDERS = ("Placeholder", "PlaceholderWithDefault")


def retype_graph(graph: GraphDef, names: Collection[str], target: int) -> None:
    """Gives inputs and outputs of a graph the target dtype under their names, in place.

    Args:
        graph: the graph.
        names: the nodes that are fed or fetched; those that are not float32 stay as they are.
        target: a value of `types_pb2.DataType`.
    """
    body = Body(graph)
    for name in sorted(names):
        node = body.nodes.get(name)
        if node is not None and _is_float(node):
            _retype_node(body, node, target)


def retype_meta_graph(meta: MetaGraphDef, target: int) -> None:
    """Gives the float32 inputs and outputs of all signatures the target dtype, in place.

    Raises:
        ModelError: there is no signature, or one has a form that cannot be retyped.
    """
    signatures = {
        key: signature
        for key, signature in meta.signature_def.items()
        if signature.inputs or signature.outputs
    }
    if not any(signature.outputs for signature in signatures.values()):
        raise ModelError("There is no signature whose inputs and outputs could be retyped.")
    body = Body(meta.graph_def)
    functions = {f.signature.name: f for f in meta.graph_def.library.function}
    wrappers = {name for name in signature_functions(meta).values() if name in functions}
    for name in wrappers:
        concrete = meta.object_graph_def.concrete_functions[name]
        _retype_function(functions[name], len(concrete.bound_inputs), target)
        retype_specs(concrete.canonicalized_input_signature, _FLOAT, target)
        retype_specs(concrete.output_signature, _FLOAT, target)
    calls = {
        node.name: functions[called]
        for node in body.nodes.values()
        if node.op in CALL_KINDS
        for _, _, called in function_names(node, CALL_KINDS[node.op])
        if called in wrappers
    }
    for name, function in calls.items():
        _retype_call(body, body.nodes[name], function)
    inputs = (info for signature in signatures.values() for info in signature.inputs.values())
    fed = {node_name(info.name) for info in inputs}
    done: set[str] = set()
    for key, signature in signatures.items():
        for default in signature.defaults.values():
            if default.dtype == _FLOAT:
                values = tensor_util.MakeNdarray(default)
                default.CopyFrom(tensor_util.make_tensor_proto(values, dtype=target))
        for info in (*signature.inputs.values(), *signature.outputs.values()):
            if info.dtype != _FLOAT:
                continue
            name, node = node_name(info.name), body.nodes.get(node_name(info.name))
            if info.WhichOneof("encoding") != "name" or node is None:
                raise ModelError(f"The signature {key!r} has a tensor of a kind without one name.")
            info.dtype = target
            if name in done or name in calls:
                continue
            done.add(name)
            if node.op in _PLACEHOLDERS and _feeds_only(body, node, calls):
                node.attr["dtype"].type = target
                if node.op == "PlaceholderWithDefault":
                    node.input[0] = body.add_cast(name, node.input[0], _FLOAT, target).name
            elif _is_float(node):
                _retype_node(body, node, target, fed=name in fed)
            else:
                raise ModelError(
                    f"The signature {key!r} has the tensor {info.name!r} of the op {node.op}, "
                    "whose dtype cannot be changed. Keep float32 inputs and outputs."
                )
    refresh_op_list(meta)


def _is_float(node: Node) -> bool:
    """Whether a node has one output, in float32."""
    if node.op == "Placeholder":
        return type_of(node, "dtype") == _FLOAT
    op_type = registered_op_type(node.op)
    if op_type is None or len(op_type.op_def.output_arg) != 1:
        return False
    result = op_type.op_def.output_arg[0]
    if result.number_attr or result.type_list_attr:
        return False
    return (result.type or type_of(node, result.type_attr)) == _FLOAT


def _retype_node(body: Body, node: Node, target: int, *, fed: bool = False) -> None:
    if node.op == "Placeholder":
        node.attr["dtype"].type = target
        cast = body.add_cast(f"{node.name}/float32", node.name, target, _FLOAT)
        body.redirect(node.name, cast.name, but=[cast])
        return
    name, inner = node.name, f"{node.name}/float32"
    while inner in body.nodes:
        inner += "_1"
    read = body.add_cast(f"{name}/fed", name, target, _FLOAT).name if fed else inner
    body.redirect(name, read)
    for other in body.nodes.values():
        for position, reference in enumerate(other.input):
            if reference == f"^{name}":
                other.input[position] = f"^{inner}"
    del body.nodes[name]
    node.name = inner
    body.nodes[inner] = node
    body.add_cast(name, inner, _FLOAT, target)


def _feeds_only(body: Body, node: Node, calls: Collection[str]) -> bool:
    readers = body.readers.get(node.name, ())
    return bool(readers) and all(reader.name in calls for reader, _ in readers)


def _retype_function(function: FunctionDef, bound: int, target: int) -> None:
    """Gives the arguments and results of a function the target dtype; inside they are float32."""
    body = Body(function)
    arguments = function.signature.input_arg
    for arg in arguments[: len(arguments) - bound]:
        if arg.type == _FLOAT:
            arg.type = target
            cast = body.add_cast(f"{arg.name}/float32", arg.name, target, _FLOAT)
            body.redirect(arg.name, body.first_output(cast), but=[cast])
    for result in function.signature.output_arg:
        if result.type == _FLOAT:
            result.type = target
            tensor = function.ret[result.name]
            cast = body.add_cast(f"{result.name}/result", tensor, _FLOAT, target)
            function.ret[result.name] = body.first_output(cast)


def _retype_call(body: Body, call: Node, function: FunctionDef) -> None:
    """Makes a call agree with its function."""
    kind = CALL_KINDS[call.op]
    taken, given = call.attr[kind.arguments].list.type, call.attr[kind.results].list.type
    for position, arg in enumerate(function.signature.input_arg):
        if taken[position] != arg.type:
            maker = body.nodes.get(node_name(call.input[position]))
            if maker is None or maker.op not in _PLACEHOLDERS:
                raise ModelError(f"{call.name!r} calls a signature with what is no input.")
            taken[position] = arg.type
    for position, result in enumerate(function.signature.output_arg):
        given[position] = result.type
