"""Numbers as arguments."""

from __future__ import annotations

import argparse
import math


def count(text: str, least: int = 1) -> int:
    """Reads a whole number for `argparse`.

    Raises:
        argparse.ArgumentTypeError: it is none, or less than `least`.
    """
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number, {least} or more")
    return int(text)


def count_or_none(text: str) -> int:
    """As `count`, or 0."""
    return count(text, 0)


def amount(text: str) -> float:
    """Reads a number for `argparse`.

    Raises:
        argparse.ArgumentTypeError: it is none, not finite, or less than 0.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number, 0 or more")
    return number
