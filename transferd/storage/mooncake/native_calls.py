"""Native calls off the loop: a bounded number of threads, a share of them for each kind of call.

A native call cannot be taken back, and an interpreter that is finalized while one runs crashes in the
library's destructors. So whoever cannot wait for the calls any more ends the process without finalizing it
(daemon/process.py does, with an exit code of its own).

Stores never keep a load waiting for a thread, and the probe has one of its own: the others may all be stuck.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import TypeVar

from transferd.errors import StorageUnavailable
from transferd.runtime.threads import Crew

T = TypeVar("T")


class CallKind(enum.Enum):
    """A kind of call; the value is how many of it may be under way."""

    STORE = "store", 8
    LOAD = "load", 8
    PROBE = "probe", 1

    @property
    def threads(self) -> int:
        return self.value[1]


class NativeCalls:
    """Runs blocking functions in its own threads. Owns them from `open` to `close`.

    wait: seconds a call waits for a thread of its kind at most.
    """

    def __init__(self, wait: float) -> None:
        self._wait = wait
        self._free = {kind: asyncio.Semaphore(kind.threads) for kind in CallKind}
        self._under_way = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._crew = Crew("transferd-mooncake", sum(kind.threads for kind in CallKind))

    @property
    def under_way(self) -> int:
        return self._under_way

    async def run(self, kind: CallKind, function: Callable[[], T], begun: Callable[[], None] | None = None) -> T:
        """Run `function` in a thread and return its result; `begun` is called when a thread takes it.

        Raises StorageUnavailable when no thread came free in time; then nothing was called.
        """
        await self._a_thread(kind)
        self._under_way += 1
        self._idle.clear()
        try:
            if begun is not None:
                begun()
            return await self._crew.run(function, f"{kind.name.lower()} call")
        finally:
            self._free[kind].release()
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _a_thread(self, kind: CallKind) -> None:
        free = self._free[kind]
        if not free.locked():
            await free.acquire()  # at once
            return
        try:
            async with asyncio.timeout(self._wait):
                await free.acquire()
        except TimeoutError:
            raise StorageUnavailable(
                f"mooncake: {kind.threads} calls of this kind are under way and none ended within {self._wait:g} s"
            ) from None

    async def idle(self, within: float) -> bool:
        """Wait until no call is under way. False when one still is after `within` seconds."""
        try:
            async with asyncio.timeout(within):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def open(self) -> None:
        """Start the threads. Raises NoThreads."""
        self._crew.open()

    def close(self) -> list[str]:
        """Take no more calls. Returns those that are still under way."""
        return self._crew.close(0.0)
