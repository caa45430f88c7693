"""The C side of TensorFlow's graph-optimizer plugin API that a callback needs, by ctypes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from tf_amp.hosts.c_api import Buffer, CLibrary

PRESERVE_LIST = "TF_GetNodesToPreserveList"
FETCH_LIST = "TF_GetFetchNodesList"
ABORTED = 10
"""Status code for "did nothing": Grappler keeps the graph and stays silent."""


OPTIMIZE_FUNCTION = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.POINTER(Buffer),
    ctypes.c_void_p,
    ctypes.POINTER(Buffer),
    ctypes.c_void_p,
)

INIT_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)


class AbslStatus(ctypes.Structure):
    """absl::Status as a return value."""

    # It is returned through a hidden pointer; a structure this large makes libffi pass one.
    # Only the first word is the status.
    _fields_ = (("representation", ctypes.c_size_t), ("padding", ctypes.c_size_t * 7))

    def ok(self) -> bool:
        """Tells whether the call succeeded."""
        # abseil writes OK as 1; before 2024 it was 0.
        return self.representation in (0, 1)


class Library(CLibrary):
    """The C functions that the callbacks need."""

    def __init__(self, package: Path) -> None:
        super().__init__(package)
        p, size = ctypes.c_void_p, ctypes.c_size_t
        self.set_status = self.find("TF_SetStatus", None, p, ctypes.c_int, ctypes.c_char_p)
        self.new_buffer = self.find(
            "TF_NewBufferFromString", ctypes.POINTER(Buffer), ctypes.c_char_p, size
        )
        self.delete_buffer = self.find("TF_DeleteBuffer", None, ctypes.POINTER(Buffer))
        self.new_properties = self.find("TF_NewGraphProperties", p, p)
        self.delete_properties = self.find("TF_DeleteGraphProperties", None, p)
        self.infer_statically = self.find("TF_InferStatically", None, p, *(ctypes.c_ubyte,) * 4, p)
        self._new_empty_buffer = self.find("TF_NewBuffer", ctypes.POINTER(Buffer))
        self._output_count = self.find(
            "TF_GetOutputPropertiesListSize",
            *(None, p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int), p),
        )
        self._output_list = self.find(
            "TF_GetOutputPropertiesList",
            *(None, p, ctypes.c_char_p, ctypes.POINTER(ctypes.POINTER(Buffer)), ctypes.c_int, p),
        )
        self._name_lists = {
            name: (
                self.find(
                    f"{name}Size",
                    *(None, p, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(size), p),
                ),
                self.find(
                    name,
                    *(None, p, ctypes.POINTER(p), ctypes.POINTER(size), ctypes.c_int, p, size, p),
                ),
            )
            for name in (PRESERVE_LIST, FETCH_LIST)
        }

    def names(self, list_name: str, item: int) -> tuple[str, ...]:
        """Returns a list of node names that Grappler keeps for the graph of `item`.

        Args:
            list_name: The C function that fills the list.
            item: Address of the TF_GrapplerItem.

        Raises:
            RuntimeError: if TensorFlow reports an error.
        """
        get_size, get_list = self._name_lists[list_name]
        status = self.new_status()
        try:
            count, size = ctypes.c_int(), ctypes.c_size_t()
            get_size(item, ctypes.byref(count), ctypes.byref(size), status)
            values = (ctypes.c_void_p * max(1, count.value))()
            lengths = (ctypes.c_size_t * max(1, count.value))()
            storage = ctypes.create_string_buffer(max(1, size.value))
            get_list(item, values, lengths, count, ctypes.addressof(storage), size, status)
            if code := self.get_code(status):
                raise RuntimeError(f"{list_name} ended with status code {code}")
            return tuple(
                ctypes.string_at(values[i] or 0, lengths[i]).decode("utf-8", "surrogateescape")
                for i in range(count.value)
            )
        finally:
            self.delete_status(status)

    def output_properties(
        self, properties: int | None, node: str, status: int | None
    ) -> list[bytes]:
        """Returns the serialized OpInfo.TensorProperties of a node's outputs; none on an error."""
        name, count = node.encode("utf-8", "surrogateescape"), ctypes.c_int()
        self._output_count(properties, name, ctypes.byref(count), status)
        if self.get_code(status) or not count.value:
            return []
        buffers = [self._new_empty_buffer() for _ in range(count.value)]
        try:
            array = (ctypes.POINTER(Buffer) * count.value)(*buffers)
            self._output_list(properties, name, array, count, status)
            if self.get_code(status):
                return []
            return [ctypes.string_at(b.contents.data or 0, b.contents.length) for b in buffers]
        finally:
            for buffer in buffers:
                self.delete_buffer(buffer)

    def hand_over(self, output: Any, data: bytes) -> None:
        """Makes `data` the content of the TF_Buffer `output`, which frees it by itself."""
        copy = self.new_buffer(data, len(data))
        output.contents.data = copy.contents.data
        output.contents.length = copy.contents.length
        output.contents.data_deallocator = copy.contents.data_deallocator
        copy.contents.data_deallocator = None
        self.delete_buffer(copy)
