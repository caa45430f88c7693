"""Minimum cuts, against trying all of them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.placement.max_flow import sink_side

Arc = tuple[int, int, int, int]
WAVES = 1000


def cut(excess: list[int], arcs: list[Arc], waves: int = WAVES) -> set[int] | None:
    nodes = sink_side(excess, np.array(arcs, np.int64).reshape(-1, 4), waves)
    return None if nodes is None else set(nodes)


def capacity(excess: list[int], arcs: list[Arc], side: set[int]) -> int:
    """What a cut costs, given the nodes on the side of the sink."""
    ends = sum(max(0, amount if node in side else -amount) for node, amount in enumerate(excess))
    there = sum(c for tail, head, c, _ in arcs if tail not in side and head in side)
    back = sum(c for tail, head, _, c in arcs if head not in side and tail in side)
    return ends + there + back


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[int], list[Arc]]:
    nodes = draw(st.integers(1, 6))
    node, room = st.integers(0, nodes - 1), st.integers(0, 5)
    ends = node.flatmap(lambda tail: st.tuples(st.just(tail), node.filter(lambda n: n != tail)))
    arcs = st.lists(st.tuples(ends, room, room), max_size=10 if nodes > 1 else 0)
    excess = draw(st.lists(st.integers(-6, 6), min_size=nodes, max_size=nodes))
    return excess, [(*pair, there, back) for pair, there, back in draw(arcs)]


@settings(max_examples=300, deadline=None)
@given(networks())
def test_the_cut_is_minimal_and_the_side_of_the_sink_the_smallest(
    network: tuple[list[int], list[Arc]],
) -> None:
    excess, arcs = network
    sides = [
        set(side)
        for count in range(len(excess) + 1)
        for side in itertools.combinations(range(len(excess)), count)
    ]
    best = min(sides, key=lambda side: (capacity(excess, arcs, side), len(side)))
    assert cut(excess, arcs) == best


def test_flow_goes_on_another_way_where_the_shortest_is_full() -> None:
    # 0 -> 3 takes one of the five that 3 misses, 0 -> 1 -> 2 -> 3 three more.
    arcs = [(0, 3, 1, 0), (0, 1, 9, 0), (1, 2, 3, 0), (2, 3, 9, 0)]
    assert cut([9, 0, 0, -5], arcs) == {2, 3}
    assert cut([9, 0, 0, -4], arcs) == set()


def test_flow_that_is_stuck_goes_back() -> None:
    # What 0 sends towards the sink over 1 cannot all pass, and 2 is the longer way around.
    arcs = [(0, 1, 9, 0), (1, 3, 1, 0), (0, 2, 9, 0), (2, 4, 9, 0), (4, 3, 9, 0)]
    assert cut([9, 0, 0, -9, 0], arcs) == set()
    assert cut([9, 0, 0, -10, 0], arcs) == {1, 2, 3, 4, 0}


def test_a_cut_may_be_given_up() -> None:
    assert cut([3, -5], [(0, 1, 9, 0)], waves=0) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_thousand_nodes_take_a_few_dozen_waves(seed: int) -> None:
    random_ = random.Random(seed)
    excess = [random_.randint(-100, 100) for _ in range(1000)]
    arcs = [
        (node, random_.randrange(max(0, node - 20), node), *random_.choices(range(1, 1000), k=2))
        for node in range(1, 1000)
        for _ in range(2)
    ]
    assert cut(excess, arcs, waves=100) is not None
