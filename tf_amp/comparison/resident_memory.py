"""Resident memory of this process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc/self")


def resident_bytes() -> int:
    """Returns the resident set size now, in bytes.

    Raises:
        OSError: the system is not Linux.
    """
    return _field("VmRSS")


def peak_resident_bytes() -> int:
    """Returns the largest resident set size since the start or the last `reset_peak`, in bytes.

    `getrusage` would count what the parent had when it started this process.

    Raises:
        OSError: the system is not Linux.
    """
    return _field("VmHWM")


def reset_peak() -> None:
    """Starts the peak anew from what is resident now.

    Raises:
        OSError: the system does not allow it.
    """
    # 5 resets VmHWM (man 5 proc_pid_clear_refs).
    (_PROC / "clear_refs").write_text("5")


def _field(name: str) -> int:
    for line in (_PROC / "status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_PROC / 'status'} has no field {name}; this needs Linux.")
