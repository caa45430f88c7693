"""TensorFlow's C API by ctypes.

The functions are looked up in the libraries that the imported TensorFlow has already loaded.
``TF_Buffer`` repeats ``tensorflow/c/tf_buffer.h``, which has not changed in the supported range.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Buffer(ctypes.Structure):
    """TF_Buffer."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("length", ctypes.c_size_t),
        ("data_deallocator", ctypes.c_void_p),
    )


class CApiError(RuntimeError):
    """TensorFlow's C API cannot be used as wanted in this process; the text says why."""


class CLibrary:
    """TensorFlow's own libraries, and the functions that report on a call."""

    def __init__(self, package: Path) -> None:
        """Looks for the libraries in the directory of the imported TensorFlow package."""
        self._handles = list(_loaded_libraries(package))
        p = ctypes.c_void_p
        self.get_code = self.find("TF_GetCode", ctypes.c_int, p)
        self.new_status = self.find("TF_NewStatus", p)
        self.delete_status = self.find("TF_DeleteStatus", None, p)

    def find(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """Returns a function of TensorFlow's libraries.

        Raises:
            CApiError: if no library exports the name.
        """
        for handle in self._handles:
            try:
                # The index syntax makes a new function object, whose types nobody else sees.
                function = handle[name]
            except AttributeError:
                continue
            function.restype = result
            function.argtypes = arguments
            return function  # type: ignore[no-any-return]
        raise CApiError(f"TensorFlow's libraries export no {name}")


def _loaded_libraries(package: Path) -> Iterator[ctypes.CDLL]:
    mode = getattr(os, "RTLD_NOLOAD", 0) | getattr(os, "RTLD_NOW", ctypes.DEFAULT_MODE)
    for name in (
        *("libtensorflow_cc.so.2", "libtensorflow_framework.so.2"),
        *("libtensorflow_cc.2.dylib", "libtensorflow_framework.2.dylib"),
    ):
        path = package / name
        if path.exists():
            yield ctypes.CDLL(str(path), mode=mode)
