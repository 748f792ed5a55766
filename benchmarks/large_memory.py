"""How long an event loop stands still while host memory is made and freed beside it.

    python -m benchmarks.large_memory [--gigabytes 4] [--regions 2]

Makes that much memory in each of some regions, all at once, as the ranks of a daemon do at start and at
restore_cache, then frees it. Prints the time per gigabyte and the longest gap of the loop; compare it with the
watchdog's interval and client_timeout. Exit code 1 above half a second.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import sys
import time
from collections.abc import Callable

from transferd.tiers.pinned import HostRegion

WORST_S = 0.5
TICK_S = 0.002


async def longest_gap(work: Callable[[], object], times: int = 1) -> tuple[float, float]:
    """Run `work` in as many threads at once. Returns the seconds it took and the longest gap between ticks."""
    longest, last = 0.0, time.monotonic()
    started = last
    running = asyncio.gather(*(asyncio.to_thread(work) for _ in range(times)))
    while not running.done():
        await asyncio.wait({running}, timeout=TICK_S)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    await running
    return time.monotonic() - started, longest


def by_mmap(nbytes: int) -> None:
    """As it was: one call of Python's mmap module."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(23)  # MADV_POPULATE_WRITE
    memory.close()


async def measure(nbytes: int, count: int) -> float:
    regions: list[HostRegion] = []

    def make() -> None:
        regions.append(HostRegion(nbytes))

    def free() -> None:
        regions.pop().close()

    worst, total = 0.0, nbytes * count / 1e9
    for name, work, times in (
        ("one call of mmap, before", lambda: by_mmap(nbytes), 1),
        ("allocate", make, count),
        ("close", free, count),
    ):
        took, gap = await longest_gap(work, times)
        amount = nbytes / 1e9 if times == 1 and name.startswith("one") else total
        print(f"{name:<26} {amount:6.1f} GB  {took / amount:6.3f} s/GB  longest gap {gap:.3f} s", flush=True)
        if not name.startswith("one"):
            worst = max(worst, gap)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="in each region")
    parser.add_argument("--regions", type=int, default=2)
    options = parser.parse_args()
    worst = asyncio.run(measure(int(options.gigabytes * 1024**3), options.regions))
    return int(worst > WORST_S)


if __name__ == "__main__":
    sys.exit(main())
