"""One step behind a gate: the optimizer runs if all gradients are finite, else it is skipped.

Everything an optimizer changes, it changes inside one branch of a `tf.cond`: variables, slots,
iteration counter and moving averages of a skipped step therefore stay what they were. All replicas
and processes of a training job decide alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.impl.api import autograph_artifact

from tf_amp.loss_scale import gradients as gradient_math
from tf_amp.loss_scale.host_call import call_where_built
from tf_amp.loss_scale.manager import LossScaleManager
from tf_amp.loss_scale.rule import LossScaleState
from tf_amp.loss_scale.seen_graphs import mark_seen
from tf_amp.loss_scale.state import FIELDS, PlannedUpdate, as_numbers

# Applies gradients, given in the order of the step's variables.
Apply = Callable[[Sequence[Any]], Any]


# AutoGraph, which would take seconds for all of this, converts what `apply` calls of the program's.
@autograph_artifact
def apply_if_finite(
    manager: LossScaleManager,
    gradients: Sequence[Any],
    variables: Sequence[Any],
    apply: Apply,
    *,
    step: Any = None,
    horovod: bool = False,
    drop_window: Callable[[], Any] | None = None,
) -> tf.Tensor:
    """Applies unscaled gradients if all are finite, and moves the loss scale.

    Args:
        manager: The manager of the optimizer.
        gradients: Unscaled gradients, one for each variable; None where there is none.
        variables: The variables: their names, for messages, and whether they are references.
        apply: Called in the branch that runs when the step is taken. Under a distribution
            strategy it is called in the context of each replica.
        step: The optimizer's iteration for messages: a scalar integer tensor, or None.
        horovod: Whether the processes of Horovod must agree on the flag.
        drop_window: Given when the optimizer accumulates the gradients of a window. Then a window
            with a non-finite gradient is given up as a whole, and `drop_window` undoes what the
            finite calls in it accumulated.

    Returns:
        Scalar bool tensor: whether the gradients were applied. In a v1 graph, running it runs
        the step.

    Raises:
        ValueError: If no variable has a gradient.
        RuntimeError: If called in the cross-replica context of a distribution strategy.
    """
    mark_seen()
    _require_gradients(gradients, variables)
    require_replica_context()
    if not manager.rule.checks_gradients:
        return _true_after(apply(gradients))

    finite = agree(gradient_math.all_finite(gradients), horovod=horovod)
    first_name = manager.register_variable_names(
        [gradient_math.variable_name(v) for v in variables]
    )
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]

    def complete(function: Apply) -> Callable[..., Any]:
        def of_all(*values: Any) -> Any:
            # Of the branch, as those are that a class changes there: what sums the gradients of
            # replicas takes none of two graphs.
            found = dict(zip(present, map(tf.identity, values), strict=True))
            return function([found.get(i) for i in range(len(gradients))])

        return of_all

    def decide(call: Callable[..., Any], flag: tf.Tensor, *values: Any) -> tf.Tensor:
        return _Gate(manager, flag, step, first_name, drop_window).pass_through(
            lambda: call(complete(apply), *values),
            lambda: largest(call(complete(gradient_math.culprit_code), *values)),
        )

    with _branches_for([*variables, step]):
        return in_deciding_context(decide, finite, *(gradients[i] for i in present))


@contextlib.contextmanager
def _branches_for(variables: Sequence[Any]) -> Iterator[None]:
    """Lets `tf.cond` make branches in which these variables can be assigned to.

    A branch that is a function of its own captures values: of a v1 reference variable it gets what
    the variable holds, which no op can update. The switches of v1 control flow pass references.

    In such a branch an optimizer asks `init_scope` for its graph. It finds a v1 graph that was
    entered; of one that is the default because a script disabled eager execution it only knows
    where nothing, not even `tf.config.list_physical_devices`, came before.
    """
    v1 = tf.compat.v1
    graph = v1.get_default_graph()
    dtypes = [getattr(variable, "dtype", None) for variable in variables]
    references = any(getattr(dtype, "_is_ref_dtype", False) for dtype in dtypes)
    with contextlib.ExitStack() as stack:
        if not tf.executing_eagerly() and not graph.building_function:
            stack.enter_context(graph.as_default())
        if references and v1.control_flow_v2_enabled():
            v1.disable_control_flow_v2()
            stack.callback(v1.enable_control_flow_v2)
        yield


@dataclasses.dataclass(frozen=True)
class _Gate:
    """The decision of one step; the fields are as in `apply_if_finite`."""

    manager: LossScaleManager
    finite: tf.Tensor
    step: Any
    first_name: int
    drop_window: Callable[[], Any] | None

    def pass_through(self, apply: Callable[[], Any], culprit: Callable[[], tf.Tensor]) -> tf.Tensor:
        plan = self.manager.plan(self.finite)
        proceeds = self.finite if self.drop_window is None else plan.window_finite
        applied = tf.cond(
            proceeds,
            lambda: _true_after(apply()),
            lambda: tf.logical_not(_true_after(self._skip(plan, culprit))),
        )
        with tf.control_dependencies([applied]):
            updates = self.manager.assign(plan)
        with tf.control_dependencies(_operations(updates)):
            return tf.identity(applied)

    def _skip(self, plan: PlannedUpdate, culprit: Callable[[], tf.Tensor]) -> Any:
        effects = []
        if self.drop_window is not None:
            # Calls after the non-finite one of a window are skipped too, but not reported.
            effects.append(
                tf.cond(self.finite, _true, lambda: _true_after(self._report(plan, culprit)))
            )
            drop = self.drop_window
            effects.append(tf.cond(plan.closes_window, lambda: _true_after(drop()), _true))
        else:
            effects.append(self._report(plan, culprit))
        return effects

    def _report(self, plan: PlannedUpdate, culprit: Callable[[], tf.Tensor]) -> Any:
        code = culprit()
        code = gradient_math.select(
            code < 0, code, code + self.first_name * len(gradient_math.KIND_NAMES)
        )
        if gradient_math.in_xla_context():
            self.manager.assign_culprit(code)
            return tf.constant(True)
        # What the state will be once the window closes, whatever else happens in it.
        after = self.manager.rule.update(plan.before, tf.constant(False), gradient_math.select)
        step = tf.constant(-1, tf.int64) if self.step is None else tf.cast(self.step, tf.int64)
        inputs = [step, code, plan.before.scale, *(getattr(after, field) for field in FIELDS)]
        if tf.executing_eagerly():
            return _tell(self.manager, *(value.numpy() for value in inputs))
        return call_where_built(
            _tell, self.manager, inputs, lambda: _log_skip(plan.before.scale, after)
        )


def _tell(manager: LossScaleManager, step: Any, code: Any, before: Any, *values: Any) -> bool:
    state = as_numbers(dict(zip(FIELDS, values, strict=True)))
    manager.report_skip(None if step < 0 else int(step), float(before), state, int(code))
    return True


def _log_skip(before: tf.Tensor, after: LossScaleState) -> tf.Tensor:
    """Logs the first, second, fourth, eighth ... skipped step, as `SkipReporter` does, in C++."""

    def log() -> tf.Tensor:
        text = tf.strings.format(
            "tf_amp: skipped a step, a gradient is not finite; loss scale {} -> {} ({} so far).",
            (before, after.scale, after.skipped_steps),
        )
        printed = tf.print(text, output_stream=tf.compat.v1.logging.info, end="")
        return _true_after(printed)

    is_due = tf.equal(tf.bitwise.bitwise_and(after.skipped_steps, after.skipped_steps - 1), 0)
    return tf.cond(is_due, log, _true)


def _true() -> tf.Tensor:
    return tf.constant(True)


def _true_after(result: Any) -> tf.Tensor:
    """A true tensor that exists once `result`, tensors or operations, was computed."""
    with tf.control_dependencies(_operations(result)):
        return tf.identity(tf.constant(True))


def _operations(result: Any) -> list[Any]:
    """What of a result can be waited for in a graph."""
    if tf.executing_eagerly():
        return []
    flat = []
    for item in tf.nest.flatten(result):
        for local in local_values(item):
            # Not a Keras variable, which passes for a tensor: its optimizers return their counter.
            if isinstance(local, tf.Operation | tf.Tensor):
                flat.append(local)
            elif isinstance(getattr(local, "op", None), tf.Operation):
                flat.append(local.op)
    return flat


def _require_gradients(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    if all(gradient is None for gradient in gradients):
        names = ", ".join(gradient_math.variable_name(v) for v in variables) or "no variable"
        raise ValueError(
            "No variable has a gradient, so there is nothing to apply. Received: None for "
            f"{names}. Check that the loss depends on these variables and that it was computed "
            "(and scaled) inside the GradientTape."
        )


def require_replica_context() -> None:
    """Refuses to go on in a cross-replica context.

    Raises:
        RuntimeError: If called inside `strategy.scope()` but outside `strategy.run`.
    """
    if tf.distribute.in_cross_replica_context():
        raise RuntimeError(
            "Gradients are applied in the context of a replica: call apply_gradients inside the "
            "function that is given to strategy.run. Received: a call in the cross-replica "
            f"context of {type(tf.distribute.get_strategy()).__name__}"
        )


def agree(finite: tf.Tensor, *, horovod: bool = False) -> tf.Tensor:
    """Whether the flag is true everywhere.

    Args:
        finite: The flag of this replica, a scalar bool tensor.
        horovod: Whether the processes of Horovod take part.

    Returns:
        A scalar bool tensor, equal on all replicas of the strategy and, if asked, all processes
        of Horovod.

    Raises:
        RuntimeError: If `horovod` is asked for and `horovod.tensorflow` is not imported.
    """
    if tf.distribute.has_strategy():
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            finite = context.all_reduce(tf.distribute.ReduceOp.SUM, _count_bad(finite)) < 0.5
    if horovod:
        module = sys.modules.get("horovod.tensorflow")
        if module is None:
            raise RuntimeError(
                "The optimizer is Horovod's, but horovod.tensorflow is not imported, so the "
                "processes cannot agree on skipped steps. Import horovod.tensorflow and call its "
                "init() before training."
            )
        finite = module.allreduce(_count_bad(finite), op=module.Sum) < 0.5
    return finite


def in_deciding_context(decide: Callable[..., Any], finite: tf.Tensor, *values: Any) -> Any:
    """Runs `decide(call, finite, *values)` where a `tf.cond` may contain an optimizer.

    An optimizer under a strategy merges its replicas, which is not possible inside a `tf.cond` of
    one replica. There the decision is taken once for all replicas, and `call(f, *values)` goes
    back into the context of each. Everywhere else `call(f, *values)` is just `f(*values)`.

    Args:
        decide: The decision.
        finite: The flag all replicas agreed on.
        *values: Tensors of this replica that `decide` needs.

    Returns:
        What `decide` returns.
    """
    if not tf.distribute.has_strategy() or (
        tf.__internal__.distribute.strategy_supports_no_merge_call()
    ):
        return decide(lambda function, *args: function(*args), finite, *values)

    def merged(strategy: Any, flags: Any, *all_values: Any) -> Any:
        def call(function: Callable[..., Any], *args: Any) -> Any:
            return strategy.extended.call_for_each_replica(function, args=args)

        return decide(call, local_values(flags)[0], *all_values)

    context = tf.distribute.get_replica_context()
    return context.merge_call(merged, args=(finite, *values))


def largest(codes: Any) -> tf.Tensor:
    """The largest of the integer scalars that the replicas computed."""
    return tf.reduce_max(tf.stack(local_values(codes)))


def local_values(value: Any) -> tuple[Any, ...]:
    """The values of a per-replica object on this machine; `(value,)` for any other object."""
    return tuple(tf.distribute.get_strategy().experimental_local_results(value))


def _count_bad(finite: tf.Tensor) -> tf.Tensor:
    # Strategies reduce floating-point tensors on every device; few reduce booleans.
    return tf.cast(tf.logical_not(finite), tf.float32)
