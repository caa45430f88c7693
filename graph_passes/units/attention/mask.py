"""Masks of attention whose large negative number float16 cannot hold.

A mask takes positions out of a softmax by putting a number in their place, or adding one, that is
so far below all others that its exponential is 0:

    Softmax(Select(mask, scores, -1e9))            Softmax(scores + (1 - mask) * -1e9)

float16 ends at -65504. A number within its range does the same to a softmax, as long as the scores
of one row are less than `REPLACED` (or `ADDED`) apart. It stays finite even where three masks are
added to one another, so a row in which every position is masked gives no NaN. In such a row,
softmax over -1e9 is uniform in float32, since -1e9 swallows the scores; in float16 it is uniform
where the number replaces the scores, and nearly so where it is added to scores within 8 of 0.

For bfloat16 see `bounded_constants`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from tensorflow.python.framework import dtypes

from graph_passes.ir.adjacency import walk
from graph_passes.rewriter.editor import GraphEdits
from graph_passes.rewriter.matcher import ADDS, MOVES, SELECTS, SIZES, SPREADS, Matcher
from graph_passes.rewriter.replacement import Replacement
from graph_passes.units.unit_pass import UnitSearch

RULE = "attention-mask"
REPLACED = 30000.0
"""How far below 0 what replaces a masked score is, as Keras chooses for float16."""
ADDED = 20000.0
"""How far below 0 what is added to a masked score is: three of them are within float16."""
_LARGEST = float(np.finfo(np.float16).max)
MOST_OPS = 64
"""Ops that are looked at for one softmax, or for one factor of a mask."""

_PICKS = ("StridedSlice", "Slice", "GatherV2", "MatrixBandPart", *SPREADS, *MOVES)
_JOINS = ("Mul", "Maximum", "Minimum")
_PORTS: Mapping[str, Sequence[int]] = {
    **dict.fromkeys((*MOVES, *SPREADS), (0,)),
    "Fill": (1,),
    **dict.fromkeys(SELECTS, (1, 2)),
    **dict.fromkeys((*ADDS, "Sub"), (0, 1)),
}
"""Op -> where it reads what may hold masks; products are asked for (`_factor`)."""


@dataclasses.dataclass(frozen=True)
class _Mask:
    """A constant that takes positions out of a softmax.

    Attributes:
        reader: node that reads it.
        port: where.
        bound: the least value that it may have, or the largest where that is positive.
    """

    reader: int
    port: int
    bound: float


def bound_masks(search: UnitSearch) -> None:
    """Puts numbers that float16 holds in the place of those in masks of softmaxes."""
    if not (search.is_float16 and search.infers("Softmax")):
        return
    edits = search.edits
    masks = _MaskSearch(edits)
    for number in edits.view.of_op("Softmax"):
        masks.follow(number)
    for mask in masks.closed():
        edits.propose(RULE, mask.reader, _bound, mask)


def _bound(new: Replacement, mask: _Mask) -> None:
    m, name = new.matcher, new.view.names[mask.reader]
    old = m.tensor(mask.reader, mask.port)
    clip = np.maximum if mask.bound < 0 else np.minimum
    value = clip(m.constant(old), np.float32(mask.bound))
    inputs = list(new.inputs_of(mask.reader))
    inputs[mask.port] = new.constant(value, name=f"mask_{mask.port}", beside=old)
    new.inputs[name] = inputs


class _MaskSearch:
    """Follows the inputs of softmaxes back to the constants of masks."""

    def __init__(self, edits: GraphEdits) -> None:
        self.m, self._edits = edits.matcher, edits
        self._masks: dict[tuple[int, int], _Mask] = {}
        # Each node on a way from a mask to a softmax -> the nodes that it feeds on such ways.
        self._feeds: dict[int, set[int]] = {}
        self._left = 0

    def follow(self, softmax: int) -> None:
        """Finds the masks of one softmax."""
        self._left = MOST_OPS
        for mask, way in self._search(self.m.tensor(softmax, 0), -1.0, (softmax,)):
            place = (mask.reader, mask.port)
            found = (mask, self._masks.get(place, mask))
            self._masks[place] = min(found, key=lambda one: (abs(one.bound), one.bound))
            for reader, node in itertools.pairwise(way):
                self._feeds.setdefault(node, set()).add(reader)

    def _search(
        self, tensor: str, sign: float, way: tuple[int, ...], *, added: bool = False
    ) -> Iterator[tuple[_Mask, tuple[int, ...]]]:
        """The masks in what makes a tensor, each with the nodes on the way back to it."""
        m = self.m
        number = m.maker(tensor)
        op, way = m.op(number), (*way, number)
        self._left -= 1
        if self._left < 0:
            return  # what is not found counts as a leak of the masks on other ways
        added = added or op in (*ADDS, "Sub")
        for port in self._factor(number) if op == "Mul" and added else _PORTS.get(op, ()):
            towards = -sign if op == "Sub" and port == 1 else sign
            operand = m.tensor(number, port)
            if m.op(m.maker(operand)) != "Const":
                yield from self._search(operand, towards, way, added=added)
            elif self._is_beyond(operand, towards * (REPLACED if added else _LARGEST)):
                yield _Mask(number, port, towards * (ADDED if added else REPLACED)), way

    def _is_beyond(self, tensor: str, limit: float) -> bool:
        """Whether a constant goes beyond a limit, and not to infinity."""
        value = self.m.constant(tensor)
        far = float(value.min(initial=0) if limit < 0 else value.max(initial=0))
        return value.dtype == np.float32 and bool(np.isfinite(far)) and far / limit > 1

    def _factor(self, number: int) -> tuple[int, ...]:
        """The port of the constant that a mask of zeros and ones is multiplied by, if any."""
        m = self.m
        for port in (0, 1):
            if m.op(m.source(number, port)) == "Const":
                if _is_indicator(m, m.tensor(number, 1 - port)):
                    return (port,)
                if abs(m.scalar(m.tensor(number, port)) or 0) > REPLACED:
                    self._edits.miss(
                        number, "nothing shows that the mask holds zeros and ones only"
                    )
        return ()

    def closed(self) -> list[_Mask]:
        """The masks that reach nothing but softmaxes."""
        leaks = {node for node in self._feeds if self._leak(node)}

        def fed(node: int) -> Collection[int]:
            return self._feeds.get(node, ())

        masks = self._masks.values()
        return [m for m in masks if not any(node in leaks for node in walk([m.reader], fed))]

    def _leak(self, number: int) -> bool:
        m = self.m
        if number in self._edits.kept:
            self._edits.miss(number, f"{m.node(number).name!r} is to be preserved")
            return True
        for reader in m.readers(number):
            if reader not in self._feeds[number] and m.op(reader) not in SIZES:
                self._edits.miss(number, f"{m.node(reader).name!r} reads the masked scores as well")
                return True
        return False


def _is_indicator(matcher: Matcher, tensor: str) -> bool:
    """Whether a float32 tensor holds zeros and ones: made from booleans or whole numbers."""
    pending, seen = [tensor], 0
    while pending and seen < MOST_OPS:
        seen += 1
        tensor = pending.pop()
        number = matcher.maker(tensor)
        op = matcher.op(number)
        if op == "Const":
            if not np.isin(matcher.constant(tensor), (0, 1)).all():
                return False
        elif op == "Cast":
            read = dtypes.as_dtype(matcher.node(number).attr["SrcT"].type)
            if not (read.is_bool or read.is_integer):
                pending.append(matcher.tensor(number, 0))
        elif op in _PICKS:
            pending.append(matcher.tensor(number, 0))
        elif op in _JOINS:
            pending.extend(matcher.inputs(number))
        elif op == "Fill":
            pending.append(matcher.tensor(number, 1))
        elif op == "Sub":
            whole, part = matcher.inputs(number)
            if matcher.scalar(whole) != 1:
                return False
            pending.append(part)
        else:
            return False
    return not pending
