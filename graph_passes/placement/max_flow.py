"""Minimum cuts of flow networks, by waves of flow that run towards where some is missing.

A wave (after Tarjan, 1984, "A simple version of Karzanov's blocking flow algorithm") finds for
each node the distance to the nearest one that misses some. Then every node, the farthest first,
sends on what it has to nodes that are one step nearer. What gets stuck waits for the next wave, and
its node is farther away by then, so that there is an end. A few dozen waves did for random networks
and grids of ten thousand nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def sink_side(excess: Sequence[int], arcs: np.ndarray, waves: int) -> list[int] | None:
    """Finds the minimum cut that has the fewest nodes on the side of the sink.

    Args:
        excess: for each node the capacity of its arc from the source, or minus that of its arc to
            the sink.
        arcs: between nodes: tail, head, capacity, and capacity from head to tail; int64 [arcs, 4].
        waves: after how many waves to give up.

    Returns:
        The nodes on the side of the sink; None if the cut was given up.
    """
    left = list(excess)
    leaving: list[list[int]] = [[] for _ in left]
    for arc, tail in enumerate(arcs[:, :2].ravel().tolist()):
        leaving[tail].append(arc)  # at even numbers the arcs, each followed by its reverse
    heads = arcs[:, 1::-1].ravel().tolist()
    room = arcs[:, 2:].ravel().tolist()
    for _ in range(waves):
        distances = [-1] * len(left)
        reached = [node for node, amount in enumerate(left) if amount < 0]
        for node in reached:
            distances[node] = 0
        for node in reached:  # which grows
            for arc in leaving[node]:
                tail = heads[arc]
                if distances[tail] < 0 and room[arc ^ 1]:
                    distances[tail] = distances[node] + 1
                    reached.append(tail)
        if all(left[node] <= 0 for node in reached):
            return reached
        for node in reversed(reached):
            if left[node] <= 0:
                continue
            for arc in leaving[node]:
                head = heads[arc]
                if room[arc] and distances[head] == distances[node] - 1:
                    flow = min(room[arc], left[node])
                    room[arc] -= flow
                    room[arc ^ 1] += flow
                    left[node] -= flow
                    left[head] += flow
                    if not left[node]:
                        break
    return None
