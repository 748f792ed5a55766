"""The current stack frame of every thread in this process."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_one_at_a_time = threading.Lock()


def current_frames() -> dict[int, FrameType]:
    """`sys._current_frames()`: {thread: innermost frame}. Clear the dict when done: it keeps all locals alive.

    CPython before 3.11.8 and 3.12.2 allocates while it holds the lock on the list of threads. If that starts a garbage
    collection, and a finalizer lets another thread run that starts or ends a thread, the process deadlocks
    (python/cpython#106883). So we disable the collector meanwhile.
    """
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()  # noqa: SLF001 - the only way to ask
        finally:
            if collects:
                gc.enable()
