"""What can go wrong with a session's graph, and what the user is then told: one subprocess."""

from __future__ import annotations

import dataclasses
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import session_harness as harness
import tensorflow as tf
from session_peer_graphs import fed, values

import graph_passes
from graph_passes import pipeline
from tf_amp.hosts import session, session_config

v1 = tf.compat.v1
LINES = harness.Lines()


def small_graph() -> tuple[Any, Any]:
    x, feed = fed(4, 8)
    return tf.nn.relu(tf.matmul(x, tf.constant(values(1, 8, 8)))) * 2.0, feed


def run_small(config: Any = None) -> Any:
    with tf.Graph().as_default():
        return harness.run_new_session(*small_graph(), config=config)


@contextmanager
def lines_of(level: int) -> Iterator[list[str]]:
    LINES.records.clear()
    said: list[str] = []
    yield said
    said.extend(LINES.at(level))


def broken(target: str, replacement: Any) -> dict[str, Any]:
    """Runs with one function replaced; says what was logged and whether the result is float32's."""
    expected = run_small()
    with harness.amp(), mock.patch(target, replacement), lines_of(logging.ERROR) as said:
        got = run_small()
    return {
        "exact": bool(np.array_equal(expected.values, got.values)),
        "dtypes": got.dtypes("MatMul"),
        "errors": said,
        "dumps": [
            sorted({p.name.split("_")[1] for p in Path(word.rstrip(".")).glob("graphdef_*.pb")})
            for line in said
            for word in line.split()
            if word.startswith("/")
        ],
    }


def raising(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("made by the test")


def case_pass_raises() -> dict[str, Any]:
    return broken("graph_passes.rewrite_graph_def", raising)


def case_unfuse_raises() -> dict[str, Any]:
    return broken("tf_amp.hosts.session.unfuse", raising)


def case_record_raises() -> dict[str, Any]:
    return broken("tf_amp.installation.Installation.record", raising)


def case_interrupt() -> dict[str, Any]:
    """Control-C while a graph is planned ends the session's call, as it does without the host."""

    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    # A process started in the background ignores the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with harness.amp(), lines_of(logging.WARNING) as said:
        raised = False
        try:
            with mock.patch("graph_passes.rewrite_graph_def", interrupted):
                run_small()
            time.sleep(1)
        except KeyboardInterrupt:
            raised = True
    return {"raised": raised, "said": said, "dtypes": run_small().dtypes("MatMul")}


def case_pass_makes_invalid_graph() -> dict[str, Any]:
    apply_plan = pipeline.apply_plan

    def wrong(*args: Any) -> Any:
        applied = apply_plan(*args)
        proto = type(applied.proto)()
        proto.CopyFrom(applied.proto)
        node = next(node for node in proto.node if node.op == "Cast")
        node.attr["DstT"].type = tf.float64.as_datatype_enum
        return dataclasses.replace(applied, proto=proto)

    return broken("graph_passes.pipeline.apply_plan", wrong)


def case_pass_returns_nothing() -> dict[str, Any]:
    """A graph without nodes would be taken by TensorFlow, and fail when run."""

    def emptied(graph: Any, config: Any, **_: Any) -> Any:
        result = graph_passes.RewriteResult(
            proto=type(graph)(),
            report=graph_passes.Report(target_dtype="bfloat16", device="CPU", total_nodes=0),
            changed=True,
        )
        assert config.target_dtype == "bfloat16"
        return result

    return broken("graph_passes.rewrite_graph_def", emptied)


def case_obstacles() -> dict[str, Any]:
    """A config that keeps plugins from being called is said once, with the field and a remedy."""
    configs = []
    for _ in range(2):
        meta, plugins, pruned = v1.ConfigProto(), v1.ConfigProto(), v1.ConfigProto()
        meta.graph_options.rewrite_options.disable_meta_optimizer = True
        rewrite = plugins.graph_options.rewrite_options
        rewrite.use_plugin_optimizers = rewrite.OFF
        pruned.graph_options.place_pruned_graph = True
        configs += [meta, plugins, pruned]
    with harness.amp(), lines_of(logging.WARNING) as said:
        dtypes = [run_small(config).dtypes("MatMul")[0] for config in configs]
    return {"said": said, "dtypes": sorted(set(dtypes))}


def case_upstream_option() -> dict[str, Any]:
    """TensorFlow's own pass is off in a session of ours, and the caller's config stays his own."""
    config = v1.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    rewrite.auto_mixed_precision_onednn_bfloat16 = rewrite.ON
    rewrite.optimizers.extend(["auto_mixed_precision_onednn_bfloat16", "constfold"])
    before = config.SerializeToString(deterministic=True)
    with harness.amp(), lines_of(logging.INFO) as said:
        with tf.Graph().as_default(), v1.Session(config=config) as made:
            inside = made._config.graph_options.rewrite_options
            options = [inside.auto_mixed_precision_onednn_bfloat16, list(inside.optimizers)]
        nodes = run_small(config).nodes
    with tf.Graph().as_default(), v1.Session(config=config) as made:
        after = made._config.graph_options.rewrite_options.auto_mixed_precision_onednn_bfloat16
    return {
        "untouched": before == config.SerializeToString(deterministic=True),
        "options": options,
        "after": after,
        "off": rewrite.OFF,
        "on": rewrite.ON,
        "said": [line for line in said if "own" in line],
        "casts": sum(node.op == "Cast" for node in nodes.values()),
    }


def case_server_target() -> dict[str, Any]:
    """A server that may be in another process is named once; one of this process is not."""
    server = v1.train.Server.create_local_server()
    with harness.amp(), lines_of(logging.WARNING) as said, tf.Graph().as_default():
        for target in (server.target, server.target, v1.train.Server.create_local_server().target):
            v1.Session(target).close()
        v1.Session().close()
    return {"said": [line for line in said if "server" in line], "target": server.target}


def case_gpu_layout() -> dict[str, Any]:
    rewrite = v1.ConfigProto().graph_options.rewrite_options
    return {
        "off": rewrite.OFF,
        "layout": {
            device: session_config.adjusted(
                v1.ConfigProto(), device
            ).graph_options.rewrite_options.layout_optimizer
            for device in ("CPU", "GPU")
        },
    }


def case_other_device() -> dict[str, Any]:
    """A graph reaches the registration of each device it uses; one of them rewrites it."""
    with harness.amp() as installed:
        host = session.SessionHost(installed, session.graph_plugin(tf))
        graph = tf.Graph()
        with graph.as_default():
            small_graph()
        data = graph.as_graph_def().SerializeToString()
        item = session.GraphItem("GPU", data, (), ("mul",))
        other = host.rewrite(item)
        body = graph.as_graph_def()
        body.node.add(name="argument", op="_Arg").attr["T"].type = 1
        function = host.rewrite(item._replace(device_type="CPU", graph=body.SerializeToString()))
        return {"other": other, "function": function, "recorded": installed.tally.rewritten}


def case_remapper_leaves_nameless_op() -> dict[str, Any]:
    """TensorFlow 2.21 breaks MatMul + BiasAdd + AddV2 + Relu on a CPU; the user hears of it."""
    config = v1.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    rewrite.remapping = rewrite.OFF
    dtypes = []
    with harness.amp(), lines_of(logging.WARNING) as said:
        for given in (None, None, config):
            with tf.Graph().as_default():
                x, feed = fed(4, 8)
                y = tf.matmul(x, tf.constant(values(1, 8, 8)), name="product")
                y = tf.nn.relu(tf.nn.bias_add(y, tf.constant(values(2, 8))) + x)
                dtypes += harness.run_new_session(y * 2.0, feed, config=given).dtypes("MatMul")
    return {"dtypes": dtypes, "said": said}


def case_arithmetic_optimizer_takes_a_read_node_away() -> dict[str, Any]:
    """TensorFlow 2.21 breaks the last of a stack of reshaped tensors, reshaped once more."""
    config = v1.ConfigProto()
    rewrite = config.graph_options.rewrite_options
    rewrite.arithmetic_optimization = rewrite.OFF
    dtypes = []
    with harness.amp() as installed, lines_of(logging.WARNING) as said:
        for given in (None, None, config):
            with tf.Graph().as_default():
                x, feed = fed(16, 8)
                layers = [tf.reshape(one, [4, 4, 8]) for one in (x, tf.nn.relu(x))]
                last = tf.reshape(tf.stack(layers)[-1], [16, 8])
                y = tf.matmul(last, tf.constant(values(1, 8, 8)))
                dtypes += harness.run_new_session(y * 2.0, feed, config=given).dtypes("MatMul")
        failed = installed.status().graphs_failed
    return {"dtypes": dtypes, "said": said, "failed": failed, "errors": LINES.at(logging.ERROR)}


def case_late() -> dict[str, Any]:
    """A session that ran before the switch-on keeps what it has run; the user is told."""
    with tf.Graph().as_default():
        y, feed = small_graph()
        with v1.Session() as old:
            before = harness.traced_run(old, y, feed).dtypes("MatMul")
            with lines_of(logging.WARNING) as said, harness.amp():
                plain = old.run(y, feed)
                new = harness.run_new_session(y, feed)
    return {
        "before": before,
        "kept": bool(np.isfinite(plain).all()),
        "new": new.dtypes("MatMul"),
        "said": said,
    }


def case_wrapped_by_others() -> dict[str, Any]:
    """Somebody wraps the session's constructor over ours: switching off must not undo that."""
    from tensorflow.python.client import session as session_lib

    original = session_lib.BaseSession.__init__
    with harness.amp():
        ours = session_lib.BaseSession.__init__

        def theirs(self: Any, *args: Any, **kwargs: Any) -> None:
            ours(self, *args, **kwargs)

        session_lib.BaseSession.__init__ = theirs
    kept = session_lib.BaseSession.__init__ is theirs
    config = v1.ConfigProto()
    with tf.Graph().as_default(), v1.Session(config=config) as made:
        untouched = made._config is config
    session_lib.BaseSession.__init__ = original
    return {"kept": kept, "untouched": untouched}


CASES = {name[5:]: case for name, case in list(globals().items()) if name.startswith("case_")}


def main(*names: str) -> None:
    logging.getLogger("tf_amp").setLevel(logging.INFO)
    for name in names or CASES:
        harness.report(name, **CASES[name]())
