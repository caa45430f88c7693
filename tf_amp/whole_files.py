"""Files that are there whole or not at all, whoever reads them meanwhile."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file under another name first, and gives it its own name when it is complete.

    Args:
        path: the file; the folder must exist. A file of that name is replaced, or the one that a
            link of that name leads to. What is no file, such as a pipe, is written to as it is.
        content: all of it.

    Raises:
        OSError: it cannot be written. Nothing is left behind then.
    """
    path = path.resolve()
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(content)
        return
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
