"""A step that was traced, run on copies of its variables in float32 and in mixed precision."""

from __future__ import annotations

import dataclasses
import functools
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.core.framework.graph_pb2 import GraphDef

from graph_passes import PrecisionConfig, Remark, rewrite_graph_def
from graph_passes.ir.eligibility import node_name
from graph_passes.plan_remarks import Lines
from tf_amp.compatibility import DIAGNOSIS, obstacle
from tf_amp.diagnosis.gradients import GradientMeter, Gradients, scale_of, watched_tapes
from tf_amp.diagnosis.recording import (
    DiagnosisError,
    Key,
    Record,
    Tell,
    Turn,
    Wants,
    float32_of,
    run_recorded,
    traced_name,
)
from tf_amp.hosts import function_originals
from tf_amp.hosts.function_debug_info import source_lines
from tf_amp.hosts.function_devices import captured_constants
from tf_amp.hosts.function_kernels import SEEDS, draws_anew
from tf_amp.hosts.function_redirects import with_callees
from tf_amp.hosts.function_shapes import called_shapes, traced_shapes
from tf_amp.loss_scale.gradients import variable_name

_log = logging.getLogger("tf_amp")


@dataclasses.dataclass(frozen=True)
class Step:
    """A function that was traced, with what it takes to run copies of it.

    Attributes:
        concrete: the ConcreteFunction.
        inputs: the tensors for its arguments, captured ones left out.
        values: as `diagnose`.
        gradients: the gradients that tapes gave while it was traced, each with its variable.
    """

    concrete: Any
    inputs: list[tf.Tensor]
    values: Mapping[int, tf.Tensor]
    gradients: Sequence[tuple[str, tf.Tensor]] = ()

    @classmethod
    def trace(
        cls, function: Callable[..., Any], inputs: Sequence[Any], values: Mapping[int, tf.Tensor]
    ) -> Step:
        """Traces a function for its arguments; as `diagnose`."""
        given = tf.nest.map_structure(_as_tensor, tuple(inputs))
        of = function if hasattr(function, "get_concrete_function") else tf.function(function)
        found: list[tuple[str, tf.Tensor]] = []
        if (why := obstacle(DIAGNOSIS)) is not None:
            _log.warning("Gradients are not looked at: %s.", why)
            concrete = of.get_concrete_function(*given)
        else:
            # What was traced before took its gradients unseen.
            of = of._clone(None) if hasattr(of, "_clone") else of
            with watched_tapes() as found:
                concrete = of.get_concrete_function(*given)
        flat = [
            value
            for value in tf.nest.flatten(given, expand_composites=True)
            if isinstance(value, tf.Tensor)
        ]
        expected = concrete.inputs[: len(concrete.inputs) - len(concrete.captured_inputs)]
        if [t.dtype for t in flat] != [t.dtype for t in expected]:
            raise DiagnosisError(
                f"The function takes {len(expected)} tensors and was given {len(flat)}. Give the "
                "batch as tensors or arrays, not as an iterator or a variable."
            )
        return cls(concrete, flat, values, found)

    @functools.cached_property
    def _atomic(self) -> Any:
        return self.concrete._inference_function

    @property
    def name(self) -> str:
        """The function's name in the runtime."""
        return self._atomic.name.decode()  # type: ignore[no-any-return]

    @functools.cached_property
    def lines(self) -> Lines:
        """The Python lines of its nodes."""
        return source_lines(self.concrete.graph)

    @property
    def _gradients(self) -> dict[Key, str]:
        """The tensor of each gradient -> the variable."""
        names, pending = {}, [self._atomic]
        for atomic in pending:
            names[id(atomic.graph)] = traced_name(atomic.name.decode())
            pending.extend(child for child in atomic.children if child not in pending)
        return {
            (names[id(tensor.graph)], tensor.op.name, tensor.value_index): variable
            for variable, tensor in self.gradients
            if id(getattr(tensor, "graph", None)) in names
        }

    def measured_gradients(
        self, float32: Mapping[str, FunctionDef], loss_scale: float | None
    ) -> Gradients | None:
        """Runs the step in float32 and counts what float16 loses of its gradients.

        Args:
            float32: the step's library.
            loss_scale: what they are judged at; None for that by which it multiplies its loss.

        Returns:
            The counts, None where no tape gave a gradient of a variable.
        """
        names = self._gradients
        if not names:
            return None
        present = scale_of(self.concrete.graph.variables, self.values)
        meter = GradientMeter(names, present, present if loss_scale is None else loss_scale)

        def tell(key: Key, turn: Turn, values: np.ndarray) -> None:
            del turn
            meter.tell(key, values)

        self.record(float32, float32_of(names), tell)
        return meter.gradients()

    def library(self) -> dict[str, FunctionDef]:
        """The function and all that it calls, in float32; what draws without a seed has one.

        Raises:
            DiagnosisError: one of them takes its data from an iterator.
        """
        context, originals = self._atomic._bound_context, function_originals.installed()
        find = functools.partial(originals.definition, context)
        main = self._atomic.cached_definition
        found = {f.signature.name: _seeded(f) for f in with_callees((main,), find)}
        for function in found.values():
            if any(node.op.startswith("Iterator") for node in function.node_def):
                raise DiagnosisError(
                    f"The function {function.signature.name!r} takes its data from an iterator, "
                    "which would go on. Give a function of one batch, such as `model.train_step`."
                )
        return found

    def record(
        self,
        functions: Mapping[str, FunctionDef],
        wants: Wants,
        tell: Tell | None = None,
    ) -> list[Record]:
        """Runs it on copies of its variables and records tensors; as `run_recorded`."""
        return run_recorded(functions, self.name, self._copies(), wants, tell)

    def _copies(self) -> list[tf.Tensor]:
        """Its inputs, with a copy of each variable in the place of the variable."""
        variables = {id(v.handle): v for v in self.concrete.graph.variables}
        self._kept.clear()
        captured = []
        for tensor in self.concrete.captured_inputs:
            variable = variables.get(id(tensor))
            if variable is None:
                captured.append(tensor)
                continue
            with tf.device(variable.device):
                value = self.values.get(id(variable))
                copy = tf.Variable(
                    variable.read_value() if value is None else value,
                    trainable=False,
                    shape=variable.shape,
                )
            self._kept.append(copy)
            captured.append(copy.handle)
        return [*self.inputs, *captured]

    @property
    def spoiled(self) -> tuple[str, ...]:
        """The variables that hold values that are not finite before it runs."""
        held = ((v, self.values.get(id(v))) for v in self.concrete.graph.variables)
        return tuple(
            variable_name(variable)
            for variable, value in held
            if not is_finite(variable.read_value() if value is None else value)
        )

    @functools.cached_property
    def _kept(self) -> list[tf.Variable]:
        return []


def is_finite(value: tf.Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    return not value.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(value)))


def _seeded(function: FunctionDef) -> FunctionDef:
    """A function of which each run draws the same, itself where nothing in it draws anew."""
    copy = FunctionDef()
    copy.CopyFrom(function)
    drawn = False
    for node in copy.node_def:
        if draws_anew(node):
            node.attr[SEEDS[0]].i = 1 + zlib.crc32(node.name.encode())
            drawn = True
    return copy if drawn else function


def _as_tensor(value: Any) -> Any:
    return tf.convert_to_tensor(value) if hasattr(value, "__array__") else value


@dataclasses.dataclass(frozen=True)
class Low:
    """A step in mixed precision.

    Attributes:
        functions: the function and those that it calls.
        remarks: (function, node) -> the remark on its conversion.
        main: the function's name.
    """

    functions: dict[str, FunctionDef]
    remarks: dict[tuple[str, str], Remark]
    main: str

    @functools.cached_property
    def readers(self) -> dict[tuple[str, str], list[str]]:
        """(Function, node) -> the nodes that read it."""
        found: dict[tuple[str, str], list[str]] = {}
        for name, function in self.functions.items():
            for node in function.node_def:
                for tensor in node.input:
                    if not tensor.startswith("^"):
                        key = (traced_name(name), node_name(tensor))
                        found.setdefault(key, []).append(node.name)
        return found

    @functools.cached_property
    def sources(self) -> dict[tuple[str, str], list[str]]:
        """(Function, node) -> the nodes that it reads."""
        return {
            (traced_name(name), node.name): [node_name(t) for t in node.input if t[:1] != "^"]
            for name, function in self.functions.items()
            for node in function.node_def
        }

    @functools.cached_property
    def _casts(self) -> dict[tuple[str, str], str]:
        """(Function, node) of each Cast -> the tensor that it reads."""
        return {
            (traced_name(name), node.name): node.input[0]
            for name, function in self.functions.items()
            for node in function.node_def
            if node.op == "Cast"
        }

    def origin(self, key: Key) -> Key:
        """The tensor that has the same values in float32: of a Cast, what it reads."""
        function, node, _ = key
        tensor = self._casts.get((function, node))
        if tensor is None or (function, node) in self.remarks:
            return key
        port = tensor.rpartition(":")[2]
        return function, node_name(tensor), int(port) if port.isdecimal() else 0

    def remark(self, key: Key) -> Remark | None:
        """The converted node that a tensor belongs to: for a Cast, the one that reads it."""
        function, node, _ = key
        seen: set[str] = set()
        pending = [node]
        for name in pending:
            remark = self.remarks.get((function, name))
            if remark is not None and remark.op != "Const":
                return remark
            seen.add(name)
            pending.extend(r for r in self.readers.get((function, name), ()) if r not in seen)
        return None


def rewritten(step: Step, float32: Mapping[str, FunctionDef], config: PrecisionConfig) -> Low:
    """A step in mixed precision; `float32` is its library.

    Raises:
        DiagnosisError: it cannot be converted.
    """
    graph, shapes = step.concrete.graph, called_shapes(step.concrete.graph._functions)
    own = traced_shapes(graph, float32[step.name])
    library = GraphDef()
    library.library.function.extend(float32.values())
    result = rewrite_graph_def(
        library,
        config,
        roots=[step.name],
        function_shapes=lambda name: own if name == step.name else shapes(name),
        function_constants=captured_constants(graph, float32[step.name]),
        lines=_lines_of(step),
    )
    if result.failure is not None:
        raise DiagnosisError(f"The function cannot be converted: {result.failure}.")
    remarks = {
        (remark.function or step.name, remark.node): remark
        for remark in result.remarks(lines=_lines_of(step)).remarks
        if remark.kind == "converted"
    }
    functions = {f.signature.name: f for f in result.proto.library.function}
    return Low(functions, remarks, step.name)


def record_low(step: Step, low: Low, target: int) -> tuple[list[Record], set[Key]]:
    """Runs a step in mixed precision: its tensors of the target dtype, and those in float32."""
    seen: set[Key] = set()

    def wants(key: Key, dtype: int) -> bool:
        if dtype != target:
            return False
        seen.add(low.origin(key))
        return True

    return step.record(low.functions, wants), seen


def record_float32(
    step: Step, float32: Mapping[str, FunctionDef], wanted: Set[Key]
) -> dict[tuple[Key, Turn], Record]:
    """Runs a step in float32, whose library is given: tensor and turn -> the record."""
    records = step.record(float32, float32_of(wanted))
    return {(record.key, record.turn): record for record in records}


def _lines_of(step: Step) -> Lines:
    return lambda function, node: step.lines("" if function == step.name else function, node)
