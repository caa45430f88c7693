"""The inside of a converted model beside that of the original: products, and ends of regions."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from tensorflow.core.framework import types_pb2
from tensorflow.core.framework.function_pb2 import FunctionDef

from graph_passes import PrecisionConfig, load_op_lists
from graph_passes.ir.eligibility import node_name
from graph_passes.ir.function_references import called_functions
from graph_passes.ir.view import view_body
from graph_passes.ops.node_types import NodeTypeTable
from tf_amp.comparison.callables import Arrays, Signature
from tf_amp.comparison.output_figures import OutputFigures, Sums
from tf_amp.comparison.steps import fed, step_of
from tf_amp.diagnosis.recording import Key, Turn, float32_of, traced_name

_LOW = (types_pb2.DT_HALF, types_pb2.DT_BFLOAT16)
_NO_RESULTS = ("Const", "ReadVariableOp")

Library = Mapping[str, FunctionDef]


def boundary_figures(
    key: str, one: Signature, other: Signature, samples: Iterable[Arrays]
) -> tuple[list[OutputFigures], int]:
    """Runs a signature of both models and compares what its converted regions make.

    Looked at are the products in low precision, and what a Cast to float32 reads: there a region
    ends. Each is compared with the tensor of the same name in the original; what a unit that was
    replaced as a whole gives, with the node after which the unit is named. The tensors of one
    sample are on disk meanwhile, not in memory.

    Args:
        key: the signature's key.
        one: the signature of the original.
        other: that of the converted model.
        samples: the inputs.

    Returns:
        The figures, in the order of execution, and how many boundaries have no tensor of that name
        and shape in the original.

    Raises:
        DiagnosisError: a model cannot be run so.
    """
    left, right = step_of(one), step_of(other)
    originals, converted = left.library(), right.library()
    pairs, unmatched = _pairs(originals, left.name, converted, right.name)
    wanted = {original for original, _ in pairs.values()}
    sums: dict[Key, Sums] = {}
    unlike: set[Key] = set()
    with tempfile.TemporaryDirectory(prefix="tf-amp-") as folder:
        for sample in samples:
            files: dict[tuple[Key, Turn], Path] = {}

            def keep(
                tensor: Key,
                turn: Turn,
                values: np.ndarray,
                files: dict[tuple[Key, Turn], Path] = files,
            ) -> None:
                file = files[tensor, turn] = Path(folder, f"{len(files)}.npy")
                np.save(file, values)

            def judge(
                tensor: Key,
                turn: Turn,
                values: np.ndarray,
                files: Mapping[tuple[Key, Turn], Path] = files,
            ) -> None:
                file = files.get((pairs[tensor][0], turn))
                right_values = None if file is None else np.load(file)
                if right_values is None or right_values.shape != values.shape:
                    unlike.add(tensor)
                    return
                added = sums.setdefault(tensor, Sums(ranked=False))
                added.add(right_values.astype(np.float64), values.astype(np.float64))

            fed(left, one, sample).record(originals, float32_of(wanted), keep)
            fed(right, other, sample).record(
                converted, lambda tensor, dtype: dtype in _LOW and tensor in pairs, judge
            )
    found = [
        added.figures(key, f"{node}:{port}" if port else node, pairs[function, node, port][1])
        for (function, node, port), added in sums.items()
    ]
    return found, unmatched + len(unlike - sums.keys())


def _pairs(
    originals: Library, original_main: str, converted: Library, converted_main: str
) -> tuple[dict[Key, tuple[Key, str]], int]:
    """Each boundary -> the tensor of the original and its op, and how many have none."""
    types = NodeTypeTable(lambda op: None if (f := converted.get(op)) is None else f.signature)
    products = load_op_lists(PrecisionConfig(target_dtype="bfloat16", device="GPU")).ops("allow")
    found: dict[Key, tuple[Key, str]] = {}
    alone: set[Key] = set()
    for low, original in _function_pairs(originals, original_main, converted, converted_main):
        view = view_body(converted[low], node_types=types)
        ops = {node.name: node.op for node in originals[original].node_def}
        ends = _unit_ends(converted[low], ops)
        made_by = {node.name: node.op for node in converted[low].node_def}
        for node in converted[low].node_def:
            if node.op == "Cast" and node.attr["DstT"].type == types_pb2.DT_FLOAT:
                if node.attr["SrcT"].type not in _LOW:
                    continue
                name, port = view.split(node.input[0])
            elif node.op in products and node.attr["T"].type in _LOW:
                name, port = node.name, 0
            else:
                continue
            unit = "" if name in ops else _replaced(name, ops)
            name = ends.get(unit, name)
            tensor = (traced_name(low), name, port)
            if made_by.get(name, "Const") in _NO_RESULTS:
                continue
            if name in ops:
                found[tensor] = (traced_name(original), name, port), ops[name]
            elif unit in ends:
                found[tensor] = (traced_name(original), unit, 0), ops[unit]
            else:
                alone.add(tensor)
    return found, len(alone)


def _unit_ends(function: FunctionDef, ops: Mapping[str, str]) -> dict[str, str]:
    """Node that a unit replaced -> the node of the unit that others read, where that is one."""
    read: dict[str, set[str]] = {}
    for node in function.node_def:
        for name in map(node_name, node.input):
            unit = _replaced(name, ops)
            if unit and name not in ops and not node.name.startswith(f"{unit}/"):
                read.setdefault(unit, set()).add(name)
    return {unit: min(names) for unit, names in read.items() if len(names) == 1}


def _replaced(name: str, ops: Mapping[str, str]) -> str:
    """The node of the original in whose place a unit's node is: units are named after it."""
    while "/" in name:
        name = name.rpartition("/")[0]
        if name in ops:
            return name
    return ""


def _function_pairs(
    originals: Library, original_main: str, converted: Library, converted_main: str
) -> Iterator[tuple[str, str]]:
    """Each converted function with the one it was: those that nodes of one name call."""
    pending, seen = [(converted_main, original_main)], {converted_main}
    for low, original in pending:
        yield low, original
        nodes = {node.name: node for node in originals[original].node_def}
        for node in converted[low].node_def:
            if node.name in nodes:
                called = [
                    [name for name in called_functions(one) if name in library]
                    for one, library in ((node, converted), (nodes[node.name], originals))
                ]
                pairs = [pair for pair in zip(*called, strict=False) if pair[0] not in seen]
                pending += pairs
                seen.update(name for name, _ in pairs)
