"""Patterns in which ops of the deny list do no harm: what they make is bounded, or unread."""

from __future__ import annotations

from collections.abc import Collection

from graph_passes.config import PrecisionConfig
from graph_passes.op_lists import OpLists
from graph_passes.patterns.attention_mask import bound_masks
from graph_passes.patterns.edits import GraphEdits
from graph_passes.patterns.gelu import lower_erf_gelus, lower_tanh_gelus
from graph_passes.patterns.softmax_gradient import lower_softmax_gradients
from graph_passes.patterns.unread_sums import REDUCTIONS, pass_unread_sums

_CENTRES = ("Softmax", "Tanh", "Erf", "Erfc")


def lower_bounded_values(
    edits: GraphEdits,
    preserve: Collection[str],
    config: PrecisionConfig,
    lists: OpLists,
    ops: Collection[str],
) -> None:
    """Applies those that are in force: masks, gradients of softmaxes, GELUs, unread sums.

    Nothing is done where the op that a pattern is made around is not on the infer list: then it
    stays float32, and so may all that belongs to it.

    Args:
        edits: receives the changes, the units and the near misses.
        preserve: names of nodes that must stay.
        config: says which patterns are in force, for which dtype and device.
        lists: the op lists in force.
        ops: the ops in the graph.
    """
    is_float16 = config.target_dtype == "float16"
    centres = [op for op in _CENTRES if lists.list_of(op) == "infer"]
    found = _numbers(edits, {*centres, *REDUCTIONS, "Reshape"} & set(ops))
    softmaxes = found.get("Softmax", ())
    if is_float16 and config.has_rule("attention-mask"):
        bound_masks(edits, softmaxes, preserve)
    if config.has_rule("softmax-gradient"):
        in_float32 = (config.device, config.target_dtype) == ("CPU", "bfloat16")
        lower_softmax_gradients(edits, softmaxes, preserve, lists, adds_up_in_float32=in_float32)
    if config.has_rule("gelu"):
        lower_tanh_gelus(edits, found.get("Tanh", ()), preserve, clamp=is_float16)
        lower_erf_gelus(edits, (*found.get("Erf", ()), *found.get("Erfc", ())))
    if config.has_rule("unread-sum"):
        ends = [number for op in (*REDUCTIONS, "Reshape") for number in found.get(op, ())]
        pass_unread_sums(edits, ends, preserve)


def _numbers(edits: GraphEdits, wanted: Collection[str]) -> dict[str, list[int]]:
    """The nodes of each op, by number: one walk for all patterns."""
    found: dict[str, list[int]] = {}
    if wanted:
        for number, op_type in enumerate(edits.view.op_types):
            if op_type is not None and op_type.name in wanted:
                found.setdefault(op_type.name, []).append(number)
    return found
