"""A few damaged and killed conversions; many are run by hand with `conversion_faults.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("conversion_faults.py")


@pytest.mark.parametrize(("kind", "cases"), [("mutate", 12), ("kill", 6)])
def test_nothing_but_a_whole_output_or_an_error(kind: str, cases: int) -> None:
    command = [sys.executable, SCRIPT, kind, "--cases", str(cases), "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "no fault" in done.stdout
