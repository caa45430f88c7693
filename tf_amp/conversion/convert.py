"""Converting a model on disk, from reading it to the output that takes its place."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import shutil
import stat
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal

from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.protobuf.meta_graph_pb2 import MetaGraphDef
from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

from graph_passes import FunctionRemarks, PrecisionConfig, Remark
from graph_passes.ir.eligibility import node_name
from graph_passes.units.product.filter_gradient import RULE as FILTER_GRADIENT
from tf_amp.conversion import weights as weights_module
from tf_amp.conversion.checkpoint import rewrite_checkpoint
from tf_amp.conversion.graphs import ConvertedGraph, convert_graph, convert_meta_graph
from tf_amp.conversion.interface import retype_graph, retype_meta_graph
from tf_amp.conversion.progress import Progress, Say
from tf_amp.conversion.staging import staged
from tf_amp.model_files import (
    ModelError,
    ends,
    load_keras,
    message_bytes,
    read_graph,
    read_message,
    saved_model_file,
)
from tf_amp.tracing.figures import of_nodes

_log = logging.getLogger("tf_amp")

Interface = Literal["float32", "target"]
_VARIABLES = "variables"
_FINGERPRINT = "fingerprint.pb"
_KERAS_METADATA = "keras_metadata.pb"
_BUILT_ANEW = (
    "tf_keras.models.load_model builds the layers of this model anew, in float32, and runs nothing "
    "of what was converted%s. Load the result with tf.saved_model.load."
)
_NAMES_ITS_OUTPUTS = "The model names its outputs in its signatures; leave out outputs."


class NothingToConvertError(ModelError):
    """No node of a model would be in the target dtype.

    Attributes:
        graphs: the remarks on each graph.
    """

    def __init__(self, message: str, graphs: tuple[FunctionRemarks, ...]) -> None:
        super().__init__(message)
        self.graphs = graphs


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        destination: what was written.
        graphs: the remarks on each graph: one for each set of tags of a SavedModel.
        weights: variable -> why it is stored in float32, "" for those in the target dtype; empty
            unless weights were asked for.
        bytes_before: size of the original on disk.
        bytes_after: size of the result.
    """

    destination: Path
    graphs: tuple[FunctionRemarks, ...]
    weights: Mapping[str, str]
    bytes_before: int
    bytes_after: int

    @property
    def products(self) -> tuple[int, int]:
        """How many matrix products and convolutions are in the target dtype, and how many are."""
        found = [remark for graph in self.graphs for remark in _products(graph)]
        return sum(remark.kind == "converted" for remark in found), len(found)


def convert(
    source: Path,
    destination: Path,
    config: PrecisionConfig,
    *,
    weights: bool = False,
    embeddings: bool = False,
    io: Interface = "float32",
    outputs: Collection[str] = (),
    allow_lambda: bool = False,
    force: bool = False,
    say: Say = lambda _: None,
) -> Conversion:
    """Converts a model.

    Args:
        source: a SavedModel's directory, a GraphDef or MetaGraphDef, or a `.keras` file.
        destination: what to make: a directory for a SavedModel or Keras model, else a file.
        config: what to convert to.
        weights: whether variables are stored in the target dtype where every reader takes them so.
        embeddings: whether tables are stored so as well whose rows are used in float32, by a cast
            behind the lookup; needs `weights`.
        io: the dtype of the float32 inputs and outputs of the signatures afterwards.
        outputs: for a graph without signatures the nodes that are fetched; by default those that
            no other reads.
        allow_lambda: whether Python code in a Keras file may be loaded, which can do anything.
        force: whether an existing destination may be replaced.
        say: takes lines on the progress of what takes long.

    Raises:
        ModelError: the model cannot be read or converted, or the output cannot be written, of
            which then nothing is there.
    """
    source, destination = Path(source), Path(destination)
    if not source.exists():
        raise ModelError(f"There is no file or directory {str(source)!r}.")
    if source.resolve() == destination.resolve():
        raise ModelError(f"{str(source)!r} is source and destination. Choose another destination.")
    if source.resolve() in destination.resolve().parents:
        raise ModelError(f"The destination {str(destination)!r} is inside the model to convert.")
    if destination.resolve() in source.resolve().parents:
        raise ModelError(
            f"The model {str(source)!r} is inside the destination {str(destination)!r}, "
            "and would be gone with what that replaces. Choose another destination."
        )
    if embeddings and not weights:
        raise ModelError("Embeddings are stored so together with weights only: ask for both.")
    # What is stored may run where oneDNN's kernels are not those of this machine.
    off = config.disabled_rules | {FILTER_GRADIENT}
    own = dataclasses.replace(config, stores_weights=weights, disabled_rules=off)
    job = _Job(own, weights, embeddings, io, outputs)
    with Progress(say) as progress, staged(destination, force=force) as path:
        try:
            if source.is_dir():
                graphs, kept = job.saved_model(source, path, progress)
            elif source.suffix == ".keras":
                with exported(source, path.parent, progress, allow_lambda=allow_lambda) as made:
                    graphs, kept = job.saved_model(made, path, progress)
            else:
                graphs, kept = job.file(source, path, progress)
        except (ModelError, OSError):
            raise
        except Exception as error:  # what a damaged file leads to is not foreseeable
            raise ModelError(
                f"{str(source)!r} cannot be converted: {type(error).__name__}: {error}"
            ) from error
        if (source / _KERAS_METADATA).exists():
            _log.warning(_BUILT_ANEW, ", and fails on weights of another dtype" if weights else "")
        progress("flushing to the disk")
        after = size_on_disk(path)
    told = {remark.rule for graph in graphs for remark in graph.remarks if remark.kind == "note"}
    for rule in config.rules:
        if str(rule) not in told:
            _log.warning("No node of the model meets the criteria of %s", rule)
    return Conversion(destination, graphs, kept, size_on_disk(source), after)


@dataclasses.dataclass(frozen=True)
class _Job:
    config: PrecisionConfig
    weights: bool
    embeddings: bool
    io: Interface
    outputs: Collection[str]

    def saved_model(
        self, source: Path, path: Path, progress: Progress
    ) -> tuple[tuple[FunctionRemarks, ...], Mapping[str, str]]:
        if self.outputs:
            raise ModelError(_NAMES_ITS_OUTPUTS)
        progress(f"reading {source.name}")
        file = saved_model_file(source)
        saved = read_message(file, SavedModel)
        if not saved.meta_graphs:
            raise ModelError(f"{str(file)!r} holds no graph.")
        names = [" ".join(sorted(m.meta_info_def.tags)) or "untagged" for m in saved.meta_graphs]
        done = []
        for meta, name in zip(saved.meta_graphs, names, strict=True):
            progress(f"converting the graph of {name!r}")
            if self.io == "target":
                retype_meta_graph(meta, self.config.target)
            done.append(convert_meta_graph(meta, self.config, name))
        _require_changes(done)
        kept: Mapping[str, str] = {}
        stored: frozenset[str] = frozenset()
        prefix = source / _VARIABLES / _VARIABLES
        if self.weights:
            progress("finding the weights that only products read")
            chosen = weights_module.retype_variables(
                saved.meta_graphs, prefix, self.config.target, embeddings=self.embeddings
            )
            kept, stored = chosen.reasons, chosen.keys
        progress("copying variables and assets")
        path.mkdir()
        (path / file.name).write_bytes(message_bytes(saved, file))
        _copy_rest(source, path, {file.name, _FINGERPRINT, *((_VARIABLES,) if stored else ())})
        if stored:
            progress("writing the weights")
            (path / _VARIABLES).mkdir()
            new_prefix = path / _VARIABLES / _VARIABLES
            rewrite_checkpoint(prefix, new_prefix, stored, self.config.target)
        if (source / _FINGERPRINT).exists():
            _write_fingerprint(path)
        return tuple(graph.remarks for graph in done), kept

    def file(
        self, source: Path, path: Path, progress: Progress
    ) -> tuple[tuple[FunctionRemarks, ...], Mapping[str, str]]:
        progress(f"reading {source.name}")
        message = read_graph(source)
        progress("converting the graph")
        if isinstance(message, MetaGraphDef):
            if self.weights:
                raise ModelError(
                    "The variables of a MetaGraph are in checkpoints beside it, which stay as "
                    "they are. Convert a SavedModel, or leave out weights."
                )
            if self.outputs and message.signature_def:
                raise ModelError(_NAMES_ITS_OUTPUTS)
            fetched = self._fetched(message.graph_def)
            if self.io == "target":
                retype_meta_graph(message, self.config.target)
            done = convert_meta_graph(message, self.config, source.stem, fetched)
        else:
            fetched = self._fetched(message)
            if self.io == "target":
                retype_graph(message, fetched, self.config.target)
            done = convert_graph(message, self.config, source.stem, preserve=fetched)
            message = done.graph_def
        _require_changes([done])
        path.write_bytes(message_bytes(message, path))
        return (done.remarks,), {}

    def _fetched(self, graph: GraphDef) -> set[str]:
        if not self.outputs:
            return set(ends(graph))
        outputs = {node_name(name.strip()) for name in self.outputs}
        if unknown := sorted(outputs - {node.name for node in graph.node}):
            raise ModelError(f"The graph has no node {unknown[0]!r}, which is to be an output.")
        return outputs | {node.name for node in graph.node if node.op == "Placeholder"}


def _products(graph: FunctionRemarks) -> list[Remark]:
    return of_nodes(remark for remark in graph.remarks if remark.is_product)


def _require_changes(done: Collection[ConvertedGraph]) -> None:
    if any(graph.changed for graph in done):
        return
    kept = Counter(
        remark.reason
        for graph in done
        for remark in _products(graph.remarks)
        if remark.kind == "kept"
    )
    graphs = tuple(graph.remarks for graph in done)
    if not kept:
        raise NothingToConvertError(
            "Nothing to convert: the model has no matrix product or convolution in float32.", graphs
        )
    reasons = ", ".join(f"{count}: {why}" for why, count in kept.most_common(3))
    raise NothingToConvertError(
        f"Nothing to convert: all {kept.total()} products stay float32 ({reasons}). "
        "`tf-amp plan` tells more.",
        graphs,
    )


def _copy_rest(source: Path, path: Path, left_out: Collection[str]) -> None:
    """Copies what else is in a directory; of links, what they lead to."""
    source = source.resolve()
    for folder, folders, files in os.walk(source, followlinks=True):
        inner = Path(folder).relative_to(source)
        if inner == Path():
            folders[:] = [name for name in folders if name not in left_out]
            files = [name for name in files if name not in left_out]
        (path / inner).mkdir(exist_ok=True)
        around = {parent.resolve() for parent in (Path(folder), *Path(folder).parents)}
        for name in folders:
            if (entry := Path(folder, name)).resolve() in around:
                raise ModelError(f"{str(entry)!r} is a link to a directory that it is in.")
        for name in files:
            entry = Path(folder, name)
            # A pipe would be waited for without end.
            if not stat.S_ISREG(entry.stat().st_mode):
                raise ModelError(f"{str(entry)!r} is neither a file nor a directory.")
            shutil.copyfile(entry, path / inner / name)


def _write_fingerprint(path: Path) -> None:
    from tensorflow.python.saved_model.pywrap_saved_model import fingerprinting

    try:
        (path / _FINGERPRINT).write_bytes(fingerprinting.CreateFingerprintDef(str(path)))
    except fingerprinting.FingerprintException:  # a help for logs: loading does without it
        return


@contextlib.contextmanager
def exported(source: Path, room: Path, progress: Progress, *, allow_lambda: bool) -> Iterator[Path]:
    """A SavedModel of a Keras file, for as long as the block runs."""
    progress(f"loading {source.name}")
    try:
        model = load_keras(source, allow_lambda=allow_lambda)
    except ModelError as error:
        hint = "" if allow_lambda else " If it is Python code that you trust: --allow-lambda."
        raise ModelError(f"{error}{hint}") from error
    with tempfile.TemporaryDirectory(prefix="export-", dir=room) as folder:
        exported = Path(folder, "model")
        progress(f"exporting {source.name}")
        try:
            # Keras 3.4 cannot be kept from saying what it exported.
            quiet = "verbose" in inspect.signature(model.export).parameters
            model.export(str(exported), **({"verbose": False} if quiet else {}))
        except Exception as error:
            raise ModelError(f"Keras cannot export {str(source)!r}: {error}") from error
        yield exported


@contextlib.contextmanager
def as_saved_model(source: Path, room: Path, progress: Progress) -> Iterator[Path]:
    """A model whose nodes have the names that `convert` gives them.

    That is the model itself, or a SavedModel of a Keras file for as long as the block runs.
    """
    if source.suffix == ".keras" and source.is_file():
        with exported(source, room, progress, allow_lambda=False) as made:
            yield made
    else:
        yield source


def size_on_disk(path: Path) -> int:
    """The bytes of a file, or of all files in a directory."""
    if path.is_file():
        return path.stat().st_size
    return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())
