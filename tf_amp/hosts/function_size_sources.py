"""What shows, at the call of a function, the size that its tracing did not know."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tensorflow.core.framework import attr_value_pb2, function_pb2, types_pb2
from tensorflow.python.eager.polymorphic_function import attributes

from tf_amp.hosts.function_redirects import Find, with_callees
from tf_amp.hosts.function_shapes import shape_of

if TYPE_CHECKING:
    from graph_passes.ir.graph_view import Shape, Shapes

_GET_NEXT, _GET_OPTIONAL = "IteratorGetNext", "IteratorGetNextAsOptional"
_BRANCHES = ("If", "StatelessIf")
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_SHAPE_OUTPUT = "tf_amp_shape"
_SHAPES = "_output_shapes"


@dataclasses.dataclass(frozen=True)
class Source:
    """What shows the size at a call: an argument, or an output of an iterator.

    Where neither does, since batches are read in a loop, only the data set can tell it.

    Attributes:
        unknown: the axes whose length is not known.
        argument: the position of the argument, None if none shows it.
        tensor: the iterator's output, as the function's body names it; "" if none shows it.
        dtype: its dtype.
    """

    unknown: tuple[int, ...]
    argument: int | None = None
    tensor: str = ""
    dtype: int = 0

    def size_of(self, shape: Sequence[int]) -> int:
        """The length that counts for an unknown axis: the geometric mean of all, at least 1."""
        product = math.prod(shape[axis] for axis in self.unknown)
        return max(1, round(product ** (1 / len(self.unknown))))

    def shown_by(self, definition: function_pb2.FunctionDef) -> function_pb2.FunctionDef:
        """A function that returns the shape as well, where an iterator's output shows it."""
        if not self.tensor:
            return definition
        shown = function_pb2.FunctionDef()
        shown.CopyFrom(definition)
        shown.signature.output_arg.add(name=_SHAPE_OUTPUT, type=types_pb2.DT_INT32)
        node = shown.node_def.add(name=_SHAPE_OUTPUT, op="Shape", input=[self.tensor])
        node.attr["T"].type = self.dtype
        node.attr["out_type"].type = types_pb2.DT_INT32
        shown.ret[_SHAPE_OUTPUT] = f"{_SHAPE_OUTPUT}:output:0"
        return shown


def find_source(definition: function_pb2.FunctionDef, shapes: Shapes, find: Find) -> Source | None:
    """Finds the largest tensor that a function gets and whose shape is known in part.

    Args:
        definition: the function as it was traced.
        shapes: static shapes of its tensors.
        find: gives what it calls, where a loop may read batches.

    Returns:
        What shows the size; None where all that the function gets is known, or nothing about it.
    """
    found: list[tuple[Shape | None, Source]] = []
    for position, argument in enumerate(definition.signature.input_arg):
        found += ((s, Source(unknown_axes(s), argument=position)) for s in shapes(argument.name))
    optionals = {node.name for node in definition.node_def if node.op == _GET_OPTIONAL}
    for node in definition.node_def:
        if node.op == _GET_NEXT:
            output, dtypes = "components", node.attr["output_types"].list.type
        # Under a strategy a replica may get nothing, which a branch decides.
        elif node.op in _BRANCHES and not optionals.isdisjoint(
            tensor.partition(":")[0] for tensor in node.input
        ):
            output, dtypes = "output", node.attr["Tout"].list.type
        else:
            continue
        for port, (shape, dtype) in enumerate(zip(shapes(node.name), dtypes, strict=True)):
            tensor = f"{node.name}:{output}:{port}"
            found.append((shape, Source(_batch_axes(shape), tensor=tensor, dtype=dtype)))
    if (source := widest(found)) is not None:
        return source
    read = (value for each in with_callees((definition,), find) for value in _read_by(each))
    sizes = ([dim.size for dim in shape.dim] for value in read for shape in value.list.shape)
    unknown = {tuple(axis for axis, size in enumerate(each) if size < 0) for each in sizes}
    return Source((0,)) if unknown - {()} == {(0,)} else None


def _read_by(function: function_pb2.FunctionDef) -> Iterator[attr_value_pb2.AttrValue]:
    """Yields the shapes of what a function takes from iterators or, as a loop, from a data set."""
    for node in function.node_def:
        if node.op in (_GET_NEXT, _GET_OPTIONAL):
            yield node.attr["output_shapes"]
    if attributes.TF_DATA_FUNCTION in function.attr:
        given = (each.attr for each in function.arg_attr.values())
        yield from (attr[_SHAPES] for attr in given if _SHAPES in attr)


def widest(found: Iterable[tuple[Shape | None, Source]]) -> Source | None:
    """Chooses the source of the largest tensor whose shape is known in part.

    Args:
        found: the sources, each with the shape of its tensor.

    Returns:
        The source; None where all shapes are known, or nothing of them.
    """
    partly_known = [each for each in found if each[1].unknown]
    return max(partly_known, key=lambda each: _known_elements(each[0]))[1] if partly_known else None


def unknown_axes(shape: Shape | None) -> tuple[int, ...]:
    """The axes of a shape whose length is not known; none where not even the rank is."""
    return tuple(axis for axis, length in enumerate(shape or ()) if length is None)


def _batch_axes(shape: Shape | None) -> tuple[int, ...]:
    """The unknown axes of a batch but for that of features or channels, which the model knows.

    What a `Sequence` of tf_keras gives has no length at all. Of two axes the last may be time.
    """
    axes = unknown_axes(shape)
    return axes[:-1] if len(axes) == len(shape or ()) > 2 else axes


def _known_elements(shape: Shape | None) -> int:
    return math.prod(length for length in shape or () if length is not None)


def size_of_calls(graph: Any) -> int | None:
    """The size by which a function of known shapes calls others that were traced without it.

    Args:
        graph: the FuncGraph that was traced.

    Returns:
        That of the largest argument whose shape the callee knows in part and the caller as a
        whole; None where there is none.
    """
    graphs = {name: getattr(called, "graph", None) for name, called in graph._functions.items()}
    if not any(unknown_axes(s) for each in graphs.values() if each for s in _given(each.inputs)):
        return None
    found: list[tuple[int, int]] = []
    for caller in (graph, *filter(None, graphs.values())):
        for call in caller.get_operations():
            callee = graphs.get(call.get_attr("f").name) if call.type in _CALLS else None
            if callee is None:
                continue
            # The gradient of a loop adds inputs to graphs it finds.
            for taken, given in zip(_given(callee.inputs), _given(call.inputs), strict=False):
                known = [length for length in given or () if length is not None]
                if (axes := unknown_axes(taken)) and len(known) == len(taken or ()):
                    found.append((math.prod(known), Source(axes).size_of(known)))
    return max(found)[1] if found else None


def _given(tensors: Iterable[Any]) -> Iterator[Shape | None]:
    return (shape_of(tensor) for tensor in tensors)
