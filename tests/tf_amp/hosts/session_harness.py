"""What the scripts of the session tests share: AMP on and off, and dtypes of what really ran."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tf_amp import installation
from tf_amp.env_config import read_settings

v1 = tf.compat.v1
PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"


class Lines(logging.Handler):
    """Keeps every message of the project's loggers."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.records: list[logging.LogRecord] = []
        logging.getLogger("tf_amp").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def at(self, level: int) -> list[str]:
        return [r.getMessage() for r in self.records if r.levelno == level]


class Ran(NamedTuple):
    """Values of a run, and the nodes of the graphs that computed them."""

    values: Any
    nodes: dict[str, Any]

    def dtype(self, name: str) -> str:
        """The dtype a node ran in; `a+b` is a node that may have been merged into the next."""
        contraction, _, bias = name.partition("+")
        if bias and contraction not in self.nodes:
            name = contraction.replace("Conv2D", bias)
            if "Conv2DWithBias" not in self.nodes[name].op:
                raise KeyError(f"{contraction} ran neither alone nor with its bias")
        node = self.nodes[name.removesuffix(f"+{bias}")]
        key = "T" if "T" in node.attr else "dtype"
        return tf.as_dtype(node.attr[key].type).name

    def dtypes(self, *ops: str) -> list[str]:
        """Sorted `op:dtype` of the nodes of these ops, whatever oneDNN has renamed them to."""
        plain = {name: _plain(node.op) for name, node in self.nodes.items()}
        return sorted(f"{plain[n]}:{self.dtype(n)}" for n in self.nodes if plain[n] in ops)

    def fused(self) -> list[str]:
        """The fused nodes, as `op[steps]:dtype`."""
        found = []
        for name, node in self.nodes.items():
            steps = [s.decode() for s in node.attr["fused_ops"].list.s]
            if mode := node.attr["activation_mode"].s.decode():
                steps.append(mode)
            if steps:
                found.append(f"{_plain(node.op)}[{','.join(steps)}]:{self.dtype(name)}")
        return sorted(found)

    def casts(self, to: str) -> int:
        wanted = tf.as_dtype(to).as_datatype_enum
        return sum(n.op == "Cast" and n.attr["DstT"].type == wanted for n in self.nodes.values())


def _plain(op: str) -> str:
    for prefix in ("_MklNative", "_Mkl", "_"):
        op = op.removeprefix(prefix)
    return op


def settings(dtype: str = "bfloat16", **options: str) -> Mapping[str, str]:
    """The environment that asks for a rewrite to `dtype` on this CPU, whatever it is good at.

    Graphs of tests are too small for low precision to pay: the rules that weigh that are off.
    """
    return {
        "TF_ENABLE_AUTO_MIXED_PRECISION_GRAPH_REWRITE": "1",
        PREFIX + "DTYPE": dtype,
        PREFIX + "IGNORE_PERFORMANCE": "1",
        PREFIX + "RULES_DISABLE": "cost,cast-cut",
        **{PREFIX + name: value for name, value in options.items()},
    }


@contextlib.contextmanager
def amp(dtype: str = "bfloat16", **options: str) -> Iterator[Any]:
    """Switches the rewrite on for the block."""
    installed = installation.install(read_settings(settings(dtype, **options)), source="test")
    try:
        yield installed
    finally:
        installation.uninstall()


def plain_config(**fields: Any) -> Any:
    """A config that leaves the graph as it was written, apart from the plugin's work."""
    config = v1.ConfigProto(**fields)
    rewrite = config.graph_options.rewrite_options
    rewrite.remapping = rewrite.arithmetic_optimization = rewrite.OFF
    rewrite.min_graph_nodes = -1
    config.graph_options.optimizer_options.opt_level = -1
    return config


def traced_run(session: Any, fetches: Any, feed: Any = None) -> Ran:
    metadata = v1.RunMetadata()
    options = v1.RunOptions(output_partition_graphs=True)
    values = session.run(fetches, feed, options=options, run_metadata=metadata)
    return Ran(values, {n.name: n for g in metadata.partition_graphs for n in g.node})


def run_new_session(fetches: Any, feed: Any = None, config: Any = None, init: Any = None) -> Ran:
    """Runs in a session of its own, after the initializer; variables start from fixed seeds."""
    with v1.Session(config=config) as session:
        if init is not None:
            session.run(init)
        return traced_run(session, fetches, feed)


def relative_error(expected: Any, got: Any) -> float:
    """Largest relative error of two structures of arrays, each measured by its Euclidean norm."""
    pairs = zip(tf.nest.flatten(expected), tf.nest.flatten(got), strict=True)
    return max(
        float(np.linalg.norm(x - y) / max(1e-6, np.linalg.norm(x)))
        for x, y in ((np.float64(p).ravel(), np.float64(q).ravel()) for p, q in pairs)
    )


def report(name: str, **facts: Any) -> None:
    """Prints one line that the test on the other side reads."""
    print("@@" + json.dumps({"name": name, **facts}, default=str), flush=True)
