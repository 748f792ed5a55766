"""Runs a coroutine on request, at most once in an interval. It has a timer or a task only while a request waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Paced:
    """One thing to do, on one event loop. Runs never overlap.

    do: raises nothing. interval: seconds from the begin of a run to the begin of the next one.
    """

    def __init__(self, do: Callable[[], Awaitable[None]], interval: float) -> None:
        self._do = do
        self._interval = interval
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None
        self._again: bool | None = None  # another run was requested during this one; True: regardless of the interval
        self._closed = False

    @property
    def awaited(self) -> bool:
        """Whether a run will begin without another request."""
        return self._timer is not None or self._again is not None

    def soon(self, *, at_once: bool = False) -> None:
        """Request a run: now, or as soon as the interval permits. at_once: regardless of the interval."""
        if self._closed:
            return
        if self._running is not None:
            self._again = self._again or at_once
            return
        loop = asyncio.get_running_loop()
        wait = 0.0 if self._began is None or at_once else self._began + self._interval - loop.time()
        if wait <= 0:
            self._start()
        elif self._timer is None:
            self._timer = loop.call_later(wait, self._start)

    async def close(self) -> None:
        """Begin no further run, and wait for the running one. Idempotent."""
        self._closed = True
        self._stop_timer()
        if self._running is not None:
            await asyncio.wait([self._running])

    def _start(self) -> None:
        self._stop_timer()
        if not self._closed and self._running is None:
            loop = asyncio.get_running_loop()
            self._began = loop.time()
            self._running = loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._do()
        except GeneratorExit:  # the loop was closed with this task in it, so there are no further runs
            self._closed = True
            raise
        finally:
            self._running = None
            again, self._again = self._again, None
            if again is not None:
                self.soon(at_once=again)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
