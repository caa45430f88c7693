"""The rooms of graph_passes: nothing is imported upward."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import graph_passes

ROOT = Path(graph_passes.__file__).parent
ROOMS = (
    "ops",
    "policy",
    "ir",
    "rewriter",
    "units",
    "coloring",
    "placement",
    "emit",
    "functions",
    "",
)
"""Lowest first; the last is the package itself."""

MODULES = sorted(ROOT.rglob("*.py"))


def room_of(parts: tuple[str, ...]) -> str:
    return parts[0] if parts[0] in ROOMS else ""


def imported(path: Path) -> set[str]:
    """The rooms that a module imports from, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            head, *rest = name.split(".")
            assert head != "tf_amp", f"{path.name} imports {name}"
            if head == "graph_passes":
                found.add(room_of(tuple(rest)))
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_imported_upward(path: Path) -> None:
    own = ROOMS.index(room_of(path.relative_to(ROOT).parts))
    assert {room for room in imported(path) if ROOMS.index(room) > own} == set()


def test_every_room_says_what_comes_in_and_goes_out() -> None:
    folders = {path.parent.name for path in MODULES if path.parent.parent == ROOT}
    assert folders == set(ROOMS) - {""}
    for room in folders:
        text = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
        assert [line.partition(":")[0] for line in text.splitlines()[2:5]] == [
            "In",
            "Out",
            "May not",
        ]
