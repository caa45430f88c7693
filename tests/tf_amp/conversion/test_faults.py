"""A few damaged and killed conversions; many are run by hand with `conversion_faults.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from environments import RunPython

SCRIPT = Path(__file__).with_name("conversion_faults.py")
CODE = f"""
import runpy, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


@pytest.mark.parametrize(("kind", "cases"), [("mutate", 12), ("kill", 6)])
def test_nothing_but_a_whole_output_or_an_error(
    run_forked: RunPython, kind: str, cases: int
) -> None:
    args = (kind, "--cases", str(cases), "--seed", "3")
    assert "no fault" in run_forked(CODE, args=args, timeout=400).stdout
