"""A scrub: reads every stored object in the background, slowly, so that damage is found before a read finds it.

Theory of operation
-------------------
A disk that loses bits loses them in objects that nobody reads, too. A scrub walks the directory, reads
each object piece by piece and checks it against its own name; one that is damaged leaves the index and goes
to the quarantine, as if a read had found it. Then it rests, and begins again.

It never reads faster than `rate` bytes a second, and steps aside for traffic: before each piece it waits
until no load or store is under way, at most PATIENCE_S, so a store that is never idle is still scrubbed,
slowly. It holds one piece of memory and one open directory for each level, whatever the store holds. With
a rate of 0 there is no task, no timer and no memory.

Time comes from the loop, so a simulation can run it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import Any

import structlog

from transferd.runtime.clock import Clock
from transferd.runtime.threads import Direction, Threads
from transferd.storage.directory import ObjectDirectory
from transferd.storage.examine import PIECE_BYTES, Examination
from transferd.storage.traffic import Traffic

log = structlog.get_logger(__name__)

PATIENCE_S = 0.5  # that one piece waits for traffic
REST_S = 60.0  # between two passes: an empty store is not looked at without end


class Scrub:
    """One directory's scrub. Changed on the event loop only.

    traffic: what it steps aside for. bad: makes an object unreachable; awaited for each one found damaged.
    """

    def __init__(
        self,
        directory: ObjectDirectory,
        threads: Threads,
        clock: Clock,
        traffic: Traffic,
        bad: Callable[[str], Awaitable[None]],
    ) -> None:
        self._directory = directory
        self._threads = threads
        self._now = clock.monotonic
        self._traffic = traffic
        self._bad = bad
        self._rate = 0
        self._counts: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None

    def set_rate(self, rate: int) -> None:
        """Bytes a second from now on; 0 ends the scrub after the piece it is reading. Call on the event loop."""
        self._rate = rate
        if self._task is None:
            if rate:
                self._task = asyncio.get_running_loop().create_task(self._run())
                self._task.add_done_callback(self._ended)
        elif not rate:
            self._task.cancel()

    async def close(self) -> None:
        """End it; returns when the piece under way has been read."""
        self.set_rate(0)
        if self._task is not None:
            await asyncio.wait({self._task})

    def statistics(self) -> dict[str, Any]:
        """rate, whole passes, and what was read in them and since: objects, bytes, damaged, unsealed, errors."""
        keys = ("passes", "objects", "bytes", "damaged", "unsealed", "errors")
        return {"rate": self._rate} | {key: self._counts[key] for key in keys}

    # --- inside -------------------------------------------------------------------------------------

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the scrub stopped on an unexpected error (bug)", exc_info=error)
        elif self._rate:  # switched off and on again while it was reading a piece
            self.set_rate(self._rate)

    async def _run(self) -> None:
        buffer = memoryview(bytearray(PIECE_BYTES))
        while True:
            try:
                await self._pass(buffer)
            except OSError as error:
                self._counts["errors"] += 1
                log.warning("scrub cannot list the objects", problem=str(error))
            await asyncio.sleep(REST_S)

    async def _pass(self, buffer: memoryview) -> None:
        """Every object once. Raises OSError for a directory that cannot be read."""
        steps = self._steps(buffer)
        due = self._now()
        try:
            while (step := await self._next(steps)) is not None:
                if isinstance(step, Examination):
                    await self._examined(step)
                    continue
                self._counts["bytes"] += step
                # What was not read in its time is not caught up with: that would be a burst.
                due = max(due, self._now() - PATIENCE_S) + step / max(1, self._rate)
                await asyncio.sleep(max(0.0, due - self._now()))
            self._counts["passes"] += 1
        finally:
            steps.close()

    async def _next(self, steps: Iterator[int | Examination]) -> int | Examination | None:
        """The next step, once traffic lets it. A cancellation comes through when the thread has let go."""
        await self._traffic.quiet(PATIENCE_S)
        return await self._threads.run(Direction.OUT, lambda: next(steps, None), "scrub")

    def _steps(self, buffer: memoryview) -> Generator[int | Examination, None, None]:
        """In a thread, one step a call: the bytes of each piece, then the examination that they belonged to."""
        for file in self._directory.objects():
            examination = Examination(file.name, self._directory.path(file.name))
            try:
                yield from examination.pieces(buffer)
            except OSError as error:
                log.warning("scrub cannot read an object", name=file.name, problem=str(error))
                self._counts["errors"] += 1
            else:
                yield examination

    async def _examined(self, examination: Examination) -> None:
        if examination.gone:
            return
        self._counts["objects"] += 1
        self._counts["unsealed"] += examination.unsealed
        if examination.damage is not None:
            self._counts["damaged"] += 1
            log.warning("scrub found a damaged object", name=examination.name, damage=str(examination.damage))
            await self._bad(examination.name)
