"""What patterns want changed in a graph, gathered before anything is."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from tensorflow.core.framework import graph_pb2, node_def_pb2, tensor_pb2, types_pb2
from tensorflow.python.framework import tensor_util

from graph_passes.patterns.matching import Matcher, NoMatchError
from graph_passes.patterns.surgery import output_name, replace_tensors
from graph_passes.view import FLOAT, GraphView, Shape

_Found = TypeVar("_Found")
_FEW_ELEMENTS = 8
"""Constants of no more are mostly shapes, which come again from unit to unit."""


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A subgraph that looks like a pattern but is not one.

    Attributes:
        node: the node that the search started from.
        why: what is amiss.
    """

    node: str
    why: str


class GraphEdits:
    """New nodes, tensors that come from elsewhere, and nodes with other inputs.

    Attributes:
        view: the graph that the edits are for.
        redirect: tensor -> the tensor that its readers shall read instead.
        inputs: node -> all its new data inputs.
        new_nodes: nodes to add.
        shapes: static shapes of the outputs of added nodes.
        units: "pattern: node" of each subgraph that is replaced.
        misses: what came close to a pattern.
        listed: node -> the list that it counts as being on, `op_lists.FLOAT32` for what computes in
            float32 inside a unit. A denied op within a unit denies nothing outside.
    """

    def __init__(self, view: GraphView) -> None:
        self.view = view
        self.redirect: dict[str, str] = {}
        self.inputs: dict[str, Sequence[str]] = {}
        self.new_nodes: list[node_def_pb2.NodeDef] = []
        self.shapes: dict[str, tuple[Shape | None, ...]] = {}
        self.units: list[str] = []
        self.misses: list[NearMiss] = []
        self.listed: dict[str, str] = {}
        # Messages of one owner share memory; each alone takes a thousand bytes.
        self._owner = graph_pb2.GraphDef()
        self._values: dict[tuple[object, ...], tensor_pb2.TensorProto] = {}

    @functools.cached_property
    def matcher(self) -> Matcher:
        """Reads the graph; all patterns share it, and with it what it remembers."""
        return Matcher(self.view)

    def attempt(self, number: int, find: Callable[[int], _Found]) -> _Found | None:
        """What a search that starts from a node finds; None, and a near miss, for NoMatchError."""
        try:
            return find(number)
        except NoMatchError as miss:
            self.misses.append(NearMiss(self.view.nodes[number].name, str(miss)))
            return None

    def add(
        self,
        op: str,
        name: str,
        inputs: Sequence[str],
        device: str,
        dtypes: Mapping[str, int],
        shapes: Sequence[Shape | None] = (),
    ) -> node_def_pb2.NodeDef:
        """Adds a node; `dtypes` gives its type attrs, `shapes` those of its outputs if known."""
        node = self._owner.node.add(name=name, op=op, device=device, input=inputs)
        for attr, dtype in dtypes.items():
            node.attr[attr].type = dtype
        self.new_nodes.append(node)
        if shapes:
            self.shapes[name] = tuple(shapes)
        return node

    def add_constant(self, name: str, value: np.ndarray, device: str, beside: str) -> str:
        """Adds a constant and returns its tensor.

        In a graph with loops of TensorFlow 1, a control input from the node that makes the tensor
        `beside` keeps the constant in the frame of the loop that its reader is in.
        """
        controls = ("^" + self.view.split(beside)[0],) if "Enter" in self.view.ops else ()
        dtype = types_pb2.DT_INT32 if value.dtype == np.int32 else FLOAT
        node = self.add("Const", name, controls, device, {"dtype": dtype})
        node.attr["value"].tensor.CopyFrom(self._value(value))
        return self.output(name, "Const")

    def _value(self, value: np.ndarray) -> tensor_pb2.TensorProto:
        if value.size > _FEW_ELEMENTS:
            return tensor_util.make_tensor_proto(value)
        key = (value.dtype, value.shape, value.tobytes())
        found = self._values.get(key)
        if found is None:
            found = self._values[key] = tensor_util.make_tensor_proto(value)
        return found

    def add_single(
        self, op: str, name: str, inputs: Sequence[str], device: str, dtypes: Mapping[str, int]
    ) -> str:
        """Adds a node with one output and returns its tensor."""
        self.add(op, name, inputs, device, dtypes)
        return self.output(name, op)

    def add_reshape(
        self, name: str, tensor: str, dimensions: str, device: str, shape: Shape | None
    ) -> str:
        """Adds a Reshape to what the tensor `dimensions` holds and returns its tensor.

        Args:
            name: its name.
            tensor: what is reshaped, float32.
            dimensions: a tensor of int32.
            device: its device.
            shape: what is known of its static shape.
        """
        dtypes = {"T": FLOAT, "Tshape": types_pb2.DT_INT32}
        self.add("Reshape", name, (tensor, dimensions), device, dtypes, [shape])
        return self.output(name, "Reshape")

    def add_reshape_like(self, name: str, tensor: str, like: str, device: str) -> str:
        """Adds a Reshape to the shape of another tensor and returns its tensor.

        Args:
            name: its name; what makes the dimensions is named after it.
            tensor: what is reshaped, float32.
            like: a float32 tensor of the shape; its rank is known.
            device: the device of both.
        """
        shape = self.view.shape(like)
        if shape is not None and shape.count(None) <= 1:
            sizes = np.array([-1 if size is None else size for size in shape], np.int32)
            wanted = self.add_constant(f"{name}_shape", sizes, device, like)
        else:
            dtypes = {"T": FLOAT, "out_type": types_pb2.DT_INT32}
            wanted = self.add_single("Shape", f"{name}_shape", (like,), device, dtypes)
        return self.add_reshape(name, tensor, wanted, device, shape)

    def take_shapes_of(self, tensor: str, nodes: Iterable[int]) -> None:
        """Lets what asks for the shape of one of some nodes ask a tensor of the same shape."""
        m, shape = self.matcher, self.view.shape(tensor)
        if shape is None or "Shape" not in self.view.ops:
            return
        for number in nodes:
            asking = [reader for reader in m.readers(number) if m.op(reader) == "Shape"]
            if asking and self.view.shape(m.output(number)) == shape:
                self.inputs.update((m.node(reader).name, [tensor]) for reader in asking)

    def output(self, node: str, op: str, port: int = 0) -> str:
        """The name of an output, as readers in this graph write it."""
        return output_name(self.view, node, op, port)

    def apply(self, preserve: Collection[str]) -> GraphView:
        """The graph with all edits made; nothing in the view or the protos is changed.

        Args:
            preserve: names of nodes that must stay even if nothing reads them.
        """
        if not (self.redirect or self.inputs or self.new_nodes):
            return self.view
        self.__dict__.pop("matcher", None)  # in a large graph it remembers a lot
        return replace_tensors(
            self.view,
            redirect={tensor: self._final(tensor) for tensor in self.redirect},
            inputs={n: [self._final(t) for t in tensors] for n, tensors in self.inputs.items()},
            new_nodes=self.new_nodes,
            preserve=preserve,
            shapes=self.shapes,
        )

    def _final(self, tensor: str) -> str:
        """Follows redirections whose target is redirected as well (two units in a row)."""
        while tensor in self.redirect:
            tensor = self.redirect[tensor]
        return tensor
