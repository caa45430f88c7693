"""Resident memory of this process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc/self")


def resident_mb() -> float:
    """Returns the resident set size now, in MB (10^6 bytes)."""
    return _field("VmRSS")


def peak_resident_mb() -> float:
    """Returns the largest resident set size since the start or the last `reset_peak`, in MB."""
    return _field("VmHWM")


def reset_peak() -> None:
    """Starts the peak anew from what is resident now.

    Raises:
        OSError: the system does not allow it.
    """
    # 5 resets VmHWM (man 5 proc_pid_clear_refs).
    (_PROC / "clear_refs").write_text("5")


def _field(name: str) -> float:
    for line in (_PROC / "status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"{_PROC / 'status'} has no field {name}; this needs Linux.")
