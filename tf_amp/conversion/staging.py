"""Output that is there whole or not at all, files and directories alike."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tf_amp.model_files import ModelError

_AT_CWD, _EXCHANGE = -100, 2  # of renameat2(2)


@contextlib.contextmanager
def staged(destination: Path, *, force: bool = False) -> Iterator[Path]:
    """Gives a path to write to, whose content becomes the destination when all went well.

    The path is in a hidden directory beside the destination. It is written to the disk before it
    is renamed. What a process that was killed has left there goes when the next one comes by.

    Args:
        destination: the file or directory to make.
        force: whether it may take the place of an existing one.

    Raises:
        ModelError: the destination exists, or it cannot be written to.
    """
    destination = Path(os.path.abspath(destination))
    if os.path.lexists(destination) and not force:
        raise ModelError(
            f"The destination {str(destination)!r} exists. Choose another, or allow it to be "
            "replaced (`force=True`, `--force`)."
        )
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        _clear(destination)
        prefix = f"{_prefix(destination)}{os.getpid()}-"
        room = Path(tempfile.mkdtemp(prefix=prefix, dir=destination.parent))
    except OSError as error:
        raise ModelError(f"{str(destination.parent)!r} cannot be written to: {error}.") from error
    try:
        path = room / destination.name
        yield path
        _flush(path)
        if force and os.path.lexists(destination):
            _exchange(path, destination)
        else:
            _rename_new(path, destination)
        _flush_entry(destination.parent)
    except OSError as error:
        raise ModelError(f"{str(destination)!r} was not written: {error}.") from error
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _prefix(destination: Path) -> str:
    host = re.sub("[^A-Za-z0-9]", "_", socket.gethostname())
    return f".{destination.name[:100]}.tf-amp-{host}-"


def _clear(destination: Path) -> None:
    """Removes what processes of this machine have left that are no more."""
    prefix = _prefix(destination)
    for entry in destination.parent.iterdir():
        number = entry.name[len(prefix) :].partition("-")[0]
        if entry.name.startswith(prefix) and number.isdecimal():
            try:
                os.kill(int(number), 0)
            except ProcessLookupError:
                shutil.rmtree(entry, ignore_errors=True)
            except OSError:
                pass  # somebody else's process


def _flush(path: Path) -> None:
    """Has a file, or all of a directory, written to the disk."""
    if path.is_dir():
        for folder, _, files in os.walk(path):
            for name in files:
                _flush_entry(Path(folder, name))
            _flush_entry(Path(folder))
    else:
        _flush_entry(path)


def _flush_entry(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _rename_new(path: Path, destination: Path) -> None:
    """Renames to what must not be there; an empty directory would silently be replaced."""
    if os.path.lexists(destination):
        raise FileExistsError(f"{str(destination)!r} was made meanwhile")
    os.rename(path, destination)


def _exchange(path: Path, destination: Path) -> None:
    """Puts the new in the place of the old, which is then where the new was."""
    with contextlib.suppress(AttributeError, OSError):
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        names = os.fsencode(path), os.fsencode(destination)
        if rename(_AT_CWD, names[0], _AT_CWD, names[1], _EXCHANGE) == 0:
            return
    old = path.with_name(path.name + ".old")  # the file system cannot exchange two names
    os.rename(destination, old)
    try:
        os.rename(path, destination)
    except OSError:
        os.rename(old, destination)
        raise
