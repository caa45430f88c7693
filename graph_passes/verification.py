"""Post-conditions of a rewrite, read back from the new graph itself.

Nothing the plan says is believed: dtypes come from the attrs of the new nodes, and what reads what
from the names that their inputs hold. Nodes that the rewrite did not touch are the caller's own.
"""

from __future__ import annotations

from collections.abc import Sequence

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
        self._retyped = [self._nodes[number - self._shift] for number in applied.retyped]
        added = self._nodes[self._end - self._shift :]
        self._casts = {node.name: node for node in added}
        if len(self._casts) != len(added) or any(name in view.index for name in self._casts):
            raise VerificationError("two nodes have the same name")

    def check(self) -> None:
        """Runs all checks but that of the signature."""
        kinds = self._read_kinds()
        made, taken = self._read_dtypes(kinds)
        starts = self._view.edge_starts
        cut = [starts[number] + port for number, port, _ in self._applied.rewired]
        self._check_inputs()
        self._check_uncut_edges(cut, made, taken)
        self._check_casts(made[cut].tolist(), taken[cut].tolist())
        self._check_retyped(kinds)

    def _inputs(self, number: int) -> list[str]:
        """What a node of the new graph reads; for a pseudo-node the new result."""
        if number >= self._end:
            return [self._applied.proto.ret[self._results[number - self._end]]]
        return self._nodes[number - self._shift].input[:]  # type: ignore[no-any-return]

    def _read_kinds(self) -> list[Kind]:
        """For each retyped node its kind in the new graph."""
        return self._view.node_index.kinds.kinds_of(self._retyped)

    def _read_dtypes(self, kinds: Sequence[Kind]) -> tuple[np.ndarray, np.ndarray]:
        """For each edge the dtypes in the new graph that its ends make and take.

        A ref dtype counts as its dtype; an op that TensorFlow does not know makes and takes what it
        did before.
        """
        view, retyped = self._view, list(self._applied.retyped)
        before = np.asarray(view.dtypes) % 100
        owners = np.asarray(view.vertex_nodes)
        slots = np.bincount(owners[1:], minlength=len(view.nodes))[retyped]
        for number, kind, count in zip(retyped, kinds, slots.tolist(), strict=True):
            if len(kind.dtypes) != count:
                raise VerificationError(f"node {view.nodes[number].name!r} has other ports")
        is_retyped = np.zeros(len(view.nodes) + 1, bool)  # the owner of `OPAQUE` is the last
        is_retyped[retyped] = True
        dtypes = before.copy()
        dtypes[is_retyped[owners]] = [dtype % 100 for kind in kinds for dtype in kind.dtypes]
        made, taken = dtypes[view.sources], dtypes[view.targets]
        made = np.where(view.sources == OPAQUE, before[view.targets], made)
        taken = np.where(view.targets == OPAQUE, before[view.sources], taken)
        return made, taken

    def _check_inputs(self) -> None:
        """Touched nodes read what they read before, but for the Casts."""
        view = self._view
        expected: dict[int, list[str]] = {}
        for number, port, cast in self._applied.rewired:
            if number not in expected:
                expected[number] = view.nodes[number].input[:]
            expected[number][port] = f"{cast}:y:0" if view.is_function else cast
        for number, new in zip(self._applied.retyped, self._retyped, strict=True):
            if number not in expected and new.input != view.nodes[number].input:
                expected[number] = view.nodes[number].input[:]
        for number, inputs in expected.items():
            if self._inputs(number) != inputs:
                raise VerificationError(
                    f"node {view.nodes[number].name!r} reads {self._inputs(number)}, not {inputs}"
                )

    def _check_uncut_edges(self, cut: Sequence[int], made: np.ndarray, taken: np.ndarray) -> None:
        view = self._view
        wrong = (made != taken) & ((view.sources != OPAQUE) | (view.targets != OPAQUE))
        wrong[cut] = False
        if wrong.any():
            edge = int(np.argmax(wrong))
            source, target = int(view.sources[edge]), int(view.targets[edge])
            names = [view.node_of(v).name if v != OPAQUE else "an op" for v in (target, source)]
            raise VerificationError(
                f"{names[0]!r} takes {_name(taken[edge])}, but {names[1]!r} makes "
                f"{_name(made[edge])}"
            )

    def _check_casts(self, made: Sequence[int], taken: Sequence[int]) -> None:
        """Each Cast is read, and is between the dtypes made and taken at the edges it cuts."""
        view, rewired = self._view, self._applied.rewired
        read = {name for _, _, name in rewired}
        inputs: dict[str, list[str]] = {}
        ends: dict[str, tuple[int, int]] = {}
        for name, cast in self._casts.items():
            if name not in read:
                raise VerificationError(f"nothing reads the Cast {name!r}")
            inputs[name] = cast.input[:]
            ends[name] = (cast.attr["SrcT"].type, cast.attr["DstT"].type)
        for (number, port, name), before, behind in zip(rewired, made, taken, strict=True):
            if name not in self._casts:
                raise VerificationError(f"no node makes the Cast {name!r}")
            tensor = view.nodes[number].input[port]
            if inputs[name] != [tensor] and view.split(inputs[name][0]) != view.split(tensor):
                raise VerificationError(f"the Cast {name!r} reads {inputs[name]}, not {tensor!r}")
            if ends[name] != (before, behind) or before == behind:
                raise VerificationError(
                    f"the Cast {name!r} is from {_name(ends[name][0])} to {_name(ends[name][1])} "
                    f"between {_name(before)} and {_name(behind)}"
                )

    def _check_retyped(self, kinds: Sequence[Kind]) -> None:
        canvas, view = self._plan.canvas, self._view
        preserved, why, base = int(Reason.PRESERVED), canvas.why, view.base
        for number in self._applied.retyped:
            if why[base[number]] == preserved or view.op_type(number) is None:
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
