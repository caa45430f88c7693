"""The cheapest colouring, against trying all of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.placement import min_cut
from graph_passes.placement.min_cut import FLOAT32, LOW, LinkTable


class Link(NamedTuple):
    """One row of a `LinkTable`."""

    producer: int
    readers: tuple[int, ...]
    to_low: int
    to_float32: int


Problem = tuple[list[int], list[Link]]


def table_of(links: Sequence[Link]) -> LinkTable:
    columns = (
        [link.producer for link in links],
        [0, *itertools.accumulate(len(link.readers) for link in links)],
        [reader for link in links for reader in link.readers],
        [link.to_low for link in links],
        [link.to_float32 for link in links],
    )
    return LinkTable(*(np.array(column, np.int64) for column in columns))


def cheapest_colours(gains: list[int], links: list[Link]) -> list[int]:
    colours, skipped = min_cut.cheapest_colours(np.array(gains), table_of(links))
    assert not skipped
    return colours.tolist()


def total_cost(gains: Sequence[int], links: Iterable[Link], colours: Sequence[int]) -> int:
    """What a colouring costs: all Casts, less the gains of low variables."""
    cost = -sum(gain for gain, colour in zip(gains, colours, strict=True) if colour == LOW)
    for link in links:
        if colours[link.producer] == LOW:
            cost += link.to_float32 * any(colours[r] == FLOAT32 for r in link.readers)
        else:
            cost += link.to_low * any(colours[r] == LOW for r in link.readers)
    return cost


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    count = draw(st.integers(1, 6))
    gains = [0, 0, *draw(st.lists(st.integers(-6, 6), min_size=count, max_size=count))]
    variables = st.integers(0, count + 1)
    links = []
    for _ in range(draw(st.integers(0, 8))):
        producer = draw(variables)
        readers = tuple(sorted(draw(st.sets(variables, min_size=1, max_size=4)) - {producer}))
        if readers:
            links.append(Link(producer, readers, draw(st.integers(0, 5)), draw(st.integers(0, 5))))
    return gains, links


def _best(gains: list[int], links: list[Link]) -> list[int]:
    """The cheapest colouring, of several the one with most variables low, by trying all."""
    all_of_them = (
        [FLOAT32, LOW, *rest] for rest in itertools.product((FLOAT32, LOW), repeat=len(gains) - 2)
    )
    return min(all_of_them, key=lambda colours: (total_cost(gains, links, colours), -sum(colours)))


@settings(max_examples=300, deadline=None)
@given(problems())
def test_the_colouring_is_the_best_one(problem: Problem) -> None:
    gains, links = problem
    assert cheapest_colours(gains, links) == _best(gains, links)


@settings(max_examples=100, deadline=None)
@given(problems(), st.randoms())
def test_the_order_of_variables_and_links_does_not_matter(
    problem: Problem, random_: random.Random
) -> None:
    gains, links = problem
    order = list(range(2, len(gains)))
    random_.shuffle(order)
    new = {0: 0, 1: 1, **{old: place + 2 for place, old in enumerate(order)}}
    shuffled = [
        Link(new[k.producer], tuple(new[r] for r in k.readers), k.to_low, k.to_float32)
        for k in links
    ]
    random_.shuffle(shuffled)
    moved = cheapest_colours([0, 0, *(gains[old] for old in order)], shuffled)
    plain = cheapest_colours(gains, links)
    assert [moved[new[variable]] for variable in range(len(gains))] == plain


def test_readers_share_one_cast() -> None:
    # Three readers lose 2 each by being float32; one Cast of 5 pays for all of them.
    gains = [0, 0, 2, 2, 2]
    assert cheapest_colours(gains, [Link(0, (2, 3, 4), 5, 5)]) == [0, 1, 1, 1, 1]
    apart = [Link(0, (reader,), 5, 5) for reader in (2, 3, 4)]
    assert cheapest_colours(gains, apart) == [0, 1, 0, 0, 0]


def test_a_chain_goes_as_a_whole_where_no_single_member_would() -> None:
    # Each of the middle three loses 3; taking out one costs two Casts of 4, all three as well.
    gains = [0, 0, -3, -3, -3]
    chain = [Link(1, (2,), 4, 4), Link(2, (3,), 4, 4), Link(3, (4,), 4, 4), Link(4, (1,), 4, 4)]
    assert cheapest_colours(gains, chain) == [0, 1, 0, 0, 0]
    assert cheapest_colours([0, 0, -3], [Link(1, (2,), 4, 4), Link(2, (1,), 4, 4)]) == [0, 1, 1]


def test_a_cast_moves_to_where_fewer_bytes_pass() -> None:
    # float32 -> 2 -> 3 -> low, without gains: the cheapest of the three places is before 3.
    chain = [Link(0, (2,), 9, 9), Link(2, (3,), 2, 2), Link(3, (1,), 9, 9)]
    assert cheapest_colours([0, 0, 0, 0], chain) == [0, 1, 0, 1]


def test_a_cast_that_some_reader_needs_in_any_case_is_free_for_the_others() -> None:
    # Variable 2 is read by float32 and by 3, which alone would not be worth a Cast of 5.
    gains = [0, 0, 9, -2]
    assert cheapest_colours(gains, [Link(2, (0, 3), 5, 5)]) == [0, 1, 1, 0]
    assert cheapest_colours(gains, [Link(2, (3,), 5, 5)]) == [0, 1, 1, 1]


def test_parts_that_are_alike_are_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    solved = []
    real = min_cut.sink_side
    monkeypatch.setattr(min_cut, "sink_side", lambda *args: solved.append(args) or real(*args))
    # Two variables that agree best, many times over, and once with another price.
    gains, links = [0, 0], []
    for price in (5, 5, 5, 6):
        gains += [4, -3]
        first = len(gains) - 2
        links += [Link(first, (first + 1,), price, price), Link(0, (first,), 2, 2)]
    assert cheapest_colours(gains, links) == _best(gains, links)
    assert len(solved) == 2


def test_parts_that_take_too_long_stay_low(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first two have no links: they need no flow.
    gains = [0, 0, 3, -3, 4, -5]
    links = [Link(4, (5,), 9, 9), Link(5, (4,), 9, 9)]
    assert cheapest_colours(gains, links) == [0, 1, 1, 0, 0, 0]
    monkeypatch.setattr(min_cut, "_WAVES", 0)
    colours, skipped = min_cut.cheapest_colours(np.array(gains), table_of(links))
    assert colours.tolist() == [0, 1, 1, 0, 1, 1]
    assert skipped == 2


def test_only_variables_count_as_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two readers share a Cast, for which the network has nodes that are no variables.
    monkeypatch.setattr(min_cut, "_WAVES", 0)
    gains = [0, 0, 3, -5, -5]
    colours, skipped = min_cut.cheapest_colours(np.array(gains), table_of([Link(2, (3, 4), 9, 9)]))
    assert (colours.tolist(), skipped) == ([0, 1, 1, 1, 1], 3)
