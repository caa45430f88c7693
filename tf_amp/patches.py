"""Replaces members of other libraries, and takes the replacements off again."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any


class Patches:
    """A set of replaced functions, methods and properties that is taken off together.

    Others may replace the same members later. `undo` leaves theirs alone; what theirs then still
    calls of ours runs the original.

    Attributes:
        active: False once the replacements were taken off.
    """

    def __init__(self) -> None:
        self.active = True
        # Weak, and the original is kept by the replacement: a class made in a function may go.
        self._replaced: dict[tuple[weakref.ref[Any], str], weakref.ref[Any]] = {}

    def replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        """Replaces a member of a module, or of the class in the inheritance that defines it.

        What was replaced before stays with its first replacement.

        Args:
            owner: A module or a class.
            name: The name of a function, a method or a property.
            make: Gets the original, of a property its getter, and returns the replacement.

        Raises:
            AttributeError: If there is no such function, method or property.
        """
        owners = owner.__mro__ if isinstance(owner, type) else (owner,)
        found = next((one for one in owners if name in one.__dict__), None)
        original = found.__dict__[name] if found is not None else None
        getter: Any = original.fget if isinstance(original, property) else original
        if found is None or not (inspect.isfunction(getter) or inspect.isbuiltin(getter)):
            raise AttributeError(f"{owner.__name__} has no function {name!r}")
        key = weakref.ref(found), name
        if key in self._replaced:
            return
        made = make(getter)

        @functools.wraps(getter)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return (made if self.active else getter)(*args, **kwargs)

        new = property(replacement) if isinstance(original, property) else replacement
        replacement.original = original  # type: ignore[attr-defined]
        setattr(found, name, new)
        self._replaced[key] = weakref.ref(replacement)

    def undo(self) -> None:
        """Takes off all replacements, the last one first, but for those that others replaced."""
        self.active = False
        while self._replaced:
            (of_owner, name), of_replacement = self._replaced.popitem()
            owner, ours = of_owner(), of_replacement()
            member = getattr(owner, "__dict__", {}).get(name)
            if ours is getattr(member, "fget", member) and ours is not None:
                setattr(owner, name, ours.original)
