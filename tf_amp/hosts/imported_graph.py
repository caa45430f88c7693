"""A graph that TensorFlow's own importer builds, without a Python object for each of its nodes.

The importer infers the shape of every tensor while it builds. Making Python's objects of the nodes
takes several times as long as that, and nothing here needs them.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from tf_amp.hosts.c_api import Buffer, CApiError, CLibrary

if TYPE_CHECKING:
    from tensorflow.core.framework.graph_pb2 import GraphDef

    from graph_passes.ir.graph_view import Shape


class ImportedGraph:
    """A TF_Graph, freed with this object. No op runs."""

    def __init__(self, graph_def: GraphDef) -> None:
        """Builds the graph with its library.

        TensorFlow may end the process on a graph that is not valid: whoever calls has checked it.

        Args:
            graph_def: the graph; it is not changed.

        Raises:
            CApiError: TensorFlow cannot build it, and the text is TensorFlow's, or its libraries
                lack a function.
        """
        self._c = _importer()
        self._graph, self._status = self._c.new_graph(), self._c.new_status()
        weakref.finalize(self, self._c.delete_graph, self._graph)
        weakref.finalize(self, self._c.delete_status, self._status)
        try:
            self._import(graph_def)
        except CApiError:
            if (rest := _without_empty_attrs(graph_def)) is None:
                raise
            self._import(rest)

    def _import(self, graph_def: GraphDef) -> None:
        c, data = self._c, graph_def.SerializeToString()
        options = c.new_options()
        buffer = Buffer(ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p), len(data), None)
        c.import_graph_def(self._graph, buffer, options, self._status)
        c.delete_options(options)
        if c.get_code(self._status):
            raise CApiError(c.message(self._status).decode(errors="replace"))

    def shapes(self, node: str) -> tuple[Shape | None, ...]:
        """The shapes of the outputs of a node, as `graph_passes.ir.view.Shapes`."""
        operation = self._c.find_operation(self._graph, node.encode())
        if operation is None:
            return ()
        outputs = (_Output(operation, port) for port in range(self._c.count_outputs(operation)))
        return tuple(map(self._shape, outputs))

    def _shape(self, output: _Output) -> Shape | None:
        rank = self._c.rank(self._graph, output, self._status)
        if rank < 0:
            return None
        dims = (ctypes.c_int64 * rank)()
        self._c.dims(self._graph, output, dims, rank, self._status)
        return tuple([None if size < 0 else size for size in dims])


def _without_empty_attrs(graph_def: GraphDef) -> GraphDef | None:
    """A copy without attrs that have no value; None where there are none.

    Asking in Python for an attr that a node lacks leaves an empty one, which Python's importer
    overlooks and TensorFlow's does not.
    """
    copy = type(graph_def)()
    copy.CopyFrom(graph_def)
    count = 0
    for node in copy.node:
        for name in [name for name in node.attr if node.attr[name].WhichOneof("value") is None]:
            del node.attr[name]
            count += 1
    return copy if count else None


class _Output(ctypes.Structure):
    """TF_Output."""

    _fields_ = (("operation", ctypes.c_void_p), ("index", ctypes.c_int))


class _Importer(CLibrary):
    """The C functions that build a graph and tell of it."""

    def __init__(self, package: Path) -> None:
        super().__init__(package)
        find, p, text = self.find, ctypes.c_void_p, ctypes.c_char_p
        self.new_graph, self.delete_graph = find("TF_NewGraph", p), find("TF_DeleteGraph", None, p)
        self.new_options = find("TF_NewImportGraphDefOptions", p)
        self.delete_options = find("TF_DeleteImportGraphDefOptions", None, p)
        self.import_graph_def = find(
            "TF_GraphImportGraphDef", None, p, ctypes.POINTER(Buffer), p, p
        )
        self.message = find("TF_Message", text, p)
        self.find_operation = find("TF_GraphOperationByName", p, p, text)
        self.count_outputs = find("TF_OperationNumOutputs", ctypes.c_int, p)
        self.rank = find("TF_GraphGetTensorNumDims", ctypes.c_int, p, _Output, p)
        self.dims = find("TF_GraphGetTensorShape", None, p, _Output, p, ctypes.c_int, p)


@functools.cache
def _importer() -> _Importer:
    import tensorflow

    return _Importer(Path(str(tensorflow.__file__)).parent)
