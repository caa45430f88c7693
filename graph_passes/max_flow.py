"""Maximum flow by Dinic's algorithm, for networks of whole-numbered capacities."""

from __future__ import annotations

from collections import deque


class Network:
    """A flow network with whole-numbered capacities."""

    def __init__(self, nodes: int) -> None:
        """Makes a network of some nodes, numbered from 0, without arcs."""
        self._arcs: list[list[int]] = [[] for _ in range(nodes)]
        self._heads: list[int] = []
        self._room: list[int] = []

    def add_node(self) -> int:
        """Adds a node and gives its number."""
        self._arcs.append([])
        return len(self._arcs) - 1

    def add_arc(self, tail: int, head: int, capacity: int) -> None:
        """Adds an arc and its reverse, which is at the next number."""
        for start, end, room in ((tail, head, capacity), (head, tail, 0)):
            self._arcs[start].append(len(self._heads))
            self._heads.append(end)
            self._room.append(room)

    def saturate(self, source: int, sink: int, work: int) -> int:
        """Sends as much as fits from the source to the sink.

        Args:
            source: a node.
            sink: another.
            work: after how many steps to give up.

        Returns:
            How many steps are left, none if the flow was given up.
        """
        while work > 0:
            levels = self._levels(source, sink)
            work -= len(self._heads)
            if levels[sink] < 0:
                break
            work -= self._block(source, sink, levels, work)
        return max(work, 0)

    def reaching(self, sink: int) -> bytearray:
        """For each node whether more could flow from it to the sink."""
        reached = bytearray(len(self._arcs))
        reached[sink] = 1
        pending = [sink]
        while pending:
            for arc in self._arcs[pending.pop()]:
                tail = self._heads[arc]
                if self._room[arc ^ 1] and not reached[tail]:
                    reached[tail] = 1
                    pending.append(tail)
        return reached

    def _levels(self, source: int, sink: int) -> list[int]:
        """For each node its distance from the source over arcs with room, -1 beyond the sink."""
        levels = [-1] * len(self._arcs)
        levels[source] = 0
        pending = deque((source,))
        while pending and levels[sink] < 0:
            node = pending.popleft()
            for arc in self._arcs[node]:
                head = self._heads[arc]
                if self._room[arc] and levels[head] < 0:
                    levels[head] = levels[node] + 1
                    pending.append(head)
        return levels

    def _block(self, source: int, sink: int, levels: list[int], work: int) -> int:
        """Fills every shortest path; gives the number of steps that this took."""
        heads, room = self._heads, self._room
        left = [iter(arcs) for arcs in self._arcs]
        path: list[int] = []
        node, steps = source, 0
        while steps < work:
            steps += 1
            if node == sink:
                flow = min(room[arc] for arc in path)
                full = len(path)
                for position in reversed(range(len(path))):
                    arc = path[position]
                    room[arc] -= flow
                    room[arc ^ 1] += flow
                    if not room[arc]:
                        full = position
                steps += len(path)
                node = heads[path[full] ^ 1]
                del path[full:]
                continue
            for arc in left[node]:
                if room[arc] and levels[heads[arc]] == levels[node] + 1:
                    path.append(arc)
                    node = heads[arc]
                    break
            else:
                if not path:
                    break
                levels[node] = -1
                node = heads[path.pop() ^ 1]
        return steps
