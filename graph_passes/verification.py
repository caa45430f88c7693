"""Post-conditions of a rewrite, read back from the new graph itself.

Nothing the plan says is believed: dtypes come from the attrs of the new nodes, and what reads what
from the names that their inputs hold. Nodes that the rewrite did not touch are the caller's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from tensorflow.core.framework import function_pb2, graph_pb2, types_pb2

from graph_passes.application import Applied
from graph_passes.kinds import Kind
from graph_passes.planning import Plan
from graph_passes.reasons import Reason
from graph_passes.view import OPAQUE


class VerificationError(Exception):
    """The rewritten graph breaks a post-condition; it must not run.

    Attributes:
        rejected: that graph.
    """

    def __init__(
        self, message: str, rejected: graph_pb2.GraphDef | function_pb2.FunctionDef | None = None
    ) -> None:
        super().__init__(message)
        self.rejected = rejected


def verify(
    plan: Plan, applied: Applied, original: graph_pb2.GraphDef | function_pb2.FunctionDef
) -> None:
    """Checks a rewritten graph.

    The dtypes at both ends of each edge agree; every retyped node has a kernel; preserved nodes,
    signatures and control inputs are as they were; every Cast is read, changes the dtype, and
    reads no Cast of this rewrite; names are unique.

    Raises:
        VerificationError: a post-condition does not hold. The message names the node.
    """
    try:
        _Verification(plan, applied).check()
        if plan.canvas.view.is_function:
            _check_signature(applied.proto, original)
    except VerificationError as error:
        error.rejected = applied.proto
        raise


class _Verification:
    """The checks of one rewritten graph, in the node numbers of the original's view."""

    def __init__(self, plan: Plan, applied: Applied) -> None:
        self._plan = plan
        self._applied = applied
        self._view = view = plan.canvas.view
        proto = applied.proto
        self._shift = len(proto.signature.input_arg) if view.is_function else 0
        self._results = [a.name for a in proto.signature.output_arg] if view.is_function else []
        self._nodes = proto.node_def if view.is_function else proto.node
        self._end = len(view.nodes) - len(self._results)
        added = self._nodes[self._end - self._shift :]
        self._casts = {node.name: node for node in added}
        if len(self._casts) != len(added) or any(name in view.index for name in self._casts):
            raise VerificationError("two nodes have the same name")

    def check(self) -> None:
        """Runs all checks but that of the signature."""
        rewired = {(number, port): cast for number, port, cast in self._applied.rewired}
        kinds = self._read_kinds()
        dtypes = self._read_dtypes(kinds)
        self._check_inputs(rewired)
        self._check_uncut_edges(rewired, dtypes)
        self._check_casts(rewired, dtypes)
        self._check_retyped(kinds)

    def _inputs(self, number: int) -> list[str]:
        """What a node of the new graph reads; for a pseudo-node the new result."""
        if number >= self._end:
            return [self._applied.proto.ret[self._results[number - self._end]]]
        return self._nodes[number - self._shift].input[:]  # type: ignore[no-any-return]

    def _read_kinds(self) -> list[Kind]:
        """For each retyped node its kind in the new graph."""
        retyped = [self._nodes[number - self._shift] for number in self._applied.retyped]
        return self._view.node_index.kinds.kinds_of(retyped)

    def _read_dtypes(self, kinds: Sequence[Kind]) -> np.ndarray:
        """The dtype of each vertex in the new graph; a ref dtype counts as its dtype."""
        view = self._view
        dtypes = np.array(view.dtypes, np.int32)
        for number, kind in zip(self._applied.retyped, kinds, strict=True):
            if len(kind.dtypes) != len(view.layout(number).slots):
                raise VerificationError(f"node {view.nodes[number].name!r} has other ports")
            first = view.base[number]
            dtypes[first : first + len(kind.dtypes)] = kind.dtypes
        return dtypes % 100

    def _check_inputs(self, rewired: Mapping[tuple[int, int], str]) -> None:
        """Touched nodes read what they read before, but for the Casts."""
        view = self._view
        expected: dict[int, list[str]] = {n: view.nodes[n].input[:] for n in self._applied.retyped}
        for (number, port), cast in rewired.items():
            if number not in expected:
                expected[number] = view.nodes[number].input[:]
            expected[number][port] = f"{cast}:y:0" if view.is_function else cast
        for number, inputs in expected.items():
            if self._inputs(number) != inputs:
                raise VerificationError(
                    f"node {view.nodes[number].name!r} reads {self._inputs(number)}, not {inputs}"
                )

    def _check_uncut_edges(
        self, rewired: Mapping[tuple[int, int], str], dtypes: np.ndarray
    ) -> None:
        view = self._view
        plain = np.ones(len(view.sources), bool)
        plain[[view.edge_starts[number] + port for number, port in rewired]] = False
        before = np.asarray(view.dtypes) % 100
        made, taken = dtypes[view.sources], dtypes[view.targets]
        # An op that TensorFlow does not know makes and takes what it did before.
        made = np.where(view.sources == OPAQUE, before[view.targets], made)
        taken = np.where(view.targets == OPAQUE, before[view.sources], taken)
        unknown = (view.sources == OPAQUE) & (view.targets == OPAQUE)
        wrong = np.flatnonzero(plain & (made != taken) & ~unknown)
        if len(wrong):
            source, target = int(view.sources[wrong[0]]), int(view.targets[wrong[0]])
            names = [view.node_of(v).name if v != OPAQUE else "an op" for v in (target, source)]
            raise VerificationError(
                f"{names[0]!r} takes {_name(taken[wrong[0]])}, but {names[1]!r} makes "
                f"{_name(made[wrong[0]])}"
            )

    def _check_casts(self, rewired: Mapping[tuple[int, int], str], dtypes: np.ndarray) -> None:
        view, read = self._view, set(rewired.values())
        inputs: dict[str, list[str]] = {}
        ends: dict[str, tuple[int, int]] = {}
        for name, cast in self._casts.items():
            if name not in read:
                raise VerificationError(f"nothing reads the Cast {name!r}")
            inputs[name] = cast.input[:]
            ends[name] = (cast.attr["SrcT"].type, cast.attr["DstT"].type)
        for (number, port), name in rewired.items():
            if name not in self._casts:
                raise VerificationError(f"no node makes the Cast {name!r}")
            tensor = view.nodes[number].input[port]
            if inputs[name] != [tensor] and view.split(inputs[name][0]) != view.split(tensor):
                raise VerificationError(f"the Cast {name!r} reads {inputs[name]}, not {tensor!r}")
            edge = view.edge_starts[number] + port
            source, target = int(view.sources[edge]), int(view.targets[edge])
            made = dtypes[source] if source != OPAQUE else view.dtypes[target] % 100
            taken = dtypes[target] if target != OPAQUE else view.dtypes[source] % 100
            if ends[name] != (made, taken) or made == taken:
                raise VerificationError(
                    f"the Cast {name!r} is from {_name(ends[name][0])} to {_name(ends[name][1])} "
                    f"between {_name(made)} and {_name(taken)}"
                )

    def _check_retyped(self, kinds: Sequence[Kind]) -> None:
        canvas, view = self._plan.canvas, self._view
        for number in self._applied.retyped:
            if view.op_type(number) is None or canvas.why[view.base[number]] == Reason.PRESERVED:
                name = view.nodes[number].name
                raise VerificationError(f"the preserved node {name!r} was retyped")
        # What has a kernel depends on the kind alone: one node of each is enough.
        for kind, number in dict(zip(kinds, self._applied.retyped, strict=True)).items():
            for position, dtype in enumerate(kind.dtypes):
                if dtype == canvas.target and not canvas.support.supports(kind, position):
                    raise VerificationError(
                        f"node {view.nodes[number].name!r} ({kind.op}) has no "
                        f"{canvas.config.device} kernel with {kind.layout.slots[position]} in "
                        f"{canvas.config.target_dtype}"
                    )


def _name(dtype: int) -> str:
    return types_pb2.DataType.Name(int(dtype))  # type: ignore[no-any-return]


def _check_signature(new: function_pb2.FunctionDef, original: function_pb2.FunctionDef) -> None:
    if new.signature != original.signature or new.control_ret != original.control_ret:
        raise VerificationError(f"the signature of {original.signature.name!r} changed")
