"""Tables and progress: plain for programs, fitted for terminals."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tf_amp.terminal import table

pty = pytest.importorskip("pty", reason="terminals as Unix has them")

HEAD, ROWS = ("function", "low"), [("step [bold]", "1 of 2"), ("a long name " * 10, "3")]
SCRIPT = f"from tf_amp.terminal import table; print(table({HEAD!r}, {ROWS!r}))"
BAR = """
import time
from tf_amp.terminal import progress_bar
with progress_bar(3) as tell:
    tell("[red]one", 1)
    time.sleep(0.5)  # longer than between two looks at it
    tell("two", 2)
"""


def on_terminal(script: str, columns: int, **environ: str) -> str:
    """What a script writes to a terminal, both streams."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", **environ}
    env.pop("FORCE_COLOR", None)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        seen = b""
        try:
            while part := os.read(ours, 4096):
                seen += part
        except OSError:  # how Linux tells that the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0
    return seen.decode()


def test_elsewhere_a_row_is_a_line() -> None:
    first, second, third = table(HEAD, ROWS).splitlines()
    assert first.split() == ["function", "low"]
    assert second.startswith("step [bold]  ")
    assert third.endswith("  3") and len(third) > 120


@pytest.mark.parametrize("columns", [40, 100])
def test_a_terminal_gets_its_width(columns: int) -> None:
    shown = re.sub(r"\x1b\[[0-9;]*m", "", on_terminal(SCRIPT, columns))
    assert max(map(len, shown.splitlines())) <= columns
    assert "step [bold]" in shown
    assert shown.split().count("name") == 10


def test_colors_can_be_refused() -> None:
    colors = re.compile(r"\x1b\[(?:\d+;)*3\d")
    assert colors.search(on_terminal(BAR, 80))
    assert not colors.search(on_terminal(BAR, 80, NO_COLOR="1"))


def test_what_is_kept_has_no_codes_of_terminals() -> None:
    script = "from tf_amp.terminal import plain_table; print(plain_table(('a', 'b'), [('1', '2')]))"
    assert "\x1b" not in on_terminal(script, 20)


def test_a_bar_moves() -> None:
    shown = on_terminal(BAR, 80)
    assert "[red]one" in shown and "1/3" in shown and "3/3" in shown


def test_a_bar_elsewhere_is_its_end() -> None:
    done = subprocess.run([sys.executable, "-c", BAR], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert [line.split()[0] for line in done.stderr.splitlines()] == ["two"]
