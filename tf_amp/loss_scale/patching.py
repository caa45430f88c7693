"""Replaces methods of other libraries' classes, and puts them back."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
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


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs an action right after a module was imported, or at once if it was before.

    A module whose import is under way (`import keras` imports TensorFlow, whose import may be what
    led here) is waited for too.

    Args:
        actions: What to run, by the name of the module; it gets the module.
    """

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = dict(actions)

    def start(self) -> None:
        """Runs the actions of imported modules and waits for the others."""
        for name in [name for name in self._actions if name in sys.modules]:
            spec = sys.modules[name].__spec__
            if spec is not None and getattr(spec, "_initializing", False):
                _WatchedSpec.watch(spec, functools.partial(self._act, name))
            else:
                self._act(name)
        if self._actions:
            sys.meta_path.insert(0, self)

    def _act(self, name: str) -> None:
        action = self._actions.pop(name, None)
        if action is not None and name in sys.modules:
            action(sys.modules[name])

    def stop(self) -> None:
        """Waits no longer."""
        self._actions.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds an awaited module as the other finders do, with a loader that runs the action."""
        if fullname not in self._actions:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec = find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _ActingLoader(spec.loader, self._actions.pop(fullname))
                return spec
        return None


class _WatchedSpec(importlib.machinery.ModuleSpec):
    """The spec of a module being imported, which tells when the import has ended.

    The import system marks that by setting `_initializing`; nothing else happens at that moment
    that a module which is half imported already could be waited for by.
    """

    _on_end: Callable[[], None]

    @classmethod
    def watch(cls, spec: importlib.machinery.ModuleSpec, on_end: Callable[[], None]) -> None:
        """Has `on_end` called when the import of the spec's module has ended."""
        spec.__class__ = cls
        spec.__dict__["_on_end"] = on_end

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__.get("_initializing", False))

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if not value:
            self.__class__ = importlib.machinery.ModuleSpec  # type: ignore[assignment]
            self.__dict__.pop("_on_end")()


class _ActingLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, action: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Whoever asks the module for its files must meet the real loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._action(module)
