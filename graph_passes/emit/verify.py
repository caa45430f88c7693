"""Post-conditions of a rewrite, read back from the new body itself.

Nothing that the plan says is believed. Once units were replaced, a body may change by retyped nodes
and Casts alone, which is checked node by node for what was touched and for all edges at once. What
the units have changed is compared with the body that the caller gave by `verify_units`.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from tensorflow.core.framework import function_pb2, types_pb2

from graph_passes.emit.verify_units import (
    VerificationError,
    require_controls,
    require_same_outputs,
    verify_units,
)
from graph_passes.ir.copying import Graph, nodes_of
from graph_passes.ir.eligibility import node_name, numbers_of
from graph_passes.ir.graph_view import GraphView
from graph_passes.ir.vertices import OPAQUE
from graph_passes.ops.kernels import KernelSupport
from graph_passes.ops.node_types import NodeType


def verify(
    original: GraphView,
    fused: GraphView,
    new: Graph,
    support: KernelSupport,
    preserve: Collection[str] = (),
    touched: Collection[int] | None = None,
) -> None:
    """Checks a rewritten graph or function body, in time linear in its size.

    The dtypes at both ends of each edge agree; every retyped node has a kernel; every Cast that was
    added is read, changes the dtype and reads what its readers did; but for Casts, and for what
    loops take on, each node is as it was once units were replaced. For those see `verify_units`.

    Args:
        original: the view of the body as the caller gave it.
        fused: that of the body after its units were replaced, with the same table of node types.
        new: the rewritten body; its nodes are those of `fused`, in order, and more behind them.
        support: tells what has a kernel in the target dtype.
        preserve: names of the nodes or tensors that are fed or fetched.
        touched: numbers, in `fused`, of the nodes that may differ; by default all are compared.

    Raises:
        InvalidGraphError: the caller's graph is to blame.
        VerificationError: a post-condition does not hold. The message names the node.
    """
    try:
        verify_units(original, fused, preserve)
        _Verification(fused, new, touched).check(support, preserve)
    except VerificationError as error:
        original.require_matching_dtypes()
        error.rejected = new
        raise


class _Verification:
    """The checks of one body, in the numbers of the view that it had before it was planned."""

    def __init__(self, view: GraphView, new: Graph, touched: Collection[int] | None) -> None:
        self._view = view
        first, end, nodes = view.body.start, view.body.stop, nodes_of(new)
        self._arguments: dict[str, int] = {}
        self._results: list[tuple[str, int]] = []  # name of the tensor, dtype
        if isinstance(new, function_pb2.FunctionDef):
            self._arguments = {arg.name: arg.type for arg in new.signature.input_arg}
            # get: [] would write to a map that lacks the key.
            self._results = [(new.ret.get(a.name, ""), a.type) for a in new.signature.output_arg]
        if len(nodes) < end - first:
            raise VerificationError("nodes are gone")
        self._first, self._end = first, end
        if touched is None:
            pairs = zip(nodes, view.nodes[first:end], strict=False)  # more nodes may be behind them
            touched = [n for n, (new_node, old) in enumerate(pairs, first) if new_node != old]
        self._touched = {n: nodes[n - first] for n in sorted(touched) if n < end}
        added = nodes[end - first :]
        self._added = {node.name: node.input[:] for node in added}
        if len(self._added) < len(added) or not self._added.keys().isdisjoint(view.index):
            raise VerificationError("two nodes have the same name")
        types = view.node_index.node_types.node_types_of([*self._touched.values(), *added])
        # By number in the view, or by name where a node was added.
        self._types: dict[int | str, NodeType] = dict(
            zip((*self._touched, *self._added), types, strict=True)
        )
        self._read: set[str] = set()  # nodes that were added

    def check(self, support: KernelSupport, preserve: Collection[str]) -> None:
        """Runs all checks."""
        view = self._view
        before = np.asarray(view.dtypes) % 100  # a ref dtype is its dtype plus 100
        dtypes = self._read_dtypes(before)
        self._check_nodes(preserve)
        changed, more = self._compare_inputs()
        made, taken = dtypes[view.sources], dtypes[view.targets]
        # An unknown op makes and takes what it did.
        made = np.where(view.sources == OPAQUE, before[view.targets], made)
        taken = np.where(view.targets == OPAQUE, before[view.sources], taken)
        self._check_edges(changed, made, taken)
        edges = list(changed)
        ends = zip(made[edges].tolist(), taken[edges].tolist(), strict=True)
        for (name, old, tensor), (one, other) in zip(changed.values(), ends, strict=True):
            self._check_changed(name, old, tensor, one, other)
        for name, tensor, dtype in more:
            self._require_dtype(name, tensor, dtype)
        self._check_added()
        self._check_kernels(support)

    def _read_dtypes(self, before: np.ndarray) -> np.ndarray:
        """For each vertex its dtype now."""
        view, dtypes = self._view, before.copy()
        vertices: list[int] = []
        values: list[int] = []
        for number in self._touched:
            first, old, new = view.base[number], view.node_type(number), self._types[number]
            if new is old:
                continue
            # A loop may have more arguments and results than it had.
            if len(new.dtypes) != len(old.dtypes) and not new.runs_functions:
                raise VerificationError(f"node {view.nodes[number].name!r} has other ports")
            vertices.extend(range(first, first + len(old.dtypes)))
            values.extend(new.dtypes[: len(old.dtypes)])
        dtypes[vertices] = np.array(values, dtypes.dtype) % 100
        arguments = zip(range(self._first), self._arguments.values(), strict=False)
        results = zip(range(self._end, len(view.nodes)), self._results, strict=False)
        for number, dtype in (*arguments, *((number, dtype) for number, (_, dtype) in results)):
            dtypes[view.base[number]] = dtype
        return dtypes

    def _check_nodes(self, preserve: Collection[str]) -> None:
        view, devices = self._view, self._view.node_index.node_types.devices
        names, ops, device_of = view.names, view.op_names, view.node_index.device_of
        for number, new in self._touched.items():
            if new.name != names[number] or self._types[number].op != ops[number]:
                raise VerificationError(f"node {names[number]!r} is gone")
            if devices.get(new.device) != device_of[number]:
                raise VerificationError(f"node {names[number]!r} has another device")
        for number in self._touched.keys() & numbers_of(view, preserve):
            require_same_outputs(view, number, self._types[number])

    def _compare_inputs(self) -> tuple[dict[int, tuple[str, str, str]], list[tuple[str, str, int]]]:
        """Edges with other tensors (reader, tensor before and now), and what is read besides."""
        view = self._view
        changed: dict[int, tuple[str, str, str]] = {}
        more: list[tuple[str, str, int]] = []
        for number, new in self._touched.items():
            old = view.nodes[number]
            if new.input == old.input:
                continue
            name, before, now = view.names[number], old.input[:], new.input[:]
            first, new_type = view.edge_starts[number], self._types[number]
            count = view.edge_starts[number + 1] - first
            waits = [tensor[1:] for tensor in now if tensor[0] == "^"]
            now = [tensor for tensor in now if tensor[0] != "^"]
            require_controls(name, view.waits.get(number, ()), waits)
            for awaited in waits:
                if not self._knows(awaited):
                    raise VerificationError(f"{name!r} waits for {awaited!r}, not there")
            if len(now) != count and not (new_type.runs_functions and len(now) > count):
                raise VerificationError(f"node {name!r} has {len(now)} inputs, not {count}")
            for port, tensor in enumerate(now):
                if port >= count:
                    slot = new_type.layout.in_slots[port]
                    more.append((name, tensor, new_type.dtypes[slot]))
                elif tensor != before[port]:
                    changed[first + port] = (name, before[port], tensor)
        for number, (tensor, dtype) in enumerate(self._results, self._end):
            if number >= len(view.nodes):
                more.append(("a result", tensor, dtype))
            elif tensor != view.nodes[number].input[0]:
                name = view.nodes[number].name.rpartition("/")[0]
                old = view.nodes[number].input[0]
                changed[view.edge_starts[number]] = (name, old, tensor)
        return changed, more

    def _knows(self, name: str) -> bool:
        return name in self._view.index or name in self._added

    def _check_edges(self, changed: Collection[int], made: np.ndarray, taken: np.ndarray) -> None:
        """Tensors that are read as before have the dtypes that their readers take."""
        view = self._view
        wrong = made != taken
        wrong[list(changed)] = False
        if wrong.any():
            edge = int(np.argmax(wrong))
            source, target = int(view.sources[edge]), int(view.targets[edge])
            names = [view.node_of(v).name if v != OPAQUE else "an op" for v in (target, source)]
            raise VerificationError(
                f"{names[0]!r} takes {_name(taken[edge])}, but {names[1]!r} makes "
                f"{_name(made[edge])}"
            )

    def _check_changed(self, name: str, old: str, new: str, made: int, taken: int) -> None:
        """A tensor that is read in place of another is a Cast of it, or a new argument."""
        if new in self._arguments and new not in self._view.index:
            self._require_dtype(name, new, taken)
            return
        producer = new.partition(":")[0]
        cast = self._types.get(producer)
        output = f"{producer}:y:0" if self._view.is_function else producer
        if cast is None or cast.op != "Cast" or new != output:
            if not self._knows(producer):
                raise VerificationError(f"no node makes the tensor {new!r}")
            raise VerificationError(f"{name!r} reads {new!r}, not {old!r}")
        self._read.add(producer)
        read = self._added[producer][0]
        if read != old and self._view.split(read) != self._view.split(old):
            raise VerificationError(f"the Cast {producer!r} reads {read!r}, not {old!r}")
        ends = _ends(cast)
        if ends != (made, taken):
            raise VerificationError(
                f"the Cast {producer!r} is from {_name(ends[0])} to {_name(ends[1])} "
                f"between {_name(made)} and {_name(taken)}"
            )

    def _check_added(self) -> None:
        for name, inputs in self._added.items():
            node_type = self._types[name]
            if name not in self._read:
                data = [tensor for tensor in inputs if tensor[0] != "^"]
                slots = node_type.layout.in_slots
                if len(data) != len(slots):
                    raise VerificationError(f"node {name!r} has {len(data)} inputs")
                for tensor, slot in zip(data, slots, strict=True):
                    self._require_dtype(name, tensor, node_type.dtypes[slot])
            for tensor in inputs:
                if not self._knows(node_name(tensor)) and tensor not in self._arguments:
                    raise VerificationError(f"no node makes the tensor {tensor!r}")
        for name, inputs in self._added.items():
            if self._types[name].op != "Cast":
                continue
            maker = node_name(inputs[0])
            if name not in self._read:
                raise VerificationError(f"nothing reads the Cast {name!r}")
            if len(set(_ends(self._types[name]))) == 1:
                raise VerificationError(f"the Cast {name!r} changes nothing")
            if maker in self._types and self._types[maker].op == "Cast":
                raise VerificationError(f"the Cast {name!r} reads the Cast {maker!r}")

    def _require_dtype(self, reader: str, tensor: str, dtype: int) -> None:
        """Checks the dtype of one tensor that was not read before."""
        found = self._arguments.get(tensor)
        if found is None:
            name, _, port = tensor.partition(":")
            self._read.add(name)
            number = self._view.index.get(name)
            node_type = self._types.get(name) or self._types.get(number)  # type: ignore[arg-type]
            if node_type is None:
                if number is None:
                    raise VerificationError(f"no node makes the tensor {tensor!r}")
                node_type = self._view.node_type(number)
            if node_type.op_type is None:
                return
            position, slots = node_type.layout.port(port), node_type.layout.out_slots
            if not 0 <= position < len(slots):
                raise VerificationError(f"no node makes the tensor {tensor!r}")
            found = node_type.dtypes[slots[position]]
        if found % 100 != dtype % 100:
            raise VerificationError(f"{reader!r} does not take the dtype of {tensor!r}")

    def _check_kernels(self, support: KernelSupport) -> None:
        # What has a kernel depends on the node type alone: one node of each is enough.
        changed = {self._types[number]: number for number in self._touched}
        for node_type, number in changed.items():
            if node_type is self._view.node_type(number):
                continue
            name = self._view.nodes[number].name
            if node_type.op_type is None:
                raise VerificationError(f"node {name!r} of an unknown op was changed")
            for position, dtype in enumerate(node_type.dtypes):
                if dtype == support.dtype and not support.supports(node_type, position):
                    raise VerificationError(
                        f"node {name!r} ({node_type.op}) has no {support.device} kernel with "
                        f"{node_type.layout.slots[position]} in {_name(dtype)}"
                    )


def _ends(cast: NodeType) -> tuple[int, int]:
    """The dtypes that a Cast takes and makes."""
    layout = cast.layout
    return cast.dtypes[layout.in_slots[0]], cast.dtypes[layout.out_slots[0]]


def _name(dtype: int) -> str:
    return types_pb2.DataType.Name(int(dtype))
