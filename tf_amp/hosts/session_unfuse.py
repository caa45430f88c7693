"""Takes apart what TensorFlow's remapper has fused, and puts back what nobody changed.

A graph plugin sees the graph after the remapper of Grappler's first round. Converting a fused
node as a whole is not safe: on a CPU the registry lists kernels of ``_FusedConv2D`` and
``_FusedConv3D`` for float16 that refuse to run, ``_FusedMatMul`` runs GELU in float16 nowhere but
on a GPU, and the OpDef of ``_FusedConv2D`` has no bfloat16. The lists of the rewrite, and the
user's edits of them, also speak of the ops the model was written with.

So each fused float32 node becomes the ops it stands for, the pass decides about those, and the
remapper of the second round fuses them again in the dtype they then have, wherever the machine
has a kernel: it knows what the hardware runs. A node none of whose parts was changed is put back
as it was, because a session may be configured to have no second round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tensorflow.core.framework import graph_pb2, node_def_pb2

from tf_amp.hosts.session_fused_ops import (
    PART_PREFIX,
    FusedGroup,
    copy_node,
    is_fused,
    parts_of,
)

_FRAME_OPS = frozenset({"Enter", "RefEnter"})


@dataclass(frozen=True)
class UnfusedGraph:
    """A graph without fused float32 nodes, as far as they can be taken apart.

    Attributes:
        graph: The graph; the same object as the given one when nothing was fused.
        whole: Names of fused float32 nodes that were left as they are.
        groups: What was taken apart.
    """

    graph: graph_pb2.GraphDef
    whole: tuple[str, ...]
    groups: tuple[FusedGroup, ...]

    def fused_name(self, name: str) -> str:
        """Returns the node of the fused graph whose first output has the shape of a part's.

        Args:
            name: A node of `graph`. The parts of a fused node all have one shape, but for
                constants; a node that is no part stands for itself.
        """
        fused, _, part = name.partition(f"/{PART_PREFIX}")
        return fused if part else name

    def put_back(self, rewritten: graph_pb2.GraphDef) -> graph_pb2.GraphDef:
        """Restores each fused node of which `rewritten` holds every part unchanged.

        Args:
            rewritten: `graph` after a rewrite; not changed.

        Returns:
            A new graph, or `rewritten` itself when nothing had been taken apart.
        """
        if not self.groups:
            return rewritten
        nodes = {node.name: node for node in rewritten.node}
        moved_back: dict[str, str] = {}
        removed: set[str] = set()
        fused: dict[str, node_def_pb2.NodeDef] = {}
        for group in self.groups:
            if all(nodes.get(part.name) == part for part in group.parts):
                removed.update(part.name for part in group.parts)
                fused[group.fused.name] = copy_node(group.fused)
                moved_back.update((new, old) for old, new in group.moved)
        # A fused node may read an output that another one, still apart, has moved.
        _move_inputs(fused.values(), dict(pair for g in self.groups for pair in g.moved))
        result = graph_pb2.GraphDef()
        result.CopyFrom(rewritten)
        del result.node[:]
        for node in rewritten.node:
            if node.name in fused:
                result.node.append(fused[node.name])
            elif node.name not in removed:
                result.node.append(node)
        _move_inputs(result.node, moved_back)
        return result


def unfuse(
    graph: graph_pb2.GraphDef,
    preserve: Collection[str] = (),
    shapes: Callable[[str], Sequence[Any]] | None = None,
) -> UnfusedGraph:
    """Replaces fused float32 nodes by the plain ops they stand for.

    Args:
        graph: A graph as the remapper leaves it; not changed.
        preserve: Names of nodes whose outputs must stay what they are.
        shapes: Gives the static shapes of the outputs of a node.

    Returns:
        The graph taken apart, and what is needed to undo it.
    """
    keep = frozenset(preserve)
    in_frames = any(node.op in _FRAME_OPS for node in graph.node)

    def rank_of(tensor: str) -> int | None:
        node, _, port = tensor.partition(":")
        found = () if shapes is None else shapes(node)[int(port or 0) :]
        return len(found[0]) if found and found[0] is not None else None

    groups: dict[str, FusedGroup] = {}
    whole: list[str] = []
    for node in filter(is_fused, graph.node):
        group = parts_of(node, preserved=node.name in keep, in_frames=in_frames, rank_of=rank_of)
        if group is None:
            whole.append(node.name)
        else:
            groups[node.name] = group
    if not groups:
        return UnfusedGraph(graph, tuple(whole), ())
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph)
    del result.node[:]
    for node in graph.node:
        result.node.extend(groups[node.name].parts if node.name in groups else (node,))
    moved = dict(pair for group in groups.values() for pair in group.moved)
    _move_inputs(result.node, moved)
    # A part may read what another group has moved: the parts to compare with are the final ones.
    final = {node.name: node for node in result.node}
    return UnfusedGraph(
        result,
        tuple(whole),
        tuple(
            FusedGroup(g.fused, tuple(copy_node(final[part.name]) for part in g.parts), g.moved)
            for g in groups.values()
        ),
    )


def _move_inputs(nodes: Iterable[node_def_pb2.NodeDef], moved: dict[str, str]) -> None:
    if not moved:
        return
    for node in nodes:
        for index, name in enumerate(node.input):
            # A part reads the output that was moved away from it; every other reader follows.
            target = moved.get(name) or moved.get(name.removesuffix(":0"))
            if target is not None and not node.name.startswith(f"{_base(name)}/{PART_PREFIX}"):
                node.input[index] = target


def _base(name: str) -> str:
    return name.rsplit(":", 1)[0]
