"""What blocks most: graphs are planned again with one thing changed, and the plans compared."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from tensorflow.python.framework import op_def_registry

from graph_passes import RULES, ListEdit, PrecisionConfig, Remark, load_op_lists
from graph_passes.ops.reasons import Reason
from tf_amp.env_variables import COST_TABLE, REWRITE, RULES_DISABLE
from tf_amp.tracing.figures import SLOWER, Figures, figures_of
from tf_amp.tracing.trace import TracedGraph

BUDGET = 60.0
"""Seconds after which no further change is planned."""
_LEAST = 0.01  # of all cast bytes: what saves less is not worth a setting
_INFER_ADD, _DENY_ADD = f"{REWRITE}_INFERLIST_ADD", f"{REWRITE}_DENYLIST_ADD"
_REASONS = [reason.name.lower() for reason in Reason]
_RULE_OF = {name: name.replace("_", "-") for name in _REASONS if name.replace("_", "-") in RULES}
_RULE_OF[Reason.MOVES_MORE.name.lower()] = "cast-cut"


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing that a user may change.

    Attributes:
        what: the op or rule, for people.
        variable: the environment variable that does it.
        value: what that gets.
        risk: what speaks against it.
        op: the op type that goes to the infer list, or back to its own where the variable is the
            one that denied it, if it is that.
        rule: the rule that is switched off, if it is that.
    """

    what: str
    variable: str
    value: str
    risk: str
    op: str = ""
    rule: str = ""

    def applied(self, config: PrecisionConfig) -> PrecisionConfig:
        """The configuration with the change."""
        if self.variable == _DENY_ADD:
            edits = tuple(edit for edit in config.list_edits if edit.op != self.op)
            return dataclasses.replace(config, list_edits=edits)
        if self.op:
            edit = ListEdit(list_name="infer", action="add", op=self.op, source=self.variable)
            return dataclasses.replace(config, list_edits=(*config.list_edits, edit))
        if self.rule:
            rules = config.disabled_rules | {self.rule}
            return dataclasses.replace(config, disabled_rules=rules)
        return dataclasses.replace(config, cost_table=None)

    def line(self, variables: Mapping[str, str]) -> str:
        """What to paste; it keeps what the variables say already.

        Args:
            variables: the variables that are set: name -> value.
        """
        before = variables.get(self.variable, "").strip() if self.variable != COST_TABLE else ""
        if self.variable == _DENY_ADD:
            rest = [op for op in map(str.strip, before.split(",")) if op not in ("", self.op)]
            return f"export {self.variable}={','.join(rest)}" if rest else f"unset {self.variable}"
        return f"export {self.variable}={','.join(filter(None, (before, self.value)))}"


@dataclasses.dataclass(frozen=True)
class Blocker:
    """What a change gives, by new plans of all graphs.

    Attributes:
        change: the change.
        products: how many products more are in the target dtype.
        flops: how much more of the arithmetic is.
        casts: how many Casts more there are; negative where some vanish.
        cast_bytes: how many bytes more they move.
    """

    change: Change
    products: int
    flops: int
    casts: int
    cast_bytes: int


@dataclasses.dataclass(frozen=True)
class Search:
    """What came of looking for blockers.

    Attributes:
        found: those that help, the one with the most arithmetic first, then with the fewest cast
            bytes.
        not_tried: changes for which there was no time, the largest candidate first.
    """

    found: tuple[Blocker, ...]
    not_tried: tuple[Change, ...] = ()


def find_blockers(graphs: Sequence[TracedGraph], budget: float = BUDGET) -> Search:
    """Finds the changes that put the most into the target dtype.

    Each op type that is on the deny list or on none, and each rule that keeps a node in float32, is
    one change: the op goes to the infer list, the rule off. The graphs are planned as they are and
    with each change, from what the graphs themselves tell of shapes.

    Args:
        graphs: those to plan. A graph without products is left out: nothing in it goes low.
        budget: the seconds after which no further change is planned; one is in any case.
    """
    relevant = [g for g in graphs if any(r.is_product for r in g.remarks.remarks)]
    changes = _changes(relevant)
    if not changes:
        return Search(())
    until = time.monotonic() + budget
    now = _planned(relevant, None)
    found = []
    for number, change in enumerate(changes):
        if number and time.monotonic() > until:
            break
        then = _planned(relevant, change)
        found.append(
            Blocker(
                change,
                products=then.products_low - now.products_low,
                flops=then.flops_low - now.flops_low,
                casts=then.casts - now.casts,
                cast_bytes=then.cast_bytes - now.cast_bytes,
            )
        )
    least = _LEAST * now.cast_bytes
    helpful = (b for b in found if b.products > 0 or (b.products == 0 and b.cast_bytes < -least))
    best = sorted(helpful, key=lambda b: (-b.flops, b.cast_bytes))
    return Search(tuple(best), tuple(changes[len(found) :]))


def _planned(graphs: Sequence[TracedGraph], change: Change | None) -> Figures:
    configs = (change.applied(g.config) if change else g.config for g in graphs)
    return figures_of([g.plan(c, products_only=True) for g, c in zip(graphs, configs, strict=True)])


def _changes(graphs: Sequence[TracedGraph]) -> list[Change]:
    """What may be changed, that first which keeps the most arithmetic and then nodes float32."""
    flops, touched = Counter[Change](), Counter[Change]()
    for graph in graphs:
        for remark in graph.remarks.remarks:
            change = _change_for(remark, graph.config)
            if change is not None:
                touched[change] += 1
                flops[change] += (remark.flops or 0) if remark.is_product else 0
    return sorted(touched, key=lambda change: (-flops[change], -touched[change]))


def _has_state(op: str) -> bool:
    """Whether an op reads or changes something that has a dtype of its own."""
    definition = op_def_registry.get(op)
    return definition is not None and definition.is_stateful


def _change_for(remark: Remark, config: PrecisionConfig) -> Change | None:
    if remark.kind != "kept":
        return None
    lists = load_op_lists(config)
    if remark.rule in SLOWER:
        risk = "By the cost table, float32 is faster for these."
        return Change("the cost table", COST_TABLE, "off", risk)
    if remark.rule in _RULE_OF:
        rule = _RULE_OF[remark.rule]
        risk = f"Without it, this no longer holds: {RULES[rule]}."
        return Change(f"the rule {rule}", RULES_DISABLE, rule, risk, rule=rule)
    denied = remark.blocked_by or (remark.op if remark.rule == "deny_list" else "")
    if denied and denied in lists.entries:
        is_edited = any(e.op == denied and e.source == _DENY_ADD for e in config.list_edits)
        variable = _DENY_ADD if is_edited else _INFER_ADD
        return Change(
            f"{denied}, denied", variable, denied, lists.entries[denied].reason, op=denied
        )
    if remark.rule == "unlisted" and not _has_state(remark.op):
        risk = lists.unlisted.get(remark.op, "Nothing is known of this op: it is on no list.")
        return Change(f"{remark.op}, on no list", _INFER_ADD, remark.op, risk, op=remark.op)
    return None
