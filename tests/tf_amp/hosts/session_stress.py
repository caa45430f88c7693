"""Many sessions and functions at once: threads build, run and close graphs, AMP on.

python tests/tf_amp/hosts/session_stress.py --minutes 10 --threads 16
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import threading
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import session_harness as harness
import tensorflow as tf

v1 = tf.compat.v1
THREADS = 8
GRAPHS = 200
KINDS = 4


def numpy_values(seed: int, *shape: int) -> np.ndarray:
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def plain_session(seed: int, x: np.ndarray) -> tuple[Any, Any, int]:
    """Two dense layers; several fetches in one session."""
    w = numpy_values(seed + 1, 16, 16) * 0.25
    with tf.Graph().as_default(), v1.Session() as session:
        fed = v1.placeholder(tf.float32, x.shape)
        hidden = tf.nn.relu(tf.nn.bias_add(tf.matmul(fed, w), np.ones(16, np.float32)))
        y = tf.matmul(hidden, w) * 2.0
        ran = harness.traced_run(session, y, {fed: x})
        session.run(hidden, {fed: x})
    return ran.values, np.maximum(x @ w + 1.0, 0.0) @ w * 2.0, ran.casts("bfloat16")


def loop_session(seed: int, x: np.ndarray) -> tuple[Any, Any, int]:
    """A v1 while loop."""
    w = numpy_values(seed + 1, 16, 16) * 0.25
    expected = x
    with tf.Graph().as_default(), v1.Session() as session:
        fed = v1.placeholder(tf.float32, x.shape)
        _, y = tf.while_loop(
            lambda i, _: i < 3, lambda i, t: (i + 1, tf.nn.relu(tf.matmul(t, w))), [0, fed]
        )
        ran = harness.traced_run(session, tf.identity(y), {fed: x})
    for _ in range(3):
        expected = np.maximum(expected @ w, 0.0)
    return ran.values, expected, ran.casts("bfloat16")


def training_session(seed: int, x: np.ndarray) -> tuple[Any, Any, int]:
    """Variables, gradients and an optimizer; the weight after one step."""
    w = numpy_values(seed + 1, 16, 16) * 0.25
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("w", initializer=w)
        loss = tf.reduce_sum(tf.square(tf.matmul(tf.constant(x) * 1.0, weight)))
        step = v1.train.GradientDescentOptimizer(0.01).minimize(loss)
        session.run(v1.global_variables_initializer())
        ran = harness.traced_run(session, step)
        got = session.run(weight)
    return got, w - 0.01 * 2.0 * x.T @ (x @ w), ran.casts("bfloat16")


def eager_function(seed: int, x: np.ndarray) -> tuple[Any, Any, int]:
    """A tf.function, which is the other host's."""
    w = numpy_values(seed + 1, 16, 16) * 0.25
    function = tf.function(lambda t: tf.nn.relu(tf.matmul(t, w)))
    concrete = function.get_concrete_function(tf.TensorSpec(x.shape, tf.float32))
    definition = concrete.inference_fn.definition
    casts = sum(node.op == "Cast" for node in definition.node_def)
    return function(x).numpy(), np.maximum(x @ w, 0.0), casts


WORK = (plain_session, loop_session, training_session, eager_function)


def main(
    graphs: int = GRAPHS,
    switch_interval: float | None = None,
    *,
    threads: int = THREADS,
    minutes: float = 0,
) -> dict[str, Any]:
    """Runs `graphs` graphs; a short interval makes Python change threads inside callbacks.

    With `minutes`, it runs as many as there are in them instead.
    """
    if switch_interval is not None:
        sys.setswitchinterval(switch_interval)
    v1.disable_control_flow_v2()
    logging.getLogger("tf_amp").setLevel(logging.ERROR)
    lines = harness.Lines()
    start = time.monotonic()
    todo: Iterable[int] = iter(range(graphs))
    if minutes:
        end = start + 60 * minutes
        todo = itertools.takewhile(lambda _: time.monotonic() < end, itertools.count())
    lock = threading.Lock()
    errors: list[float] = []
    failures: list[str] = []
    session_casts: list[int] = []

    def work() -> None:
        while True:
            with lock:
                seed = next(todo, None)
            if seed is None:
                return
            kind = WORK[seed % KINDS]
            try:
                got, expected, casts = kind(seed, numpy_values(seed, 8, 16))
            except Exception as error:
                failures.append(f"{kind.__name__}: {error}")
                continue
            errors.append(harness.relative_error(expected, got))
            if kind is not eager_function:
                session_casts.append(casts)

    with harness.amp() as installed:
        workers = [threading.Thread(target=work, name=f"worker {i}") for i in range(threads)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join(60 * minutes + 240)
        rewritten = installed.tally.rewritten
    facts = {
        "alive": sum(thread.is_alive() for thread in workers),
        "finished": len(errors),
        "failures": failures[:3],
        "largest_error": max(errors),
        "sessions_without_casts": session_casts.count(0),
        "rewritten": rewritten,
        "log_errors": lines.at(logging.ERROR)[:3],
        "seconds": round(time.monotonic() - start, 1),
    }
    harness.report("stress", **facts)
    return facts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--threads", type=int, default=16)
    found = main(**vars(parser.parse_args()))
    faults = ("alive", "failures", "log_errors", "sessions_without_casts")
    sys.exit(any(found[name] for name in faults) or found["largest_error"] > 0.02)
