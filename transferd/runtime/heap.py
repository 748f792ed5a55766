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
MUCH = 32 * 1024**2  # bytes of growth that are worth a trim, or a quarter if that is more


def trim() -> None:
    """Give back what was freed. Blocking: some milliseconds. Does nothing where the C library cannot (musl)."""
    if (give_back := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        give_back(0)


async def keep_trimmed() -> None:
    """Trim the heap whenever this process's own memory has grown by much, until cancelled.

    What has grown may be freed later, which nothing tells. So it is trimmed again, each time after twice the pause: a
    trim looks at all free pieces, and whoever allocates waits for it.
    """
    kept, pause, again = _own(), LOOK_S, math.inf
    while True:
        await asyncio.sleep(LOOK_S)
        now, own = time.monotonic(), _own()
        kept = min(kept, own)
        if own > kept + max(MUCH, kept // 4):
            pause, again = LOOK_S, now
        if now >= again:
            with contextlib.suppress(RuntimeError):  # the process may start no more threads
                await asyncio.to_thread(trim)
            kept = _own()
            pause *= 2
            again = now + pause


def _own() -> int:
    """Bytes of resident memory that are no file's, and nobody else's."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * mmap.PAGESIZE
