"""The graphs whose loss scale, or the lack of one, somebody here knows from Python."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

_seen: weakref.WeakSet[Any] = weakref.WeakSet()


def mark_seen() -> None:
    """Marks the graph being built, and the functions around it; nothing while executing eagerly.

    It is for whoever scales a loss there by a rule, be it one that never scales, or has warned that
    nobody does.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None:
        _seen.add(graph)
        outer = getattr(graph, "outer_graph", None)
        # Around the outermost function is whatever graph is the default of the process.
        graph = outer if outer is not None and outer.building_function else None


def is_seen(graph: Any) -> bool:
    """Whether a graph was marked; None is none."""
    return graph is not None and graph in _seen
