"""What v1 scripts do with sessions, each done with AMP off and on: one subprocess runs them all.

Each case returns facts that `test_session.py` checks.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import session_harness as harness
import tensorflow as tf
from session_peer_graphs import fed, values, variable

v1 = tf.compat.v1


def dense(x: Any, seed: int, resource: bool = True) -> Any:
    """A dense layer with its own variables, of either kind."""
    size = int(x.shape[-1])
    weight = v1.get_variable(
        f"w{seed}", initializer=values(seed, size, 8, scale=0.3), use_resource=resource
    )
    bias = v1.get_variable(f"b{seed}", initializer=values(seed + 9, 8), use_resource=resource)
    return tf.nn.relu(tf.nn.bias_add(tf.matmul(x, weight), bias))


def twice(build: Callable[[], Any], use: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Builds and uses a graph without AMP, then with it."""
    with tf.Graph().as_default():
        plain = use(build())
    with tf.Graph().as_default(), harness.amp():
        return plain, use(build())


def train(resource: bool) -> dict[str, Any]:
    """Trains with momentum; what is assigned to a variable must be computed in float32."""

    def build() -> Any:
        x, feed = fed(16, 8)
        prediction = dense(dense(x, 1, resource), 2, resource)
        loss = tf.reduce_mean(tf.square(prediction - tf.constant(values(3, 16, 8))))
        step = v1.train.MomentumOptimizer(0.05, 0.9).minimize(loss)
        return loss, step, feed, v1.global_variables_initializer()

    def use(made: Any) -> Any:
        loss, step, feed, init = made
        with v1.Session() as session:
            session.run(init)
            losses = [session.run([loss, step], feed)[0] for _ in range(15)]
            ran = harness.traced_run(session, [loss, step], feed)
        updates = [n for n in ran.nodes if "Momentum" in ran.nodes[n].op]
        return losses, ran.dtypes("MatMul", "FusedMatMul"), {ran.dtype(n) for n in updates}

    (plain, _, _), (losses, matmuls, updates) = twice(build, use)
    return {
        "first": [plain[0], losses[0]],
        "last": [plain[-1], losses[-1]],
        "matmuls": matmuls,
        "updates": sorted(updates),
    }


def compared(build: Callable[[], Any], sessions: int = 1) -> dict[str, Any]:
    """What a graph gives with and without; `build` makes its fetches, feeds and initializer.

    It runs in some sessions, and must give each time what it gives in one of them without.
    """

    def use(made: Any) -> list[harness.Ran]:
        fetches, feed, init = made
        return [harness.run_new_session(fetches, feed, init=init) for _ in range(sessions)]

    plain, low = twice(build, use)
    errors = [[harness.relative_error(p.values, r.values) for p in plain] for r in low]
    return {"error": max(map(min, errors)), "dtypes": low[0].dtypes("MatMul", "FusedMatMul")}


def case_train_resource_variables() -> dict[str, Any]:
    return train(resource=True)


def case_train_ref_variables() -> dict[str, Any]:
    return train(resource=False)


def case_feed_any_node() -> dict[str, Any]:
    def build() -> Any:
        x, feed = fed(4, 8)
        inner = dense(x, 1)
        return x, feed, inner, tf.identity(dense(inner, 2)), v1.global_variables_initializer()

    def use(made: Any) -> Any:
        _, _, inner, y, init = made
        return harness.run_new_session(y, {inner: values(5, 4, 8)}, init=init)

    plain, low = twice(build, use)
    return {
        "error": harness.relative_error(plain.values, low.values),
        "dtypes": low.dtypes("MatMul", "FusedMatMul"),
        "value_dtype": str(low.values.dtype),
    }


def case_fetch_inner_node() -> dict[str, Any]:
    """A fetched node keeps name, dtype and float32 value."""

    def build() -> Any:
        x, feed = fed(4, 8)
        inner = tf.matmul(x, tf.constant(values(1, 8, 8)), name="inner")
        return [inner, tf.matmul(inner, tf.constant(values(2, 8, 8))) * 2.0], feed

    plain, low = twice(build, lambda made: harness.run_new_session(*made))
    return {
        "exact": bool(np.array_equal(plain.values[0], low.values[0])),
        "inner": low.dtype("inner"),
        "error": harness.relative_error(plain.values[1], low.values[1]),
    }


def case_partial_run() -> dict[str, Any]:
    def build() -> Any:
        x, feed = fed(4, 8)
        late = v1.placeholder(tf.float32, [4, 8])
        first = tf.identity(dense(x, 1))
        second = tf.identity(dense(first + late, 2))
        return x, late, first, second, feed, v1.global_variables_initializer()

    def use(made: Any) -> Any:
        x, late, first, second, feed, init = made
        with v1.Session() as session:
            session.run(init)
            handle = session.partial_run_setup([first, second], [x, late])
            one = session.partial_run(handle, first, feed)
            two = session.partial_run(handle, second, {late: one * 0.5})
            callable_ = session.make_callable(second, [x, late])
            three = callable_(feed[x], one * 0.5)
        return [one, two, three]

    plain, low = twice(build, use)
    return {"error": harness.relative_error(plain, low), "same": bool(np.allclose(low[1], low[2]))}


def case_dynamic_rnn() -> dict[str, Any]:
    """An LSTM over TensorArrays in a v1 while loop of dynamic length, with gradients."""

    def build() -> Any:
        x, feed = fed(4, 6, 8)
        length = v1.placeholder(tf.int32, [])
        weight, bias = variable(1, 16, 32), variable(2, 32)
        steps = tf.TensorArray(tf.float32, 6).unstack(tf.transpose(x, [1, 0, 2]))

        def body(i: Any, c: Any, h: Any, outputs: Any) -> Any:
            gates = tf.nn.bias_add(tf.matmul(tf.concat([steps.read(i), h], 1), weight), bias)
            new, i_gate, f_gate, o_gate = tf.split(gates, 4, axis=1)
            c = tf.sigmoid(f_gate) * c + tf.sigmoid(i_gate) * tf.tanh(new)
            h = tf.sigmoid(o_gate) * tf.tanh(c)
            return i + 1, c, h, outputs.write(i, h)

        zeros = tf.zeros([4, 8])
        outputs = tf.TensorArray(tf.float32, length)
        *_, outputs = tf.while_loop(
            lambda i, *_: i < length, body, [0, zeros, zeros, outputs], name="rnn"
        )
        y = outputs.stack()
        gradients = tf.gradients(tf.reduce_sum(tf.square(y)), v1.trainable_variables())
        fetches = [tf.identity(y), *map(tf.identity, gradients)]
        return fetches, feed | {length: 5}, v1.global_variables_initializer()

    return compared(build)


def case_state_in_ref_variable() -> dict[str, Any]:
    """A state that a step sets and reads again behind that, by a copy of its own or the first."""

    def build() -> Any:
        x, feed = fed(8, 32)
        state, weight = (
            v1.get_variable(name, initializer=values(5, *shape, scale=0.3), use_resource=False)
            for name, shape in (("state", (8, 32)), ("weight", (32, 32)))
        )
        shaped = tf.reshape(tf.reshape(state, [256]), [4, 64])
        step = state.assign(tf.tanh(tf.matmul(state, weight) + x))
        with tf.control_dependencies([step]):
            reads = (state.read_value(), state, tf.reshape(shaped, [8, 32]))
            products = [tf.matmul(read, weight) for read in reads]
            always = tf.reduce_sum(x) < 1e9

        def set_again() -> Any:
            with tf.control_dependencies([v1.assign(state, x)]):
                return tf.matmul(state, weight)

        with tf.control_dependencies(products):
            products.append(tf.cond(always, set_again, lambda: x))
        return [product * 2.0 for product in products], feed, v1.global_variables_initializer()

    # Without, one in 25 of the first sessions reads by the first copy what was set meanwhile.
    return compared(build, sessions=4)


def case_cond() -> dict[str, Any]:
    def build() -> Any:
        x, feed = fed(4, 8)
        left = v1.placeholder(tf.bool, [])
        y = tf.cond(left, lambda: dense(x, 1), lambda: tf.nn.tanh(dense(x, 2)))
        return y, left, feed, v1.global_variables_initializer()

    def use(made: Any) -> Any:
        y, left, feed, init = made
        ran = [harness.run_new_session(y * 2.0, feed | {left: b}, init=init) for b in (True, False)]
        return [r.values for r in ran], ran[0].dtypes("MatMul", "FusedMatMul")

    (plain, _), (low, dtypes) = twice(build, use)
    return {"error": harness.relative_error(plain, low), "dtypes": dtypes}


def case_control_flow_v2() -> dict[str, Any]:
    """Functional While and If in a v1 graph, which TensorFlow lowers before any plugin."""

    def build() -> Any:
        v1.enable_control_flow_v2()
        try:
            x, feed = fed(8, 8)
            weight = variable(1, 8, 8)
            _, y = tf.while_loop(
                lambda i, _: i < 3, lambda i, x: (i + 1, tf.nn.relu(tf.matmul(x, weight))), [0, x]
            )
            y = tf.cond(tf.reduce_sum(y) > 0.0, lambda: tf.matmul(y, weight), lambda: y)
            return tf.identity(y), feed, v1.global_variables_initializer()
        finally:
            v1.disable_control_flow_v2()

    plain, low = twice(build, lambda m: harness.run_new_session(m[0], m[1], init=m[2]))
    return {
        "error": harness.relative_error(plain.values, low.values),
        "dtypes": low.dtypes("MatMul"),
    }


def case_function_in_v1_graph() -> dict[str, Any]:
    def build() -> Any:
        x, feed = fed(4, 8)
        layer = tf.function(lambda t: tf.nn.relu(tf.matmul(t, tf.constant(values(1, 8, 8)))))
        return layer(layer(x)) * 2.0, feed

    plain, low = twice(build, lambda made: harness.run_new_session(*made))
    return {
        "error": harness.relative_error(plain.values, low.values),
        "dtypes": low.dtypes("MatMul", "FusedMatMul"),
    }


def case_compiled_function_in_v1_graph() -> dict[str, Any]:
    """A function for XLA is not inlined; the graph around the call is rewritten."""

    def build() -> Any:
        x, feed = fed(4, 8)
        weight = tf.constant(values(1, 8, 8))
        inner = tf.function(lambda t: tf.nn.relu(t) * 0.5, jit_compile=True)
        return tf.identity(tf.matmul(inner(tf.matmul(x, weight)), weight)), feed

    plain, low = twice(build, lambda made: harness.run_new_session(*made))
    return {
        "error": harness.relative_error(plain.values, low.values),
        "dtypes": low.dtypes("MatMul", "FusedMatMul"),
    }


def case_queue_runners() -> dict[str, Any]:
    def build() -> Any:
        queue = tf.queue.FIFOQueue(8, tf.float32, [4, 8])
        source = tf.constant(values(0, 4, 8)) * 2.0
        runner = v1.train.QueueRunner(queue, [queue.enqueue(source)] * 2)
        v1.train.add_queue_runner(runner)
        return tf.identity(dense(queue.dequeue(), 1)), v1.global_variables_initializer()

    def use(made: Any) -> Any:
        y, init = made
        with v1.Session() as session:
            session.run(init)
            coordinator = v1.train.Coordinator()
            threads = v1.train.start_queue_runners(session, coordinator)
            result = [session.run(y) for _ in range(5)]
            coordinator.request_stop()
            session.run(tf.constant(0))  # the session outlives the request
            coordinator.join(threads, stop_grace_period_secs=5, ignore_live_threads=True)
        return result

    plain, low = twice(build, use)
    return {"error": harness.relative_error(plain, low)}


def _of_server(make_session: Callable[[str], Any]) -> dict[str, Any]:
    server = v1.train.Server.create_local_server()

    def build() -> Any:
        x, feed = fed(4, 8)
        with tf.device("/job:localhost/task:0"):
            return tf.identity(dense(x, 1)), feed, v1.global_variables_initializer()

    def use(made: Any) -> Any:
        y, feed, init = made
        with make_session(server.target) as session:
            session.run(init)
            return harness.traced_run(session, y, feed)

    plain, low = twice(build, use)
    return {
        "error": harness.relative_error(plain.values, low.values),
        "dtypes": low.dtypes("MatMul", "FusedMatMul"),
    }


def case_grpc_server() -> dict[str, Any]:
    return _of_server(v1.Session)


def case_monitored_grpc_server() -> dict[str, Any]:
    return _of_server(lambda target: v1.train.MonitoredTrainingSession(master=target))


def case_many_threads_one_session() -> dict[str, Any]:
    with tf.Graph().as_default(), harness.amp():
        x, feed = fed(4, 8)
        outputs = [tf.identity(dense(x, 10 * i)) for i in range(1, 9)]
        init = v1.global_variables_initializer()
        results: dict[int, Any] = {}
        with v1.Session() as session:
            session.run(init)
            threads = [
                threading.Thread(
                    target=lambda i=i: results.update({i: session.run(outputs[i], feed)})
                )
                for i in range(len(outputs))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            alone = [session.run(y, feed) for y in outputs]
    same = [bool(np.array_equal(results[i], alone[i])) for i in range(len(outputs))]
    return {"same": all(same), "count": len(results)}


def case_monitored_session_and_saver() -> dict[str, Any]:
    directory = tempfile.mkdtemp()
    try:  # as the session's own hook does
        tf.io.write_graph(tf.Graph(), directory, "graph.pbtxt")
    except TypeError as error:
        return {"unsupported": str(error)}

    def build() -> Any:
        x, feed = fed(16, 8)
        loss = tf.reduce_mean(tf.square(dense(dense(x, 1), 2) - 1.0))
        step = v1.train.get_or_create_global_step()
        return loss, v1.train.AdamOptimizer(0.01).minimize(loss, step), feed

    with tf.Graph().as_default(), harness.amp() as installed:
        loss, train_op, feed = build()
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=directory, save_checkpoint_secs=None, save_checkpoint_steps=10
        ) as session:
            losses = [session.run([loss, train_op], feed)[0] for _ in range(20)]
        rewritten = installed.tally.rewritten
    with tf.Graph().as_default():
        loss, _, feed = build()
        saver = v1.train.Saver()
        with v1.Session() as session:
            saver.restore(session, tf.train.latest_checkpoint(directory))
            restored = session.run(loss, feed)
            dtypes = {v.dtype.base_dtype.name for v in v1.trainable_variables()}
    return {
        "losses": [losses[0], losses[-1], restored],
        "rewritten": rewritten,
        "dtypes": sorted(dtypes),
    }


def case_v1_saved_model() -> dict[str, Any]:
    directory = str(Path(tempfile.mkdtemp()) / "model")
    with tf.Graph().as_default():
        x, feed = fed(4, 8)
        y = tf.identity(dense(x, 1), name="y")
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            plain = session.run(y, feed)
            v1.saved_model.simple_save(session, directory, {"x": x}, {"y": y})
    with tf.Graph().as_default(), harness.amp(), v1.Session() as session:
        v1.saved_model.loader.load(session, ["serve"], directory)
        low = harness.traced_run(session, "y:0", {"Placeholder:0": values(0, 4, 8)})
    return {
        "error": harness.relative_error(plain, low.values),
        "dtypes": low.dtypes("MatMul", "FusedMatMul"),
    }


def case_uninstalled() -> dict[str, Any]:
    """After the switch-off nothing is rewritten; a second switch-on registers nothing again."""

    def run() -> list[str]:
        with tf.Graph().as_default():
            x, feed = fed(4, 8)
            y = tf.matmul(x, tf.constant(values(1, 8, 8))) * 2.0
            return harness.run_new_session(y, feed).dtypes("MatMul")

    with harness.amp():
        on = run()
    off = run()
    with harness.amp("float16"):
        again = run()
    return {"on": on, "off": off, "again": again, "init": v1.Session.__init__.__module__}


def case_both_hosts() -> dict[str, Any]:
    """A tf.function beside a session: each graph is rewritten by its own host, once."""
    with harness.amp() as installed:
        with tf.Graph().as_default():
            x, feed = fed(4, 8)
            y = tf.matmul(x, tf.constant(values(1, 8, 8))) * 2.0
            session_casts = harness.run_new_session(y, feed).casts("bfloat16")
        by_session = installed.tally.rewritten
        layer = tf.function(lambda t: tf.matmul(t, t) * 2.0)
        layer(tf.ones([8, 8]))
        return {
            "session_casts": session_casts,
            "by_session": by_session,
            "by_function": installed.tally.rewritten - by_session,
        }


CASES = {name[5:]: case for name, case in list(globals().items()) if name.startswith("case_")}


def main(*names: str) -> None:
    # Version 1 graphs, but with eager execution left on, for the other host.
    v1.disable_control_flow_v2()
    logging.getLogger("tf_amp").setLevel(logging.ERROR)
    for name in names or CASES:
        harness.report(name, **CASES[name]())
