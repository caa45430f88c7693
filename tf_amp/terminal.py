"""Tables and progress as a terminal shows them, and plain text for whatever else reads them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

Tell: TypeAlias = Callable[[str, int], None]
"""Takes what is under way, and how many more parts are done."""


def plain_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of left-aligned columns, two blanks between them; a row is a line."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = ("  ".join(map(str.ljust, line, widths)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table to print: where that goes to a terminal, of its width and with folded cells.

    Args:
        head: the names of the columns.
        rows: the cells; markup in them is text.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        return plain_table(head, rows)

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    columns = (Column(Text(name), overflow="fold") for name in head)
    made = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        made.add_row(*map(Text, row))
    console = Console(highlight=False)
    with console.capture() as shown:
        console.print(made)
    return "\n".join(filter(None, (line.rstrip() for line in shown.get().splitlines())))


def say(line: str) -> None:
    """Prints a line on the error stream at once: what is under way, beside the result."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar(total: int) -> Iterator[Tell]:
    """Shows a bar on the error stream; where that is no terminal, its end alone.

    Args:
        total: how many parts there are.

    Yields:
        What moves it.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)
        yield lambda what, done: bar.update(task, description=what, advance=done)
