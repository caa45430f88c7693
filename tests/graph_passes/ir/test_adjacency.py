"""Neighbours of vertices, themselves and through relays, beside a search by the definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.ir.adjacency import Adjacency, walk

VERTICES, RELAYS = 6, 5
Pairs = list[tuple[int, int]]
plain = st.tuples(st.integers(0, VERTICES - 1), st.integers(0, VERTICES - 1))
relayed = st.tuples(
    st.integers(0, VERTICES + RELAYS - 1), st.integers(0, VERTICES + RELAYS - 1)
).filter(lambda pair: max(pair) >= VERTICES)


def joined(edges: Pairs, extra: Pairs) -> set[tuple[int, int]]:
    """All pairs of vertices with an edge, or a way through relays alone, from one to the other."""
    ways = set(extra)
    while True:
        longer = {(a, d) for a, b in ways for c, d in ways if b == c and b >= VERTICES} - ways
        if not longer:
            return {way for way in ways if max(way) < VERTICES} | set(edges)
        ways |= longer


@given(edges=st.lists(plain, max_size=8), extra=st.lists(relayed, max_size=12))
def test_relays_join_what_ways_through_them_join(edges: Pairs, extra: Pairs) -> None:
    sources, targets = np.array(edges, np.int32).reshape(-1, 2).T
    found = Adjacency(VERTICES, sources, targets, extra)
    pairs = joined(edges, extra)
    for vertex in range(VERTICES):
        readers, producers = found.readers(vertex), found.producers(vertex)
        assert set(readers) == {target for source, target in pairs if source == vertex}
        assert set(producers) == {source for source, target in pairs if target == vertex}
        closure = {vertex}
        while new := {b for a, b in pairs if a in closure} - closure:
            closure |= new
        reached = found.reach([vertex], np.ones(VERTICES, bool), forward=True)
        assert {v for v in range(VERTICES) if reached[v]} == closure
        while new := {x for a, b in pairs if {a, b} & closure for x in (a, b)} - closure:
            closure |= new
        reached = found.reach([vertex], np.ones(VERTICES, bool), forward=True, backward=True)
        assert {v for v in range(VERTICES) if reached[v]} == closure


@given(extra=st.lists(relayed, max_size=12))
def test_what_lies_behind_passed_relays_is_found_once(extra: Pairs) -> None:
    none = np.zeros(0, np.int32)
    found = Adjacency(VERTICES, none, none, extra)
    passed: set[int] = set()
    once = [set(found.readers(vertex, passed)) for vertex in range(VERTICES)]
    assert set().union(*once) == {target for _, target in joined([], extra)}


def test_a_walk_gives_each_place_once_and_asks_for_no_steps_too_many() -> None:
    asked: list[int] = []

    def steps(place: int) -> list[int]:
        asked.append(place)
        return {0: [1, 2], 1: [3], 2: [3], 3: [0]}[place]

    assert sorted(walk([0, 0], steps)) == [0, 1, 2, 3]
    assert sorted(asked) == [0, 1, 2, 3]
    assert next(walk([4], steps)) == 4
