"""Puts a plain ``import tensorflow`` into mixed precision when an environment variable asks for it.

The mechanism is a ``.pth`` file at the top of site-packages (``tf_amp_autoload.pth``). Python's
``site`` module runs its one line at every start. The line compares three variables with nothing
and stops there; only if one is set does it import this module and call `activate`, which puts a
finder in front of `sys.meta_path`. The finder lets the real import of ``tensorflow`` run, installs
the hosts right after it, and is gone from then on. Other mechanisms that were weighed:

- The ``tensorflow-plugins`` directory: ``import tensorflow`` loads any shared object in it, but
  whether it is wanted or not; the loader lists the devices again, which resets the visible devices
  and memory growth that the user chose; the file has to be compiled; and with an editable install
  it is not in site-packages at all.
- ``sitecustomize``: one per interpreter. Distributions and administrators use it already, and a
  wheel must not overwrite theirs.
- Entry points: TensorFlow looks none up.

What a ``.pth`` file does not reach: ``python -S``, frozen programs, ``pip install --target``.
``tf-amp run script.py`` needs none of it; from code, ``tf_amp.autoload.activate()`` before
``import tensorflow`` does the same.
"""

from __future__ import annotations

import importlib.abc
import logging
import os
import site
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from tf_amp.env_variables import ENABLING_VARIABLES, EnvConfigError
from tf_amp.loss_scale.patching import AfterImport
from tf_amp.visible_log import ensure_visible

_log = logging.getLogger("tf_amp")
_TRIGGER = "tensorflow"


def activate() -> None:
    """Installs the hosts now if TensorFlow is imported, otherwise as soon as it is.

    Does nothing if no enabling variable is set, or if it was called before.

    Raises:
        EnvConfigError: TensorFlow is imported already and a variable holds an illegal value.
            Otherwise the import of TensorFlow raises it.
    """
    if not any(os.environ.get(name) for name in ENABLING_VARIABLES):
        return
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if _TRIGGER in sys.modules:
        _install()
    else:
        sys.meta_path.insert(0, _Finder())


def deactivate() -> None:
    """Takes back `activate`, as long as TensorFlow has not been imported."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


def pth_path() -> str | None:
    """Returns where the .pth file lies that Python reads at its start, None if there is none."""
    directories = [*site.getsitepackages(), site.getusersitepackages()]
    paths = (os.path.join(directory, "tf_amp_autoload.pth") for directory in directories)
    return next(filter(os.path.exists, paths), None)


def _install() -> None:
    from tf_amp.env_config import read_settings

    settings = read_settings()
    if not (settings.graph_rewrite or settings.loss_scaling):
        return
    try:
        from tf_amp import installation

        installation.install(settings, source="environment")
    except EnvConfigError:
        raise
    except Exception as error:
        # Somebody else's training script must not die of a fault in here.
        ensure_visible()
        _log.warning(
            "AMP could not be switched on, and everything runs in float32: %s: %s",
            type(error).__name__,
            error,
        )
        _log.debug("The fault in full:", exc_info=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``tensorflow`` where the other finders find it, and has its loader call back."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TRIGGER:
            return None
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec = find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Runs the real loader, then installs the hosts."""

    def __init__(self, loader: importlib.abc.Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        from tf_amp.env_config import check_environment

        # An illegal value must stop the import before it has run half-way.
        check_environment()
        # Whoever asks the module for its source or data files must meet the real loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        if "graph_passes" in sys.modules:
            # Its import may be what imports TensorFlow; the hosts need it whole.
            AfterImport({"graph_passes": lambda _: _install()}).start()
        else:
            _install()
