"""Replaces members of other libraries, and takes the replacements off again."""

from __future__ import annotations

import functools
import inspect
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
        self._replaced: dict[tuple[Any, str], tuple[Any, Any]] = {}

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
        if (found, name) in self._replaced:
            return
        made = make(getter)

        @functools.wraps(getter)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return (made if self.active else getter)(*args, **kwargs)

        new = property(replacement) if isinstance(original, property) else replacement
        setattr(found, name, new)
        self._replaced[found, name] = original, new

    def undo(self) -> None:
        """Takes off all replacements, the last one first, but for those that others replaced."""
        self.active = False
        while self._replaced:
            (owner, name), (original, replacement) = self._replaced.popitem()
            if owner.__dict__.get(name) is replacement:
                setattr(owner, name, original)
