"""Post-conditions of a rewritten call tree, read back from its bodies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from tensorflow.core.framework import function_pb2, node_def_pb2, op_def_pb2

from graph_passes.emit.verify import verify
from graph_passes.emit.verify_units import VerificationError
from graph_passes.functions.call_tree import CallKind, Region, function_names
from graph_passes.ir.graph_view import GraphView
from graph_passes.ops.kernels import KernelSupport

Views = Callable[[Region], GraphView]


def verify_tree(
    pairs: Iterable[tuple[Region, Region]],
    originals: Views,
    fused: Views,
    support: KernelSupport,
    preserve: Collection[str],
    touched: Collection[int] | None = None,
) -> None:
    """Checks all bodies of a call tree, see `verify`, and that calls agree with what they call.

    Args:
        pairs: each region of the tree as the caller gave it, with that of the rewritten tree,
            whose functions have their names; the main graph first.
        originals: gives the view of a region as the caller gave it.
        fused: that of the same region after its units were replaced.
        support: tells what has a kernel in the target dtype.
        preserve: names of the nodes or tensors of the main graph that are fed or fetched.
        touched: of a tree of one region, the numbers of the nodes that may differ.

    Raises:
        InvalidGraphError, VerificationError: as `verify`.
    """
    checked: set[str] = set()
    for old, region in pairs:
        main, body = old.is_main, region.proto
        if isinstance(body, function_pb2.FunctionDef):
            _check_signature(old.proto, body, is_main=main)  # type: ignore[arg-type]
            if body.signature.name in checked or body == old.proto:
                continue  # nothing changed, or calls share the bodies of equal functions
            checked.add(body.signature.name)
        verify(originals(old), fused(old), body, support, preserve if main else (), touched)
        nodes = {node.name: node for node in region.nodes} if region.calls else {}
        for call in region.calls:
            node = nodes[call.node]
            callees = {c.name: c.proto.signature for c in call.callees}  # type: ignore[union-attr]
            for attr, _, name in function_names(node, call.kind):
                if name not in callees:
                    raise VerificationError(f"the call {call.node!r} calls {name!r}")
                _check_call(node, call.kind, attr, callees[name])


def _check_signature(
    old: function_pb2.FunctionDef, new: function_pb2.FunctionDef, *, is_main: bool
) -> None:
    kept = new.control_ret == old.control_ret
    if is_main:
        kept = kept and new.signature == old.signature
    for before, after in (
        (old.signature.input_arg, new.signature.input_arg),
        (old.signature.output_arg, new.signature.output_arg),
    ):
        names = [arg.name for arg in before]
        kept = kept and names == [arg.name for arg in after][: len(names)]
    if not kept:
        raise VerificationError(f"the signature of {old.signature.name!r} changed")


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
