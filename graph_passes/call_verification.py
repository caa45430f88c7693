"""Post-conditions of a rewritten call tree, read back from its bodies."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from tensorflow.core.framework import function_pb2, node_def_pb2, op_def_pb2

from graph_passes.call_graph import CallKind, Graph, Library, Region, function_names, kinds_with
from graph_passes.kinds import Kind, KindTable
from graph_passes.verification import VerificationError

_UNKNOWN = -1
"""Stands for the dtype of what an op makes that this TensorFlow does not know."""


def verify_calls(
    root: Region,
    called: Mapping[str, function_pb2.FunctionDef],
    library: Library,
) -> None:
    """Checks a call tree whose bodies are functions.

    Each calling node has the dtypes of the functions that it names, arguments and results of
    every body have the dtypes of its signature, and within each body the two ends of every edge
    agree.

    Args:
        root: the tree.
        called: the functions of the tree by name.
        library: gives any other function by name.

    Raises:
        VerificationError: a call or an edge does not agree. The message names the node.
    """
    kinds = kinds_with(library)
    checked: set[str] = set()
    for region in root.walk():
        if not region.is_main:
            name = region.proto.signature.name  # type: ignore[union-attr]
            if name in checked:
                continue  # calls share the bodies of equal functions, and what those call
            checked.add(name)
        nodes = {node.name: node for node in region.nodes}
        if len(nodes) < len(region.nodes):
            raise VerificationError("two nodes have the same name")
        _Body(region.proto, nodes, kinds).check()
        for call in region.calls:
            node = nodes[call.node]
            for attr, _, name in function_names(node, call.kind):
                _check_call(node, call.kind, attr, called[name].signature)


class _Body:
    """What the nodes of one body make and take."""

    def __init__(
        self, proto: Graph, nodes: Mapping[str, node_def_pb2.NodeDef], table: KindTable
    ) -> None:
        self._nodes = nodes
        self._kinds = dict(zip(nodes, table.kinds_of([*nodes.values()]), strict=True))
        self._made: dict[str, int] = {}  # name of a tensor -> its dtype
        self._results: dict[str, tuple[str, int]] = {}  # of a function: the tensor, the dtype
        is_function = isinstance(proto, function_pb2.FunctionDef)
        for name, kind in self._kinds.items():
            for ending, dtype in _outputs(kind, is_function):
                self._made[name + ending] = dtype
        if is_function:
            signature = proto.signature  # type: ignore[union-attr]
            self._made.update((arg.name, arg.type) for arg in signature.input_arg)
            # get: [] would write to a map that lacks the key.
            ret = proto.ret.get  # type: ignore[union-attr]
            self._results = {a.name: (ret(a.name, ""), a.type) for a in signature.output_arg}

    def check(self) -> None:
        """Checks the two ends of every edge.

        Raises:
            VerificationError: they do not agree, or a node has another number of inputs.
        """
        find = self._made.get
        for (name, node), kind in zip(self._nodes.items(), self._kinds.values(), strict=True):
            read, taken = node.input[:], _inputs(kind)
            if read and read[-1][0] == "^":
                read = [tensor for tensor in read if tensor[0] != "^"]
            if [*map(find, read)] != taken and kind.op_type is not None:
                self._check_one_by_one(f"node {name!r} ({kind.op})", read, taken)
        for name, (tensor, dtype) in self._results.items():
            if find(tensor) != dtype:
                self._check_one_by_one(f"the result {name!r}", [tensor], [dtype])

    def _check_one_by_one(self, reader: str, read: Sequence[str], taken: Sequence[int]) -> None:
        if len(read) != len(taken):
            raise VerificationError(f"{reader} has {len(read)} inputs, not {len(taken)}")
        for tensor, dtype in zip(read, taken, strict=True):
            if self._dtype_of(tensor) not in (dtype, _UNKNOWN):
                raise VerificationError(f"{reader} does not take the dtype of {tensor!r}")

    def _dtype_of(self, tensor: str) -> int:
        """The dtype of a tensor, which may go by another of its names than that in the table."""
        dtype = self._made.get(tensor)
        if dtype is not None:
            return dtype
        name, _, port = tensor.partition(":")
        kind = self._kinds.get(name)
        if kind is None:
            raise VerificationError(f"no node makes the tensor {tensor!r}")
        if kind.op_type is None:
            return _UNKNOWN
        number, slots = kind.layout.port(port), kind.layout.out_slots
        if number >= len(slots):
            raise VerificationError(f"no node makes the tensor {tensor!r}")
        return kind.dtypes[slots[number]] % 100


@functools.lru_cache(maxsize=1 << 14)
def _inputs(kind: Kind) -> list[int]:
    """The dtypes that nodes of a kind take; a ref dtype counts as its dtype, which is 100 less."""
    return [kind.dtypes[slot] % 100 for slot in kind.layout.in_slots]


@functools.lru_cache(maxsize=1 << 14)
def _outputs(kind: Kind, in_function: bool) -> list[tuple[str, int]]:
    """What stands behind a node's name in those of the tensors that it makes, and their dtypes."""
    dtypes = [kind.dtypes[slot] % 100 for slot in kind.layout.out_slots]
    if not in_function:
        return [(f":{port}" if port else "", dtype) for port, dtype in enumerate(dtypes)]
    offsets = kind.layout.output_offsets
    ends = [*offsets.values(), len(dtypes)][1:]
    return [
        (f":{arg}:{port - first}", dtypes[port])
        for (arg, first), end in zip(offsets.items(), ends, strict=True)
        for port in range(first, end)
    ]


def _check_call(
    node: node_def_pb2.NodeDef, kind: CallKind, attr: str, signature: op_def_pb2.OpDef
) -> None:
    ends = [("takes", kind.arguments, signature.input_arg)]
    if attr != kind.predicate:
        ends.append(("gives", kind.results, signature.output_arg))
    for verb, dtypes, args in ends:
        if [arg.type for arg in args] != list(node.attr[dtypes].list.type):
            raise VerificationError(
                f"the call {node.name!r} ({node.op}) does not have the dtypes that "
                f"{signature.name!r} {verb}"
            )
