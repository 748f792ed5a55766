"""A scrub: slowly reads every stored object in the background, to find damage before a task does.

Theory of operation
-------------------
A failing disk also loses bits in objects that no task reads. The scrub walks the directory, reads each object
piece by piece and checks it against its own name. A damaged object leaves the index and goes to quarantine, as
if a read had found it. Then the scrub rests and starts again.

It never reads faster than `rate` bytes a second, and yields to traffic: before each piece it waits until no load
or store runs, for at most PATIENCE_S. So a store that is never idle is still scrubbed, only more slowly. It needs
memory for one piece, and for the entries of one directory, whatever the store holds. With a rate of 0 it has no
task, no timer and no memory.

Time comes from the loop, so a simulation can run it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import structlog

from transferd.runtime.threads import Direction, Threads
from transferd.storage.directory import ObjectDirectory
from transferd.storage.effects import Traffic
from transferd.storage.examine import PIECE_BYTES, Examination

log = structlog.get_logger(__name__)

PATIENCE_S = 0.5  # how long a piece waits for traffic to pause
REST_S = 60.0  # the rest between two passes, so that an empty store is not walked in a busy loop


@dataclass(eq=False)
class Scrub:
    """One directory's scrub. Changed on the event loop only.

    traffic: the loads and stores that it yields to.
    bad: makes an object unreachable; awaited for each damaged one.
    walked: called after each pass. A walk cannot miss what is not there, so the owner checks for removed files then.
    """

    _directory: ObjectDirectory
    _threads: Threads
    _now: Callable[[], float]  # monotonic seconds
    _traffic: Traffic
    _bad: Callable[[str], Awaitable[object]]
    _walked: Callable[[], None]
    _rate: int = 0
    _counts: Counter[str] = field(default_factory=Counter)
    _task: asyncio.Task[None] | None = None

    def set_rate(self, rate: int) -> None:
        """Set bytes per second; 0 ends the scrub after its current piece. Call on the event loop."""
        self._rate = rate
        if self._task is None:
            if rate:
                self._task = asyncio.get_running_loop().create_task(self._run())
                self._task.add_done_callback(self._ended)
        elif not rate:
            self._task.cancel()

    async def close(self) -> None:
        """End the scrub, and wait until its current piece has been read."""
        self.set_rate(0)
        if self._task is not None:
            await asyncio.wait({self._task})

    def statistics(self) -> dict[str, Any]:
        """rate, complete passes, and its totals: objects, bytes, damaged, unsealed, errors."""
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
            await self._pass(buffer)
            await asyncio.sleep(REST_S)

    async def _pass(self, buffer: memoryview) -> None:
        """Examine every object once."""
        steps = self._steps(buffer)
        due = self._now()
        try:
            while (step := await self._next(steps)) is not None:
                if isinstance(step, Examination):
                    await self._examined(step)
                    continue
                self._counts["bytes"] += step
                # Do not catch up after a delay: that would be a burst.
                due = max(due, self._now() - PATIENCE_S) + step / max(1, self._rate)
                await asyncio.sleep(max(0.0, due - self._now()))
            self._counts["passes"] += 1
            self._walked()
        finally:
            steps.close()

    async def _next(self, steps: Iterator[int | Examination]) -> int | Examination | None:
        """The next step, once traffic permits. A cancellation takes effect when the thread has finished the step."""
        await self._traffic.quiet(PATIENCE_S)
        return await self._threads.run(Direction.OUT, lambda: next(steps, None), "scrub")

    def _steps(self, buffer: memoryview) -> Generator[int | Examination, None, None]:
        """Runs in a thread, one step per call: yields the size of each piece, then the examination of the object."""
        for name, _ in self._directory.objects(self._refused):
            examination = self._directory.examination(name)
            try:
                yield from examination.pieces(buffer)
            except OSError as error:
                log.warning("scrub could not read an object", name=name, problem=str(error))
                self._counts["errors"] += 1
            else:
                yield examination

    def _refused(self, error: OSError) -> None:
        log.warning("scrub could not list objects", problem=str(error))
        self._counts["errors"] += 1

    async def _examined(self, examination: Examination) -> None:
        if examination.gone:
            return
        self._counts["objects"] += 1
        self._counts["unsealed"] += examination.unsealed
        if examination.damage is not None:
            self._counts["damaged"] += 1
            log.warning("scrub found a damaged object", name=examination.name, damage=str(examination.damage))
            await self._bad(examination.name)
