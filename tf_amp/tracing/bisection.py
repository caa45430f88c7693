"""Finding the conversion that breaks a program, by running the program with fewer of them."""

from __future__ import annotations

import dataclasses
import operator
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from graph_passes import Remark, Rule, format_rules
from tf_amp.env_variables import BISECT_LIMIT, ENABLE, LOG_PATH, RULES
from tf_amp.tool_error import ToolError
from tf_amp.tracing.keep_rule import keep_rule
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


class BisectionError(ToolError):
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

    def figures(self, output: str) -> list[str]:
        """The figures of that name."""
        pattern = rf"(?<![\w.]){re.escape(self.name)}['\"]?\s*[:=]?\s*({_FIGURE})(?!\w)"
        return re.findall(pattern, output, re.IGNORECASE)

    def holds(self, output: str) -> bool:
        """Whether it holds for the last such figure; not where that is NaN or there is none."""
        figures = self.figures(output)
        return bool(figures) and bool(_COMPARISONS[self.comparison](float(figures[-1]), self.bound))


@dataclasses.dataclass(frozen=True)
class Found:
    """A conversion that breaks the program.

    Attributes:
        remark: the conversion or unit: without it the program passes, with it no more.
        function: the function that it is in.
        total: how many conversions and units there are.
    """

    remark: Remark
    function: str
    total: int

    @property
    def rule(self) -> Rule:
        """The rule that keeps it float32."""
        what = self.remark.op or f"unit {self.remark.rule}"
        return keep_rule(self.remark.node, f"tf-amp bisect: with this {what} the program fails")


@dataclasses.dataclass(frozen=True)
class Bisection:
    """What came of a bisection.

    Attributes:
        found: what has to stay float32, in the order in which it was found.
        passes: whether the program passes with the rules of all of them.
        runs: how often the program ran.
    """

    found: tuple[Found, ...]
    passes: bool
    runs: int

    @property
    def rules(self) -> str:
        """The rules, as TOML."""
        return format_rules(found.rule for found in self.found)


Run = Callable[[Mapping[str, str]], bool]
"""Runs the program with more variables in its environment; whether it passed."""


def bisect(run: Run, say: Callable[[str], None], *, rules: str = "", most: int = 8) -> Bisection:
    """Finds the conversions and units that break a program.

    One is the first, in the order of their numbers, with which the program fails. About log2 of
    their number runs find it, besides one with all and one with none of them. If the program fails
    with that one in float32 too, the next one is looked for.

    Args:
        run: runs the program.
        say: is told of each run.
        rules: rules that hold anyway, as TOML.
        most: how many are looked for.

    Raises:
        BisectionError: the program passes with all of them, or fails with none, or its graphs are
            not rewritten.
    """
    with tempfile.TemporaryDirectory(prefix="tf-amp-bisect-") as folder:
        search = _Search(run, say, Path(folder), rules)
        passes = search.passes(ALL, "all conversions")
        if not search.numbers:
            raise BisectionError(
                f"The program {'passes' if passes else 'fails'}, and no graph of it was converted "
                "by then: it has none to convert, or AMP is not on for it. "
                f"`{ENABLE}=1 tf-amp env` tells whether this machine is the reason."
            )
        if passes:
            raise BisectionError("The program passes with all conversions: there is nothing amiss.")
        if not search.passes(0, "no conversion"):
            raise BisectionError("The program fails without any conversion too.")
        found: list[Found] = []
        while not passes and len(found) < most:
            found.append(search.find())
            search.rules = "\n".join((rules, format_rules(f.rule for f in found)))
            passes = search.passes(ALL, f"all but {len(found)}")
            if not search.numbers:
                break
        return Bisection(tuple(found), passes, search.runs)


class _Search:
    """The runs of a program; the arguments are those of `bisect`.

    Attributes:
        rules: the rules in force.
        runs: how many there were.
        numbers: what the last run numbered: number -> function and remark.
    """

    def __init__(self, run: Run, say: Callable[[str], None], folder: Path, rules: str) -> None:
        self._run, self._say, self._folder = run, say, folder
        self.rules, self.runs = rules, 0
        self.numbers: dict[int, tuple[str, Remark]] = {}

    def passes(self, limit: int, name: str) -> bool:
        """Whether the program passes with so many conversions."""
        self.runs += 1
        trace = self._folder / str(self.runs)
        trace.mkdir()
        variables = {BISECT_LIMIT: str(limit), LOG_PATH: str(trace)}
        if self.rules.strip():
            file = self._folder / "rules.toml"
            file.write_text(self.rules, encoding="utf-8")
            variables[RULES] = str(file)
        passed = self._run(variables)
        self._say(f"run {self.runs}, {name}: {'passes' if passed else 'fails'}")
        self.numbers = _numbered(trace)
        shutil.rmtree(trace, ignore_errors=True)
        return passed

    def find(self) -> Found:
        """The first conversion with which the program fails, as it did in the last run."""
        known, good, bad = dict(self.numbers), 0, max(self.numbers)
        total = bad
        while bad - good > 1:
            middle = (good + bad) // 2
            if self.passes(middle, f"the first {middle} of {total}"):
                good = middle
            else:
                bad = middle
                known.update(self.numbers)
        function, remark = known[bad]
        return Found(remark, function, total)


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
