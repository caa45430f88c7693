"""Small changes of a program that must not be lost on a rewrite: it keeps their meaning or yields.

A mutation says what is done to which node, so that a failing example reads as a reproduction.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf
from programs import FLOATS, Program, import_copy, variable_handle
from tensorflow.core.framework import node_def_pb2

from graph_passes.ir.adjacency import walk

COUNTER = "steps_counted"
SOURCES = ("Placeholder", "VarHandleOp")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change.

    Attributes:
        kind: a key of `KINDS`.
        node: the node that is changed, read or named.
        number: a seed, where something else is chosen.
    """

    kind: str
    node: str
    number: int = 0

    def __str__(self) -> str:
        return f"{self.kind}: {self.node}" + (f" ({self.number})" if self.number else "")


def targets(program: Program) -> tuple[str, ...]:
    """The nodes that can be mutated: those that make one or more floats and are not fed."""
    with tf.Graph().as_default() as graph:
        import_copy(program.graph_def)
    made = ((op.name, op.type, op.outputs) for op in graph.get_operations())
    return tuple(
        sorted(
            name
            for name, op, outputs in made
            if op not in SOURCES and outputs and outputs[0].dtype.as_datatype_enum in FLOATS
        )
    )


def mutated(program: Program, mutation: Mutation) -> Program:
    """The program with one change; whether that still runs is for the caller to see."""
    return KINDS[mutation.kind](program, mutation)


def _copy(program: Program) -> dict[str, node_def_pb2.NodeDef]:
    return {
        name: node_def_pb2.NodeDef.FromString(node.SerializeToString())
        for name, node in program.nodes.items()
    }


def _dtype(program: Program, name: str) -> int:
    with tf.Graph().as_default() as graph:
        import_copy(program.graph_def)
        return int(graph.get_tensor_by_name(f"{name}:0").dtype.as_datatype_enum)


def _control_input(program: Program, mutation: Mutation) -> Program:
    """The node waits for a counter that each step adds one to."""
    program, nodes = _counting(program)
    nodes[mutation.node].input.append(f"^{COUNTER}/add")
    return program.with_nodes(list(nodes.values()))


def _behind(program: Program, mutation: Mutation) -> Program:
    """The counter waits for what reads the node, and what reads no other node for the counter.

    As under `tf.control_dependencies` with an update that is made of the node.
    """
    program, nodes = _counting(program)
    reader = node_def_pb2.NodeDef(name=f"behind/{mutation.node}", op="Neg", input=[mutation.node])
    reader.attr["T"].type = _dtype(program, mutation.node)
    nodes[reader.name] = reader
    nodes[f"{COUNTER}/add"].input.append(f"^{reader.name}")

    def makers(name: str) -> list[str]:
        names = (tensor.lstrip("^").partition(":")[0] for tensor in nodes[name].input)
        return [maker for maker in names if nodes[maker].op not in SOURCES]

    before = set(walk([f"{COUNTER}/add"], makers))
    for name in nodes.keys() - before:
        if nodes[name].op not in SOURCES and not makers(name):
            nodes[name].input.append(f"^{COUNTER}/add")
    return program.with_nodes(list(nodes.values()))


def _counting(program: Program) -> tuple[Program, dict[str, node_def_pb2.NodeDef]]:
    """The program with a counter, and a copy of its nodes, the counter's among them."""
    nodes = _copy(program)
    if COUNTER not in nodes:
        value = np.float32(0)
        one = node_def_pb2.NodeDef(name=f"{COUNTER}/one", op="Const")
        one.attr["dtype"].type = tf.float32.as_datatype_enum
        one.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.float32(1)))
        add = node_def_pb2.NodeDef(
            name=f"{COUNTER}/add", op="AssignAddVariableOp", input=[COUNTER, one.name]
        )
        add.attr["dtype"].type = tf.float32.as_datatype_enum
        nodes |= {n.name: n for n in (variable_handle(COUNTER, value), one, add)}
        program = dataclasses.replace(program, state={**program.state, COUNTER: value})
    return program, nodes


def _fetched(program: Program, mutation: Mutation) -> Program:
    return dataclasses.replace(program, fetches=_added(program, f"{mutation.node}:0"))


def _fed(program: Program, mutation: Mutation) -> Program:
    """The caller gives another value of what the node makes."""
    tensor = f"{mutation.node}:0"
    value = program.value(tensor)
    fed = (np.asarray(value) * 0.75 + 0.125).astype(value.dtype)
    return dataclasses.replace(program, feeds={**program.feeds, tensor: fed})


def _added(program: Program, tensor: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*program.fetches, tensor)))


def _reader(op: str, **attrs: int) -> Callable[[Program, Mutation], Program]:
    """One more op reads what the node makes, and a copy of its result is fetched."""

    def change(program: Program, mutation: Mutation) -> Program:
        nodes = _copy(program)
        name = f"extra/{op}/{mutation.node}"
        if name in nodes:
            return program
        reader = node_def_pb2.NodeDef(name=name, op=op, input=[mutation.node])
        reader.attr["T"].type = _dtype(program, mutation.node)
        for attr, dtype in attrs.items():
            reader.attr[attr].type = dtype
        if op == "Squeeze":
            reader.attr["squeeze_dims"].list.i.extend(_axes_to_squeeze(program, mutation))
        if op == "Reshape":
            flat = node_def_pb2.NodeDef(name=f"{name}/shape", op="Const")
            flat.attr["dtype"].type = tf.int32.as_datatype_enum
            flat.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(np.int32([-1])))
            reader.input.append(flat.name)
            nodes[flat.name] = flat
        behind = node_def_pb2.NodeDef(name=f"{name}/fetched", op="Identity", input=[name])
        behind.attr["T"].type = attrs.get("out_type", reader.attr["T"].type)
        nodes |= {name: reader, behind.name: behind}
        fetches = _added(program, f"{behind.name}:0")
        return program.with_nodes(list(nodes.values()), fetches=fetches)

    return change


def _axes_to_squeeze(program: Program, mutation: Mutation) -> list[int]:
    """Some of the axes whose size is known to be 1; none stands for all that there are."""
    shapes = program.shapes(mutation.node)
    shape = shapes[0] if shapes and shapes[0] else ()
    ones = [axis for axis, size in enumerate(shape) if size == 1]
    return ones[: mutation.number % (len(ones) + 1)]


def _twin(program: Program, mutation: Mutation) -> Program:
    """A second node computes the same, and its result is fetched."""
    nodes = _copy(program)
    name = f"{mutation.node}_twin"
    if name in nodes:
        return program
    twin = node_def_pb2.NodeDef()
    twin.CopyFrom(nodes[mutation.node])
    twin.name = name
    nodes[name] = twin
    return program.with_nodes(list(nodes.values()), fetches=_added(program, f"{name}:0"))


def _beside(program: Program, mutation: Mutation) -> Program:
    """Another node is to be where the node is."""
    nodes = _copy(program)
    others = [n for n in targets(program) if n != mutation.node]
    other = nodes[others[mutation.number % len(others)]]
    other.attr["_class"].list.s[:] = [f"loc:@{mutation.node}".encode()]
    return program.with_nodes(list(nodes.values()))


def _waiting(program: Program, mutation: Mutation) -> Program:
    """A node without outputs waits for the node and is run."""
    nodes = _copy(program)
    name = f"waiting/{mutation.node}"
    nodes[name] = node_def_pb2.NodeDef(name=name, op="NoOp", input=[f"^{mutation.node}"])
    return program.with_nodes(
        list(nodes.values()), targets=tuple(dict.fromkeys((*program.targets, name)))
    )


def _device(program: Program, mutation: Mutation) -> Program:
    nodes = _copy(program)
    choice = ("/device:CPU:0", "/job:localhost/replica:0/task:0/device:CPU:0", "/device:GPU:0")
    nodes[mutation.node].device = choice[mutation.number % len(choice)]
    return program.with_nodes(list(nodes.values()))


def _shuffled(program: Program, mutation: Mutation) -> Program:
    nodes = list(program.graph_def.node)
    random.Random(mutation.number).shuffle(nodes)
    return program.with_nodes(nodes)


def _without(hide: Callable[[tuple[int | None, ...]], tuple[int | None, ...] | None]):
    """Less is known of the shape of what the node makes."""

    def change(program: Program, mutation: Mutation) -> Program:
        known = program.shapes

        def shapes(name: str) -> tuple[tuple[int | None, ...] | None, ...]:
            if name != mutation.node:
                return known(name)
            return tuple(None if shape is None else hide(shape) for shape in known(name))

        return dataclasses.replace(program, shapes=shapes)

    return change


def _without_any(program: Program, mutation: Mutation) -> Program:
    return dataclasses.replace(program, shapes=lambda name: ())


KINDS: Mapping[str, Callable[[Program, Mutation], Program]] = {
    "control input": _control_input,
    "behind it": _behind,
    "fetched": _fetched,
    "fed": _fed,
    "read": _reader("Neg"),
    "squeezed": _reader("Squeeze"),
    "reshaped": _reader("Reshape", Tshape=tf.int32.as_datatype_enum),
    "asked for its shape": _reader("Shape", out_type=tf.int32.as_datatype_enum),
    "twin": _twin,
    "another is beside it": _beside,
    "waited for": _waiting,
    "device": _device,
    "shuffled": _shuffled,
    "sizes unknown": _without(lambda shape: (None,) * len(shape)),
    "batch unknown": _without(lambda shape: (None, *shape[1:]) if shape else shape),
    "rank unknown": _without(lambda shape: None),
    "no shapes": _without_any,
}
"""What can be done to a program."""
