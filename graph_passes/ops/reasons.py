"""The closed set of reasons for which a vertex ends in the dtype that it has."""

from __future__ import annotations

import enum


@enum.unique
class Reason(enum.IntEnum):
    """Why one (node, type attribute) pair is converted or stays float32.

    Attributes:
        text: the reason as a phrase for people.
    """

    text: str

    def __new__(cls, code: int, text: str = "") -> Reason:
        """Makes a member, or finds that of a code."""
        member = int.__new__(cls, code)
        member._value_, member.text = code, text
        return member

    # Converted.
    ALLOW_LIST = 1, "on the allow list"
    BETWEEN_ALLOW = 2, "between ops of the allow list"
    AFTER_ALLOW = 3, "on the infer list, directly after a converted op"
    CLEAR_FLOOD = 4, "on the clear list, joined to a converted op"
    LIST_CLUSTER = 5, "shares a tensor list with a converted op"
    LOOP_EDGE = 6, "carries a loop variable that is converted"
    EXISTING_CAST = 7, "a Cast that only converted ops read"
    FORCED = 8, "level UNSAFE_FORCE_ALL converts every op that it may"
    FOLDED_CONSTANT = 9, "a constant that only converted ops read"
    COMPARISON = 10, "compares a rounded tensor with what it comes from"
    # Stays float32.
    DENY_LIST = 20, "on the deny list"
    BEHIND_DENY = 21, "behind an op of the deny list"
    UNSAFE_CLUSTER = 22, "its tensor list also reaches an op that must stay float32"
    PRESERVED = 23, "fed, fetched or otherwise to be preserved"
    OTHER_DEVICE = 24, "placed on another device"
    NO_KERNEL = 25, "no kernel for the target dtype on this device"
    UNLISTED = 26, "on no list"
    NO_ALLOW_NEAR = 27, "not next to or between converted ops"
    READS_VARIABLE = 28, "reads a variable, which stays float32"
    LOOP_MISMATCH = 29, "carries a loop variable that could not be converted everywhere"
    QUANTIZED = 30, "a quantized op"
    VARIABLE_UPDATE = 31, "computes what is assigned to a variable"
    CONSTANT_RANGE = 32, "reads an integer product or constant that the target dtype cannot hold"
    RUNS_FUNCTION = 33, "runs a function, whose signature is float32"
    SLOWER_HERE = 34, "slower in the target dtype on this device, casts included"
    INSIDE_UNIT = 35, "inside a unit, which computes in float32"
    MOVES_MORE = 36, "moves more bytes in the target dtype, casts included"
    KEPT_BY_RULE = 37, "kept by a rule"
    DECOMPOSITION = 38, "feeds a matrix decomposition or solver, or reads what it gives"
    SMALL_STEP = 39, "adds little to much: in a loop, by a small factor, to a large number, or many"
    BISECT_LIMIT = 40, "beyond the bisect limit"
    NEVER_LOW = 41, "float32 without the bisect limit too"
    SLOWER_UNDER_XLA = 42, "slower in the target dtype under XLA on this device, casts included"
    DISTANCE = 43, "part of a squared distance, moment or offset: a small rest of large numbers"
    CONSTANT_OPERAND = 44, "part of a product with a written constant, or of a count"
    POSITION = 45, "part of a position, by which elements or pixels are picked"
    SATURATION = 46, "leads from a saturating op to what has a pole at its bound, as a logarithm"
    PERIOD = 47, "part of a product of which the rest by a period is taken"
    RECURRENCE = 48, "leads on from step to step by products alone, as the powers of a matrix"
    POOLING = 49, "a pooling of which the gradient stays float32, or the gradient of such a one"
    COORDINATES = 50, "part of a product over at most four terms, as of coordinates or few features"
    RESULT = 51, "between the last product and a result, of which nothing else is made"
    ASSERTION = 52, "between the last product and a comparison that an assertion makes"

    @property
    def converts(self) -> bool:
        """Whether a vertex with this reason is in the target dtype."""
        return self < Reason.DENY_LIST

    @property
    def keeps_values(self) -> bool:
        """Whether a vertex with this reason is float32 for what rounding would make of values."""
        return self in (
            *(Reason.DECOMPOSITION, Reason.SMALL_STEP, Reason.DISTANCE, Reason.RECURRENCE),
            *(Reason.CONSTANT_OPERAND, Reason.POSITION, Reason.SATURATION, Reason.PERIOD),
            *(Reason.COORDINATES, Reason.ASSERTION),
        )
