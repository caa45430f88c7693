"""Whole numbers as arguments."""

from __future__ import annotations

import argparse


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
