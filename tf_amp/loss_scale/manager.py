"""The loss-scale manager: a rule, its state in variables, and what a training step does to them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.impl.api import autograph_artifact

from tf_amp.loss_scale import gradients as gradient_math
from tf_amp.loss_scale import telemetry
from tf_amp.loss_scale.clip_notice import ClipNotice
from tf_amp.loss_scale.floor import SkippedStep, SkipReporter
from tf_amp.loss_scale.history import History
from tf_amp.loss_scale.rule import LossScale, LossScaleState, require_count, resolve
from tf_amp.loss_scale.seen_graphs import mark_seen
from tf_amp.loss_scale.state import (
    CULPRIT,
    FIELDS,
    PlannedUpdate,
    StateVariables,
    as_numbers,
    plan_update,
)
from tf_amp.loss_scale.step_protocol import StepProtocol, UsedScale


class LossScaleManager(tf.__internal__.tracking.Trackable):
    """Holds a loss scale and moves it by its rule.

    A manager usually belongs to one optimizer; `wrap_optimizer` makes it. To train several
    optimizers with one scale, make the manager first, say how many optimizers share it and hand
    it to each `wrap_optimizer`:

    ```python
    manager = LossScaleManager("dynamic", window=2)
    generator_optimizer = wrap_optimizer(generator_optimizer, manager)
    discriminator_optimizer = wrap_optimizer(discriminator_optimizer, manager)
    ```

    Each optimizer then skips for its own gradients alone, and the scale moves once per window.

    The state (see `LossScaleState`) lives in variables that are created on first use and are part
    of every checkpoint. Reading it inside a step costs no transfer to the host.

    Args:
        loss_scale: `"dynamic"` (default), a number, or a rule; see `rule.resolve`.
        window: How many calls of `apply_gradients` make one update of the scale; default 1.
        name: The prefix of the variables' names.
        strict: Whether a step whose loss was not scaled is an error instead of one warning.

    Raises:
        ValueError: If an argument is not legal.
    """

    def __init__(
        self,
        loss_scale: Any = "dynamic",
        *,
        window: int = 1,
        name: str = "loss_scale",
        strict: bool = False,
    ) -> None:
        super().__init__()
        self._rule = resolve(loss_scale)
        self._window = window = require_count("window", window)
        self._name = name
        self._strict = strict
        self._state = StateVariables(self._rule.initial_state(), windowed=window > 1, name=name)
        self._reporter = SkipReporter(self._rule)
        self._history = History(name, self._rule.initial_state())
        self._variable_names: list[str] = []
        self._clip_notice = ClipNotice()
        self._protocols: weakref.WeakSet[StepProtocol] = weakref.WeakSet()
        self._used_scale = UsedScale()
        telemetry.register(self)

    @property
    def rule(self) -> LossScale:
        """The rule that moves the scale."""
        return self._rule

    @property
    def name(self) -> str:
        """The prefix of the variables' names."""
        return self._name

    @property
    def window(self) -> int:
        """How many calls of `apply_gradients` make one update of the scale."""
        return self._window

    @property
    def scale(self) -> tf.Tensor:
        """The current loss scale, a scalar float32 tensor."""
        if not self._rule.scales_loss:
            return tf.constant(1.0)
        return self._state.read("scale")["scale"]

    @property
    def variables(self) -> tuple[tf.Variable, ...]:
        """The state variables of the current graph; created if they do not exist."""
        return tuple(v for field, v in self._state.get().items() if field != CULPRIT)

    @property
    def scale_variable(self) -> tf.Variable | None:
        """The variable of the scale outside v1 graphs; None if it was not needed yet."""
        return self._state.eager().get("scale")

    def new_protocol(self) -> StepProtocol:
        """A record of one optimizer's steps; `scale_loss` of this manager counts for it."""
        protocol = StepProtocol(strict=self._strict)
        self._protocols.add(protocol)
        return protocol

    # Else AutoGraph converts this with all that it calls, which takes longer than to trace a loop.
    @autograph_artifact
    def scale_loss(self, loss: Any) -> Any:
        """Multiplies a loss by the scale, as the last thing before its gradients are taken.

        Args:
            loss: Floating-point tensors of any shape, nested as you like, or a callable. A tensor
                that this method gave last is not scaled again.

        Returns:
            The same structure. Report the loss you passed in, not this one.
        """
        for protocol in self._protocols:
            protocol.loss_scaled()
        if callable(loss):
            return lambda: self.scale_loss(loss())
        if self._used_scale.has_scaled(loss):
            return loss  # as a loop does that hands it to `minimize` of tf_keras, which scales too
        scaled = self.multiply(loss)
        self._used_scale.note_loss(scaled)
        return scaled

    @autograph_artifact
    def multiply(self, tensors: Any, scale: tf.Tensor | None = None) -> Any:
        """Multiplies tensors by the scale, without counting as the scaling of a step's loss.

        For a gradient inside a loss, such as a gradient penalty: take the inner gradient of
        `multiply(output)` and hand it through `unscale` before its norm is computed.

        Args:
            tensors: As `loss` of `scale_loss`.
            scale: What `scale` gave, for the caller to hand it to `unscale` too; default it is
                read here.
        """
        mark_seen()
        if not self._rule.scales_loss:
            return tensors
        if scale is None:
            scale = self.scale
            self._used_scale.note(scale)
        return gradient_math.scale(tensors, scale)

    @autograph_artifact
    def unscale(self, gradients: Sequence[Any], scale: tf.Tensor | None = None) -> list[Any]:
        """Divides gradients by the scale.

        Args:
            gradients: Tensors or `tf.IndexedSlices` of any shape, or None.
            scale: By what the loss was multiplied; default what the same function multiplied by
                last, or else the scale as it is.

        Returns:
            The gradients in the same order; sparse ones stay sparse.
        """
        if not self._rule.scales_loss:
            return list(gradients)
        if scale is None:
            scale = self._used_scale.found()
        self._clip_notice.look(gradients, scale)
        return gradient_math.unscale(gradients, self.scale if scale is None else scale)

    def create_variables(self) -> None:
        """Creates the state variables in the current graph and strategy, if they are missing."""
        if self._rule.checks_gradients or self._rule.scales_loss:
            self._state.get()

    def plan(self, finite: tf.Tensor) -> PlannedUpdate:
        """What a call of the optimizer with these gradients will do to the state.

        Args:
            finite: Scalar bool tensor: whether all gradients of this call are finite.
        """
        return plan_update(self._rule, self._window, self._state.read(), finite)

    def assign(self, plan: PlannedUpdate) -> list[Any]:
        """Writes what a call does to the state variables; returns the operations that do so."""
        variables = self._state.get()
        values = dict(plan.values)
        if tf.compat.v1.executing_eagerly_outside_functions():
            return [variables[field].assign(value) for field, value in values.items()]
        with tf.control_dependencies([self._state.initialize_after(plan.before)]):
            # In a session two steps of one run, or of two workers, read and write in any order.
            # What one of them does not move it must not set back.
            scale, before = values.pop("scale"), plan.before.scale
            moves = tf.not_equal(scale, before)
            skipped = values.pop("skipped_steps") - plan.before.skipped_steps
            return [
                tf.cond(moves, lambda: variables["scale"].assign(scale), lambda: before),
                variables["skipped_steps"].assign_add(skipped),
                *(variables[field].assign(value) for field, value in values.items()),
            ]

    def assign_culprit(self, code: tf.Tensor) -> None:
        """Keeps a `gradients.culprit_code` for the next `check`; not available in v1 graphs."""
        variable = self._state.get().get(CULPRIT)
        if variable is not None:
            variable.assign(code)

    def register_variable_names(self, names: Sequence[str]) -> int:
        """Makes names known to messages; returns the index of the first.

        Tracing the same step again does not register its names again.
        """
        known = self._variable_names
        for start in range(len(known) - len(names) + 1):
            if known[start : start + len(names)] == list(names):
                return start
        known.extend(names)
        return len(known) - len(names)

    def report_skip(
        self, step: int | None, before: float | None, state: LossScaleState, code: int
    ) -> None:
        """Tells the user of a skipped step, on the host.

        Args:
            step: The optimizer's iteration, or None.
            before: The scale the step was taken with, or None.
            state: The state after it, as Python numbers.
            code: A `gradients.culprit_code` shifted by the index of the first name.

        Raises:
            LossScaleAtFloorError: See `SkipReporter.report`.
        """
        culprit = gradient_math.decode_culprit(code, self._variable_names)
        skipped = SkippedStep(step, before, state, culprit)
        self._history.note_skip(skipped)
        self._reporter.report(skipped)

    def state(self, session: tf.compat.v1.Session | None = None) -> LossScaleState:
        """Reads the state to the host. This waits for the device: not for use in every step.

        Args:
            session: The session to read from, in a v1 graph.

        Returns:
            The state as Python numbers; the initial state where no variable exists yet.

        Raises:
            ValueError: If the current graph is a v1 graph and no session is given.
        """
        if session is not None:
            with session.graph.as_default():
                variables = self._state.created()
            if not variables:
                return self._rule.initial_state()
            try:
                values = session.run({field: variables[field] for field in FIELDS})
            except tf.errors.FailedPreconditionError:  # nothing has initialized them yet
                return self._rule.initial_state()
        elif not tf.executing_eagerly():
            raise ValueError(
                "In a v1 graph the state of a loss scale is read through a session: call "
                "state(session) with the session that trains. Received: session=None"
            )
        else:
            variables = self._state.eager()
            if not variables:
                return self._rule.initial_state()
            values = {field: variables[field].numpy() for field in FIELDS}
        return as_numbers(values)

    def check(self, step: int | None = None) -> LossScaleState:
        """Reads the state and tells the user of skipped steps that were not reported yet.

        Steps report themselves, except inside functions compiled by XLA, which cannot call the
        host. Loops that use `jit_compile=True` call this now and then; Keras's `fit` does it by
        the callback of `loss_scale_callback`.

        Args:
            step: The number to call the current step in messages.

        Returns:
            The state as Python numbers.

        Raises:
            LossScaleAtFloorError: If the rule says `at_floor="raise"` and its patience is over.
        """
        state = self.state()
        if state.skipped_in_a_row or state.skipped_steps:
            culprit = self._state.eager().get(CULPRIT)
            code = -1 if culprit is None else int(culprit.numpy())
            self.report_skip(step, None, state, code)
        self._history.note(step, state)
        return state

    def begin(self) -> None:
        """Takes the state as it is for that before the first step, unless there was one.

        What was restored, from a file or a copy, tells of steps that another run reported.
        """
        self.create_variables()  # a value restored early waits for its variable
        state = self.state()
        if self._history.begin(state):
            self._reporter.know(state.skipped_steps)

    def export_state(self) -> dict[str, Any]:
        """The values of the state variables by name, as NumPy scalars; empty if none exist."""
        return {k: v.numpy() for k, v in self._state.eager().items() if k != CULPRIT}

    def import_state(self, values: Mapping[str, Any]) -> None:
        """Sets the state variables to values of `export_state`; missing ones stay what they are."""
        if not values:
            return
        variables = self._state.get()
        for field in values.keys() & variables.keys():
            variables[field].assign(np.asarray(values[field]))

    def get_config(self) -> dict[str, Any]:
        """A JSON-able description, without the state, for `from_config`."""
        return {
            "loss_scale": self._rule.get_config(),
            "window": self._window,
            "name": self._name,
            "strict": self._strict,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LossScaleManager:
        """A new manager as `get_config` described it, in its initial state."""
        return cls(**config)

    def __reduce__(self) -> tuple[Any, ...]:
        # What is copied or pickled together with an optimizer: a scale of its own, as it is now.
        return _rebuilt, (self.get_config(), self.export_state())

    def summary(self, step: int) -> None:
        """Writes the state to TensorBoard, with the default summary writer.

        Args:
            step: The step to file the values under.
        """
        telemetry.write_summary(self._state.get(), step)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        return self._state._trackable_children(save_type, **kwargs)

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        return self._state._lookup_dependency(name, cached_dependencies)

    @property
    def _deferred_dependencies(self) -> Any:
        # A restored value of a variable that does not exist yet waits where it is created.
        return self._state._deferred_dependencies


def _rebuilt(config: Mapping[str, Any], state: Mapping[str, Any]) -> LossScaleManager:
    manager = LossScaleManager.from_config(config)
    manager.import_state(state)
    return manager
