"""Rules on nodes, as text to paste into a file of rules."""

from __future__ import annotations

import json
import re

_FUNCTION_OF_UNIT = re.compile(r"^__(?:inference|forward|backward)_.*?_\d+/")


def keep_rule(node: str, why: str) -> str:
    """The rule that keeps a node, or the unit that is named after it, in float32, as TOML.

    Args:
        node: the node's name, as a remark has it.
        why: the reason, for people.
    """
    pattern = re.escape(_FUNCTION_OF_UNIT.sub("", node)).replace("\\-", "-")
    lines = ("[[rule]]", f"node = {json.dumps(pattern)}", 'action = "keep_float32"')
    return "\n".join((*lines, f"why = {json.dumps(why)}", ""))
