"""JSON that every reader takes: the format has no NaN and no infinity."""

from __future__ import annotations

import json
import math
from typing import Any


def strict_json(value: Any) -> str:
    """Writes a value as JSON, with null for each float that is not finite."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
