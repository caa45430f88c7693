"""Which functions of a package run, and how long they are."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


class Executed:
    """Collects the functions of a package that run while it is told to watch.

    Attributes:
        functions: the code of each function that has run.
    """

    def __init__(self, package: Path) -> None:
        self.functions: set[CodeType] = set()
        self._prefix = str(package.resolve())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watches this thread; slows calls down about two times."""
        before = sys.getprofile()
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._prefix):
            self.functions.add(frame.f_code)


def lines_by_module(functions: Iterable[CodeType]) -> Counter[str]:
    """Module file -> lines of some functions in it; a function within another counts once."""
    lines: dict[str, set[int]] = {}
    for code in functions:
        numbers = lines.setdefault(code.co_filename, set())
        last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
        numbers.update(range(code.co_firstlineno, last + 1))
    return Counter({name: len(numbers) for name, numbers in lines.items()})


def only_with(run: Callable[[bool], None], package: Path) -> Counter[str]:
    """Module file -> lines of functions that run with something, and never without it.

    Args:
        run: is called with True and False for each of the two; twice, for the sake of caches.
        package: the directory of the package.
    """
    seen = {}
    for state in (True, False):
        run(state)
        executed = Executed(package)
        with executed.watching():
            run(state)
        seen[state] = executed.functions
    return lines_by_module(seen[True] - seen[False])
