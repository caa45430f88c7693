"""What a caller may choose about a rewrite."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Literal, get_args

from graph_passes.policy.rules import Rule
from graph_passes.policy.toml import read_shipped

if TYPE_CHECKING:
    from graph_passes.policy.cost_table import CostTable

TargetDtype = Literal["float16", "bfloat16"]
Device = Literal["GPU", "CPU"]
Level = Literal["", "TENSOR_CORES_ONLY", "TREAT_INFER_AS_DENY", "UNSAFE_FORCE_ALL"]
ListName = Literal["allow", "infer", "clear", "deny"]
Action = Literal["add", "remove"]

PAY_IN_FLOAT32 = ("batch-norm", "fused-update", "grouped-convolution", "onednn-kernel")
"""The rules that are at work where nothing is converted."""

UNKNOWN_DIMENSION = 32
"""The length of an unknown dimension, unless the caller knows better."""


def _require(name: str, value: object, legal: tuple[object, ...]) -> None:
    if value not in legal:
        choices = ", ".join(repr(choice) for choice in legal)
        raise ValueError(f"`{name}` must be one of {choices}. Received: {name}={value!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListEdit:
    """One change of an op list: an op type added to a list or removed from it.

    Attributes:
        list_name: the list that changes: "allow", "infer", "clear" or "deny".
        action: "add" or "remove". Adding an op takes it off whatever list it was on.
        op: the op type, as in `NodeDef.op`; case matters.
        source: who asked for it (an environment variable, say), for messages.

    Raises:
        ValueError: the list, the action or the op name is not a legal one.
    """

    list_name: ListName
    action: Action
    op: str
    source: str = ""

    def __post_init__(self) -> None:
        _require("list_name", self.list_name, get_args(ListName))
        _require("action", self.action, get_args(Action))
        if not self.op or self.op != self.op.strip():
            raise ValueError(
                f"`op` must be an op type without blanks around it. Received: op={self.op!r}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """What is converted and replaced, of all that would be: for finding what breaks a program.

    Attributes:
        nodes: the nodes that may be converted, each with its function, "" for the main graph.
            Constants and Casts go by those that read them.
        units: the units that may be made: rule, function that was planned with its callees, and
            node as in `Remark`.
        left_out: the nodes that would be converted, were they not left out; all others stay float32
            without this, too.
        root: the function that is being planned; the pass sets it.
    """

    nodes: frozenset[tuple[str, str]]
    units: frozenset[tuple[str, str, str]]
    left_out: frozenset[tuple[str, str]] = frozenset()
    root: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Everything that decides how a graph is rewritten.

    Attributes:
        target_dtype: the low-precision dtype, "float16" or "bfloat16".
        device: the device type whose kernels must exist, "GPU" or "CPU". A plan for a GPU needs
            no GPU: it is made from the kernels that this TensorFlow build has registered.
        converts: whether anything is converted. False, for a device that has no fast units for the
            dtype, leaves the rules that pay in float32 too (`PAY_IN_FLOAT32`).
        only_device: whether there is no other, so that TensorFlow puts everything on this one.
        parity: plan as TensorFlow's own `auto_mixed_precision` pass does, with its lists.
            False (the default) uses the lists and rules of this project.
        level: "" (all four lists), "TENSOR_CORES_ONLY" (the allow list alone),
            "TREAT_INFER_AS_DENY", or "UNSAFE_FORCE_ALL" (float16 on a GPU only).
        list_edits: changes of the lists, applied in order.
        rules: what single nodes are to be, whatever list their op is on.
        disabled_rules: names of rules and patterns (see `graph_passes.RULES`) to leave out.
        cost_table: what kernels and Casts cost on the device, or in what XLA makes of a function
            for it; what is slower in the target dtype stays float32. None leaves cost out of
            account.
        unknown_dimension: the length that counts for a dimension that is not known, nearly always
            the batch, where the cost of an op depends on it.
        fused: whether the graph is for a compiler that fuses element-wise ops (XLA), so that only
            matrix products and convolutions have a price of their own, and Casts have none.
        stores_weights: whether the caller stores variables in the target dtype that only converted
            ops read, as constants are, so that their Casts have no price.
        selection: what may be converted and replaced; None leaves nothing out.

    Raises:
        ValueError: a value is not one of the legal ones, or they do not go together.
    """

    target_dtype: TargetDtype = "float16"
    device: Device = "GPU"
    converts: bool = True
    only_device: bool = False
    parity: bool = False
    level: Level = ""
    list_edits: tuple[ListEdit, ...] = ()
    rules: tuple[Rule, ...] = ()
    disabled_rules: frozenset[str] = frozenset()
    cost_table: CostTable | None = None
    unknown_dimension: int = UNKNOWN_DIMENSION
    fused: bool = False
    stores_weights: bool = False
    selection: Selection | None = None

    def __post_init__(self) -> None:
        # Configurations are keys of caches: a list or a set would be none.
        object.__setattr__(self, "list_edits", tuple(self.list_edits))
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise ValueError(f"`rules` must be Rule objects. Received one: {rule!r}.")
        object.__setattr__(self, "disabled_rules", frozenset(self.disabled_rules))
        _require("target_dtype", self.target_dtype, get_args(TargetDtype))
        _require("device", self.device, get_args(Device))
        _require("level", self.level, get_args(Level))
        if self.level == "UNSAFE_FORCE_ALL" and (self.target_dtype, self.device) != (
            "float16",
            "GPU",
        ):
            raise ValueError(
                "`level='UNSAFE_FORCE_ALL'` exists for float16 on a GPU only. Received: "
                f"target_dtype={self.target_dtype!r}, device={self.device!r}. "
                "Leave the level empty, or choose float16 on a GPU."
            )
        if self.unknown_dimension < 1:
            raise ValueError(
                f"`unknown_dimension` must be at least 1. Received: {self.unknown_dimension!r}."
            )
        table = self.cost_table
        if table is not None and (table.target_dtype, table.device) != (
            self.target_dtype,
            self.device,
        ):
            raise ValueError(
                f"`cost_table` is for {table.target_dtype} on {table.device}, and the graph is to "
                f"be rewritten for {self.target_dtype} on {self.device}. Choose another table or "
                "None."
            )
        unknown = sorted(self.disabled_rules - RULES.keys())
        if unknown:
            raise ValueError(
                f"`disabled_rules` names unknown rules: {', '.join(unknown)}. "
                f"Legal: {', '.join(sorted(RULES))}."
            )

    @functools.cached_property
    def target(self) -> int:
        """The target dtype as a value of `types_pb2.DataType`."""
        # Settings are read while TensorFlow is being imported: this module must not need it.
        from tensorflow.core.framework import types_pb2

        return types_pb2.DT_HALF if self.target_dtype == "float16" else types_pb2.DT_BFLOAT16

    @property
    def weighs_bytes(self) -> bool:
        """Whether bytes decide where Casts are: no rule that knows the times does."""
        has_times = self.cost_table is not None and self.has_rule("cost")
        return self.has_rule("cast-cut") and not has_times and self.level != "UNSAFE_FORCE_ALL"

    def has_rule(self, name: str) -> bool:
        """Whether the named rule of the default mode is in force."""
        pays = self.converts or (name in PAY_IN_FLOAT32 and not self.fused)
        return pays and not self.parity and name not in self.disabled_rules


RULES: dict[str, str] = read_shipped("lists/rules.toml")
"""Rules of the default mode, by the name that switches each off, with what they do."""
