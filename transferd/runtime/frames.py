"""Where every thread of this process is now."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_one_at_a_time = threading.Lock()


def current_frames() -> dict[int, FrameType]:
    """`sys._current_frames()`: by thread, its innermost frame. Clear the dict when done: it keeps all locals alive.

    CPython before 3.11.8 and 3.12.2 holds its lock on the list of threads meanwhile, and allocates. If that starts the
    collector, and a finalizer lets another thread run which starts or ends a thread, the process stands still for ever
    (python/cpython#106883). So the collector waits.
    """
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()  # noqa: SLF001 - the only way to ask
        finally:
            if collects:
                gc.enable()
