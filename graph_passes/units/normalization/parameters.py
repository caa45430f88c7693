"""What a normalization stores: scales, offsets and running statistics."""

from __future__ import annotations

from graph_passes.rewriter.matcher import ADDS, SHAPERS, SPREADS, Matcher

_STORED = ("ReadVariableOp", "VariableV2", "Const")
_GIVEN = ("_Arg", "Placeholder")
_ARITHMETIC = frozenset((*ADDS, "Mul", "Sub", "SquaredDifference", "Neg"))
_KEEPS_PARAMETER = frozenset((*SHAPERS, "Cast", "Enter", *SPREADS))
_MAKES_PARAMETER = _KEEPS_PARAMETER.union(_ARITHMETIC, _STORED, _GIVEN)
_DEEPEST_PARAMETER = 3


def may_be_parameter(op: str) -> bool:
    """Whether nodes of an op type may make a stored tensor."""
    return op in _MAKES_PARAMETER


def is_parameter(m: Matcher, tensor: str) -> bool:
    """Whether a tensor is stored, or made of stored tensors alone in a few steps."""
    pending = [(m.maker(tensor), 0)]
    stored = False
    while pending:
        number, depth = pending.pop()
        op = m.ops[number]
        if op not in _MAKES_PARAMETER:
            return False
        if op in _STORED:
            stored = stored or op != "Const" or m.constant(m.output(number)).size > 1
            continue
        makers = m.makers(number)
        if op in _GIVEN and _is_vector(m, number):
            stored = True
        elif depth == _DEEPEST_PARAMETER or not makers or op in _GIVEN:
            return False
        elif op in _KEEPS_PARAMETER:
            pending.append((makers[0], depth + 1))
        else:
            pending.extend((maker, depth + 1) for maker in makers)
    return stored


def _is_vector(m: Matcher, number: int) -> bool:
    """Whether what a node makes is known to have at most one axis that is longer than 1."""
    shape = m.shape(number)
    return shape is not None and sum(size != 1 for size in shape) <= 1
