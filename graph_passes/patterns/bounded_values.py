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


def lower_bounded_values(
    edits: GraphEdits,
    preserve: Collection[str],
    config: PrecisionConfig,
    lists: OpLists,
) -> None:
    """Applies those that are in force: masks, gradients of softmaxes, GELUs, unread sums.

    Nothing is done where the op that a pattern is made around is not on the infer list: then it
    stays float32, and so may all that belongs to it.

    Args:
        edits: receives the changes, the units and the near misses.
        preserve: names of nodes that must stay.
        config: says which patterns are in force, for which dtype and device.
        lists: the op lists in force.
    """
    is_float16 = config.target_dtype == "float16"
    of_op = edits.view.of_op
    softmaxes = of_op("Softmax") if lists.list_of("Softmax") == "infer" else []
    if is_float16 and config.has_rule("attention-mask"):
        bound_masks(edits, softmaxes, preserve)
    if config.has_rule("softmax-gradient"):
        in_float32 = (config.device, config.target_dtype) == ("CPU", "bfloat16")
        lower_softmax_gradients(edits, softmaxes, preserve, lists, adds_up_in_float32=in_float32)
    if config.has_rule("gelu"):
        if lists.list_of("Tanh") == "infer":
            lower_tanh_gelus(edits, of_op("Tanh"), preserve, clamp=is_float16)
        lower_erf_gelus(
            edits, of_op(*(op for op in ("Erf", "Erfc") if lists.list_of(op) == "infer"))
        )
    if config.has_rule("unread-sum"):
        pass_unread_sums(edits, of_op(*REDUCTIONS, "Reshape"), preserve, lists.ops("deny"))
