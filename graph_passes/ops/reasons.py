"""The closed set of reasons for which a vertex ends in the dtype that it has."""

from __future__ import annotations

import enum


@enum.unique
class Reason(enum.IntEnum):
    """Why one (node, type attribute) pair is converted or stays float32."""

    # Converted.
    ALLOW_LIST = 1
    BETWEEN_ALLOW = 2
    AFTER_ALLOW = 3
    CLEAR_FLOOD = 4
    LIST_CLUSTER = 5
    LOOP_EDGE = 6
    EXISTING_CAST = 7
    FORCED = 8
    FOLDED_CONSTANT = 9
    # Stays float32.
    DENY_LIST = 20
    BEHIND_DENY = 21
    UNSAFE_CLUSTER = 22
    PRESERVED = 23
    OTHER_DEVICE = 24
    NO_KERNEL = 25
    UNLISTED = 26
    NO_ALLOW_NEAR = 27
    READS_VARIABLE = 28
    LOOP_MISMATCH = 29
    QUANTIZED = 30
    VARIABLE_UPDATE = 31
    CONSTANT_RANGE = 32
    RUNS_FUNCTION = 33
    SLOWER_HERE = 34
    INSIDE_UNIT = 35
    MOVES_MORE = 36

    @property
    def converts(self) -> bool:
        """Whether a vertex with this reason is in the target dtype."""
        return self < Reason.DENY_LIST

    @property
    def text(self) -> str:
        """The reason as a phrase for people."""
        return _TEXT[self]


_TEXT = {
    Reason.ALLOW_LIST: "on the allow list",
    Reason.BETWEEN_ALLOW: "between ops of the allow list",
    Reason.AFTER_ALLOW: "on the infer list, directly after a converted op",
    Reason.CLEAR_FLOOD: "on the clear list, joined to a converted op",
    Reason.LIST_CLUSTER: "shares a tensor list with a converted op",
    Reason.LOOP_EDGE: "carries a loop variable that is converted",
    Reason.EXISTING_CAST: "a Cast that only converted ops read",
    Reason.FORCED: "level UNSAFE_FORCE_ALL converts every op that it may",
    Reason.FOLDED_CONSTANT: "a constant that only converted ops read",
    Reason.DENY_LIST: "on the deny list",
    Reason.BEHIND_DENY: "behind an op of the deny list",
    Reason.UNSAFE_CLUSTER: "its tensor list also reaches an op that must stay float32",
    Reason.PRESERVED: "fed, fetched or otherwise to be preserved",
    Reason.OTHER_DEVICE: "placed on another device",
    Reason.NO_KERNEL: "no kernel for the target dtype on this device",
    Reason.UNLISTED: "on no list",
    Reason.NO_ALLOW_NEAR: "not next to or between converted ops",
    Reason.READS_VARIABLE: "reads a variable, which stays float32",
    Reason.LOOP_MISMATCH: "carries a loop variable that could not be converted everywhere",
    Reason.QUANTIZED: "a quantized op",
    Reason.VARIABLE_UPDATE: "computes what is assigned to a variable",
    Reason.CONSTANT_RANGE: "reads a constant that the target dtype cannot hold",
    Reason.RUNS_FUNCTION: "runs a function, whose signature is float32",
    Reason.INSIDE_UNIT: "inside a unit, which computes in float32",
    Reason.SLOWER_HERE: "slower in the target dtype on this device, casts included",
    Reason.MOVES_MORE: "moves more bytes in the target dtype, casts included",
}
