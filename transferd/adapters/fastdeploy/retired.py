"""Parts of FastDeploy's queue that have nothing left to do, kept so that code which touches them goes on.

Its ranks met at barriers in the queue's server. Here ranks meet inside the daemon, so a barrier of the
queue lets everybody through at once.
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
    """The interface of threading.Barrier; nobody ever waits at it."""

    def __init__(self, parties: int) -> None:
        self.parties = parties
        self.n_waiting = 0
        self.broken = False

    def wait(self, timeout: float | None = None) -> int:  # noqa: ARG002 - the interface it keeps
        return 0

    def reset(self) -> None:
        """Nothing to reset."""

    def abort(self) -> None:
        """Nobody to wake."""
