"""Native calls off the loop: a bounded number of threads, with a share for each kind of call.

A native call cannot be cancelled, and finalizing the interpreter while one runs crashes in the library's
destructors. So if the calls do not end in time, daemon/process.py ends the process without finalizing it, with
an exit code of its own.

Stores never make a load wait for a thread, and the probe has its own thread because all others may hang.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from typing import TypeVar

from transferd.errors import StorageUnavailable
from transferd.runtime.compat import timeout
from transferd.runtime.threads import Crew

T = TypeVar("T")


class CallKind(enum.Enum):
    """A kind of call. The number in the value is how many of them may run at the same time."""

    STORE = "store", 8
    LOAD = "load", 8
    PROBE = "probe", 1

    @property
    def threads(self) -> int:
        return self.value[1]


class NativeCalls:
    """Runs blocking functions in its own threads. Owns them from `open` to `close`.

    wait: the most seconds that a call waits for a thread of its kind.
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
        """Run `function` in a thread and return its result. Calls `begun` when a thread takes it.

        Raises StorageUnavailable if no thread came free in time; then nothing was called.
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
            async with timeout(self._wait):
                await free.acquire()
        except TimeoutError:
            raise StorageUnavailable(
                f"mooncake: {kind.threads} {kind.name.lower()} calls are running and none ended within {self._wait:g} s"
            ) from None

    async def idle(self, within: float) -> bool:
        """Wait until no call runs. False if one still runs after `within` seconds."""
        try:
            async with timeout(within):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def open(self) -> None:
        """Start the threads. Raises NoThreads."""
        self._crew.open()

    def close(self) -> list[str]:
        """Take no more calls. Returns those that still run."""
        return self._crew.close(0.0)
