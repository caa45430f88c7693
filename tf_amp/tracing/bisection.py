"""Finding the conversion that breaks a program, by running the program with fewer of them."""

from __future__ import annotations

import dataclasses
import operator
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from graph_passes import Remark
from tf_amp.env_variables import BISECT_LIMIT, LOG_PATH
from tf_amp.tracing.rule_text import keep_rule
from tf_amp.tracing.trace import TraceError, read_traces

ALL = 10**9
"""A limit that no program reaches."""

_COMPARISONS = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_CHECK = re.compile(r"\s*([A-Za-z_][\w./-]*)\s*(<=|>=|<|>)\s*([-+]?[\d.]+(?:e[-+]?\d+)?)\s*", re.I)
_FIGURE = r"[-+]?(?:nan|inf(?:inity)?|\d+\.?\d*(?:e[-+]?\d+)?|\.\d+(?:e[-+]?\d+)?)"


class BisectionError(ValueError):
    """There is nothing that can be found by fewer conversions."""


@dataclasses.dataclass(frozen=True)
class Check:
    """A condition on the last figure of a name in what a program prints.

    Attributes:
        name: of the figure, as in "loss: 0.25" or "loss=0.25".
        comparison: "<", "<=", ">" or ">=".
        bound: what it is compared with.
    """

    name: str
    comparison: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Check:
        """Reads a condition such as "loss < 3".

        Raises:
            ValueError: the text is none.
        """
        found = _CHECK.fullmatch(text)
        if found is None:
            raise ValueError(f"a check is NAME < FIGURE, or with <=, > or >=; received {text!r}")
        return cls(found[1], found[2], float(found[3]))

    def holds(self, output: str) -> bool:
        """Whether it holds for the last such figure; not where that is NaN or there is none."""
        pattern = rf"(?<![\w.]){re.escape(self.name)}['\"]?\s*[:=]?\s*({_FIGURE})(?!\w)"
        figures = re.findall(pattern, output, re.IGNORECASE)
        return bool(figures) and bool(_COMPARISONS[self.comparison](float(figures[-1]), self.bound))


@dataclasses.dataclass(frozen=True)
class Found:
    """What breaks the program.

    Attributes:
        remark: the conversion or unit: without it the program passes, with it no more.
        function: the function that it is in.
        total: how many conversions and units there are.
        runs: how often the program ran.
    """

    remark: Remark
    function: str
    total: int
    runs: int

    def rule(self) -> str:
        """The rule that keeps it float32, as TOML."""
        what = self.remark.op or f"unit {self.remark.rule}"
        return keep_rule(self.remark.node, f"tf-amp bisect: with this {what} the program fails")


Run = Callable[[Mapping[str, str]], bool]
"""Runs the program with more variables in its environment; whether it passed."""


def bisect(run: Run, say: Callable[[str], None]) -> Found:
    """Finds the conversion or unit that breaks a program.

    It is the first one, in the order of their numbers, with which the program fails. About log2 of
    their number runs are made, and two more: with none and with all of them.

    Args:
        run: runs the program.
        say: is told of each run.

    Raises:
        BisectionError: the program passes with all of them, or fails with none, or its graphs are
            not rewritten.
    """
    with tempfile.TemporaryDirectory(prefix="tf-amp-bisect-") as room:
        runs = 0

        def passes(limit: int, name: str) -> tuple[bool, Path]:
            nonlocal runs
            runs += 1
            trace = Path(room, str(runs))
            trace.mkdir()
            passed = run({BISECT_LIMIT: str(limit), LOG_PATH: str(trace)})
            say(f"run {runs}, {name}: {'passes' if passed else 'fails'}")
            return passed, trace

        passed, trace = passes(ALL, "all conversions")
        if passed:
            raise BisectionError("The program passes with all conversions: there is nothing amiss.")
        numbers = _numbered(trace)
        if not numbers:
            raise BisectionError(
                "The program fails, and no graph of it was converted before it did: it is not on "
                "for it, or something else is amiss."
            )
        good, bad = 0, max(numbers)
        total = bad
        if not passes(0, "no conversion")[0]:
            raise BisectionError("The program fails without any conversion too.")
        while bad - good > 1:
            middle = (good + bad) // 2
            passed, trace = passes(middle, f"the first {middle} of {total}")
            if passed:
                good = middle
            else:
                bad, numbers = middle, {**numbers, **_numbered(trace)}
        function, remark = numbers[bad]
        return Found(remark, function, total, runs)


def _numbered(trace: Path) -> dict[int, tuple[str, Remark]]:
    """The numbered remarks of the process that has most of them."""
    try:
        traces = read_traces(trace)
    except TraceError:
        return {}
    found: dict[int, tuple[str, Remark]] = {}
    for process in traces:
        numbers = {
            remark.number: (remark.function or graph.remarks.name, remark)
            for graph in reversed(process.graphs)
            for remark in graph.remarks.remarks
            if remark.number is not None
        }
        found = max(found, numbers, key=len)
    return found
