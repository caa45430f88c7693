"""Versions and members that are taken for granted."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tf_amp.compatibility import (
    COMMANDS,
    DIAGNOSIS,
    FUNCTION_HOST,
    KERAS,
    LATE_SETTINGS,
    SCOPES,
    SESSION_HOST,
    SOURCE_MAPS,
    STEP_WATCH,
    TF_KERAS,
    TRACEBACKS,
    V1_OPTIMIZERS,
    Member,
    obstacle,
    require,
    unsupported,
)

TABLES = (FUNCTION_HOST, SESSION_HOST, STEP_WATCH, SCOPES, SOURCE_MAPS, DIAGNOSIS)
TABLES += (KERAS, TF_KERAS, V1_OPTIMIZERS, COMMANDS, LATE_SETTINGS, TRACEBACKS)
REPOSITORY = Path(__file__).resolve().parents[2]
PRIVATE = ("tensorflow.python.", "keras.src.", "tf_keras.src.")


def private_members(source: str) -> Iterator[str]:
    """Names in full what a module takes of the private modules of other libraries."""
    nodes = list(ast.walk(ast.parse(source)))
    imported: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PRIVATE):
            for name in node.names:
                imported[name.asname or name.name] = f"{node.module}.{name.name}"
    used = set(imported)
    for node in nodes:
        owner = getattr(node, "value", None)
        if isinstance(node, ast.Attribute) and isinstance(owner, ast.Name):
            used.discard(owner.id)
            if owner.id in imported and not node.attr.startswith("__"):
                yield f"{imported[owner.id]}.{node.attr}"
    yield from (imported[name] for name in used)


@pytest.mark.parametrize("version", ["2.17.0", "2.19.1+cpu", "2.21.0", "2.21.0-rc1"])
def test_supported_version(version: str) -> None:
    assert unsupported(version) is None


@pytest.mark.parametrize(
    "version", ["1.15.5", "2.16.2", "2.22.0", "2.22.0-dev20260101", "3.0.0", "nightly"]
)
def test_unsupported_version_is_named_with_the_range(version: str) -> None:
    why = unsupported(version)
    assert why is not None
    assert version in why
    assert "2.17 to 2.21" in why


@pytest.mark.parametrize("members", TABLES)
def test_every_row_holds_here(members: tuple[Member, ...]) -> None:
    assert obstacle(members) is None
    assert len(set(members)) == len(members)


def test_every_private_member_that_a_module_takes_is_a_row() -> None:
    rows = {f"{member.module}.{member.path}" for members in TABLES for member in members}
    modules = [*REPOSITORY.glob("tf_amp/**/*.py"), *REPOSITORY.glob("graph_passes/**/*.py")]
    assert len(modules) > 100
    missing = {
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in modules
        for name in private_members(path.read_text())
        # What has a member that is a row is there, and so is what a row has.
        if not any(
            f"{row}.".startswith(f"{name}.") or f"{name}.".startswith(f"{row}.") for row in rows
        )
    }
    assert not missing


@pytest.mark.parametrize(
    ("member", "said"),
    [
        (Member("no_such_module", "name"), "no_such_module.name cannot be found"),
        (Member("fractions", "Fraction.no_such"), "fractions.Fraction.no_such cannot be found"),
        (Member("fractions", "Fraction.limit_denominator", ("self", "other")), "'other'"),
    ],
)
def test_what_is_missing_or_differs_is_named(member: Member, said: str) -> None:
    found = obstacle([Member("math", "sqrt"), member])
    assert found is not None
    assert said in found
    with pytest.raises(AttributeError, match=member.path):
        require([member])


def test_a_member_that_is_as_expected() -> None:
    assert Member("math", "sqrt").find() is math.sqrt
    parameters = ("self", "max_denominator")
    assert obstacle([Member("fractions", "Fraction.limit_denominator", parameters)]) is None
