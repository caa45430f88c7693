"""Runs something right after a module was imported, without importing it."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType


class AfterImport(importlib.abc.MetaPathFinder):
    """Runs an action right after a module was imported, or at once if it was before.

    A module whose import is under way (`import keras` imports TensorFlow, whose import may be what
    led here) is waited for too.

    Args:
        actions: What to run, by the name of the module; it gets the module.
        checks: What to run before the module of that name, if it is not imported yet. A check that
            raises stops the import, which may be tried again.
    """

    def __init__(
        self,
        actions: Mapping[str, Callable[[ModuleType], None]],
        checks: Mapping[str, Callable[[], None]] | None = None,
    ) -> None:
        self._actions = dict(actions)
        self._checks = dict(checks or {})

    def start(self) -> None:
        """Runs the actions of imported modules and waits for the others."""
        for name in [name for name in self._actions if name in sys.modules]:
            spec = sys.modules[name].__spec__
            if spec is not None and getattr(spec, "_initializing", False):
                _WatchedSpec.watch(spec, functools.partial(self.act, name))
            else:
                self.act(name)
        if self._actions:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Waits no longer."""
        self._actions.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def check(self, name: str) -> None:
        """Runs the check of a module that is about to be imported."""
        if name in self._actions and name in self._checks:
            self._checks[name]()

    def act(self, name: str) -> None:
        """Runs the action of a module that was imported, once; one that raises may be tried again.

        The import then fails, and the next one must not go by without the action.
        """
        if name in self._actions and name in sys.modules:
            action = self._actions.pop(name)
            try:
                action(sys.modules[name])
            except BaseException:
                self._actions[name] = action
                raise
        if not self._actions:
            self.stop()

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
                self._act_behind(spec.loader, fullname)
                return spec
        return None

    def _act_behind(self, loader: importlib.abc.Loader, name: str) -> None:
        """Has one run of a loader followed by the action, and preceded by the check.

        The loader stays what it is: whoever asks it for source or data meets the real one.
        """
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if module.__name__ != name:  # a loader may serve several modules
                return execute(module)
            self.check(name)
            loader.__dict__.pop("exec_module", None)
            execute(module)
            self.act(name)

        loader.exec_module = exec_module  # type: ignore[method-assign]


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
