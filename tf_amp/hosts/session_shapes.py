"""Static shapes of a session's graph, from TensorFlow's own shape inference.

The graph of a session carries no shapes. The plugin API infers them in C++ for the graph that
Grappler is working on; nothing is imported and no op runs.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

from tf_amp.hosts.session_c_api import Library

LOGGER = logging.getLogger("tf_amp.hosts.session")

Shape = tuple[int | None, ...]
"""A static shape; None stands for a dimension that is not known."""


class GraphShapes:
    """Shapes of the graph of one TF_GrapplerItem; valid until `close`, during the callback.

    Inference runs when the first shape is asked for: most of the time a graph has nothing to
    convert, and nobody asks.

    Attributes:
        feeds_fit: Whether what is fed is known to have the shapes that the fed nodes have when they
            are not fed, as what Python's session lets into a placeholder has. Else those are mostly
            unknown.
    """

    def __init__(self, library: Library, item: int) -> None:
        self._library = library
        self._item = item
        self._properties: int | None = None
        self._status: int | None = None
        self._useless = False
        self.feeds_fit = False

    def __call__(self, name: str) -> Sequence[Shape | None]:
        """Returns the shapes of a node's outputs.

        Args:
            name: Name of a node of the graph as Grappler handed it over.

        Returns:
            For each output its shape, or None where not even the rank is known; an empty
            sequence for an unknown node, or if TensorFlow could not infer shapes.
        """
        from tensorflow.core.grappler.costs import op_performance_data_pb2

        if self._useless or not self._infer():
            return ()
        shapes: list[Shape | None] = []
        for data in self._library.output_properties(self._properties, name, self._status):
            shape = op_performance_data_pb2.OpInfo.TensorProperties.FromString(data).shape
            # Dimensions that are equal but unknown have numbers below -1.
            dims = tuple(dim.size if dim.size >= 0 else None for dim in shape.dim)
            shapes.append(None if shape.unknown_rank else dims)
        return shapes

    def _infer(self) -> bool:
        if self._properties is None:
            self._status = self._library.new_status()
            self._properties = self._library.new_properties(self._item)
            fit, no = ctypes.c_ubyte(self.feeds_fit), ctypes.c_ubyte(0)
            self._library.infer_statically(self._properties, fit, no, no, no, self._status)
            if code := self._library.get_code(self._status):
                LOGGER.debug("TF_InferStatically ended with status code %d", code)
                self._useless = True
        return not self._useless

    def close(self) -> None:
        """Frees what TensorFlow holds for this graph; from now on every shape is unknown."""
        self._useless = True
        if self._properties is not None:
            self._library.delete_properties(self._properties)
            self._library.delete_status(self._status)
            self._properties = None
