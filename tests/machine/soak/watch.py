"""What a process holds, sampled from outside, and whether it stays flat."""

from __future__ import annotations

import asyncio
import os
import re
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

QUARTERS = 4


@dataclass(frozen=True)
class Sample:
    """At one moment. rss, shared: bytes; shared: POSIX shared memory that this process made."""

    at: float
    rss: int
    fds: int
    threads: int
    shared: int


def sample(pid: int) -> Sample:
    status = Path(f"/proc/{pid}/status").read_text()
    rss = re.search(r"VmRSS:\s+(\d+) kB", status)
    threads = re.search(r"Threads:\s+(\d+)", status)
    assert rss is not None
    assert threads is not None
    shared = sum(path.stat().st_size for path in Path("/dev/shm").glob(f"transferd.{pid}.*"))
    fds = len(os.listdir(f"/proc/{pid}/fd"))
    return Sample(time.monotonic(), int(rss[1]) * 1024, fds, int(threads[1]), shared)


@dataclass
class Watch:
    """Samples a process until it is cancelled."""

    pid: int
    samples: list[Sample] = field(default_factory=list)

    async def run(self, interval: float) -> None:
        while True:
            self.samples.append(sample(self.pid))
            await asyncio.sleep(interval)

    def middle(self, name: str, quarter: int) -> float:
        """The median of one quarter of the run, 0 the first."""
        size = max(1, len(self.samples) // QUARTERS)
        part = self.samples[quarter * size : (quarter + 1) * size]
        return float(statistics.median(getattr(one, name) for one in part))

    def peak(self, name: str) -> float:
        return float(max(getattr(one, name) for one in self.samples))

    def growth(self) -> list[str]:
        """What was higher in the last quarter than in the second (the first warms up)."""
        allowed = {"rss": max(16 * 1024**2, 0.05 * self.middle("rss", 1)), "fds": 8, "threads": 2, "shared": 0}
        found = []
        for name, more in allowed.items():
            before, after = self.middle(name, 1), self.middle(name, QUARTERS - 1)
            if after > before + more:
                found.append(f"{name} grew from {before:.0f} to {after:.0f}")
        return found
