"""The rule that keeps a node of a remark in float32."""

from __future__ import annotations

import re

from graph_passes import Rule

_FUNCTION_OF_UNIT = re.compile(r"^__(?:inference|forward|backward)_.*?_\d+/")


def keep_rule(node: str, why: str) -> Rule:
    """The rule that keeps a node, or the unit that is named after it, in float32.

    Args:
        node: the node's name, as a remark has it.
        why: the reason, for people.
    """
    pattern = re.escape(_FUNCTION_OF_UNIT.sub("", node)).replace("\\-", "-")
    return Rule(action="keep_float32", node=pattern, why=why)
