"""Models in files: reading the protos that TensorFlow writes, whoever wrote these."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf import text_format
from google.protobuf.message import DecodeError, EncodeError, Message
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

from graph_passes.ir.eligibility import node_name
from tf_amp.tool_error import ToolError

MAX_BYTES = (1 << 31) - 1
"""What a serialized message may be at most, in bytes: the limit of protobuf itself."""

_TEXT = (".pbtxt", ".txt")
_Proto = TypeVar("_Proto", bound=Message)


class ModelError(ToolError):
    """A model cannot be read, planned or converted."""


def saved_model_file(directory: Path) -> Path:
    """The file of a SavedModel that has its graphs.

    Raises:
        ModelError: the directory has none.
    """
    for name in ("saved_model.pb", "saved_model.pbtxt"):
        if (directory / name).is_file():
            return directory / name
    raise ModelError(
        f"The directory {str(directory)!r} is no SavedModel: it has no saved_model.pb."
    )


def read_message(path: Path, kind: type[_Proto]) -> _Proto:
    """Reads one message, as text where the name ends in .pbtxt or .txt.

    Raises:
        ModelError: the file cannot be read, is too large, or holds something else.
    """
    message = kind()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ModelError(
                f"{str(path)!r} has {path.stat().st_size:,} bytes, and a message may have "
                f"{MAX_BYTES:,}. Keep the weights in variables instead of constants."
            )
        if path.suffix in _TEXT:
            text_format.Parse(path.read_text(encoding="utf-8"), message)
        else:
            message.ParseFromString(path.read_bytes())
    except (OSError, UnicodeDecodeError, DecodeError, text_format.ParseError) as error:
        raise ModelError(f"{str(path)!r} is no {kind.__name__}: {error}.") from error
    except RecursionError as error:
        raise ModelError(f"{str(path)!r} is no {kind.__name__}: nested too deeply.") from error
    return message


def message_bytes(message: Message, path: Path) -> bytes:
    """What a file of a name holds of a message.

    Raises:
        ModelError: the message is too large.
    """
    try:
        if path.suffix in _TEXT:
            return text_format.MessageToString(message).encode()
        return message.SerializeToString(deterministic=True)
    except (EncodeError, ValueError) as error:
        raise ModelError(
            f"The {type(message).__name__} for {str(path)!r} cannot be written, as a message may "
            f"have {MAX_BYTES:,} bytes: {error}."
        ) from error


def read_graph(path: Path) -> GraphDef | MetaGraphDef:
    """Reads a GraphDef, or a MetaGraphDef with what it knows of its graph.

    Raises:
        ModelError: the file holds neither.
    """
    if path.suffix == ".meta":
        return read_message(path, MetaGraphDef)
    # A serialized message of one type can often be parsed as another: the one with nodes is right.
    readers: tuple[tuple[type[Any], Callable[[Any], Any]], ...] = (
        (GraphDef, lambda message: message),
        (MetaGraphDef, lambda message: message),
        (SavedModel, lambda message: message.meta_graphs[0]),
    )
    for kind, read in readers:
        try:
            found = read(read_message(path, kind))
        except (ModelError, IndexError):
            continue
        graph = getattr(found, "graph_def", found)
        if (graph.node or graph.library.function) and all(node.op for node in graph.node):
            return found  # type: ignore[no-any-return]
    raise ModelError(
        f"{str(path)!r} is neither a GraphDef nor a MetaGraphDef with nodes. Legal: a SavedModel's "
        "directory, .pb, .pbtxt, .meta, .keras; of another file of Keras give what "
        "`model.export(DIRECTORY)` makes."
    )


def ends(graph: GraphDef) -> tuple[str, ...]:
    """The nodes of a graph that are fed, and those that no other reads."""
    read = {node_name(name) for node in graph.node for name in node.input}
    return tuple(n.name for n in graph.node if n.op == "Placeholder" or n.name not in read)


def load_keras(path: Path, *, allow_lambda: bool = False) -> Any:
    """Loads a `.keras` file, not compiled.

    Args:
        path: the file.
        allow_lambda: whether Python code in it may be loaded, which can do anything.

    Raises:
        ModelError: Keras cannot load it.
    """
    import keras

    try:
        return keras.saving.load_model(path, compile=False, safe_mode=not allow_lambda)
    except Exception as error:  # whatever the layers of a model raise
        raise ModelError(
            f"Keras cannot load {str(path)!r}: {error}\nOf a model with classes or Python code of "
            "its own give what `model.export(DIRECTORY)` makes."
        ) from error


def keras_inputs(model: Any, path: Path) -> list[Any]:
    """The symbolic inputs of a Keras model.

    Args:
        model: the model.
        path: its file, for messages.

    Raises:
        ModelError: it tells of none.
    """
    try:
        return list(model.inputs)
    except (AttributeError, TypeError, ValueError) as error:  # by release of Keras
        told = str(error).rstrip(".")
        raise ModelError(
            f"{str(path)!r} does not tell what the model takes: {told}. Build it, or call it once, "
            "before it is saved; of a subclass of Model give what `model.export(DIRECTORY)` makes."
        ) from error
