"""Copies of functions that tell the values of chosen tensors while they run."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.python.eager import context as context_lib

from graph_passes.ir.graph_view import ARGUMENT, GraphView
from graph_passes.ir.view import view_body
from graph_passes.ops.node_types import NodeTypeTable
from tf_amp.hosts.function_redirects import called_names

Key: TypeAlias = tuple[str, str, int]
"""A tensor: the function as it was traced, the node or argument, and the number of the output."""

_SAMPLE = 4096
_MAX_FLOAT16 = 65504.0
_SPECIALIZED = re.compile(r"_amp_[0-9a-f]{12}$")
_ENDS_ROUND = ("NextIteration", "RefNextIteration")
_PARALLEL = "parallel_iterations"
_COMPILED = ("_XlaMustCompile", "_XlaCompile")


class DiagnosisError(ValueError):
    """A function cannot be run on the side."""


@dataclasses.dataclass(frozen=True)
class Record:
    """What one tensor held at one time.

    Attributes:
        key: the tensor.
        turn: how often it had been made before: more than 0 in loops.
        non_finite: how many values are NaN or infinite.
        over: how many finite values are over 65,504, the largest of float16.
        largest: the largest magnitude among the finite ones.
        length: that of all finite ones as one vector, from the sample.
        sample: at most 4,096 values from all over it, in float32.
    """

    key: Key
    turn: int
    non_finite: int
    over: int
    largest: float
    length: float
    sample: np.ndarray

    def error(self, right: Record) -> float | None:
        """The distance from what is right, by the length of that; None of tensors unlike each."""
        a, b = right.sample, self.sample
        if a.shape != b.shape:
            return None
        both = np.isfinite(a) & np.isfinite(b)
        length = float(np.linalg.norm(a[both]))
        distance = float(np.linalg.norm(a[both] - b[both]))
        return distance / length if length else float(distance > 0)


Tell: TypeAlias = Callable[[Key, np.ndarray], None]
"""Takes a tensor and its values."""


class Recorder:
    """Takes the values of tensors while functions run; `tell` takes them in place of records."""

    def __init__(self, tell: Tell | None = None) -> None:
        self._tell = tell
        self.records: list[Record] = []
        self._keys: list[Key] = []
        self._turns: dict[Key, int] = {}
        # TensorFlow makes the token by which a node of a graph finds Python code.
        take = tf.function(
            lambda number, value: tf.numpy_function(self._take, [number, value], tf.float32)
        )
        self._keep = take.get_concrete_function(
            tf.TensorSpec([], tf.int64), tf.TensorSpec(None, tf.float32)
        )
        nodes = self._keep.graph.as_graph_def().node
        self.token = next(node.attr["token"].s for node in nodes if node.op == "PyFunc")

    def number(self, key: Key) -> int:
        """A number by which a node names its tensor."""
        self._keys.append(key)
        return len(self._keys) - 1

    def _take(self, number: Any, value: Any) -> Any:
        key = self._keys[int(number)]
        if self._tell is not None:
            self._tell(key, np.asarray(value))
            return value
        turn = self._turns.get(key, 0)
        self._turns[key] = turn + 1
        flat = np.ravel(value)
        sizes = np.abs(flat.astype(np.float32))
        finite = np.isfinite(sizes)
        sample = flat[:: max(1, -(-flat.size // _SAMPLE))].astype(np.float32)
        known = sample[np.isfinite(sample)]
        self.records.append(
            Record(
                key,
                turn,
                non_finite=int(flat.size - np.count_nonzero(finite)),
                over=int(np.count_nonzero(sizes[finite] > _MAX_FLOAT16)),
                largest=float(np.max(sizes, initial=0, where=finite)),
                length=float(np.linalg.norm(known) * math.sqrt(flat.size / max(1, known.size))),
                sample=sample,
            )
        )
        return value


def traced_name(function: str) -> str:
    """The function of which a function is a specialized copy, or itself."""
    return _SPECIALIZED.sub("", function)


def run_recorded(
    functions: Mapping[str, FunctionDef],
    main: str,
    inputs: Sequence[Any],
    wants: Callable[[Key, int], bool],
    tell: Tell | None = None,
) -> tuple[list[Record], list[Any]]:
    """Runs a function and records tensors in it and in those that it calls.

    Args:
        functions: the function and all that it calls, by name; they are not changed.
        main: the function's name.
        inputs: one tensor for each of its arguments.
        wants: tells of a tensor and its dtype whether to record it.
        tell: is given each tensor while it is there; then nothing is kept, and no records are.

    Returns:
        The records, in the order in which the tensors were made, and what the function gave.

    Raises:
        DiagnosisError: the function fails.
    """
    recorder = Recorder(tell)
    prefix = f"__diagnosed_{id(recorder)}_"
    types = NodeTypeTable(lambda op: None if (f := functions.get(op)) is None else f.signature)
    context = context_lib.context()
    added: list[str] = []
    try:
        for function in _callees_first(functions, main):
            copy = _recording_copy(function, types, recorder, wants)
            _rename(copy, functions, prefix)
            context.add_function_def(copy)
            added.append(copy.signature.name)
        count = len(functions[main].signature.output_arg)
        try:
            given = context.call_function(f"{prefix}{main}".encode(), list(inputs), count)
            tf.test.experimental.sync_devices()
        except tf.errors.OpError as error:
            raise DiagnosisError(f"It fails when it is run: {error.message}") from error
        results = given if isinstance(given, (list, tuple)) else [given] if count else []
        return recorder.records, list(results)
    finally:
        for name in added:
            context.remove_function(name)


def _callees_first(functions: Mapping[str, FunctionDef], main: str) -> Iterator[FunctionDef]:
    done: set[str] = set()
    pending = [main]
    while pending:
        name = pending[-1]
        called = functions.keys() & called_names(functions[name])
        left = sorted(called - done - {*pending})
        if left:
            pending.extend(left[:1])
            continue
        pending.pop()
        if name not in done:
            done.add(name)
            yield functions[name]


def _recording_copy(
    function: FunctionDef,
    types: NodeTypeTable,
    recorder: Recorder,
    wants: Callable[[Key, int], bool],
) -> FunctionDef:
    copy = FunctionDef()
    copy.CopyFrom(function)
    name = traced_name(function.signature.name)
    view = view_body(copy, node_types=types)
    told: dict[str, str] = {}  # tensor -> the same behind the recorder
    for node in list(copy.node_def):
        for position, tensor in enumerate(node.input):
            if not tensor.startswith("^"):
                node.input[position] = _told(copy, view, tensor, name, recorder, wants, told)
    for result in list(copy.ret):
        copy.ret[result] = _told(copy, view, copy.ret[result], name, recorder, wants, told)
    return copy


def _told(
    copy: FunctionDef,
    view: GraphView,
    tensor: str,
    function: str,
    recorder: Recorder,
    wants: Callable[[Key, int], bool],
    told: dict[str, str],
) -> str:
    if tensor in told:
        return told[tensor]
    told[tensor] = tensor
    name, port = view.split(tensor)
    number = view.index[name]
    slots = view.layout(number).out_slots
    dtype = view.dtypes[view.base[number] + slots[port]] % 100
    key = (function, name, port)
    # TensorFlow looks for the cycle of a v1 loop where that node is read.
    if view.nodes[number].op in _ENDS_ROUND or not wants(key, dtype):
        return tensor
    stem = f"{name}/recorded_{port}"
    constant = copy.node_def.add(name=f"{stem}/number", op="Const")
    if view.nodes[number].op != ARGUMENT:
        constant.input.append(f"^{name}")  # in the frame of the loop of v1 that the tensor is in
    constant.attr["dtype"].type = types_pb2.DT_INT64
    constant.attr["value"].tensor.dtype = types_pb2.DT_INT64
    constant.attr["value"].tensor.tensor_shape.SetInParent()
    constant.attr["value"].tensor.int64_val.append(recorder.number(key))
    tell = copy.node_def.add(name=stem, op="PyFunc", input=[f"{stem}/number:output:0", tensor])
    tell.attr["token"].s = recorder.token
    tell.attr["Tin"].list.type.extend((types_pb2.DT_INT64, dtype))
    tell.attr["Tout"].list.type.append(dtype)
    told[tensor] = f"{stem}:output:0"
    return told[tensor]


def _rename(copy: FunctionDef, functions: Collection[str], prefix: str) -> None:
    copy.signature.name = prefix + copy.signature.name
    for attr in _COMPILED:  # XLA calls no Python code
        copy.attr.pop(attr, None)
    for node in copy.node_def:
        for attr in _COMPILED:
            node.attr.pop(attr, None)
        if node.op in functions:
            node.op = prefix + node.op
        if _PARALLEL in node.attr:  # turns are counted in the order in which they come
            node.attr[_PARALLEL].i = 1
        for value in node.attr.values():
            if value.HasField("func") and value.func.name in functions:
                value.func.name = prefix + value.func.name
            for function in value.list.func:
                if function.name in functions:
                    function.name = prefix + function.name
