"""Classes of ops, by what they do: data, as the op lists are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes.policy.toml import read_shipped

CLASSES: Mapping[str, Sequence[str]] = read_shipped("lists/op_classes.toml")


def ops_of(name: str) -> frozenset[str]:
    """The ops of a class.

    Raises:
        KeyError: there is none of that name.
    """
    return frozenset(CLASSES[name])
