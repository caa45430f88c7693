"""JSON without what JSON has not."""

from __future__ import annotations

import json
import math

from tf_amp.cli.strict_json import strict_json


def test_what_is_not_finite_is_null() -> None:
    written = strict_json({"a": [math.inf, (1.5, -math.inf)], "b": math.nan, "c": "NaN", "d": 3})
    assert json.loads(written) == {"a": [None, [1.5, None]], "b": None, "c": "NaN", "d": 3}
    assert "Infinity" not in written
