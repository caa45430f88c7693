"""Copies of functions that tell the values of chosen tensors while they run."""

from __future__ import annotations

import dataclasses
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.python.eager import context as context_lib

from graph_passes.ir.graph_view import ARGUMENT, GraphView
from graph_passes.ir.view import view_body
from graph_passes.ops.node_types import NodeTypeTable
from tf_amp.hosts.other_workers import OF_SEVERAL, has_other_workers
from tf_amp.loss_scale.host_call import nobody_told
from tf_amp.tool_error import ToolError

Key: TypeAlias = tuple[str, str, int]
"""A tensor: the function as it was traced, the node or argument, and the number of the output."""

Turn: TypeAlias = tuple[str, int]
"""A time at which a tensor is made: the calls that lead to its function, by the nodes that make
them, and how often it had been made by these."""

_SAMPLE = 4096
_SPECIALIZED = re.compile(r"_amp_[0-9a-f]{12}$")
_ENDS_ROUND = ("NextIteration", "RefNextIteration")
_PARALLEL = "parallel_iterations"
_COMPILED = ("_XlaMustCompile", "_XlaCompile")


class DiagnosisError(ToolError):
    """A function cannot be run on the side."""


@dataclasses.dataclass(frozen=True)
class Record:
    """What one tensor held at one time.

    Attributes:
        key: the tensor.
        turn: which time it was.
        non_finite: how many values are NaN or infinite.
        largest: the largest magnitude among the finite ones.
        length: that of all finite ones as one vector, from the sample.
        sample: at most 4,096 values from all over it, in float32.
    """

    key: Key
    turn: Turn
    non_finite: int
    largest: float
    length: float
    sample: np.ndarray

    def error(self, right: Record) -> float | None:
        """The distance from what is right, by the length of that; None of tensors unlike each."""
        a, b = right.sample, self.sample
        if a.shape != b.shape:
            return None
        both = np.isfinite(a) & np.isfinite(b)
        length, distance = _length(a[both]), _length(a[both] - b[both])
        return distance / length if length else float(distance > 0)


Tell: TypeAlias = Callable[[Key, Turn, np.ndarray], None]
"""Takes a tensor, the time and the values."""

Wants: TypeAlias = Callable[[Key, int], bool]
"""Tells of a tensor and its dtype whether to record it."""


def float32_of(keys: Container[Key]) -> Wants:
    """Wants those of some tensors that are float32."""
    return lambda key, dtype: dtype == types_pb2.DT_FLOAT and key in keys


class Recorder:
    """Takes the values of tensors while functions run; `tell` takes them in place of records."""

    def __init__(self, tell: Tell | None = None) -> None:
        self._tell = tell
        self.records: list[Record] = []
        self._numbered: list[tuple[Key, str]] = []
        self._made = Counter[tuple[Key, str]]()
        self._lock = threading.Lock()
        # TensorFlow makes the token by which a node of a graph finds Python code.
        take = tf.function(
            lambda number, value: tf.numpy_function(self._take, [number, value], tf.float32)
        )
        self._keep = take.get_concrete_function(
            tf.TensorSpec([], tf.int64), tf.TensorSpec(None, tf.float32)
        )
        nodes = self._keep.graph.as_graph_def().node
        self.token = next(node.attr["token"].s for node in nodes if node.op == "PyFunc")

    def number(self, key: Key, calls: str) -> int:
        """A number by which a node names its tensor; for `calls` see `Turn`."""
        self._numbered.append((key, calls))
        return len(self._numbered) - 1

    def _take(self, number: Any, value: Any) -> Any:
        with self._lock:  # calls that run at once tell at once
            return self._take_one(number, value)

    def _take_one(self, number: Any, value: Any) -> Any:
        key, calls = self._numbered[int(number)]
        turn = calls, self._made[key, calls]
        self._made[key, calls] += 1
        if self._tell is not None:
            self._tell(key, turn, np.asarray(value))
            return value
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
                largest=float(np.max(sizes, initial=0, where=finite)),
                length=_length(known) * math.sqrt(flat.size / max(1, known.size)),
                sample=sample,
            )
        )
        return value


def _length(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.astype(np.float64)))  # squares of masks overflow float32


def traced_name(function: str) -> str:
    """The function of which a function is a specialized copy, or itself."""
    return _SPECIALIZED.sub("", function)


def run_recorded(
    functions: Mapping[str, FunctionDef],
    main: str,
    inputs: Sequence[Any],
    wants: Wants,
    tell: Tell | None = None,
) -> list[Record]:
    """Runs a function and records tensors in it and in those that it calls.

    Args:
        functions: the function and all that it calls, by name; they are not changed.
        main: the function's name.
        inputs: one tensor for each of its arguments.
        wants: which to record.
        tell: is given each tensor while it is there; then nothing is kept, and no records are.

    Returns:
        The records, in the order in which the tensors were made.

    Raises:
        DiagnosisError: the function fails, or this is one of several workers.
    """
    recorder = Recorder(tell)
    copies = _Copies(functions, recorder, wants)
    context = context_lib.context()
    if has_other_workers(context):
        raise DiagnosisError(OF_SEVERAL)
    try:
        name = copies.add(main)
        count = len(functions[main].signature.output_arg)
        try:
            with nobody_told():
                context.call_function(name.encode(), list(inputs), count)
                tf.test.experimental.sync_devices()
        except tf.errors.OpError as error:
            raise DiagnosisError(f"It fails when it is run: {error.message}") from error
        return recorder.records
    finally:
        for name in copies.added:
            context.remove_function(name)


class _Copies:
    """Copies of functions that tell tensors; the arguments are those of `run_recorded`.

    Each call has a copy of its own: calls of one function run in any order.

    Attributes:
        added: the names of those that the runtime has.
    """

    def __init__(
        self,
        functions: Mapping[str, FunctionDef],
        recorder: Recorder,
        wants: Wants,
    ) -> None:
        self._functions, self._recorder, self._wants = functions, recorder, wants
        self._types = NodeTypeTable(
            lambda op: None if (f := functions.get(op)) is None else f.signature
        )
        self.added: list[str] = []

    def add(self, name: str, calls: Sequence[str] = (), around: Sequence[str] = ()) -> str:
        """Gives the runtime a copy of a function, and of those that it calls; returns its name.

        Args:
            name: the function.
            calls: the nodes that lead to it.
            around: the functions that these are in.

        Raises:
            DiagnosisError: it calls itself.
        """
        if name in around:
            raise DiagnosisError(f"The function {name!r} calls itself.")
        copy = self._recording(self._functions[name], "/".join(calls))
        for attr in _COMPILED:  # XLA calls no Python code
            copy.attr.pop(attr, None)
        for node in copy.node_def:
            inner = (*calls, node.name), (*around, name)
            for attr in _COMPILED:
                node.attr.pop(attr, None)
            if node.op in self._functions:
                node.op = self.add(node.op, *inner)
            if _PARALLEL in node.attr:  # turns are counted in the order in which they come
                node.attr[_PARALLEL].i = 1
            for value in node.attr.values():
                called = [value.func] if value.HasField("func") else value.list.func
                for function in called:
                    if function.name in self._functions:
                        function.name = self.add(function.name, *inner)
        copy.signature.name = f"__diagnosed_{id(self._recorder)}_{len(self.added)}_{name}"
        context_lib.context().add_function_def(copy)
        self.added.append(copy.signature.name)
        return copy.signature.name

    def _recording(self, function: FunctionDef, calls: str) -> FunctionDef:
        copy = FunctionDef()
        copy.CopyFrom(function)
        name = traced_name(function.signature.name)
        view = view_body(copy, node_types=self._types)
        told: dict[str, str] = {}  # tensor -> the same behind the recorder

        def behind(tensor: str) -> str:
            if tensor not in told:
                told[tensor] = self._told(copy, view, tensor, name, calls)
            return told[tensor]

        for node in list(copy.node_def):
            for position, tensor in enumerate(node.input):
                if not tensor.startswith("^"):
                    node.input[position] = behind(tensor)
        for result in list(copy.ret):
            copy.ret[result] = behind(copy.ret[result])
        return copy

    def _told(
        self, copy: FunctionDef, view: GraphView, tensor: str, function: str, calls: str
    ) -> str:
        """Adds what records a tensor, if that is wanted; returns the tensor for its readers."""
        name, port = view.split(tensor)
        number = view.index[name]
        slots = view.layout(number).out_slots
        dtype = view.dtypes[view.base[number] + slots[port]] % 100
        key = (function, name, port)
        # TensorFlow looks for the cycle of a v1 loop where that node is read.
        if view.nodes[number].op in _ENDS_ROUND or not self._wants(key, dtype):
            return tensor
        stem = f"{name}/recorded_{port}"
        constant = copy.node_def.add(name=f"{stem}/number", op="Const")
        if view.nodes[number].op != ARGUMENT:
            # In the frame of the loop of v1 that the tensor is in.
            constant.input.append(f"^{name}")
        constant.attr["dtype"].type = types_pb2.DT_INT64
        constant.attr["value"].tensor.dtype = types_pb2.DT_INT64
        constant.attr["value"].tensor.tensor_shape.SetInParent()
        constant.attr["value"].tensor.int64_val.append(self._recorder.number(key, calls))
        tell = copy.node_def.add(name=stem, op="PyFunc", input=[f"{stem}/number:output:0", tensor])
        tell.attr["token"].s = self._recorder.token
        tell.attr["Tin"].list.type.extend((types_pb2.DT_INT64, dtype))
        tell.attr["Tout"].list.type.append(dtype)
        return f"{stem}:output:0"
