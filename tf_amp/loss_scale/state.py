"""The variables that hold a loss scale's state, one set per graph, and what a step does to them."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tf_amp.loss_scale.gradients import select
from tf_amp.loss_scale.rule import LossScale, LossScaleState

# The names of the state variables, which are also their names in a checkpoint.
FIELDS: Mapping[str, tf.DType] = {
    "scale": tf.float32,
    "good_steps": tf.int64,
    "skipped_steps": tf.int64,
    "skipped_in_a_row": tf.int64,
}
# Present only where one update of the scale takes several calls of the optimizer.
WINDOW_FIELDS: Mapping[str, tf.DType] = {"window_position": tf.int64, "window_finite": tf.bool}

# In v1 graphs, the collection of the names of the state variables: of a collection of variables a
# MetaGraph keeps tensors.
_STATE_COLLECTION = "tf_amp_loss_scale"
# Which gradient was not finite in the last skipped step, for the message about it. It describes a
# step and not the scale, so it is in no checkpoint; see `gradients.culprit_code`.
CULPRIT = "culprit"
NO_CULPRIT = -1


class StateVariables(tf.__internal__.tracking.Trackable):
    """Creates the state variables when they are first needed, and tracks them for checkpoints.

    A variable belongs to the graph it was created in: one set serves eager code and all functions
    traced from it, and every v1 graph has a set of its own. Nothing is created in the
    constructor, so that a manager may be made before the graph or the distribution strategy that
    trains with it.

    Args:
        initial: The state before the first step.
        windowed: Whether the variables of a window are needed.
        name: The prefix of the variables' names.
    """

    def __init__(self, initial: LossScaleState, *, windowed: bool, name: str) -> None:
        super().__init__()
        self._initial = initial
        self._windowed = windowed
        self._name = name
        self._lock = threading.Lock()
        self._eager: dict[str, tf.Variable] = {}
        self._by_graph: weakref.WeakKeyDictionary[tf.Graph, dict[str, tf.Variable]] = (
            weakref.WeakKeyDictionary()
        )

    def get(self) -> Mapping[str, tf.Variable]:
        """The variables of the current graph by field name; created on the first call."""
        # A variable must outlive the function being traced, hence the lift out of it.
        with tf.init_scope(), self._lock:
            variables = self._of_current_graph()
            if not variables:
                # All at once: another thread that reads the state finds all of it or nothing.
                variables.update(self._create())
        return variables

    def read(self, *fields: str) -> dict[str, tf.Tensor]:
        """The values of variables, as scalar tensors.

        A script of TensorFlow 1 that knows nothing of these variables may have initialized its
        own by name, or all of them before the optimizer made these. What is not initialized has
        its initial value.

        Args:
            *fields: The names of the variables; default those of all.
        """
        variables = self.get()
        fields = fields or tuple(field for field in variables if field != CULPRIT)

        def values() -> dict[str, tf.Tensor]:
            return {field: tf.convert_to_tensor(variables[field]) for field in fields}

        if tf.compat.v1.executing_eagerly_outside_functions():
            return values()
        known = tf.compat.v1.is_variable_initialized(variables["scale"])
        return tf.cond(known, values, lambda: self._initial_tensors(fields))  # type: ignore[no-any-return]

    def initialize_after(self, before: LossScaleState) -> Any:
        """In a v1 graph, gives variables that are not initialized their initial values.

        Args:
            before: What was read of them, before they get a value.

        Returns:
            What is to be waited for.
        """
        variables = self.get()

        def initialize() -> tf.Tensor:
            initial = self._initial_tensors(variables)
            scale = initial.pop("scale")
            # The scale last: by it another worker knows that the others have values.
            with (
                tf.control_dependencies([variables[f].assign(v) for f, v in initial.items()]),
                tf.control_dependencies([variables["scale"].assign(scale)]),
            ):
                return tf.constant(True)

        with tf.control_dependencies([before.scale, before.skipped_steps]):
            known = tf.compat.v1.is_variable_initialized(variables["scale"])
        return tf.cond(known, lambda: tf.constant(True), initialize)

    def created(self) -> Mapping[str, tf.Variable]:
        """The variables of the current graph; empty where they do not exist yet."""
        with tf.init_scope():
            return dict(self._of_current_graph())

    def eager(self) -> Mapping[str, tf.Variable]:
        """The variables of eager code; empty where they do not exist."""
        return dict(self._eager)

    def _of_current_graph(self) -> dict[str, tf.Variable]:
        if tf.executing_eagerly():
            return self._eager
        return self._by_graph.setdefault(tf.compat.v1.get_default_graph(), {})

    def _create(self) -> dict[str, tf.Variable]:
        variables: dict[str, tf.Variable] = {}
        initial = self._initial_values()
        fields = {**FIELDS, **(WINDOW_FIELDS if self._windowed else {})}
        if tf.executing_eagerly():
            fields[CULPRIT] = tf.int64
        # The root name scope, so that the names in a v1 checkpoint do not depend on the caller's.
        with tf.compat.v1.name_scope(None):
            for field, dtype in fields.items():
                variables[field] = tf.Variable(
                    initial[field],
                    trainable=False,
                    name=f"{self._name}/{field}",
                    dtype=dtype,
                    # All replicas hold the same value; whichever writes is as good as any other.
                    aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                )
                if not tf.executing_eagerly():
                    tf.compat.v1.add_to_collection(_STATE_COLLECTION, variables[field].op.name)
                if field != CULPRIT:
                    self._handle_deferred_dependencies(name=field, trackable=variables[field])
        return variables

    def _initial_values(self) -> dict[str, Any]:
        state = {field: getattr(self._initial, field) for field in FIELDS}
        return {**state, "window_position": 0, "window_finite": True, CULPRIT: NO_CULPRIT}

    def _initial_tensors(self, fields: Iterable[str]) -> dict[str, tf.Tensor]:
        values, dtypes = self._initial_values(), {**FIELDS, **WINDOW_FIELDS}
        return {field: tf.constant(values[field], dtypes[field]) for field in fields}

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        children = {k: v for k, v in self.created().items() if k != CULPRIT}
        children.update(super()._trackable_children(save_type, **kwargs))
        return children

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        found = self.created().get(name)
        if found is not None:
            return found
        return super()._lookup_dependency(name, cached_dependencies)


def state_variables(graph: tf.Graph) -> list[Any]:
    """The variables of the loss scales of a v1 graph, also of one that was imported."""
    found = graph.get_collection(_STATE_COLLECTION)
    names = {tf.compat.as_str(name) for name in found}
    of_graph = graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES) if names else []
    return [variable for variable in of_graph if variable.op.name in names]


def as_numbers(values: Mapping[str, Any]) -> LossScaleState:
    """A state as Python numbers, of NumPy's by field name."""
    counts = {field: int(values[field]) for field in FIELDS if field != "scale"}
    return LossScaleState(scale=float(values["scale"]), **counts)


@dataclasses.dataclass(frozen=True)
class PlannedUpdate:
    """What one call of an optimizer will do to the state; all fields are scalar tensors.

    Attributes:
        before: The state before the call.
        window_finite: Whether all gradients of the window so far are finite.
        closes_window: Whether this call ends the window; None where each call is a window.
        values: The new value of every variable, by field name.
    """

    before: LossScaleState
    window_finite: tf.Tensor
    closes_window: tf.Tensor | None
    values: dict[str, tf.Tensor]


def plan_update(
    rule: LossScale, window: int, state: Mapping[str, tf.Tensor], finite: tf.Tensor
) -> PlannedUpdate:
    """Computes the state after a call; writes nothing.

    All of it is arithmetic on scalars, without control flow: it costs a few small kernels, or
    none where XLA fuses them.

    Args:
        rule: The rule that moves the scale.
        window: How many calls make one update of the scale.
        state: The values of the state variables by field name.
        finite: Scalar bool tensor: whether all gradients of this call are finite.
    """
    before = LossScaleState(**{field: state[field] for field in FIELDS})
    if window == 1:
        values = _values(rule.update(before, finite, select))
        return PlannedUpdate(before, finite, None, values)
    position = state["window_position"] + 1
    window_finite = tf.logical_and(state["window_finite"], finite)
    closes = position >= window
    closed = _values(rule.update(before, window_finite, select))
    values = {field: select(closes, closed[field], getattr(before, field)) for field in FIELDS}
    window_values = {
        "window_position": select(closes, 0, position),
        "window_finite": tf.logical_or(closes, window_finite),
    }
    return PlannedUpdate(before, window_finite, closes, {**values, **window_values})


def _values(state: LossScaleState) -> dict[str, tf.Tensor]:
    return {field: getattr(state, field) for field in FIELDS}
