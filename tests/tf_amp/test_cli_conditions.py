"""The command line: conditions of `--fail-if`."""

from __future__ import annotations

import pytest

from tf_amp.cli.conditions import Condition, ConditionError

FIGURES = {"casts": 201, "product_share": 0.9, "products": 10}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("casts>200", True),
        ("casts > 201", False),
        ("casts>200 or product_share<0.9", True),
        ("casts>201 or product_share<0.9", False),
        ("casts>200 and not product_share<0.9", True),
        ("(casts - 1) / 2 == products * 10", True),
        ("5 < products <= 10", True),
        ("5 < products < 10", False),
        ("casts != 201", False),
        ("casts / (products - 10) == 0", True),
        ("product_share >= -1", True),
    ],
)
def test_condition_holds_or_not(text: str, expected: bool) -> None:
    assert Condition(text, tuple(FIGURES)).holds(FIGURES) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cannot be read"),
        ("casts >", "cannot be read"),
        ("casts", "compares nothing"),
        ("not casts", "compares nothing"),
        ("casts + 1", "compares nothing"),
        ("cast > 1", "'cast' is none of these"),
        ("casts > 'a'", "\"'a'\" is none of these"),
        ("casts > True", "'True' is none of these"),
        ("casts ** 9 > 1", "none of these"),
        ("__import__('os').system('true') == 0", "none of these"),
        ("casts.real > 1", "'casts.real' is none of these"),
        ("casts > [1][0]", "none of these"),
        ("casts in (1, 2)", "none of these"),
        ("casts > (lambda: 1)()", "none of these"),
        ("casts > 1" + " or casts > 1" * 100, "more than 1000 characters"),
        ("(" * 400 + "casts" + ")" * 400 + "> 1", "cannot be read"),
        ("a" * 3 + "\0 > 1", "cannot be read"),
    ],
)
def test_anything_else_is_refused_with_what_is_legal(text: str, why: str) -> None:
    with pytest.raises(ConditionError, match=r"Legal: names of figures.*casts, product_share") as e:
        Condition(text, tuple(FIGURES))
    assert why in str(e.value)
