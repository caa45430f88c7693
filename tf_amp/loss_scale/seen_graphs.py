"""The graphs whose loss scale, or the lack of one, somebody here knows from Python."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import tensorflow as tf

Say: TypeAlias = Callable[[], None]
NOTHING: Mapping[str, Say] = types.MappingProxyType({})

_seen: weakref.WeakSet[Any] = weakref.WeakSet()
_scaled: weakref.WeakSet[Any] = weakref.WeakSet()
_giving: weakref.WeakSet[Any] = weakref.WeakSet()
_notes: weakref.WeakKeyDictionary[Any, dict[str, Say]] = weakref.WeakKeyDictionary()


def mark_seen() -> None:
    """Marks the graph being built, and the functions around it; nothing while executing eagerly.

    It is for whoever scales a loss there by a rule, be it one that never scales.
    """
    _seen.update(_being_built())


def is_seen(graph: Any) -> bool:
    """Whether a graph was marked; None is none."""
    return graph is not None and graph in _seen


def note(text: str, say: Say) -> None:
    """Notes at the same graphs as `mark_seen` what to say if they train in float16, unscaled.

    Args:
        text: What it is; of the same one the first counts.
        say: Says it.
    """
    for graph in _being_built():
        _notes.setdefault(graph, {}).setdefault(text, say)


def notes_of(graph: Any) -> Mapping[str, Say]:
    """What was noted at a graph; None has none."""
    return NOTHING if graph is None else _notes.get(graph, NOTHING)


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
    """Whether a graph was marked so, whose gradients may be applied elsewhere."""
    return bool(_giving)


def _being_built() -> Iterator[Any]:
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    # Around the outermost function of an eager program is whatever graph is its default.
    in_v1_graph = not tf.compat.v1.executing_eagerly_outside_functions()
    while graph is not None:
        yield graph
        outer = getattr(graph, "outer_graph", None)
        graph = outer if outer is not None and (in_v1_graph or outer.building_function) else None
