"""Softmax over several axes at once, as `keras.layers.Softmax` and attention over images write it.

No op takes more than one axis, so it comes as

    m = StopGradient(Max(x), or 0 where that is not finite)
    s = Sum(Exp(x - m))         y = Exp(x - (Log(s) + m))

and its gradient, with g flowing in, as

    p = g * y                   dx = p + spread(Sum(-p) * Reciprocal(s)) * Exp(x - m)

Exponentials and logarithms are denied. As a unit it computes in float32 inside, and takes and gives
the target dtype.
"""

from __future__ import annotations

from graph_passes.rewriter.editor import GraphEdits
from graph_passes.rewriter.matcher import NoMatchError
from graph_passes.rewriter.search import ADDS, SHAPERS, SUMS, Search
from graph_passes.units.float32_units import Float32Unit

RULE = "softmax"

_GUARDS = ("StopGradient", "SelectV2", "Select", "IsFinite", "ZerosLike", "Max")
_MOST_GUARDS = 8
_SPREADERS = (*SHAPERS, "BroadcastTo", "Tile")
_UNBROADCAST = ("Sum", "Reshape")
"""What follows the gradient of an op that may have broadcast its input."""


def find_softmaxes(edits: GraphEdits) -> list[Float32Unit]:
    """Finds every softmax that is written with a log-sum-exp.

    Args:
        edits: receives the near misses.
    """
    logs = edits.view.of_op("Log")
    found = [edits.attempt(number, _SoftmaxSearch(edits.matcher).match) for number in logs]
    return [unit for unit in found if unit is not None]


class _SoftmaxSearch(Search):
    """The search that starts from one Log."""

    def match(self, log: int) -> Float32Unit | None:
        """The unit; None where the Log is of no log-sum-exp from which x is subtracted."""
        m = self.m
        total = m.source(log, 0)
        if m.op(total) != "Sum" or m.op(m.makers(total)[0]) != "Exp":
            return None
        exponential = m.makers(total)[0]
        shifted = m.makers(exponential)[0]
        if m.op(shifted) != "Sub":
            return None
        x, bound = m.inputs(shifted)
        sums = [n for n in self.reading(log, *ADDS) if m.reads(n, bound)]
        differences = [
            reader
            for number in sums
            for reader in self.reading(number, "Sub")
            if m.inputs(reader) == [x, self.name(number)]
        ]
        if not differences:
            return None
        difference = self.one(differences, "the difference of the input and its log-sum-exp")
        output = self.only(difference, lambda n: m.op(n) == "Exp", "the exponential of it")
        self._guard(x, bound)
        self.inside.update((log, total, exponential, shifted, *sums, difference, output))
        self._gradient(total, exponential, output)
        return Float32Unit(RULE, output, frozenset(self.inside))

    def _guard(self, x: str, bound: str) -> None:
        """Counts what makes the number that x is shifted by as inside, if it is the largest of x.

        Raises:
            NoMatchError: x is shifted by something else.
        """
        m, found = self.m, set()
        pending = [m.maker(bound)]
        while pending:
            number = pending.pop()
            if m.op(number) == "Const" or number in found:
                continue
            found.add(number)
            if m.op(number) not in _GUARDS or len(found) > _MOST_GUARDS:
                raise NoMatchError(f"the input is shifted by {m.op(number)}, not by its largest")
            if m.op(number) != "Max":
                pending.extend(m.makers(number))
            elif m.tensor(number, 0) != x:
                raise NoMatchError("the input is shifted by the largest of another tensor")
        self.inside |= found

    def _gradient(self, total: int, exponential: int, output: int) -> None:
        """Counts the gradient as inside, where there is one.

        Raises:
            NoMatchError: what flows back is something else.
        """
        m = self.m
        inverses = self.reading(total, "Reciprocal")
        if not inverses:
            return
        inverse = self.one(inverses, "the inverse of the sum")
        weighted = self.one(
            [n for n in self.reading(output, "Mul") if self.reading(n, "Neg")],
            "the product of the softmax and its gradient",
        )
        into_sum = self.behind(
            weighted,
            lambda n: m.op(n) == "Mul" and inverse in m.makers(n),
            "the gradient of the sum",
            self.inside,
            ("Neg", *_UNBROADCAST),
        )
        into_exponential = self.behind(
            into_sum,
            lambda n: m.op(n) == "Mul" and exponential in m.makers(n),
            "the gradient of the exponential",
            self.inside,
            _SPREADERS,
        )
        dx_sum = self.behind(
            into_exponential,
            lambda n: m.op(n) in SUMS,
            "the gradient of the input",
            self.inside,
            _UNBROADCAST,
        )
        direct = [t for t in m.inputs(dx_sum) if m.maker(m.through(t, *_UNBROADCAST)) == weighted]
        if len(direct) != 1:
            raise NoMatchError("the gradient of the softmax does not flow to its input")
        while (number := m.maker(direct[0])) != weighted:
            self.inside.add(number)
            direct = [m.tensor(number, 0)]
        self.inside.update((inverse, weighted, into_sum, into_exponential, dx_sum))
