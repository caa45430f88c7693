"""What functions keep in kernels from one call to the next, which a variant of one begins anew."""

from __future__ import annotations

from tensorflow.core.framework import function_pb2, node_def_pb2

from graph_passes.ops.op_types import registered_op_type
from tf_amp.hosts.function_redirects import Find, with_callees

SEEDS = ("seed", "seed2")
"""The attrs of an op that draws random numbers: both are 0 where it draws others in each run."""
_SHARED_NAME, _BY_NODE_NAME = "shared_name", "use_node_name_sharing"
_VARIABLES = ("VarHandleOp", "Variable", "VariableV2")


def kept_in_kernels(definition: function_pb2.FunctionDef, find: Find) -> str | None:
    """Says what a function, or one that it calls, keeps in kernels from one call to the next.

    Each variant of a function has kernels of its own. The one of a seeded random op counts what it
    has drawn, and that of a resource without a name for others, as of a one-shot iterator, has that
    to itself: a program would not compute what it computes as it is.

    Args:
        definition: the function.
        find: gives what it calls.

    Returns:
        A clause that says why it is to have no variants; None if nothing is kept.
    """
    for function in with_callees((definition,), find):
        for node in function.node_def:
            if _is_seeded(node):
                return "it draws random numbers by a seed, and a variant of it would draw others"
            if _has_to_itself(node):
                return f"its {node.op} keeps a state that a variant of it would begin anew"
    return None


def draws_anew(node: node_def_pb2.NodeDef) -> bool:
    """Whether a node draws random numbers without a seed: others in each run."""
    op_type = registered_op_type(node.op)
    attrs = () if op_type is None else op_type.op_def.attr
    return not _is_seeded(node) and {attr.name for attr in attrs}.issuperset(SEEDS)


def _is_seeded(node: node_def_pb2.NodeDef) -> bool:
    # To read an attribute that is not there would add it.
    return any(name in node.attr and node.attr[name].i for name in SEEDS)


def _has_to_itself(node: node_def_pb2.NodeDef) -> bool:
    """Whether an op makes a resource that it shares with no other, as another function's is."""
    op_type = None if node.op in _VARIABLES else registered_op_type(node.op)
    if op_type is None or not op_type.op_def.is_stateful:
        return False
    if all(attr.name != _SHARED_NAME for attr in op_type.op_def.attr):
        return False
    is_shared = _SHARED_NAME in node.attr and node.attr[_SHARED_NAME].s
    return not is_shared and not (_BY_NODE_NAME in node.attr and node.attr[_BY_NODE_NAME].b)
