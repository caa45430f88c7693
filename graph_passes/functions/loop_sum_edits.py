"""Changes that move sums out of a loop: in its caller, at its node and in its functions."""

from __future__ import annotations

from collections.abc import Sequence

from tensorflow.core.framework import function_pb2, types_pb2
from tensorflow.python.framework import tensor_util

from graph_passes.functions.loop_editor import LoopEditor
from graph_passes.functions.loop_sums import BIAS_SUM, LoopSum
from graph_passes.ir.eligibility import node_name
from graph_passes.ir.view import FLOAT
from graph_passes.rewriter.body_editor import BodyEditor
from graph_passes.rewriter.emitter import Emitter

_ROWS = "TensorListConcatV2"
_MARK = "gradient_sums"


def has_moved_sums(function: function_pb2.FunctionDef) -> bool:
    """Whether a sum was moved out of a loop of a function: XLA cannot compile it then."""
    return any(node.op == _ROWS and f"/{_MARK}/" in node.name for node in function.node_def)


class SumMover:
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
