"""The graphs whose loss scale, or the lack of one, somebody here knows from Python."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

_seen: weakref.WeakSet[Any] = weakref.WeakSet()
_scaled: weakref.WeakSet[Any] = weakref.WeakSet()
_giving: weakref.WeakSet[Any] = weakref.WeakSet()


def mark_seen() -> None:
    """Marks the graph being built, and the functions around it; nothing while executing eagerly.

    It is for whoever scales a loss there by a rule, be it one that never scales, or has warned that
    nobody does.
    """
    _seen.update(_being_built())


def is_seen(graph: Any) -> bool:
    """Whether a graph was marked; None is none."""
    return graph is not None and graph in _seen


def mark_scaled() -> None:
    """Marks the same graphs as `mark_seen`, as ones in which others scale a loss.

    Which gradients are those of that loss, and come out unscaled, Python does not see.
    """
    _scaled.update(_being_built())


def is_scaled_by_others() -> bool:
    """Whether others scale a loss in the graph being built, or in a function around it."""
    return any(graph in _scaled for graph in _being_built())


def mark_giving(graph: Any) -> None:
    """Marks a graph that hands out gradients that it computes in float16; None is none."""
    if graph is not None and graph not in _scaled:
        _giving.add(graph)


def gradients_are_given() -> bool:
    """Whether a graph was marked so, whose gradients may be applied eagerly."""
    return bool(_giving)


def _being_built() -> Iterator[Any]:
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    # Around the outermost function of an eager program is whatever graph is its default.
    in_v1_graph = not tf.compat.v1.executing_eagerly_outside_functions()
    while graph is not None:
        yield graph
        outer = getattr(graph, "outer_graph", None)
        graph = outer if outer is not None and (in_v1_graph or outer.building_function) else None
