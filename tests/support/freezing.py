"""Stop a process and let it continue, by signal."""

from __future__ import annotations

import os
import signal


def freeze(pid: int) -> None:
    """SIGSTOP a child of this process, and wait until all its threads have stopped. The signal alone does not wait."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def thaw(pid: int) -> None:
    """SIGCONT: the process continues, with its connections."""
    os.kill(pid, signal.SIGCONT)
