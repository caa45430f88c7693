"""Puts a plain ``import tensorflow`` into mixed precision when an environment variable asks for it.

The mechanism is a ``.pth`` file at the top of site-packages (``tf_amp_autoload.pth``). Python's
``site`` module runs its one line at every start. The line places a finder in front of
`sys.meta_path`, which imports nothing and only waits for the name ``tensorflow``; so a variable
counts that the script itself sets before the import. Then `find_tensorflow` takes its place: it
lets the real import run, looks at the variables, and installs the hosts. Other mechanisms that
were weighed:

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

import logging
import os
import site
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from tf_amp.after_import import AfterImport
from tf_amp.env_variables import ENABLING_VARIABLES, PROFILE, EnvConfigError
from tf_amp.visible_log import ensure_visible

_log = logging.getLogger("tf_amp")
_TRIGGER = "tensorflow"
_PTH_FINDER = "tf_amp_autoload"


def activate() -> None:
    """Installs the hosts now if TensorFlow is imported, otherwise as soon as it is.

    The variables count as they are at that moment. Does nothing if it was called before.

    Raises:
        EnvConfigError: TensorFlow is imported already and a variable holds an illegal value.
            Otherwise the import of TensorFlow raises it.
    """
    if not any(isinstance(finder, _TensorFlowAwaited) for finder in sys.meta_path):
        deactivate()
        _TensorFlowAwaited().start()


def deactivate() -> None:
    """Takes back `activate` and the finder of the .pth file, until TensorFlow is imported."""
    for finder in list(sys.meta_path):
        if isinstance(finder, _TensorFlowAwaited):
            finder.stop()
        elif type(finder).__module__ == _PTH_FINDER:
            sys.meta_path.remove(finder)


def find_tensorflow(path: Sequence[str] | None) -> ModuleSpec | None:
    """Takes the place of the finder of the .pth file, and finds TensorFlow for it."""
    deactivate()
    awaited = _TensorFlowAwaited()
    awaited.start()
    return awaited.find_spec(_TRIGGER, path)


def pth_path() -> str | None:
    """Returns where the .pth file lies that Python reads at its start, None if there is none."""
    directories = [*site.getsitepackages(), site.getusersitepackages()]
    paths = (os.path.join(directory, "tf_amp_autoload.pth") for directory in directories)
    return next(filter(os.path.exists, paths), None)


def _install() -> None:
    from tf_amp.env_config import misspelt, read_settings

    if folder := os.environ.get(PROFILE, "").strip():
        from tf_amp.profiling import step_watch

        step_watch.start(Path(folder))
    _watch_variables()
    if not any(os.environ.get(name) for name in ENABLING_VARIABLES):
        for note in misspelt(os.environ):
            ensure_visible()
            _log.warning("%s", note)
        return
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


def _watch_variables() -> None:
    try:
        from tf_amp import late_settings

        late_settings.watch()
    except (ImportError, AttributeError) as error:
        _log.debug("Nothing is said of variables that are set too late: %s", error)


class _TensorFlowAwaited(AfterImport):
    """Installs the hosts after ``import tensorflow``, which an illegal value stops."""

    def __init__(self) -> None:
        super().__init__({_TRIGGER: _after_tensorflow}, {_TRIGGER: _check})


def _check() -> None:
    from tf_amp.env_config import check_environment

    # An illegal value must stop the import before it has run half-way.
    if any(os.environ.get(name) for name in ENABLING_VARIABLES):
        check_environment()


def _after_tensorflow(_: ModuleType) -> None:
    if "graph_passes" in sys.modules:
        # Its import may be what imports TensorFlow; the hosts need it whole.
        AfterImport({"graph_passes": lambda _: _install()}).start()
    else:
        _install()
