"""The tables of a run: ratios, means over the better peer, and what failed."""

from __future__ import annotations

from typing import Any

import pytest
from gpu.report import geometric_mean, markdown, over_better_peer


def _entry(ms: float) -> dict[str, Any]:
    times = dict.fromkeys(("median_s", "min_s", "max_s"), ms / 1e3)
    return {**times, "memory": {"peak": 1e6 * ms}, "check": "ok"}


_VARIANTS = {
    "float32": _entry(8),
    "tf_amp_float16": _entry(2),
    "keras_policy_float16": _entry(4),
    "upstream_float16": _entry(3),
    "tf_amp_bfloat16": _entry(4),
    "keras_policy_bfloat16": {"check": "failed: out of memory"},
}


def test_the_better_peer_is_the_faster_one() -> None:
    assert over_better_peer(_VARIANTS, "float16") == pytest.approx(1.5)
    assert over_better_peer(_VARIANTS, "bfloat16") is None


def test_means_leave_out_what_was_not_measured() -> None:
    assert geometric_mean([2.0, None, 8.0]) == pytest.approx(4)
    assert geometric_mean([None]) is None


def test_the_table_has_every_variant_and_says_what_failed() -> None:
    facts = {
        "device": "D",
        "platform": "P",
        "jaxlib": "1",
        "float32_products": "TF32",
        "XLA_FLAGS": "",
    }
    text = markdown(
        {"facts": facts, "rounds": 25, "cases": {"mlp training": {"variants": _VARIANTS}}}
    )
    assert (
        "| mlp training | tf_amp_float16 | 2.000 | 2.000 | 2.000 | 4.00 | 2.0 | 0.25 | ok |" in text
    )
    assert "| keras_policy_bfloat16 | - | - | - | - | - | - | failed: out of memory |" in text
    assert "| training: over the better peer | 1.500 | - |" in text
    assert "| training: tf_amp over float32 | 4.000 | 2.000 |" in text
