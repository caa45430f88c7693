"""Scripts for `test_session_sizes`: what a session plans where it does not know its batch."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf
from function_harness import switch_on, weights
from session_harness import Lines, report, v1
from tensorflow.core.protobuf import config_pb2

WIDTH, MANY = 64, 2048


def start(**settings: Any) -> Lines:
    """Switches AMP on, in a program of the first TensorFlow's kind."""
    v1.disable_eager_execution()
    lines = Lines()
    switch_on(cost_table=sys.argv[1], **settings)
    return lines


def batch(rows: int, seed: int = 1) -> Any:
    return weights(seed, (rows, WIDTH))


def dense(x: Any, name: str = "y") -> Any:
    return tf.nn.relu(tf.matmul(x, weights(shape=(WIDTH, WIDTH))), name=name)


def fresh() -> tuple[Any, Any]:
    """A placeholder of unknown rows in a new default graph, and what a layer makes of it."""
    v1.reset_default_graph()
    x = v1.placeholder(tf.float32, [None, WIDTH])
    return x, dense(x)


def said(lines: Lines) -> list[str]:
    """What was said of graphs with products since it was asked last, without their numbers."""
    found = [record.getMessage() for record in lines.records]
    lines.records.clear()
    return [line.partition(" ")[2].partition(" ")[2][2:] for line in found if "MatMul" in line]


def fed() -> None:
    """What the first run feeds decides, for good, also on other threads and for several sizes."""
    lines = start(log_path=sys.argv[2])
    for first, then in ((MANY, 1), (1, MANY)):
        x, y = fresh()
        with v1.Session() as session:
            for rows in (first, then):
                assert session.run(y, {x: batch(rows)}).shape == (rows, WIDTH)
        report(f"first {first}", said=said(lines))
    x, y = fresh()
    with v1.Session() as session:
        session.make_callable(y, [x])(batch(MANY))
    report("callable", said=said(lines))
    x, _ = fresh()
    # A fed tensor that is no placeholder; its own placeholder is not fed.
    inner = tf.nn.relu(x)
    with v1.Session() as session:
        session.run(dense(inner), {inner: batch(MANY)})
    report("inner", said=said(lines))
    v1.reset_default_graph()
    words = v1.placeholder(tf.float32, [None, None, WIDTH])
    with v1.Session() as session:
        rows = tf.reshape(words, [-1, WIDTH])
        session.run(dense(rows), {words: np.ones((16, 128, WIDTH), "f")})
    report("two axes", said=said(lines))
    x, _ = fresh()
    keep = v1.placeholder_with_default(1.0, [])  # as flags and rates are
    rows = tf.reshape(tf.reshape(x, [-1, 8, WIDTH // 8]), [-1, WIDTH])
    with v1.Session() as session:
        session.run(dense(rows * keep), {x: batch(MANY), keep: 0.5})
    report("beside a default", said=said(lines))
    v1.reset_default_graph()
    anything = v1.placeholder(tf.float32)
    with v1.Session() as session:
        session.run(dense(tf.reshape(anything, [-1, WIDTH])), {anything: batch(MANY)})
    report("any rank", said=said(lines))
    x, y = fresh()
    states = v1.placeholder(tf.float32, [None, 8 * WIDTH])
    with v1.Session() as session:
        session.run(y + tf.reduce_sum(states), {x: batch(MANY), states: np.ones((1, 8 * WIDTH))})
    report("beside a state", said=said(lines))


def threads() -> None:
    """Runs of several threads at once, each of fetches of its own."""
    start(log_path=sys.argv[2])
    x, _ = fresh()
    sizes = [1, MANY, 8, 600, 2, 4000]
    fetches = [dense(x, name=f"of_{rows}") for rows in sizes]
    with v1.Session() as session:
        barrier = threading.Barrier(len(sizes))

        def run(rows: int, fetch: Any) -> None:
            barrier.wait()
            session.run(fetch, {x: batch(rows)})

        running = [
            threading.Thread(target=run, args=pair) for pair in zip(sizes, fetches, strict=True)
        ]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()


def untold() -> None:
    """Calls that prepare a run and feed nothing."""
    lines = start()
    for name in ("callable", "partial_run"):
        x, y = fresh()
        with v1.Session() as session:
            if name == "callable":
                options = config_pb2.CallableOptions(feed=[x.name], fetch=[y.name])
                session._make_callable_from_options(options)(batch(MANY))
            else:
                session.partial_run(session.partial_run_setup([y], [x]), y, {x: batch(MANY)})
        report(name, said=said(lines))
    v1.reset_default_graph()
    known = v1.placeholder(tf.float32, [MANY, WIDTH])
    with v1.Session() as session:
        session.run(dense(known), {known: batch(MANY)})
    report("known", said=said(lines))


def data_sets() -> None:
    """Batches of iterators, told by the data set that they go through."""
    lines = start()
    scale = np.float32(2)

    def plain(rows: int) -> Any:
        return v1.data.Dataset.from_tensor_slices(batch(5000)).map(lambda x: x * scale).batch(rows)

    def mapped(rows: int) -> Any:
        captured = tf.constant(scale)
        made = tf.data.experimental.map_and_batch(lambda x: x * captured, rows)
        return v1.data.Dataset.from_tensor_slices(batch(5000)).apply(made)

    def queue() -> Any:
        """Stands for an iterator: what `train.batch` makes that allows a smaller last batch."""
        rows = v1.FIFOQueue(5000, tf.float32, shapes=[[WIDTH]])
        return SimpleNamespace(get_next=lambda: rows.dequeue_up_to(MANY)), [
            rows.enqueue_many([batch(5000)])
        ]

    def run(name: str, make: Any, monitored: bool = False) -> None:
        iterator, initializers = make()
        y = dense(iterator.get_next())
        if monitored:
            v1.train.create_global_step()
            scaffold = v1.train.Scaffold(local_init_op=tf.group(*initializers))
            creator = v1.train.ChiefSessionCreator(scaffold)
            with v1.train.MonitoredSession(creator) as session:
                session.run(y)
        else:
            with v1.Session() as session:
                session.run(initializers)
                session.make_callable(y)()
        report(name, said=said(lines))

    def initializable(data_set: Any) -> Any:
        iterator = v1.data.make_initializable_iterator(data_set)
        return iterator, [iterator.initializer]

    def from_structure() -> Any:
        data_set = plain(MANY)
        kinds = v1.data.get_output_types(data_set), v1.data.get_output_shapes(data_set)
        iterator = v1.data.Iterator.from_structure(*kinds)
        return iterator, [iterator.make_initializer(data_set.prefetch(1))]

    def by_handle() -> Any:
        iterator, initializers = from_structure()
        handle = iterator.string_handle()
        kinds = tf.float32, tf.TensorShape([None, WIDTH])
        return v1.data.Iterator.from_string_handle(handle, *kinds), initializers

    size = lambda: v1.placeholder_with_default(tf.constant(MANY, tf.int64), [])  # noqa: E731
    one_shot = v1.data.make_one_shot_iterator
    for name, make in {
        "initializable": lambda: initializable(plain(MANY).prefetch(1)),
        "map_and_batch": lambda: initializable(mapped(MANY)),
        "one_shot": lambda: (one_shot(plain(MANY).prefetch(1)), []),
        "from_structure": from_structure,
        "queue": queue,
        "within": lambda: initializable(
            v1.data.Dataset.range(4).batch(1).interleave(lambda _: plain(MANY), cycle_length=2)
        ),
        "by_handle": by_handle,
        "fed_size": lambda: initializable(plain(size())),
    }.items():
        v1.reset_default_graph()
        run(name, make)
    v1.reset_default_graph()
    run("monitored", lambda: initializable(plain(MANY)), monitored=True)


def same_names() -> None:
    """A graph to train and one to evaluate, with the same names, made before either runs."""
    lines = start()

    def session_of(rows: int) -> Any:
        with tf.Graph().as_default() as graph:
            data_set = v1.data.Dataset.from_tensor_slices(batch(5000)).batch(rows)
            y = dense(v1.data.make_one_shot_iterator(data_set).get_next())
            return v1.Session(graph=graph), y

    made = {f"rows {rows}": session_of(rows) for rows in (MANY, 1)}
    for name, (session, y) in made.items():
        session.run(y.name)
        report(name, said=said(lines))
