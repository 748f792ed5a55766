"""Parts of FastDeploy's queue that no longer do anything, kept for code that touches them.

FastDeploy's ranks met at barriers in the queue's server. Our ranks meet inside the daemon, so a barrier of
the queue never blocks.
"""

from __future__ import annotations

BARRIERS = (
    "barrier",
    "barrier0",
    "barrier1",
    "barrier2",
    "barrier3",
    "pause_barrier",
    "resume_barrier",
    "swap_to_cpu_barrier1",
    "swap_to_cpu_barrier2",
    "swap_to_gpu_barrier1",
    "swap_to_gpu_barrier2",
    "swap_storage_to_gpu_barrier",
    "swap_to_storage_barrier",
)


class OpenBarrier:
    """The interface of threading.Barrier, but `wait` never waits."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.n_waiting = 0
        self.broken = False

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002 - the interface it keeps
        return 0

    def reset(self) -> None:
        """Nothing to reset."""

    def abort(self) -> None:
        """Nothing to abort."""
