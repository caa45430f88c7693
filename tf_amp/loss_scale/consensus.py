"""All replicas and processes of a training job decide alike whether a step is skipped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf


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
