"""What must hold while anybody attacks: the daemon lives, stays small, and leaves nothing behind.

That results come, in time and with the right bytes, the honest engines say themselves (honest_engine.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections import Counter
from pathlib import Path

from tests.machine.soak.watch import sample
from transferd import Client
from transferd.client.launch import DaemonProcess

GROWTH = 256 * 1024**2  # bytes of resident memory above that of the idle daemon
LEFT = 128 * 1024**2  # the same, once everybody has left: the store, and what is kept of tasks and clients
DESCRIPTORS = 16  # above those of the idle daemon, once everybody has left
QUIET_S = 30.0  # until the daemon has noticed that everybody has left
LONG_S = 300.0  # after a shorter time nobody waits for memory
GIVEN_BACK_S = 600.0  # until it has been given back; the daemon's pauses grow while there is nothing to give back
LOOK_S = 0.1
GROWTH_OF_TRANSFERS = 384 * 1024**2  # the bounds of `pd.listen` add up to 320 MiB
SHARED = Path("/dev/shm")


def descriptors(pid: int) -> Counter[str]:
    """What a process has open, by kind or path."""
    found: Counter[str] = Counter()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found[re.sub(r"\d+", "N", os.readlink(entry.path))] += 1
    return found


class Oracle:
    """Watches one daemon from outside. problems: promises that were broken, each once, in order.

    of: which daemon; "" for the one that all honest engines share. Others have an engine of their own, which stays.
    """

    def __init__(self, daemon: DaemonProcess, of: str = "") -> None:
        self._daemon = daemon
        self._of = of
        self._growth = GROWTH if not of else GROWTH_OF_TRANSFERS
        self.name = f"the daemon {of}".rstrip()
        self._idle = sample(daemon.pid)
        self._open = descriptors(daemon.pid)
        self.peak = self._idle.rss
        self.problems: dict[str, float] = {}
        self._began = time.monotonic()
        self.doing: set[str] = set()  # the actions under way

    def wrong(self, problem: str) -> None:
        """Note a broken promise. Once the daemon is dead, nobody gets anything, and that is one problem."""
        if self.lives or not self.problems:
            self.problems.setdefault(problem, time.monotonic() - self._began)

    @property
    def lives(self) -> bool:
        return self._daemon.process.poll() is None

    async def watch(self) -> None:
        """Look until the daemon is dead, or for ever."""
        while self.lives:
            try:
                self.peak = max(self.peak, sample(self._daemon.pid).rss)
            except (OSError, AssertionError):  # it has just ended
                continue
            if self.peak > self._idle.rss + self._growth:
                self.wrong(
                    f"the memory of {self.name} grew by more than {self._growth >> 20} MiB (during {self._during})"
                )
                self._growth += GROWTH  # said again only if it grows by as much again
            await asyncio.sleep(LOOK_S)
        ended = f"ended with exit code {self._daemon.process.returncode}"
        problem = f"{self.name} {ended} during {self._during}: {self._daemon.log[-500:]}"
        self.problems[problem] = time.monotonic() - self._began

    @property
    def _during(self) -> str:
        return ", ".join(sorted(self.doing)) or "nothing"

    async def at_rest(self) -> None:
        """Everybody has left: nothing of theirs may be kept."""
        give_up = time.monotonic() + QUIET_S
        async with Client(self._daemon.endpoint, await_ready=False) as client:
            while True:
                report = await client.stats()
                engines = [*([] if self._of else report["engines"]), *["(leaving)"] * report["engines_leaving"]]
                kept = {"queued": report["queued"], "running": report["running"], "staging": report["staging"]["used"]}
                more = descriptors(self._daemon.pid) - self._open
                if not engines and not any(kept.values()) and more.total() <= DESCRIPTORS:
                    break
                if time.monotonic() > give_up:
                    self.wrong(f"left behind in {self.name}: engines {engines}, {kept}, descriptors {dict(more)}")
                    return
                await asyncio.sleep(LOOK_S)
        if give_up - self._began < LONG_S:
            return
        give_up = time.monotonic() + GIVEN_BACK_S
        while (left := sample(self._daemon.pid).rss - self._idle.rss) > LEFT:
            if time.monotonic() > give_up:
                self.wrong(f"{self.name} keeps {left >> 20} MiB that it has not had when it was idle")
                return
            await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        """Stop the daemon, and look at what it leaves."""
        code = await asyncio.to_thread(self._daemon.stop)
        found: list[str] = []
        if code != 0:
            found.append(f"{self.name} stopped with exit code {code}: {self._daemon.log[-500:]}")
        if left := not self._of and [entry.name for entry in os.scandir(SHARED) if entry.name.startswith("transferd.")]:
            found.append(f"left in /dev/shm: {left}")
        lines = [json.loads(line) for line in self._daemon.log.splitlines() if line.startswith("{")]
        bugs = [line for line in lines if "(bug)" in line["event"]]
        found += [f"{self.name} logged a bug: {line['event']}: {str(line.get('exception'))[-600:]}" for line in bugs]
        self.problems |= dict.fromkeys(found, time.monotonic() - self._began)
