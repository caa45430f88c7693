"""The conditions under which a replacement is accepted, whatever pattern proposes it.

All of them are about the graph as it was before any replacement. The *interior* are the nodes on a
path from a tensor that the replacement reads to one that it makes anew: their work is no longer
asked for, so nothing else may need it, and what they waited for their successors must wait for.
Where variables are by reference, what waited for them, as an update, waits for their successors.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Collection, Mapping, Sequence, Set

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.ir.adjacency import Neighbours, walk
from graph_passes.ir.graph_view import ARGUMENT, Shape
from graph_passes.ir.node_order import order_edges, without_order
from graph_passes.ops.node_types import WHOLE, NodeType
from graph_passes.policy.op_classes import ops_of
from graph_passes.rewriter.effects import admit_contraction
from graph_passes.rewriter.matcher import SHAPERS, SIZES, Matcher, NoMatchError
from graph_passes.rewriter.replacement import Replacement

CONTROL_FLOW = ("Enter", "Exit", "Switch", "Merge", "NextIteration", "LoopCond")
_ANY = 1 << 30
_NORM = dict.fromkeys((1, 2, 3, 4), (1, 1))
_RANKS: dict[str, dict[int, tuple[int, int]]] = {
    "FusedBatchNormV3": {0: (4, 4), **_NORM},
    "FusedBatchNormGradV3": {0: (4, 4), **_NORM, 1: (4, 4)},
    "_MklSoftmax": {0: (1, 5)},
    "MatMul": {0: (2, 2), 1: (2, 2)},
    "BatchMatMulV2": {0: (2, _ANY), 1: (2, _ANY)},
    "BiasAdd": {0: (2, _ANY), 1: (1, 1)},
    "BiasAddGrad": {0: (2, _ANY)},
    "Conv2D": {0: (4, 4), 1: (4, 4)},
    "DepthwiseConv2dNative": {0: (4, 4), 1: (4, 4)},
}
"""Op -> port -> the least and the largest rank that its kernel takes."""
_REF_VARIABLES = ops_of("ref_variables")
_MOST_NODES = 2000
"""More nodes than any unit has."""
_DEEPEST_IDLE = 5


class Gate:
    """Checks the replacements in one graph.

    Attributes:
        kept: the nodes that are fed, fetched or otherwise to be left as they are, by number.
        preserved: those of them that must make the tensors that they make.
    """

    def __init__(self, matcher: Matcher, kept: Collection[int], preserved: Collection[int]) -> None:
        self.kept, self.preserved = kept, preserved
        self._m = matcher
        self._is_boundary = bytearray(matcher.view.is_of_node_type(_is_boundary))

    def admit(self, new: Replacement) -> None:
        """Lets a replacement pass, and gives it the control inputs of what it replaces.

        Raises:
            NoMatchError: it must not be made; the message says why.
        """
        self._check_operands(new)
        if new.contraction is not None:
            admit_contraction(self._m, new.contraction, self.preserved, new.accepted.in_place)
            return
        self._check_results(new)
        interior = _Interior(self._m, new, self._is_boundary)
        self._check_interior(new, interior)
        behind = _dependents(new)
        self._check_order(new, behind)
        if interior.waits():
            self._inherit_controls(new, interior, behind)
        self._hand_on_waiting(new)

    def _check_operands(self, new: Replacement) -> None:
        for node, node_type, facts in new.new_nodes:
            fault = _illegal_dtype(node_type)
            if fault is not None:
                raise NoMatchError(fault)
            for slot, fact in zip(node_type.layout.in_slots, facts, strict=True):
                if fact.dtype != node_type.dtypes[slot]:
                    taken = _name(node_type.dtypes[slot])
                    raise NoMatchError(f"{node.op} takes {taken}, not {_name(fact.dtype)}")
            for port, (least, most) in _RANKS.get(node_type.op, {}).items():
                tensor, shape = node.input[port], facts[port].shape
                if shape is None and self._m.view.split(tensor)[0] in self._m.view.index:
                    shape = self._m.stored_shape(tensor)
                if shape is None:
                    raise NoMatchError(
                        f"nothing shows the rank of {tensor!r}, which {node.op} would read"
                    )
                if not least <= len(shape) <= most:
                    raise NoMatchError(
                        f"{node.op} takes no operand of rank {len(shape)}, as {tensor!r} is"
                    )

    def _check_results(self, new: Replacement) -> None:
        m = self._m
        for tensor, target in new.redirect.items():
            if tensor in new.accepted.redirect:
                raise NoMatchError(f"another unit makes {tensor!r}")
            old, made = new.fact(tensor), new.fact(target)
            if old.dtype != made.dtype:
                raise NoMatchError(
                    f"{tensor!r} would change from {_name(old.dtype)} to {_name(made.dtype)}"
                )
            shape = old.shape
            if shape is None or _agrees(shape, made.shape):
                continue
            if any(m.op(reader) != "Reshape" for reader in m.readers(m.maker(tensor))):
                raise NoMatchError(f"{tensor!r} would change shape from {shape} to {made.shape}")

    def _check_interior(self, new: Replacement, interior: _Interior) -> None:
        m, view, ends = self._m, self._m.view, new.redirect
        for number in interior.nodes:
            if number in self.kept:
                raise NoMatchError(f"{view.names[number]!r} is to be preserved")
        if interior.reads_state is not None:
            raise NoMatchError(f"{view.names[interior.reads_state]!r} inside has a state")
        for number in interior.on_path:
            if number in new.open:
                continue
            for reader in m.readers(number):
                if reader in interior.nodes or reader in interior.rewired:
                    continue
                left = [t for t in m.inputs(reader) if m.maker(t) == number and t not in ends]
                asks_size = m.ops[reader] in SIZES
                is_shaped = m.ops[number] in SHAPERS and m.ops[reader] in SHAPERS
                if left and not (asks_size or is_shaped or self.is_idle(reader)):
                    raise NoMatchError(
                        f"{view.names[reader]!r} outside the unit reads {view.names[number]!r}"
                    )

    def is_idle(self, number: int, depth: int = _DEEPEST_IDLE) -> bool:
        """Whether nothing comes of a node: a gradient for what needs none.

        Should somebody fetch it all the same, the primitives are there still, since it reads them.
        """
        view = self._m.view
        if number in self.kept or view.names[number] in view.awaited or not depth:
            return False
        node_type = view.node_type(number)
        if not node_type.layout.out_slots or node_type.has_effect:
            return False  # the result of a function, or an op that has an effect
        return all(self.is_idle(reader, depth - 1) for reader in self._m.readers(number))

    def _check_order(self, new: Replacement, behind: Mapping[str, Set[str]]) -> None:
        """No new node reads what comes of a tensor, or of a node, that is to be made with it."""
        m, split, index = self._m, self._m.view.split, self._m.view.index
        for node, _, _ in new.new_nodes:
            names = [split(tensor)[0] for tensor in node.input if tensor not in new.makers]
            read = {index[name] for name in names if name in index}  # not of units before
            if read:
                made = behind[node.name]
                later = {m.maker(tensor) for tensor, by in new.redirect.items() if by in made}
                later.update(n for old in [*later] for n in self._awaiting(old))
                later.update(index[n] for n, inputs in new.inputs.items() if made & {*inputs})
                self._require_no_cycle(read, later)

    def _awaiting(self, number: int) -> Sequence[int]:
        """What must not run before a node that may read a variable by reference, as its update."""
        view = self._m.view
        if _REF_VARIABLES.isdisjoint(view.ops) or view.names[number] not in view.awaited:
            return ()
        awaited, waiting = view.control_edges
        return waiting[awaited == number].tolist()

    def _hand_on_waiting(self, new: Replacement) -> None:
        """Lets what waits for nodes wait for what takes their place, too."""
        for tensor, target in new.redirect.items():
            if target in new.makers:
                heir = f"^{new.makers[target].name}"
                for waiting in self._awaiting(self._m.maker(tensor)):
                    name = self._m.view.names[waiting]
                    new.controls[name] = (*new.controls.get(name, ()), heir)

    def _inherit_controls(
        self, new: Replacement, interior: _Interior, behind: Mapping[str, Set[str]]
    ) -> None:
        """Lets what takes the place of nodes wait for what they waited for, where it can."""
        ends, index = new.redirect, self._m.view.index
        for tensor, target in ends.items():
            waits = interior.controls_of(self._m.maker(tensor))
            heir = new.makers.get(target)
            if waits and heir is None:
                raise NoMatchError(f"{tensor!r} waits for {min(waits)!r}")
            if heir is not None:
                others = [t for t, by in ends.items() if by in behind[heir.name] and t != tensor]
                awaited = {index[name] for name in waits}
                self._require_no_cycle(awaited, {*map(self._m.maker, others)})
                known = set(heir.input)
                heir.input.extend(c for w in sorted(waits) if (c := f"^{w}") not in known)
        for name, dropped in interior.dropped.items():
            waits = {w for t in dropped for w in interior.controls_of(self._m.maker(t))}
            if waits:
                new.controls[name] = tuple(f"^{w}" for w in sorted(waits))

    def _require_no_cycle(self, before: Collection[int], later: Collection[int]) -> None:
        """Asks that nothing that a new node reads or waits for comes of nodes made with it.

        Raises:
            NoMatchError: something does, or may.
        """
        limit = min(map(self._places.__getitem__, later), default=_ANY)
        late = [number for number in before if self._places[number] >= limit]

        def makers(number: int) -> list[int]:
            return [n for n in self._makers[number].tolist() if self._places[n] >= limit]

        for count, number in enumerate(walk(late, makers)):
            if number in later:
                name = self._m.view.names[number]
                raise NoMatchError(f"it would wait for what comes of {name!r}, made with it")
            if count > _MOST_NODES:
                raise NoMatchError("what it would wait for comes of too much to look through")

    @functools.cached_property
    def _makers(self) -> Neighbours:
        """For each node those that run before it."""
        makers, readers = order_edges(self._m.view)
        return Neighbours(len(self._m.view.nodes), readers, makers)

    @functools.cached_property
    def _places(self) -> list[float]:
        """For each node where it stands in an order in which each stands behind what it reads."""
        places = np.arange(len(self._m.view.nodes), dtype=np.float64)
        without_order(*order_edges(self._m.view), places)
        return places.tolist()  # type: ignore[no-any-return]


class _Interior:
    """What a replacement makes superfluous.

    Attributes:
        nodes: the nodes that the tensors it makes anew are made with, back to what it reads.
        on_path: those of them that are made of what it reads.
        rewired: the nodes that it gives other inputs.
        dropped: name of such a node -> what it no longer reads.
        reads_state: a node with a state, or of a loop, whose values are read inside.
    """

    def __init__(self, m: Matcher, new: Replacement, is_boundary: bytearray) -> None:
        """Walks back; `is_boundary` says by node where the walk ends in any case."""
        self._m, view = m, m.view
        redirected = new.redirect
        self.rewired = {view.index[name] for name in new.inputs}
        self.dropped = {
            name: [t for t in m.inputs(view.index[name]) if t not in tensors]
            for name, tensors in new.inputs.items()
        }
        roots = [m.maker(tensor) for tensor in redirected]
        roots += [m.maker(tensor) for dropped in self.dropped.values() for tensor in dropped]
        sources = {m.maker(tensor) for tensor in new.reads()}
        self.reads_state: int | None = None
        feeds: dict[int, list[int]] = collections.defaultdict(list)
        fed: list[int] = []
        pending = [number for number in roots if number not in sources]
        if not sources.isdisjoint(map(m.maker, redirected)):
            raise NoMatchError("the replacement reads what it is to make")
        self.nodes = nodes = set(pending)
        ops, makers_of = m.ops, m.makers
        while pending:
            number = pending.pop()
            if ops[number] in SIZES:
                continue
            for maker in makers_of(number):
                if maker in sources:
                    fed.append(number)
                elif not is_boundary[maker]:
                    feeds[maker].append(number)
                    if maker not in nodes:
                        nodes.add(maker)
                        pending.append(maker)
                elif self._takes_values(number, maker):
                    self.reads_state = maker
            if len(nodes) > _MOST_NODES:
                raise NoMatchError("the nodes that it would replace are too many")
        self.on_path = set(walk(fed, lambda number: feeds.get(number, ())))

    def _takes_values(self, reader: int, maker: int) -> bool:
        """Whether more than sizes, axes and conditions goes between two nodes."""
        view = self._m.view
        made = [view.dtypes[vertex] for vertex in view.producers(reader)]
        read = zip(self._m.makers(reader), made, strict=True)
        return any(number == maker and dtype not in WHOLE for number, dtype in read)

    def waits(self) -> bool:
        """Whether one of the nodes waits for one outside."""
        index, waits, nodes = self._m.view.index, self._m.view.waits, self.nodes
        waiting = [waits[number] for number in nodes if number in waits]
        return any(index[name] not in nodes for names in waiting for name in names)

    def controls_of(self, root: int) -> set[str]:
        """The nodes outside that those waited for with which a node is made."""
        m, index, waits = self._m, self._m.view.index, self._m.view.waits

        def before(number: int) -> list[int]:
            awaited = map(index.__getitem__, waits.get(number, ()))
            return [n for n in (*m.makers(number), *awaited) if n in self.nodes]

        waiting = walk(self.nodes.intersection((root,)), before)
        names = {name for number in waiting for name in waits.get(number, ())}
        return {name for name in names if index[name] not in self.nodes}


def _is_boundary(node_type: NodeType) -> bool:
    return node_type.has_effect or node_type.op in (*CONTROL_FLOW, "Placeholder", ARGUMENT)


@functools.lru_cache(maxsize=1024)
def _illegal_dtype(node_type: NodeType) -> str | None:
    """What the op's definition has against the dtypes of a new node."""
    op_type = node_type.op_type
    for slot, dtype in zip(node_type.layout.slots, node_type.dtypes, strict=True):
        if op_type is not None and slot.attr and not op_type.allows(slot, dtype):
            return f"{node_type.op} does not compute in {_name(dtype)}"
    return None


def _agrees(old: Shape, new: Shape | None) -> bool:
    if new is None or len(old) != len(new):
        return False
    return all(a == b or None in (a, b) for a, b in zip(old, new, strict=True))


def _dependents(new: Replacement) -> dict[str, set[str]]:
    """Name of a new node -> the new tensors that are made with it."""
    of_node: dict[str, set[str]] = collections.defaultdict(set)
    for tensor, node in new.makers.items():
        of_node[node.name].add(tensor)
    for node, _, _ in reversed(new.new_nodes):  # makers come before their readers
        for tensor in node.input:
            maker = new.makers.get(tensor)
            if maker is not None:
                of_node[maker.name] |= of_node[node.name]
    return of_node


def _name(dtype: int) -> str:
    return types_pb2.DataType.Name(dtype)[3:].lower()
