"""How far one tensor of two models is apart, as figures."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

TOP_K = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputFigures:
    """How far one output of two models is apart, over all samples.

    Attributes:
        signature: the signature's key.
        name: the output, or the node inside the models.
        values: how many values there were.
        max_abs: the largest difference.
        max_relative: that by the largest magnitude of the output in the first model.
        cosine: between both outputs, each taken as one vector; 1 of two that are zero.
        overflowed: the share of values that are finite in the first model and not in the second.
        compared: the share of floating values that are finite in the first model: no others count.
        flushed: the share that is 0 in the second model and not in the first.
        top_1: for floating outputs of rank 2, the share of rows with the largest value at the same
            place; for integers and strings, the share of equal values. None for others.
        top_k: for floating outputs of rank 2, the share of the `TOP_K` largest of a row that both
            models have in common.
        op: of a boundary inside the models, the op that makes it.
    """

    signature: str
    name: str
    values: int
    max_abs: float
    max_relative: float
    cosine: float
    overflowed: float
    flushed: float
    top_1: float | None = None
    top_k: float | None = None
    op: str = ""
    compared: float = 1.0

    def within(self, tolerance: float) -> bool:
        """Whether nothing overflowed and no difference is larger than the tolerance.

        Not where no value could be compared. For integers and strings, whether no larger share
        than that differs.
        """
        equal = 1.0 if self.top_1 is None else self.top_1
        far = self.max_relative if self.is_float else 1 - equal
        return self.overflowed == 0 and far <= tolerance and self.compared > 0

    @property
    def is_float(self) -> bool:
        """Whether differences mean something."""
        return not math.isnan(self.max_abs)


@dataclasses.dataclass
class Sums:
    """What is added up over the samples, for one output.

    Attributes:
        ranked: whether the largest values of rows are compared too.
    """

    ranked: bool = True
    values: int = 0
    max_abs: float = 0.0
    largest: float = 0.0
    products: float = 0.0
    squares: tuple[float, float] = (0.0, 0.0)
    equal: int = 0
    overflowed: int = 0
    not_finite: int = 0
    flushed: int = 0
    top: list[float] = dataclasses.field(default_factory=list)
    common: list[float] = dataclasses.field(default_factory=list)
    is_float: bool = True

    def add(self, right: np.ndarray, judged: np.ndarray) -> None:
        """Takes in the values of one sample, of one shape; floating ones as float64."""
        self.values += right.size
        self.is_float = right.dtype == np.float64
        if not self.is_float:
            self.equal += int(np.sum(right == judged))
            return
        finite = np.isfinite(right)
        self.not_finite += int(np.sum(~finite))
        both = finite & np.isfinite(judged)
        self.overflowed += int(np.sum(finite & ~both))
        self.flushed += int(np.sum((right != 0) & (judged == 0)))
        a, b = right[both], judged[both]
        self.max_abs = max(self.max_abs, float(np.max(np.abs(a - b), initial=0)))
        self.largest = max(self.largest, float(np.max(np.abs(right[finite]), initial=0)))
        self.products += float(a @ b)
        self.squares = (self.squares[0] + float(a @ a), self.squares[1] + float(b @ b))
        if self.ranked and right.ndim == 2 and right.shape[1] > 1:
            self.top.extend(np.argmax(right, 1) == np.argmax(judged, 1))
            k = min(TOP_K, right.shape[1])
            best = (np.argpartition(-x, k - 1, axis=1)[:, :k] for x in (right, judged))
            self.common.extend(
                len(set(p) & set(q)) / k for p, q in zip(*map(np.ndarray.tolist, best), strict=True)
            )

    def figures(self, signature: str, name: str, op: str = "") -> OutputFigures:
        """What came of it; the arguments are those of `OutputFigures`."""
        lengths = math.sqrt(self.squares[0]) * math.sqrt(self.squares[1])
        values = max(self.values, 1)
        top_1 = float(np.mean(self.top)) if self.top else None
        if not self.is_float and self.values:
            top_1 = self.equal / self.values
        return OutputFigures(
            signature=signature,
            name=name,
            op=op,
            values=self.values,
            max_abs=self.max_abs if self.is_float else math.nan,
            max_relative=self.max_abs / (self.largest or 1.0) if self.is_float else math.nan,
            cosine=self.products / lengths if lengths else 1.0,
            overflowed=self.overflowed / values,
            flushed=self.flushed / values,
            compared=1 - self.not_finite / values,
            top_1=top_1,
            top_k=float(np.mean(self.common)) if self.common else None,
        )
