"""What `tf_amp.status()` tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

_OFF = "AMP is off"


@dataclasses.dataclass(frozen=True)
class FunctionStatus:
    """What became of one function or session graph.

    Attributes:
        name: Its name, for people, such as "one_step_on_data (fit)".
        products: Its matrix products and convolutions.
        products_low: Those of them that work in the target dtype.
        casts: Casts in it.
        kept: Op type and reason -> how many products stay float32 for it.
    """

    name: str
    products: int
    products_low: int
    casts: int
    kept: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Status(Mapping[str, Any]):
    """The state of AMP in this process. `status.name` and `status["name"]` are the same.

    Attributes:
        enabled: Whether AMP is on.
        why: Who switched it on, or why it is off.
        decided_by: Setting -> the variable or call that decided it; defaults are not in it.
        graph_rewrite: Whether graphs are rewritten for the target dtype.
        target_dtype: The dtype chosen, None if there is none.
        device: The device type that it was chosen for, None while AMP is off.
        reason: Why both were chosen, or what the hardware lacks.
        level: How far the rewrite goes; "" is the default.
        cost_table: Which measured costs count, or why none do.
        cost_table_xla: The same for functions that XLA compiles.
        list_edits: Edits of the op lists in force, such as "allow add Relu".
        rules: Rules on single nodes -> how many nodes met their criteria so far.
        fused: Rules in force that need no low precision, such as "fused-update" -> in how many
            places each did its work so far.
        loss_scaling: Whether optimizers are wrapped by themselves.
        loss_scaling_reason: Why.
        log_path: Where graphs are written, None if they are not, as where none is rewritten.
        hosts: Host -> "hooked", or why it could not hook this TensorFlow.
        graphs_seen: Functions and session graphs that were looked at.
        graphs_rewritten: Those that were changed.
        graphs_failed: Those that were left alone because something failed.
        nodes_total: Nodes of the rewritten graphs.
        nodes_converted: Those of them that work in the target dtype.
        casts: Casts in the rewritten graphs.
        functions: The functions and session graphs, those that they call included, in the order in
            which they were traced; without those in which there was nothing to do. At most 100.
        loss_scale: Counters of the loss scales in use.
        trained_unscaled: The functions and session graphs that train in float16 without a loss
            scale of tf_amp's, although nobody switched loss scaling off.
        traced_before: The functions that had been traced when AMP was switched on. They stay in
            float32 until they are traced anew.
    """

    enabled: bool = False
    why: str = ""
    decided_by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    graph_rewrite: bool = False
    target_dtype: str | None = None
    device: str | None = None
    reason: str = _OFF
    level: str = ""
    cost_table: str = _OFF
    cost_table_xla: str = _OFF
    list_edits: tuple[str, ...] = ()
    rules: Mapping[str, int] = dataclasses.field(default_factory=dict)
    fused: Mapping[str, int] = dataclasses.field(default_factory=dict)
    loss_scaling: bool = False
    loss_scaling_reason: str = _OFF
    log_path: str | None = None
    hosts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    graphs_seen: int = 0
    graphs_rewritten: int = 0
    graphs_failed: int = 0
    nodes_total: int = 0
    nodes_converted: int = 0
    casts: int = 0
    functions: tuple[FunctionStatus, ...] = ()
    loss_scale: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trained_unscaled: tuple[str, ...] = ()
    traced_before: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        return len(self.__dataclass_fields__)

    def as_dict(self) -> dict[str, Any]:
        """Returns a new dict of plain values, which `json.dumps` takes."""
        return dataclasses.asdict(self)
