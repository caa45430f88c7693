"""Models on disk as functions from named arrays to named arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

from tf_amp.model_files import (
    ModelError,
    ends,
    keras_inputs,
    load_keras,
    read_graph,
    read_message,
    saved_model_file,
)

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Signature:
    """One way to call a model.

    Attributes:
        inputs: name -> shape and dtype of what it takes.
        call: runs it once on tensors by name, and gives tensors by name.
    """

    inputs: Mapping[str, tf.TensorSpec]
    call: Callable[[Mapping[str, Any]], Mapping[str, tf.Tensor]]

    def run(self, arrays: Arrays) -> Mapping[str, np.ndarray]:
        """Runs it once on arrays by name.

        Raises:
            ModelError: an array does not fit, or the model fails.
        """
        fed = self.feed(arrays)
        try:
            return {name: _as_array(value) for name, value in self.call(fed).items()}
        except tf.errors.OpError as error:
            raise ModelError(
                f"The model fails with inputs of the shapes "
                f"{', '.join(f'{name}: {tuple(value.shape)}' for name, value in fed.items())}. "
                f"Choose others (`batch`, `samples`; `--batch`, `--inputs`). {error.message}"
            ) from error

    def feed(self, arrays: Arrays) -> dict[str, tf.Tensor]:
        """Arrays as the tensors that it takes: of floating dtypes each becomes the one it has.

        Raises:
            ModelError: an input is missing, or an array does not fit.
        """
        found = {}
        for name, spec in self.inputs.items():
            if name not in arrays:
                raise ModelError(
                    f"The samples lack the input {name!r}. They have: {', '.join(sorted(arrays))}."
                )
            try:
                given = tf.convert_to_tensor(arrays[name])
                tensor = tf.cast(given, spec.dtype) if given.dtype.is_floating else given
                found[name] = tf.ensure_shape(tf.convert_to_tensor(tensor, spec.dtype), spec.shape)
            except (TypeError, ValueError, tf.errors.OpError) as error:
                raise ModelError(f"The samples do not fit the input {name!r}: {error}") from error
        return found


def _as_array(value: Any) -> np.ndarray:
    """The values of an output; of a ragged or sparse one those that are stored."""
    if isinstance(value, tf.RaggedTensor):
        return np.asarray(value.flat_values.numpy())
    return np.asarray((value.values if isinstance(value, tf.SparseTensor) else value).numpy())


def load_signatures(path: Path) -> dict[str, Signature]:
    """Loads a model.

    Args:
        path: a SavedModel's directory, a frozen GraphDef or a `.keras` file.

    Returns:
        Key -> signature. What has none of its own has one, "serving_default".

    Raises:
        ModelError: it cannot be loaded, or cannot be called.
    """
    if not path.exists():
        raise ModelError(f"There is no file or directory {str(path)!r}.")
    try:
        if path.is_dir():
            found = _of_saved_model(path)
        elif path.suffix == ".keras":
            found = {"serving_default": _of_keras(path)}
        else:
            graph = read_graph(path)
            if not isinstance(graph, GraphDef):
                raise ModelError(f"{str(path)!r} has no variables. Compare SavedModels instead.")
            found = {"serving_default": _of_graph(graph)}
    except ModelError:
        raise
    except Exception as error:  # whatever a model raises when it is loaded
        raise ModelError(f"TensorFlow cannot load {str(path)!r}: {error}") from error
    if not found:
        raise ModelError(f"{str(path)!r} has no signature to call.")
    return found


def _of_saved_model(path: Path) -> dict[str, Signature]:
    loaded = tf.saved_model.load(str(path), tags=_tags(path))

    def signature(function: Any) -> Signature:
        # The variables live as long as the object that was loaded.
        specs = function.structured_input_signature[1]

        def run(fed: Mapping[str, Any], keep: Any = loaded) -> Mapping[str, tf.Tensor]:
            return function(**fed)  # type: ignore[no-any-return]

        return Signature(dict(specs), run)

    return {key: signature(function) for key, function in sorted(loaded.signatures.items())}


def _tags(path: Path) -> list[str] | None:
    """The tags of the graph to load where there are several: that to serve, else the first."""
    saved = read_message(saved_model_file(path), SavedModel)
    tags = [list(meta.meta_info_def.tags) for meta in saved.meta_graphs]
    if len(tags) < 2:
        return None
    return next((found for found in tags if tf.saved_model.SERVING in found), tags[0])


def _of_keras(path: Path) -> Signature:
    model = load_keras(path)
    specs = {x.name: tf.TensorSpec(x.shape, x.dtype) for x in keras_inputs(model, path)}

    @tf.function(reduce_retracing=True)
    def run(fed: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        given = [fed[name] for name in specs]
        made = model(given if len(given) > 1 else given[0], training=False)
        # As in the SavedModel that Keras exports.
        if isinstance(made, dict) and all(map(tf.is_tensor, made.values())):
            return made
        return {f"output_{number}": output for number, output in enumerate(tf.nest.flatten(made))}

    return Signature(specs, run)


def _of_graph(graph: GraphDef) -> Signature:
    function = tf.compat.v1.wrap_function(
        lambda: tf.graph_util.import_graph_def(graph, name=""), []
    )
    operations = [function.graph.get_operation_by_name(name) for name in sorted(ends(graph))]
    given = [o.outputs[0] for o in operations if o.type == "Placeholder"]
    made = [t for o in operations if o.type != "Placeholder" for t in o.outputs]
    if not made:
        raise ModelError("The graph has no node that no other reads: nothing to compare.")
    pruned = function.prune(given, made)
    names = [tensor.op.name for tensor in given]
    specs = {tensor.op.name: tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in given}

    def run(fed: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        results = pruned(*(fed[name] for name in names))
        return {tensor.name: result for tensor, result in zip(made, results, strict=True)}

    return Signature(specs, run)
