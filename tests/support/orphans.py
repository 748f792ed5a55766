"""Processes that tests start end with them, also when the tests are killed."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None)  # loaded here: `die_with_parent` may run between a fork and an exec


def die_with_parent() -> None:
    """Kill this process when the thread that started it ends. Survives an exec, is not passed on to children."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
