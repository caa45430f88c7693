"""What is to be switched on: worked out from settings and machine, without touching anything."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

from graph_passes import PrecisionConfig, list_notes
from graph_passes.functions.grouped_convolutions import RULE as GROUPED_CONVOLUTION
from graph_passes.policy.config import PAY_IN_FLOAT32
from graph_passes.units.product.filter_gradient import RULE as FILTER_GRADIENT
from graph_passes.units.product.onednn_kernels import RULE as ONEDNN_KERNEL
from tf_amp.cost_tables import PLAIN_CPU, TableChoice, choose_table, device_class
from tf_amp.env_config import EnvConfigError, Settings
from tf_amp.hardware import Target, choose_target, has_onednn_kernels, uses_onednn
from tf_amp.state import Status

if TYPE_CHECKING:
    from graph_passes.policy.config import Level

ENVIRONMENT = "environment"
"""The `source` of a plan that environment variables asked for."""

_NO_REWRITE = Target(None, "CPU", "the graph rewrite was not asked for")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What follows from the settings on this machine.

    Attributes:
        settings: what was asked for.
        source: who asked: `ENVIRONMENT`, or the name of the function that was called.
        target: the dtype and device chosen, and why.
        costs: the cost table in force, and where it comes from.
        compiled_costs: the same for functions that XLA compiles.
        config: what graphs are rewritten with; None if nothing is rewritten.
        loss_scaling: whether optimizers are wrapped without being asked to one by one.
        loss_scaling_reason: why it is on or off.
    """

    settings: Settings
    source: str
    target: Target
    costs: TableChoice
    compiled_costs: TableChoice
    config: PrecisionConfig | None
    loss_scaling: bool
    loss_scaling_reason: str

    @property
    def converts(self) -> bool:
        """Whether graphs are rewritten for low precision, and not for float32 alone."""
        return self.config is not None and self.config.converts

    @property
    def float32_rules(self) -> tuple[str, ...]:
        """The rules in force that need no low precision."""
        return tuple(filter(self.config.has_rule, PAY_IN_FLOAT32)) if self.config else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What the author of the settings should know, one sentence each."""
        of_tables = filter(None, (self.costs.note, self.compiled_costs.note))
        of_lists = list_notes(self.config) if self.config else ()
        return (*self.settings.notes, *of_tables, *of_lists)

    @property
    def misses_loss_scale(self) -> bool:
        """Whether training without a loss scale is worth a warning: float16, and not asked for."""
        is_open = self.source != ENVIRONMENT and "loss_scaling" not in self.settings.decided_by
        return self.target.target_dtype == "float16" and (self.loss_scaling or is_open)

    @property
    def in_force(self) -> Settings:
        """The settings as they came out on this machine, whatever decided them."""
        return dataclasses.replace(
            self.settings,
            graph_rewrite=self.converts,
            target_dtype=str(self.target.target_dtype),
            loss_scaling=self.loss_scaling,
            loss_scaling_asked=False,
            decided_by={},
            notes=(),
        )

    @property
    def summary(self) -> str:
        """What is on and who decided it, as one line."""
        settings = self.settings
        if not settings.graph_rewrite:
            what = "graph rewrite off"
        elif not self.converts:
            what = "nothing is converted"
        else:
            what = self.target.reason
        edits = f"{len(settings.list_edits)} list edits"
        if settings.rules:
            edits += f", {len(settings.rules)} rules"
        return (
            f"{what}; level {settings.level or 'default'}; {edits}; "
            f"loss scaling {'on' if self.loss_scaling else 'off'} ({self.loss_scaling_reason}); "
            f"decided by {', '.join(sorted(set(settings.decided_by.values())) or [self.source])}"
        )

    def status(self) -> Status:
        """Returns the state that an installation of this plan starts from."""
        settings = self.settings
        return Status(
            enabled=True,
            why=f"switched on by {self.source}",
            decided_by=dict(settings.decided_by),
            graph_rewrite=self.converts,
            target_dtype=self.target.target_dtype,
            device=self.target.device,
            reason=self.target.reason,
            level=settings.level,
            cost_table=self.costs.reason,
            cost_table_xla=self.compiled_costs.reason,
            list_edits=tuple(f"{e.list_name} {e.action} {e.op}" for e in settings.list_edits),
            rules={f"{rule} ({rule.action})": 0 for rule in settings.rules},
            fused=dict.fromkeys(self.float32_rules, 0),
            loss_scaling=self.loss_scaling,
            loss_scaling_reason=self.loss_scaling_reason,
            log_path=settings.log_path if self.converts else None,
        )


def make_plan(settings: Settings, source: str) -> Plan:
    """Works out what settings lead to on this machine.

    Args:
        settings: what is asked for.
        source: who asks, for messages.

    Raises:
        tf_amp.env_config.EnvConfigError: settings that are legal one by one do not go together, or
            the cost table that they name cannot be used.
    """
    target = choose_target(settings) if settings.graph_rewrite else _NO_REWRITE
    costs = choose_table(settings, target)
    loss_scaling, why = _decide_loss_scaling(settings, target, source)
    # What pays in float32 was measured on CPUs.
    pays = target.device == "CPU" and not settings.disabled_rules.issuperset(PAY_IN_FLOAT32)
    works = settings.graph_rewrite and (target.target_dtype is not None or pays)
    config = precision_config(settings, target, costs) if works else None
    if config is not None and target.device == "CPU":
        # Without a GPU, functions run here what the program puts on one.
        config = dataclasses.replace(config, only_device=True)
        off = _without_kernels(config, target)
        config = dataclasses.replace(config, disabled_rules=config.disabled_rules.union(off))
    return Plan(
        settings=settings,
        source=source,
        target=target,
        costs=costs,
        compiled_costs=choose_table(settings, target, compiled=True),
        config=config,
        loss_scaling=loss_scaling,
        loss_scaling_reason=why,
    )


def _without_kernels(config: PrecisionConfig, target: Target) -> tuple[str, ...]:
    """The rules for which a CPU has no kernels, or TensorFlow takes these by itself.

    No kernels but oneDNN's have the gradients of groups, and of filter and bias at once. In
    bfloat16, for which a file may name a table, they fail on a CPU with AVX2 at most.
    """
    if config.converts:
        is_plain = device_class(target) == PLAIN_CPU
        return (ONEDNN_KERNEL, *((GROUPED_CONVOLUTION, FILTER_GRADIENT) if is_plain else ()))
    if not has_onednn_kernels():
        return GROUPED_CONVOLUTION, ONEDNN_KERNEL
    return (ONEDNN_KERNEL,) if uses_onednn() else ()


def precision_config(settings: Settings, target: Target, costs: TableChoice) -> PrecisionConfig:
    """What graphs are rewritten with; for a target without a dtype, what pays in float32 too.

    Raises:
        tf_amp.env_config.EnvConfigError: settings that are legal one by one do not go together.
    """
    try:
        return PrecisionConfig(
            target_dtype=target.target_dtype or "bfloat16",
            device=target.device,
            converts=target.target_dtype is not None,
            level=cast("Level", settings.level),
            list_edits=settings.list_edits,
            rules=settings.rules,
            disabled_rules=settings.disabled_rules,
            cost_table=costs.table,
        )
    except ValueError as error:
        variables = ", ".join(sorted(set(settings.decided_by.values())))
        raise EnvConfigError(
            f"The settings do not go together: {error} Settings came from: {variables}."
        ) from error


def _decide_loss_scaling(settings: Settings, target: Target, source: str) -> tuple[bool, str]:
    """Decides whether optimizers are wrapped without being passed in, and says why."""
    if not settings.loss_scaling:
        by_call = source != ENVIRONMENT
        return False, "but for optimizers that are passed in" if by_call else "not asked for"
    if settings.loss_scaling_asked or not settings.graph_rewrite:
        return True, "asked for"
    if target.target_dtype is None:
        return False, "nothing is converted"
    if target.target_dtype == "bfloat16":
        return False, "bfloat16 has the range of float32 and needs none"
    return True, "float16 needs it"
