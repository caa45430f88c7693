"""Sums of weight gradients move out of loops: lists in the body, one product behind the loop."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

from tensorflow.core.framework import function_pb2, types_pb2
from tensorflow.python.framework import tensor_util

from graph_passes.functions.call_tree import Call, Region, is_set
from graph_passes.functions.loop_editor import LoopEditor
from graph_passes.functions.loop_sums import BIAS_SUM, LoopSearch, LoopSum
from graph_passes.ir.copying import Graph
from graph_passes.ir.eligibility import node_name, numbers_of
from graph_passes.ir.graph_view import FLOAT, Shape
from graph_passes.ir.view import view_body
from graph_passes.policy.config import PrecisionConfig
from graph_passes.rewriter.body_editor import BodyEditor
from graph_passes.rewriter.editor import NearMiss
from graph_passes.rewriter.emitter import Emitter
from graph_passes.rewriter.matcher import Matcher
from graph_passes.units.fusion import Fusion

RULE = "loop-gradient-sums"
_ROWS = "TensorListConcatV2"
_MARK = "gradient_sums"

Prepare = Callable[[Region, Graph, Mapping[str, Sequence[Shape | None]]], Fusion]
"""Finds the units of a region's body, given the body and shapes of nodes that were added to it."""


def has_moved_sums(function: function_pb2.FunctionDef) -> bool:
    """Whether a sum was moved out of a loop of a function: XLA cannot compile it then."""
    return any(node.op == _ROWS and f"/{_MARK}/" in node.name for node in function.node_def)


def prepare_tree(
    tree: Region, config: PrecisionConfig, preserve: Collection[str], prepare: Prepare
) -> tuple[Region, dict[Region, Fusion]]:
    """Finds the units in all bodies of a call tree and moves sums out of its loops.

    A loop's functions come before its caller: units in the body are found first, since they leave
    out what stands between the sums and the gradients that they share, and units in the caller
    after the sums have come to it.

    Args:
        tree: the call tree; it is not changed.
        config: says which rules are in force.
        preserve: names of nodes of the main graph that must stay.
        prepare: finds the units of one body.

    Returns:
        The new tree, and for each region of it the units found there.
    """
    if not tree.calls:  # nothing to build anew: the graph is copied once less
        return tree, {tree: prepare(tree, tree.proto, {})}
    fusions: dict[Region, Fusion] = {}
    bodies: dict[Region, Graph] = {}
    prepared: dict[int, Fusion] = {}  # by the id of what was searched, which its Fusion keeps
    moves = config.has_rule(RULE) and not config.fused
    for region in reversed(list(tree.walk())):
        loops = [call for call in region.calls if call.kind.is_loop] if moves else []
        mover = _Mover(region.proto, bodies, fusions, config.unknown_dimension)
        # In a loop of TensorFlow 1, what is added would have to name the loop's frame.
        if loops and "Enter" not in {node.op for node in region.nodes}:
            kept = {node_name(name) for name in preserve} if region is tree else set()
            for call in loops:
                if call.node not in kept:
                    mover.move_from(call)
            mover.finish()
        body = mover.caller  # bodies of calls of one function are one object until they differ
        fusion = prepared.get(id(body)) or prepare(region, body, mover.shapes)
        prepared[id(body)] = fusion
        bodies[region] = fusion.proto
        fusions[region] = dataclasses.replace(
            fusion,
            units=(*mover.units, *fusion.units),
            misses=(*mover.misses, *fusion.misses),
            shapes={**mover.shapes, **fusion.shapes},
        )
    new = tree.with_bodies(bodies.__getitem__)
    return new, {r: fusions[old] for old, r in zip(tree.walk(), new.walk(), strict=True)}


class _Mover:
    """Moves sums out of the loops of one caller.

    Attributes:
        caller: the calling graph, a copy once something has moved.
        shapes: node added to the caller -> static shapes of its outputs.
        units: "rule: node" of each sum that was moved.
        misses: what came close.
    """

    def __init__(
        self,
        caller: Graph,
        bodies: dict[Region, Graph],
        fusions: dict[Region, Fusion],
        unknown: int,
    ) -> None:
        self.caller = caller
        self.shapes: dict[str, tuple[Shape | None, ...]] = {}
        self.units: list[str] = []
        self.misses: list[NearMiss] = []
        self._bodies, self._fusions, self._unknown = bodies, fusions, unknown
        self._given, self._editor = caller, BodyEditor(caller)
        self._moved: dict[str, str] = {}  # what loops gave -> the sums behind them

    def move_from(self, call: Call) -> None:
        """Moves sums out of one loop."""
        loop = self._editor.node(call.node)
        # A loop that stays one op may be for XLA, where the length of a list must be known before.
        if not ("output_shapes" in loop.attr and is_set(loop.attr, "_lower_using_switch_merge")):
            return
        body, cond = call.callee("body"), call.callee("cond")
        view = self._fusions[body].view
        rules = self._fusions[body].rules
        kept = frozenset(numbers_of(view, (name for name, rule in rules.items() if rule.keeps)))
        old: function_pb2.FunctionDef = self._bodies[body]  # type: ignore[assignment]
        cond_view = self._fusions[cond].view
        search = LoopSearch(loop, old, Matcher(view), cond_view, kept, self._unknown)
        sums, misses = search.find()
        self.misses.extend(misses)
        if not sums:
            return
        if self.caller is self._given:
            self.caller = copy.deepcopy(self.caller)
            self._editor = BodyEditor(self.caller)
        new = {region: copy.deepcopy(self._bodies[region]) for region in (body, cond)}
        mover = _SumEditor(LoopEditor(self._editor, call.node, new[body], new[cond]))  # type: ignore[arg-type]
        self._moved.update(mover.move(sums))
        self._bodies.update(new)
        for region, edited in new.items():
            before = self._fusions[region]
            view = view_body(edited, None, before.view.node_index.node_types)
            node_lists = {n: where for n, where in before.node_lists.items() if n in view.index}
            self._fusions[region] = dataclasses.replace(before, view=view, node_lists=node_lists)
        self.shapes.update(mover.emit.shapes)
        self.units.extend(f"{RULE}: {each.addition}" for each in sums)

    def finish(self) -> None:
        """Lets the caller read the sums that were moved, once they all are."""
        if self._moved:
            self._editor.redirect(self._moved)


class _SumEditor:
    """Moves sums out of one loop to what stands behind it.

    Attributes:
        emit: adds nodes to the caller.
    """

    def __init__(self, loop: LoopEditor) -> None:
        self._loop = loop
        self.emit: Emitter = loop.caller.emitter(f"{loop.node.name}/{_MARK}")
        self._rows: dict[str, str] = {}  # tensor of the body -> that with the rows of all rounds

    def move(self, sums: Sequence[LoopSum]) -> dict[str, str]:
        """Moves sums to the caller; returns what is to be read instead of what the loop gave."""
        caller, node, op = self._loop.caller, self._loop.node, self.emit.op
        moved: dict[str, str] = {}
        for each in sums:
            terms = []
            for term in each.terms:
                self.emit.device = term.device
                pairs = zip(term.operands, each.shape, strict=True)
                rows = [self._rows_of(tensor, width) for tensor, width in pairs]
                attrs = {} if term.op == BIAS_SUM else {"transpose_a": True}
                terms.append(self.emit.add(term.op, *rows, name="sum", shape=each.shape, **attrs))
            ended = caller.output(node.name, each.position)
            if not _is_zero(caller, node.input[each.position]):
                terms.insert(0, ended)
            self.emit.device = each.terms[0].device
            moved[ended] = (
                terms[0] if len(terms) == 1 else op.AddN(*terms, name="total", shape=each.shape)
            )
        body = self._loop.body
        body.redirect({body.output(each.addition): each.before for each in sums})
        gone = {each.addition for each in sums}
        body.remove(gone.union(term.node for each in sums for term in each.terms))
        return moved

    def _rows_of(self, tensor: str, width: int) -> str:
        """The rows that a tensor of the body has in all rounds; [rows, width], behind the loop."""
        if tensor in self._rows:
            return self._rows[tensor]
        emit, loop = self.emit, self._loop
        shape = emit.constant((-1, width), name="row_shape", beside="")
        limit = emit.constant(-1, name="limit", beside="")
        empty = emit.op.EmptyTensorList(shape, limit, name="list", element_dtype=FLOAT)
        rows, position = loop.add_variable("gradient_rows", empty, types_pb2.DT_VARIANT)
        inside = loop.body.emitter(rows, emit.device)
        loop.set_next(rows, inside.op.TensorListPushBack(rows, tensor, name="push"))
        ended = loop.caller.output(loop.node.name, position)
        lengths = emit.constant((), name="lengths", beside="", dtype="int64")
        made, _ = emit.op.TensorListConcatV2(
            ended, shape, lengths, name="rows", shape=(None, width), element_dtype=FLOAT
        )
        self._rows[tensor] = made
        return made


def _is_zero(caller: BodyEditor, tensor: str) -> bool:
    """Whether a tensor is certain to be all zeros."""
    node = caller.find(node_name(tensor))
    while node is not None and node.op in ("Fill", "Identity"):
        node = caller.find(node_name(node.input[1 if node.op == "Fill" else 0]))
    if node is None or node.op != "Const":
        return node is not None and node.op == "ZerosLike"
    return not tensor_util.MakeNdarray(node.attr["value"].tensor).any()
