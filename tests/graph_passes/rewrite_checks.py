"""What a rewrite must keep of a program, judged by running it before and after."""

from __future__ import annotations

import dataclasses
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import tensorflow as tf
from decisions import decisions_of
from graph_diff import all_nodes
from programs import Program
from random_graphs import shuffled
from tensorflow.core.framework import graph_pb2, node_def_pb2, types_pb2
from tensorflow.python.framework import tensor_util

from graph_passes import (
    PrecisionConfig,
    RewriteResult,
    rewrite_function_def,
    rewrite_graph_def,
)

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-20}
"""Of float32 what ops do that compute the same in another order."""
ROUNDINGS = 64
"""Roundings to the target dtype that may follow one another in these programs, in all."""
EXACT = 2e-4
"""What other float32 ops may change, as a part of the largest value."""


_COPY = re.compile("_amp_[0-9a-f]+")


class BrokenPromiseError(AssertionError):
    """A rewrite has broken a promise; `what` is the promise in a word."""

    def __init__(self, what: str, how: str) -> None:
        super().__init__(f"{what}: {how}")
        self.what = what


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A rewritten program.

    Attributes:
        graph_def: its graph.
        changed: whether that is another than before.
        units: those that were found in it.
        kept: the nodes of which the report says why they stay as they are.
    """

    graph_def: graph_pb2.GraphDef
    changed: bool
    units: tuple[str, ...]
    kept: frozenset[str] = frozenset()


Rewrite = Callable[[Program, PrecisionConfig], Rewritten]


def check_rewrite(
    program: Program,
    config: PrecisionConfig,
    expected: Mapping[str, np.ndarray],
    rewrite: Rewrite,
    compare: Callable[[Mapping[str, np.ndarray]], None] | None = None,
) -> Rewritten:
    """Rewrites a program and compares with what it gave before.

    The same ops in float32 must give the same; in the target dtype, the same but for rounding.

    Args:
        program: what is rewritten.
        config: for which dtype and device.
        expected: what `program.run` gives of the original.
        rewrite: `rewrite_graph` or `rewrite_called_function`.
        compare: checks what the rewritten program gives. None allows for some roundings.

    Returns:
        The result of the rewrite.

    Raises:
        BrokenPromiseError: a promise is not kept.
    """
    before = program.graph_def.SerializeToString(deterministic=True)
    result = _silent(rewrite, program, config)
    if program.graph_def.SerializeToString(deterministic=True) != before:
        raise BrokenPromiseError("input", "the caller's graph was changed")
    if result.changed:
        _check_kept(program, result.graph_def)
        if compare is None:
            rounding = ROUNDINGS * ROUNDING[config.target_dtype]
            _compare(program, result.graph_def, expected, rounding, "values in the target dtype")
        else:
            compare(_run(program, result.graph_def))
        if config.converts and not _has_dtype(program.graph_def, config.target):
            rules = config.disabled_rules | {"constant-folding"}
            unrounded = dataclasses.replace(config, disabled_rules=rules)
            exact = _silent(rewrite, program, unrounded).graph_def
            exact = in_float32(exact, config.target)
            is_half = _has_dtype(program.graph_def, types_pb2.DT_HALF)
            rounding = ROUNDINGS * ROUNDING["float16"] if is_half else EXACT
            _compare(program, exact, expected, rounding, "values in float32")
    _check_order(program, config, result, rewrite)
    return result


def rewrite_graph(program: Program, config: PrecisionConfig) -> Rewritten:
    """Rewrites the graph with the functions in its library."""
    result = rewrite_graph_def(
        program.graph_def,
        config,
        preserve=program.preserve,
        shapes=program.shapes,
        function_shapes=program.function_shapes,
    )
    _require_success(result)
    return Rewritten(result.graph_def, result.changed, result.report.fused_units, _kept(result))


def rewrite_called_function(program: Program, config: PrecisionConfig) -> Rewritten:
    """Rewrites the one function that the graph calls, by itself."""
    graph_def = graph_pb2.GraphDef()
    graph_def.CopyFrom(program.graph_def)
    (call,) = (node for node in graph_def.node if node.op.endswith("PartitionedCall"))
    library = {f.signature.name: f for f in program.graph_def.library.function}
    name = call.attr["f"].func.name
    result = rewrite_function_def(
        library[name],
        config,
        library=library.get,
        shapes=program.function_shapes(name),
        function_shapes=program.function_shapes,
    )
    _require_success(result)
    for function in graph_def.library.function:
        if function.signature.name == name:
            function.CopyFrom(result.proto)
    graph_def.library.function.extend(result.extra_functions)
    return Rewritten(graph_def, result.changed, result.report.fused_units, _kept(result))


def _kept(result: RewriteResult) -> frozenset[str]:
    return frozenset(d.node for d in decisions_of(result.report) if not d.converted)


def _require_success(result: RewriteResult) -> None:
    if result.failure is not None:
        raise BrokenPromiseError("given up", result.failure)


def _silent(rewrite: Rewrite, program: Program, config: PrecisionConfig) -> Rewritten:
    """Rewrites; what is raised or warned of is a broken promise."""
    try:
        with _no_warnings():
            return rewrite(program, config)
    except BrokenPromiseError:
        raise
    except Exception as error:
        raise BrokenPromiseError("raised", f"{type(error).__name__}: {error}") from error


@contextmanager
def _no_warnings() -> Iterator[None]:
    """What the package warns of is an error: it warns of its own faults only."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("graph_passes")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    if records:
        why = records[0].exc_info[1] if records[0].exc_info else ""
        raise BrokenPromiseError("warned", f"{records[0].getMessage()} {why!r}")


def _check_order(
    program: Program, config: PrecisionConfig, result: Rewritten, rewrite: Rewrite
) -> None:
    mixed = dataclasses.replace(program, graph_def=shuffled(program.graph_def, 7))
    for function in mixed.graph_def.library.function:
        nodes = list(function.node_def)
        random.Random(7).shuffle(nodes)
        del function.node_def[:]
        function.node_def.extend(nodes)
    other = _silent(rewrite, mixed, config)
    left, right = (_texts(graph_def) for graph_def in (result.graph_def, other.graph_def))
    differing = sorted(
        name for name in left.keys() | right.keys() if left.get(name) != right.get(name)
    )
    if differing:
        raise BrokenPromiseError("order", f"{len(differing)} nodes differ, such as {differing[:3]}")
    units = Counter(result.units), Counter(other.units)
    if units[0] != units[1]:
        raise BrokenPromiseError("order", f"units: {units[0] - units[1]} and {units[1] - units[0]}")


def _texts(graph_def: graph_pb2.GraphDef) -> dict[tuple[str, str], list[str]]:
    """The nodes as text; the name of a copy of a function tells in which order its nodes are.

    A function has several copies where its calls came out different: their nodes stand together.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for (function, name), node in all_nodes(graph_def).items():
        found.setdefault((_COPY.sub("", function), name), []).append(_COPY.sub("", str(node)))
    return {place: sorted(texts) for place, texts in found.items()}


def _check_kept(program: Program, graph_def: graph_pb2.GraphDef) -> None:
    before, after = program.nodes, {node.name: node for node in graph_def.node}
    if len(after) != len(graph_def.node):
        raise BrokenPromiseError("names", "two nodes have one name")
    for reference in program.preserve:
        name = reference.partition(":")[0]
        if name not in after:
            raise BrokenPromiseError("preserved", f"{name} is gone")
        if _types(before[name]) != _types(after[name]) or before[name].op != after[name].op:
            raise BrokenPromiseError("preserved", f"{name} is another node")
    for name in before.keys() & after.keys():
        if before[name].device != after[name].device:
            raise BrokenPromiseError("device", f"{name} is on {after[name].device!r}")
        lost = {i for i in before[name].input if i[0] == "^"} - set(after[name].input)
        if lost:
            raise BrokenPromiseError("control inputs", f"{name} waits no more for {sorted(lost)}")


def _types(node: node_def_pb2.NodeDef) -> dict[str, object]:
    return {k: v.type for k, v in node.attr.items() if v.WhichOneof("value") == "type"}


def _run(program: Program, graph_def: graph_pb2.GraphDef) -> dict[str, np.ndarray]:
    try:
        return program.run(graph_def)
    except Exception as error:
        raise BrokenPromiseError("runs", f"{type(error).__name__}: {str(error)[:300]}") from error


def _compare(
    program: Program,
    graph_def: graph_pb2.GraphDef,
    expected: Mapping[str, np.ndarray],
    rounding: float,
    what: str,
) -> None:
    found = _run(program, graph_def)
    floats = [v for v in expected.values() if v.dtype.kind == "f" and v.size]
    largest = max(
        (float(np.nanmax(np.abs(v[np.isfinite(v)]), initial=0)) for v in floats), default=0
    )
    for name, old in expected.items():
        new = found[name]
        if new.dtype != old.dtype:
            raise BrokenPromiseError("dtype", f"{name} is {new.dtype}, was {old.dtype}")
        if new.shape != old.shape:
            raise BrokenPromiseError("shape", f"{name} is {new.shape}, was {old.shape}")
        if old.dtype.kind != "f":
            if not np.array_equal(new, old):
                raise BrokenPromiseError("values", f"{name} is {new}, was {old}")
            continue
        is_count = name.startswith("variable") and old.ndim == 0
        finite = np.isfinite(old)
        scale = float(np.abs(old[finite]).max(initial=0)) + 0.1 * largest
        off = np.abs(np.where(finite, new.astype(np.float64) - old, 0)).max(initial=0)
        if not (off <= (0 if is_count else rounding * scale)):
            kind = "effects" if is_count else what
            raise BrokenPromiseError(kind, f"{name} is off by {off:.3g} of {scale:.3g}")
        if not np.array_equal(np.isnan(new), np.isnan(old)):
            raise BrokenPromiseError("finite", f"{name} has {np.isnan(new).sum()} NaN")


def _has_dtype(graph_def: graph_pb2.GraphDef, dtype: int) -> bool:
    bodies = [graph_def.node, *(f.node_def for f in graph_def.library.function)]
    return any(
        value.type == dtype or dtype in value.list.type
        for nodes in bodies
        for node in nodes
        for value in node.attr.values()
    )


def in_float32(graph_def: graph_pb2.GraphDef, target: int) -> graph_pb2.GraphDef:
    """A rewritten graph with all that is in the target dtype back in float32."""
    result = graph_pb2.GraphDef()
    result.CopyFrom(graph_def)
    float32 = types_pb2.DT_FLOAT
    for function in result.library.function:
        for arg in (*function.signature.input_arg, *function.signature.output_arg):
            if arg.type == target:
                arg.type = float32
    for nodes in (result.node, *(f.node_def for f in result.library.function)):
        for node in nodes:
            for value in node.attr.values():
                if value.type == target:
                    value.type = float32
                for index, dtype in enumerate(value.list.type):
                    value.list.type[index] = float32 if dtype == target else dtype
            if node.op == "Const" and node.attr["value"].tensor.dtype == target:
                array = tensor_util.MakeNdarray(node.attr["value"].tensor).astype(np.float32)
                node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(array))
    return result
