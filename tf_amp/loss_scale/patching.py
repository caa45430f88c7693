"""Replaces methods of other libraries' classes, and puts them back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Patches:
    """A set of replaced methods that can be taken back together.

    `active` tells replacements that were copied elsewhere meanwhile whether they still count.
    """

    def __init__(self) -> None:
        self.active = True
        self._restore: list[tuple[type, str, Any]] = []

    def replace(self, cls: type, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        """Replaces the method `name` on the class in the inheritance of `cls` that defines it.

        Args:
            cls: A class that has the method.
            name: The method's name.
            make: Gets the original and returns the replacement.

        Raises:
            AttributeError: If no class in the inheritance defines the method.
        """
        owner = next((one for one in cls.__mro__ if name in one.__dict__), None)
        if owner is None:
            raise AttributeError(f"{cls.__module__}.{cls.__qualname__} has no method {name!r}")
        original = owner.__dict__[name]
        setattr(owner, name, functools.wraps(original)(make(original)))
        self._restore.append((owner, name, original))

    def undo(self) -> None:
        """Puts all originals back, the last replaced first."""
        self.active = False
        while self._restore:
            owner, name, original = self._restore.pop()
            setattr(owner, name, original)
