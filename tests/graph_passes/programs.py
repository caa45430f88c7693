"""Graphs that run by themselves in a session: placeholders are fed, variables are their own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2, node_def_pb2, types_pb2

from tf_amp.hosts.function_shapes import called_shapes, static_shapes

Shapes = Callable[[str], tuple[tuple[int | None, ...] | None, ...]]
Run = Callable[[Mapping[str, np.ndarray], Mapping[str, np.ndarray], int], dict[str, np.ndarray]]
FLOATS = (types_pb2.DT_FLOAT, types_pb2.DT_HALF, types_pb2.DT_DOUBLE, types_pb2.DT_BFLOAT16)


@dataclasses.dataclass(frozen=True)
class Program:
    """A graph with all that it takes to run it.

    Attributes:
        graph_def: the graph; variables are VarHandleOps, whose shared name is their name.
        feeds: tensor -> the value that it is fed with.
        fetches: the tensors to fetch.
        targets: the nodes to run for their effects.
        state: name of a variable -> what it holds at first.
        shapes: static shapes of the graph.
        function_shapes: those of the functions in its library.
    """

    graph_def: graph_pb2.GraphDef
    feeds: Mapping[str, np.ndarray]
    fetches: tuple[str, ...]
    targets: tuple[str, ...]
    state: Mapping[str, np.ndarray]
    shapes: Shapes
    function_shapes: Callable[[str], Shapes | None] = lambda name: None

    @property
    def preserve(self) -> tuple[str, ...]:
        """What a rewrite must leave alone."""
        return (*self.feeds, *self.fetches, *self.targets)

    @property
    def nodes(self) -> dict[str, node_def_pb2.NodeDef]:
        """The nodes of the main graph by name."""
        return {node.name: node for node in self.graph_def.node}

    def with_nodes(self, nodes: Sequence[node_def_pb2.NodeDef], **others: Any) -> Program:
        """The program with other nodes, and with other attributes as given."""
        graph_def = graph_pb2.GraphDef(
            versions=self.graph_def.versions, library=self.graph_def.library, node=nodes
        )
        return dataclasses.replace(self, graph_def=graph_def, **others)

    def value(self, tensor: str) -> np.ndarray:
        """What a tensor of the graph is in the first step."""
        alone = dataclasses.replace(self, fetches=(tensor,), targets=())
        return alone.run(self.graph_def, steps=1)[tensor]

    def run(self, graph_def: graph_pb2.GraphDef, steps: int = 2) -> dict[str, np.ndarray]:
        """What some steps of a graph that was made from this one fetch in the end.

        Returns:
            Tensor -> value, with "variable NAME" for what each variable holds after the steps.

        Raises:
            Exception: TensorFlow does not take the graph, or an op fails in it.
        """
        with self.running(graph_def) as run:
            return run(self.feeds, self.state, steps)

    @contextlib.contextmanager
    def running(self, graph_def: graph_pb2.GraphDef) -> Iterator[Run]:
        """A graph that was made from this one, in a session: it may run more than once.

        Args:
            graph_def: the graph.

        Yields:
            What runs it as `run` does, from feeds, what the variables hold at first and a number
            of steps.

        Raises:
            Exception: TensorFlow does not take the graph.
        """
        options = tf.compat.v1.ConfigProto(allow_soft_placement=True)
        options.graph_options.rewrite_options.disable_meta_optimizer = True
        options.graph_options.optimizer_options.opt_level = -1
        with tf.Graph().as_default() as graph:
            import_copy(graph_def)
            start, read, given = [], {}, {}
            for name, value in self.state.items():
                handle = tf.raw_ops.VarHandleOp(
                    dtype=value.dtype, shape=value.shape, shared_name=name
                )
                given[name] = tf.raw_ops.Placeholder(dtype=value.dtype, shape=value.shape)
                start.append(tf.raw_ops.AssignVariableOp(resource=handle, value=given[name]))
                with tf.control_dependencies([]):
                    made = tf.raw_ops.ReadVariableOp(resource=handle, dtype=value.dtype)
                read[f"variable {name}"] = made
            targets = [graph.get_operation_by_name(name) for name in self.targets]
        fetches = [{f: f for f in self.fetches}, targets]

        def run(
            feeds: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray], steps: int
        ) -> dict[str, np.ndarray]:
            session.run(start, {given[name]: value for name, value in state.items()})
            for _ in range(steps):
                found, _ = session.run(fetches, feeds)
            return {**found, **session.run(read)}

        with contextlib.closing(tf.compat.v1.Session(graph=graph, config=options)) as session:
            yield run


def import_copy(graph_def: graph_pb2.GraphDef) -> None:
    """Imports a graph into the current one; TensorFlow adds attributes to what it is given."""
    copy = graph_pb2.GraphDef()
    copy.CopyFrom(graph_def)
    tf.graph_util.import_graph_def(copy, name="")


def trace(function: Callable[..., Any], *arguments: np.ndarray | tf.TensorSpec) -> Program:
    """Traces a function of tensors, of which it may also capture constants and variables.

    Args:
        function: what is traced.
        arguments: values to run it with, alone or with the spec to trace it for before each.
    """
    specs, values = [], []
    for argument in arguments:
        if isinstance(argument, tf.TensorSpec):
            specs.append(argument)
        else:
            values.append(argument)
            if len(specs) < len(values):
                specs.append(tf.TensorSpec(argument.shape, argument.dtype))
    return of_concrete(tf.function(function, autograph=False).get_concrete_function(*specs), values)


def of_concrete(
    concrete: Any, values: Sequence[np.ndarray], variables: Iterable[Any] = ()
) -> Program:
    """A program of a concrete function and values of its arguments.

    Args:
        concrete: the function.
        values: of its arguments.
        variables: those that it has besides the ones its graph knows; `tf_keras` updates slots of
            its older optimizers by their handles.
    """
    graph_def = concrete.graph.as_graph_def()
    nodes = {node.name: node for node in graph_def.node}
    held = {id(v.handle): v for v in (*concrete.graph.variables, *variables)}
    count = len(concrete.inputs) - len(concrete.captured_inputs)
    feeds = {t.name: v for t, v in zip(concrete.inputs[:count], values, strict=True)}
    state = {}
    for captured, inside in zip(concrete.captured_inputs, concrete.inputs[count:], strict=True):
        variable = held.get(id(captured))
        if variable is None:
            feeds[inside.name] = captured.numpy()
            continue
        name = inside.op.name
        state[name] = variable.numpy()
        nodes[name].CopyFrom(variable_handle(name, state[name]))
    return Program(
        graph_def=graph_def,
        feeds=feeds,
        fetches=tuple(t.name for t in concrete.outputs),
        targets=tuple(op.name for op in concrete.graph.control_outputs),
        state=state,
        shapes=static_shapes(concrete.graph),
        function_shapes=called_shapes(concrete.graph._functions),
    )


def variable_handle(name: str, value: np.ndarray) -> node_def_pb2.NodeDef:
    """The node of a variable that can hold a value."""
    node = node_def_pb2.NodeDef(name=name, op="VarHandleOp")
    node.attr["dtype"].type = tf.as_dtype(value.dtype).as_datatype_enum
    node.attr["shape"].shape.CopyFrom(tf.TensorShape(value.shape).as_proto())
    node.attr["shared_name"].s = name.encode()
    return node


def in_function(program: Program) -> Program:
    """A program whose graph does nothing but call a function with the program's graph in it.

    What is fed must be placeholders.
    """
    names = [tensor.partition(":")[0] for tensor in program.feeds]

    @tf.function(autograph=False)
    def body(*fed: tf.Tensor) -> list[tf.Tensor]:
        kept = [node for node in program.graph_def.node if node.name not in names]
        made = tf.graph_util.import_graph_def(
            program.with_nodes(kept).graph_def,
            input_map=dict(zip(program.feeds, fed, strict=True)),
            return_elements=[*program.fetches, *program.targets],
            name="",
        )
        count = len(program.fetches)
        with tf.control_dependencies(made[count:]):
            return [tf.identity(tensor) for tensor in made[:count]]

    nodes = program.nodes
    specs = [
        tf.TensorSpec(program.shapes(name)[0], nodes[name].attr["dtype"].type) for name in names
    ]
    inner = body.get_concrete_function(*specs)
    outer = tf.function(lambda *fed: inner(*fed), autograph=False).get_concrete_function(*specs)
    return dataclasses.replace(
        of_concrete(outer, list(program.feeds.values())), state=program.state
    )
