"""Times of several functions that take turns, so that what disturbs one disturbs all."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

WARM_UP = 3


def take_turns(
    starts: Mapping[str, Callable[[], Any]], rounds: int, turn_s: float
) -> dict[str, dict[str, Any]]:
    """Times functions that start work on a device.

    A turn starts one function as often as fits into `turn_s` and waits for the last result. The
    order of the turns changes from round to round.

    Args:
        starts: name -> what starts the work and returns arrays without waiting for them.
        rounds: turns of each.
        turn_s: seconds of a turn of the fastest; all do the same number of steps.

    Returns:
        Name -> `median_s`, `min_s`, `max_s` of a step, and `values_s` of every round.
    """
    steps = max(1, round(turn_s / min((_warm(start) for start in starts.values()), default=1.0)))
    taken: dict[str, list[float]] = {name: [] for name in starts}
    order = list(starts)
    for number in range(rounds):
        shift = number % max(1, len(order))
        turns = order[shift:] + order[:shift]
        for name in turns if number % 2 else reversed(turns):
            taken[name].append(_seconds(starts[name], steps) / steps)
    return {
        name: {
            "median_s": statistics.median(seconds),
            "min_s": min(seconds),
            "max_s": max(seconds),
            "values_s": [float(f"{value:.4g}") for value in seconds],
            "steps_per_turn": steps,
        }
        for name, seconds in taken.items()
    }


def _warm(start: Callable[[], Any]) -> float:
    for _ in range(WARM_UP):
        seconds = _seconds(start, 1)
    return seconds


def _seconds(start: Callable[[], Any], steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        last = start()
    jax.block_until_ready(last)
    return time.perf_counter() - started
