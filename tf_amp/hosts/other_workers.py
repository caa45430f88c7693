"""Other processes of a job: several workers, and functions that run elsewhere."""

from __future__ import annotations

from typing import Any

OF_SEVERAL = (
    "The program is one of several workers, and TensorFlow cannot wait for the devices of their "
    "job. Run one worker alone: without TF_CONFIG, or with one task in it."
)


def has_other_workers(context: Any) -> bool:
    """Whether the eager context is one of several workers'."""
    server = getattr(context, "_collective_ops_server_def", None)
    return server is not None and sum(len(job.tasks) for job in server.cluster.job) > 1


def runs_elsewhere(context: Any) -> bool:
    """Whether functions of the eager context may run in other processes."""
    return getattr(context, "_server_def", None) is not None
