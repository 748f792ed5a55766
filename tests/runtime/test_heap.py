"""Memory that a burst has taken goes back to the system, also what is freed long after the burst."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import subprocess
import sys
from collections.abc import Sequence

import pytest

from transferd.runtime import heap
from transferd.runtime.compat import wait_for

MIB = 1024**2
PROGRAM = """
import asyncio, gc
from transferd.runtime import heap

heap.LOOK_S = 0.05
MIB = 1024**2

trims = []
trim = heap.trim
heap.trim = lambda: trims.append(trim())

async def main():
    trimming = asyncio.ensure_future(heap.keep_trimmed())
    await asyncio.sleep(0)  # it begins
    before = heap._own()
    burst, between = [], []
    for _ in range(256 * 64):  # what stays lies between what goes, so the C library keeps all of it
        burst.append(b"x" * 16384)
        between.append(b"x" * 1024)
    while not trims:  # one in vain
        await asyncio.sleep(0.01)
    taken = heap._own() - before
    del burst
    gc.collect()
    while heap._own() - before > 64 * MIB:
        await asyncio.sleep(0.01)
    print(taken, heap._own() - before)
    trimming.cancel()

asyncio.run(main())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library keeps what was freed")
def test_what_a_burst_has_taken_is_given_back_once_it_is_freed() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    taken, left = map(int, done.stdout.split())
    assert taken > 256 * MIB
    assert left < 64 * MIB


@pytest.mark.parametrize(
    "looks",
    [
        [1 << 40, (1 << 40) + heap.MUCH + 1],  # a process of 1 TiB is no reason to keep more
        [OSError(errno.EMFILE, "no descriptor is left"), 0, OSError(errno.EMFILE, "again"), heap.MUCH + 1],
    ],
)
async def test_the_same_growth_is_trimmed_in_every_process_and_a_look_that_fails_is_made_again(
    looks: Sequence[int | OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed, loop, each = asyncio.Event(), asyncio.get_running_loop(), iter(looks)

    def own() -> int:
        look = next(each, looks[-1])
        if isinstance(look, OSError):
            raise look
        return look

    monkeypatch.setattr(heap, "LOOK_S", 0.0)
    monkeypatch.setattr(heap, "_own", own)
    monkeypatch.setattr(heap, "trim", lambda: loop.call_soon_threadsafe(trimmed.set))
    trimming = asyncio.ensure_future(heap.keep_trimmed())
    await wait_for(trimmed.wait(), 20)
    assert not trimming.done()
    trimming.cancel()
