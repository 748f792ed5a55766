"""Memory that bursts of work have taken, given back to the system.

The C library keeps what was freed, and after a flood of large messages that may be hundreds of MiB, in pieces that the
next flood cannot use.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import math
import mmap
import time
from pathlib import Path

LOOK_S = 10.0
MUCH = 32 * 1024**2  # bytes of growth that are worth a trim


def trim() -> None:
    """Give back what was freed. Blocking: some milliseconds. Does nothing where the C library cannot (musl)."""
    if (give_back := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        give_back(0)


async def keep_trimmed() -> None:
    """Trim the heap whenever this process's own memory has grown by much, until cancelled.

    While memory only grows, few of its pieces are free, and a trim costs little. What has grown may be freed later,
    which nothing tells. So it is trimmed again, each time after twice the pause: a trim looks at all free pieces, and
    whoever allocates waits for it. The pauses have no bound: what was held for long goes back within about as long
    again.
    """
    kept, pause, again = math.inf, LOOK_S, math.inf
    while True:
        with contextlib.suppress(OSError, RuntimeError):  # no descriptor or thread is left now: it looks again
            now, own = time.monotonic(), _own()
            kept = min(kept, own)
            if own > kept + MUCH:
                pause, again = LOOK_S, now
            if now >= again:
                await asyncio.to_thread(trim)
                kept = _own()
                pause *= 2
                again = now + pause
        await asyncio.sleep(LOOK_S)


def _own() -> int:
    """Bytes of resident memory that are no file's, and nobody else's."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * mmap.PAGESIZE
