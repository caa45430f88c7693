"""What shows, at the call of a function, the size that its tracing did not know."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensorflow.core.framework import function_pb2, types_pb2

if TYPE_CHECKING:
    from graph_passes.ir.view import Shape, Shapes

_GET_NEXT, _GET_OPTIONAL = "IteratorGetNext", "IteratorGetNextAsOptional"
_BRANCHES = ("If", "StatelessIf")
_SHAPE_OUTPUT = "tf_amp_shape"


@dataclasses.dataclass(frozen=True)
class Source:
    """What shows the size at a call: an argument, or an output of an iterator.

    Attributes:
        unknown: the axes whose length is not known.
        argument: the position of the argument, None for an iterator's output.
        tensor: the iterator's output, as the function's body names it.
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
        """A function that returns the shape as well, where no argument shows it."""
        if self.argument is not None:
            return definition
        shown = function_pb2.FunctionDef()
        shown.CopyFrom(definition)
        shown.signature.output_arg.add(name=_SHAPE_OUTPUT, type=types_pb2.DT_INT32)
        node = shown.node_def.add(name=_SHAPE_OUTPUT, op="Shape", input=[self.tensor])
        node.attr["T"].type = self.dtype
        node.attr["out_type"].type = types_pb2.DT_INT32
        shown.ret[_SHAPE_OUTPUT] = f"{_SHAPE_OUTPUT}:output:0"
        return shown


def find_source(definition: function_pb2.FunctionDef, shapes: Shapes) -> Source | None:
    """Finds the largest tensor that a function gets and whose shape is known in part.

    Args:
        definition: the function as it was traced.
        shapes: static shapes of its tensors.
    """
    found: list[tuple[Shape | None, Source]] = []
    for position, argument in enumerate(definition.signature.input_arg):
        found += ((s, Source(_unknown(s), argument=position)) for s in shapes(argument.name))
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
            source = Source(_unknown(shape), tensor=f"{node.name}:{output}:{port}", dtype=dtype)
            found.append((shape, source))
    partly_known = [each for each in found if each[1].unknown]
    return max(partly_known, key=lambda each: _known_elements(each[0]))[1] if partly_known else None


def _unknown(shape: Shape | None) -> tuple[int, ...]:
    return tuple(axis for axis, length in enumerate(shape or ()) if length is None)


def _known_elements(shape: Shape | None) -> int:
    return math.prod(length for length in shape or () if length is not None)
