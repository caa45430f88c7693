"""Sums of weight gradients that a loop adds up round by round.

The gradient of a recurrent layer is a loop whose body adds, in every round t, the gradient of each
weight to a loop variable that nothing else reads:

    dW = dW + MatMul(x[t], d[t], transpose_a)

Each round so reads and writes tensors of the size of the weight, and the sum is rounded as often
as there are rounds. One product of all rounds is the same sum, added up in float32 inside:

    dW = dW before the loop + MatMul(rows of all x[t], rows of all d[t], transpose_a)

Here such sums are found; `loop_sum_moves` moves them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

from tensorflow.core.framework import function_pb2, node_def_pb2

from graph_passes.ir.graph_view import FLOAT, RESULT, GraphView
from graph_passes.rewriter.editor import NearMiss
from graph_passes.rewriter.matcher import Matcher, NoMatchError

PRODUCT, BIAS_SUM = "MatMul", "BiasAddGrad"
_COPIES = 2
"""How many times the elements of the rows that are kept a sum must have. They are written, joined
and read behind the loop; in it, products and sums run beside what the next round waits for. At 1.6
times LSTM(128) of 64 rows took 1.09 times as long with its sums moved as without, at 3.2
LSTM(256) 0.87 to 1.01 times, at 12 0.71 to 0.83 times (AVX512_BF16, two cores)."""


@dataclasses.dataclass(frozen=True)
class Term:
    """What one round adds to a sum.

    Attributes:
        node: name of the node that makes it, a `PRODUCT` or a `BIAS_SUM`.
        op: its op.
        device: its device.
        operands: the tensors of the body that it is made of, matrices with the rows of a round;
            the sum has an axis for the columns of each.
    """

    node: str
    op: str
    device: str
    operands: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class LoopSum:
    """A loop variable to which every round adds terms.

    Attributes:
        position: of the loop variable.
        addition: name of the AddN.
        before: the tensor with what the rounds before have made, in the body.
        shape: of the sum.
        terms: what a round adds.
    """

    position: int
    addition: str
    before: str
    shape: tuple[int, ...]
    terms: tuple[Term, ...]


@dataclasses.dataclass(frozen=True)
class LoopSearch:
    """Searches the functions of one loop.

    Attributes:
        loop: the calling node.
        body: the loop's body.
        m: reads it.
        cond_view: the view of the loop's condition.
        kept: numbers of nodes of the body that rules of the user keep in float32.
        unknown: what counts for the rows of a round, the batch, where they are not known.
    """

    loop: node_def_pb2.NodeDef
    body: function_pb2.FunctionDef
    m: Matcher
    cond_view: GraphView
    kept: frozenset[int]
    unknown: int

    def find(self) -> tuple[list[LoopSum], list[NearMiss]]:
        """The sums that are worth moving, and what came close to one."""
        sums: list[LoopSum] = []
        misses: list[NearMiss] = []
        additions = self._additions()
        for position, addition in additions.items():
            found = self._attempt(position, addition)
            if isinstance(found, LoopSum):
                sums.append(found)
            else:
                misses.append(found)
        return self._worthwhile(sums, self._rows(additions), misses), misses

    def _additions(self) -> dict[int, int]:
        """Loop variable -> the AddN that adds to it, where a product is among the terms.

        An addition that broadcasts is another thing: how its terms are shaped is not known.
        """
        found = {}
        for position, result in enumerate(self.body.signature.output_arg):
            if result.type != FLOAT:
                continue
            number = self.m.maker(self.m.through(self.body.ret[result.name], "Identity"))
            terms = self.m.inputs(number) if self.m.op(number) == "AddN" else ()
            makers = {self.m.op(self.m.maker(tensor)) for tensor in terms}
            if makers & {PRODUCT, BIAS_SUM} and self._before(position, number):
                found[position] = number
        return found

    def _before(self, position: int, addition: int) -> list[str]:
        """The terms of an addition that are the loop variable itself."""
        argument = self.body.signature.input_arg[position].name
        terms = self.m.inputs(addition)
        return [tensor for tensor in terms if self.m.through(tensor, "Identity") == argument]

    def _attempt(self, position: int, addition: int) -> LoopSum | NearMiss:
        try:
            return self._read_sum(position, addition)
        except NoMatchError as miss:
            return NearMiss(self.m.node(addition).name, str(miss))

    def _read_sum(self, position: int, addition: int) -> LoopSum:
        before = self._before(position, addition)
        if len(before) != 1:
            raise NoMatchError("the loop variable is more than one of its terms")
        self._require_one_reader(position, addition)
        shape = self._shape(position)
        terms = [
            self._read_term(self.m.maker(tensor), addition)
            for tensor in self.m.inputs(addition)
            if tensor != before[0]
        ]
        return LoopSum(position, self.m.node(addition).name, before[0], shape, tuple(terms))

    def _require_one_reader(self, position: int, addition: int) -> None:
        """Requires that the loop keeps the sum to itself until it ends."""
        argument = self.cond_view.nodes[position].name
        if self.cond_view.reading_nodes(self.cond_view.index[argument]):
            raise NoMatchError("the loop's condition reads the sum")
        number = self.m.view.index[self.body.signature.input_arg[position].name]
        while number != addition:
            number = self._only_reader(number)
        self._require_removable(addition)
        result = self.m.view.index[f"{self.body.signature.output_arg[position].name}/{RESULT}"]
        while number != result:
            number = self._only_reader(number)

    def _only_reader(self, number: int) -> int:
        readers = self.m.readers(number)
        if len(readers) != 1:
            raise NoMatchError(f"more than the sum reads {self.m.node(number).name!r}")
        return readers[0]

    def _require_removable(self, number: int) -> None:
        node = self.m.node(number)
        if number in self.kept:
            raise NoMatchError(f"a rule keeps {node.name!r}")
        if self.m.view.is_ordered(number) or node.name in self.body.control_ret.values():
            raise NoMatchError(f"{node.name!r} has control inputs or is one")

    def _shape(self, position: int) -> tuple[int, ...]:
        shapes = self.loop.attr["output_shapes"].list.shape
        shape = tuple(dim.size for dim in shapes[position].dim) if position < len(shapes) else ()
        if min(shape, default=-1) < 0:
            raise NoMatchError("the shape of the sum is not known")
        return shape

    def _read_term(self, number: int, addition: int) -> Term:
        node = self.m.node(number)
        self.m.expect(number, PRODUCT, BIAS_SUM)
        self._require_removable(number)
        if self.m.readers(number) != [addition]:
            raise NoMatchError(f"more than the sum reads {node.name!r}")
        flags = [self.m.attr(number, f"transpose_{side}").b for side in "ab"]
        if node.op == PRODUCT and flags != [True, False]:
            raise NoMatchError(f"{node.name!r} does not sum over the rows of its inputs")
        return Term(node.name, node.op, node.device, tuple(self.m.inputs(number)))

    def _worthwhile(self, sums: list[LoopSum], rows: int, misses: list[NearMiss]) -> list[LoopSum]:
        """Those sums whose lists are clearly smaller than the sums in every round.

        A round reads and writes the sum and its terms where they are added up in the loop; moved,
        it keeps the rows of what the terms are made of. So one weighs the elements of the sum
        against those of the rows that no other sum has kept already. The gradient of a bias is
        moved where a weight's has its rows: it is too small to keep any for its sake, and what it
        is made of may be no matrix.
        """
        stored: set[str] = set()
        chosen = []
        for each in sorted(sums, key=lambda found: (-len(found.shape), -math.prod(found.shape))):
            added = {
                operand: width
                for term in each.terms
                for operand, width in zip(term.operands, each.shape, strict=True)
                if operand not in stored
            }
            if added and len(each.shape) < 2:
                continue
            if math.prod(each.shape) < _COPIES * rows * sum(added.values()):
                why = f"it has less than {_COPIES} times the elements that its terms are made of"
                misses.append(NearMiss(each.addition, why))
                continue
            stored |= added.keys()
            chosen.append(each)
        return sorted(chosen, key=lambda found: found.position)

    def _rows(self, additions: Collection[int]) -> int:
        """The rows of a round: those of the other matrices that it changes, states of a batch."""
        found = []
        shapes = self.loop.attr["output_shapes"].list.shape
        signature = self.body.signature
        ends = zip(signature.input_arg, signature.output_arg, strict=True)
        for position, (argument, result) in enumerate(ends):
            tensor = self.m.through(self.body.ret[result.name], "Identity")
            if argument.type != FLOAT or position in additions or tensor == argument.name:
                continue
            if position < len(shapes) and len(shapes[position].dim) == 2:
                rows = shapes[position].dim[0].size
                found.append(self.unknown if rows < 0 else rows)
        return max(found, default=self.unknown)
