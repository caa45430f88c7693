"""Classes of names that may mean one variable."""

from __future__ import annotations

from collections.abc import Hashable


class VariableClasses:
    """Names of variables, joined where they may be the same one.

    Attributes:
        blocked: class -> why it must stay float32.
        wanted: classes of which a read is cast.
    """

    def __init__(self) -> None:
        self._parents: dict[Hashable, Hashable] = {}
        self.blocked: dict[Hashable, str] = {}
        self.wanted: set[Hashable] = set()

    def find(self, name: Hashable) -> Hashable:
        """The name that stands for a class."""
        self._parents.setdefault(name, name)
        while (parent := self._parents[name]) != name:
            self._parents[name] = self._parents[parent]
            name = parent
        return name

    def join(self, one: Hashable, other: Hashable) -> None:
        """Says that two names may mean one variable."""
        first, second = self.find(one), self.find(other)
        if first == second:
            return
        self._parents[second] = first
        if second in self.blocked:
            self.blocked.setdefault(first, self.blocked.pop(second))
        if second in self.wanted:
            self.wanted.add(first)

    def block(self, name: Hashable, why: str) -> None:
        """Says that a variable must stay float32."""
        self.blocked.setdefault(self.find(name), why)

    def want(self, name: Hashable) -> None:
        """Says that a read of a variable is cast."""
        self.wanted.add(self.find(name))

    def members(self) -> dict[Hashable, list[tuple[object, ...]]]:
        """Class -> the names in it."""
        found: dict[Hashable, list[tuple[object, ...]]] = {}
        for name in list(self._parents):
            found.setdefault(self.find(name), []).append(name)  # type: ignore[arg-type]
        return found
