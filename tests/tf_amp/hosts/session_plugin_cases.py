"""Registration of the graph plugin: done once, refused aloud, safe at fork and at exit."""

from __future__ import annotations

import _ctypes
import importlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import session_harness as harness
import tensorflow as tf
from session_peer_graphs import fed, values
from tensorflow.python.eager import context
from tensorflow.python.grappler import tf_optimizer

from tf_amp.hosts import session, session_plugin

v1 = tf.compat.v1


def run_small() -> list[str]:
    with tf.Graph().as_default():
        x, feed = fed(4, 8)
        y = tf.matmul(x, tf.constant(values(1, 8, 8))) * 2.0
        return harness.run_new_session(y, feed).dtypes("MatMul")


def case_refusals() -> dict[str, Any]:
    """Before anything is registered: the shared object is missing, or of another version."""
    refusals, dtypes = {}, []
    other = Path(_ctypes.__file__)
    for name, path in {"missing": other.with_name("not_built.so"), "other": other}.items():
        replaced = mock.patch.object(session_plugin, "_SHARED_OBJECT", path)
        with replaced, harness.amp() as installed:
            refusals[name] = installed.refusals["session"]
            dtypes += run_small()
    return {"refusals": refusals, "dtypes": dtypes}


def case_devices_untouched() -> dict[str, Any]:
    """Registering neither starts TensorFlow's runtime nor forgets what was chosen for it."""
    context._reset_context()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with harness.amp():
        started = context.context()._initialized
        logical = len(tf.config.list_logical_devices("CPU"))
    return {"started": started, "logical": logical}


def case_registers_once() -> dict[str, Any]:
    """A reload and a second copy of the module find what the first has registered."""
    first = session_plugin.graph_plugin(tf)
    same = importlib.reload(session_plugin).graph_plugin(tf) is first
    del sys.modules["tf_amp.hosts.session_plugin"]
    copy = importlib.import_module("tf_amp.hosts.session_plugin")
    with harness.amp():
        dtypes = run_small()
    return {
        "same": same,
        "copy": copy.graph_plugin(tf) is first,
        "device_types": list(first._registered),
        "dtypes": dtypes,
    }


def case_once_per_graph() -> dict[str, Any]:
    """Grappler calls twice (its rounds) for each graph; the handler sees it once."""
    seen = []
    plugin = session_plugin.graph_plugin(tf)
    plugin.handler = lambda item: seen.append(item)
    try:
        run_small()
        calls = len(seen)
    finally:
        plugin.handler = None
    return {"calls": calls, "preserve": sorted(seen[0].preserve), "fetches": seen[0].fetches}


def case_shapes() -> dict[str, Any]:
    """Shapes are inferred for the graph at hand, in the callback and not after it."""
    found: dict[str, Any] = {}
    late: list[Any] = []

    def ask(item: Any) -> None:
        late.append(item.shapes)
        found[item.fetches[0]] = [item.shapes(name) for name in ("x", "product", "split", "nobody")]

    plugin = session_plugin.graph_plugin(tf)
    plugin.handler = ask
    try:
        with tf.Graph().as_default(), v1.Session() as made:
            x = v1.placeholder(tf.float32, [None, 8], name="x")
            product = tf.matmul(x, tf.constant(values(1, 8, 4)), name="product")
            first, second = tf.split(product, 2, axis=1, name="split")
            usual = tf.add(tf.cumsum(first), second * 3.0, name="usual")
            inner = tf.add(tf.cumsum(first), second * 3.0, name="inner")
            made.run(usual, {x: values(0, 3, 8)})
            made.run(inner, {product: values(0, 3, 4)})
    finally:
        plugin.handler = None
    return {"found": found, "late": list(late[0]("x"))}


def case_exit_waits_for_callbacks() -> dict[str, Any]:
    """What the exit hook does while a callback is under way on another thread."""
    entered, leave = threading.Event(), threading.Event()

    def slow(_: Any) -> None:
        entered.set()
        leave.wait(10)

    plugin = session_plugin.graph_plugin(tf)
    plugin.handler = slow
    thread = threading.Thread(target=run_small)
    thread.start()
    entered.wait(10)
    threading.Timer(0.3, leave.set).start()
    start = time.monotonic()
    plugin._wait_at_exit()
    waited = time.monotonic() - start
    running = plugin._running.value
    thread.join(10)
    return {"waited": waited, "running": running, "handler": plugin.handler}


CASES = {name[5:]: case for name, case in list(globals().items()) if name.startswith("case_")}


def main(*names: str) -> None:
    for name in names or CASES:
        harness.report(name, **CASES[name]())


def fork() -> None:
    """Forks right after the switch-on: parent and child each run a session of their own."""
    with harness.amp():
        child = os.fork()
        if child == 0:
            os._exit(0 if run_small() == ["MatMul:bfloat16"] else 3)
        mine = run_small()
        _, status = os.waitpid(child, 0)
    harness.report("fork", child=os.waitstatus_to_exitcode(status), parent=mine)


def exit_while_running() -> None:
    """Leaves the interpreter with AMP on, open sessions and idle threads of queue runners."""
    with tf.Graph().as_default():
        installed = harness.amp()
        installed.__enter__()
        queue = tf.queue.FIFOQueue(2, tf.float32, [8, 8])
        runner = v1.train.QueueRunner(queue, [queue.enqueue(tf.random.normal([8, 8]))])
        v1.train.add_queue_runner(runner)
        x = queue.dequeue()
        made = v1.Session()
        v1.train.start_queue_runners(made)
        total = made.run(tf.reduce_sum(tf.matmul(x, x) * 2.0))
        harness.report("exit", finite=bool(abs(total) < float("inf")))


def documented_entry() -> None:
    """Registers by having TensorFlow load the library, the symbol of the other way being away."""
    missing = mock.patch.object(session_plugin, "_INIT_GRAPH_PLUGIN", "no_such_symbol")
    with missing, harness.amp() as installed:
        harness.report("documented", refusals=installed.refusals, dtypes=run_small())


def not_ours() -> None:
    """Graphs that no call of Python's session builds never reach Python."""
    seen: list[int] = []
    real = session.SessionHost.rewrite
    with (
        mock.patch.object(
            session.SessionHost, "rewrite", lambda *args: seen.append(1) or real(*args)
        ),
        harness.amp(),
    ):
        product = tf.function(lambda x: tf.matmul(x, x) * 2.0)
        product(tf.ones((8, 8)))
        with tf.Graph().as_default() as graph:
            x = tf.constant(values(0, 8, 8))
            with tf.device("/device:CPU:0"):
                fetch = tf.matmul(x, x) * 2.0
            graph.add_to_collection("train_op", fetch)
            meta = v1.train.export_meta_graph(graph=graph)
        optimized = tf_optimizer.OptimizeGraph(v1.ConfigProto(), meta)
        foreign = len(seen)
        run_small()
    harness.report("not_ours", seen=[foreign, len(seen)], optimized=len(optimized.node) > 0)


def loaded_by_others() -> None:
    """TensorFlow itself has loaded a graph plugin before AMP is switched on."""
    with harness.amp() as installed:
        refusals = dict(installed.refusals)
        harness.report("loaded", refusals=refusals, dtypes=run_small())
