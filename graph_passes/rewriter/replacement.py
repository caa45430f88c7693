"""What one unit wants changed in a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tensorflow.core.framework import node_def_pb2

from graph_passes.rewriter.effects import Contraction, write_contraction
from graph_passes.rewriter.emitter import Emitter

if TYPE_CHECKING:
    from graph_passes.rewriter.editor import GraphEdits


class Replacement(Emitter):
    """New nodes, tensors that come from elsewhere, and nodes with other inputs or on other lists.

    Attributes:
        accepted: what the graph's other units have changed so far.
        view: the graph.
        matcher: reads it.
        redirect, inputs, controls, in_place: what changes, as in `Edits`.
        node_lists: node -> the list that it counts as being on.
        open: nodes that the unit leaves in place for readers outside.
        contraction: nodes with effects that become one node.
    """

    def __init__(self, edits: GraphEdits, like: int, stem: str = "") -> None:
        """Starts a replacement of the node `like`; names of new nodes begin with the stem."""
        self.accepted, self.view, self.matcher = edits, edits.view, edits.matcher
        self.redirect: dict[str, str] = {}
        self.inputs: dict[str, Sequence[str]] = {}
        self.controls: dict[str, Sequence[str]] = {}
        self.node_lists: dict[str, str] = {}
        self.open: set[int] = set()
        self.contraction: Contraction | None = None
        self.in_place: dict[int, node_def_pb2.NodeDef] = {}
        super().__init__(
            edits.view.nodes[like],
            nodes=edits.owner.node,
            known=edits.view.index,
            taken=edits.taken,
            fact=edits.fact,
            is_function=edits.view.is_function,
            has_frames="Enter" in edits.view.ops,
            stem=stem,
        )

    def reads(self) -> set[str]:
        """The tensors of the graph that take part in the replacement."""
        read = self.read.union(self.redirect.values(), *self.inputs.values())
        made, earlier = self.made, self.accepted.made
        return {tensor for tensor in read if tensor not in made and tensor not in earlier}

    @property
    def edits_graph(self) -> bool:
        """Whether it changes more than lists."""
        return bool(self.redirect or self.inputs or self.in_place)

    def inputs_of(self, number: int) -> Sequence[str]:
        """The data inputs that units before leave a node."""
        return self.accepted.inputs.get(self.view.names[number], self.matcher.inputs(number))

    def replace(self, number: int, tensor: str) -> None:
        """Lets what reads a node's first output read another tensor."""
        self.redirect[self.matcher.output(number)] = tensor

    def contract(
        self,
        nodes: Contraction,
        op: str,
        *inputs: str,
        first: Sequence[node_def_pb2.NodeDef] = (),
        **attrs: Any,
    ) -> None:
        """Lets nodes with effects become one node of another op, in the place of the last.

        Or several new ones in a row, of which that is the last and `first` are the first.
        """
        self.add(op, *inputs, **attrs)
        self.contraction = nodes
        self.in_place = write_contraction(self.matcher, nodes, self.new_nodes[-1][0], first)

    def take_shapes_of(self, tensor: str, nodes: Iterable[int]) -> None:
        """Lets what asks for the shape of one of some nodes ask a tensor of the same shape."""
        m, shape = self.matcher, self.matcher.shape_of(tensor)
        if shape is None or "Shape" not in self.view.ops:
            return
        for number in nodes:
            asking = [reader for reader in m.readers(number) if m.op(reader) == "Shape"]
            if asking and self.matcher.shape_of(m.output(number)) == shape:
                self.inputs.update((m.node(reader).name, [tensor]) for reader in asking)
