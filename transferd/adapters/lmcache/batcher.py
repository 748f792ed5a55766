"""Joins transfers that come close together: LMCache's requests have few objects, and a task costs as much as several.

A request that finds less than `AT_ONCE` tasks under way becomes a task at once. Others wait for one of them to end, or
for `MOST_WAIT_S`; then all that wait become one task, up to a bound. docs/lmcache.md has what that gains.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from transferd.runtime.aio import Timer

AT_ONCE = 2  # so that the daemon has work while the next task is on its way
MOST_WAIT_S = 0.002
MOST_OBJECTS, MOST_BYTES = 64, 64 * 1024**2  # of a joined task: its first request waits for its last

Run = Callable[[list[str], list[int], float], Awaitable[list[bool]]]


@dataclass(frozen=True, slots=True)
class _MoveRequest:
    """since: monotonic seconds."""

    keys: Sequence[str]
    blocks: Sequence[int]
    since: float
    answer: asyncio.Future[list[bool]]


class Batcher:
    """The transfers of one kind of objects in one direction. Belongs to one event loop.

    run: has the daemon move these keys to or from these blocks within so many seconds; for each key, whether it did.
    timeout: seconds for a request, from its call of `move`. One that waits longer is given up: nothing is moved.
    """

    def __init__(self, run: Run, timeout: float, object_bytes: int) -> None:
        self._run = run
        self._timeout = timeout
        self._most = max(1, min(MOST_OBJECTS, MOST_BYTES // object_bytes))
        self._waiting: deque[_MoveRequest] = deque()
        self._under_way: set[asyncio.Task[None]] = set()
        self._alarm = Timer()

    async def move(self, keys: Sequence[str], blocks: Sequence[int]) -> list[bool]:
        """Move the objects. For each, whether it was moved. Raises what `run` raises."""
        loop = asyncio.get_running_loop()
        request = _MoveRequest(keys, blocks, time.monotonic(), loop.create_future())
        self._waiting.append(request)
        if len(self._under_way) < AT_ONCE:
            self._start()
        elif not self._alarm:
            self._alarm.set(MOST_WAIT_S, self._start_all)
        return await request.answer

    def _start_all(self) -> None:
        while self._waiting:
            self._start()

    def _start(self) -> None:
        running = asyncio.ensure_future(self._carry_out(self._next_batch()))
        self._under_way.add(running)
        running.add_done_callback(self._ended)

    def _ended(self, running: asyncio.Task[None]) -> None:
        self._under_way.discard(running)
        if self._waiting:
            self._start()

    def _next_batch(self) -> list[_MoveRequest]:
        """Take the oldest request, and those after it that fit. A key or a block is in a task only once."""
        batch = [self._waiting.popleft()]
        keys, blocks = set(batch[0].keys), set(batch[0].blocks)
        while self._waiting:
            one = self._waiting[0]
            full = len(keys) + len(one.keys) > self._most
            if full or not keys.isdisjoint(one.keys) or not blocks.isdisjoint(one.blocks):
                break
            keys.update(one.keys)
            blocks.update(one.blocks)
            batch.append(self._waiting.popleft())
        return batch

    async def _carry_out(self, batch: list[_MoveRequest]) -> None:
        keys, blocks = [key for one in batch for key in one.keys], [block for one in batch for block in one.blocks]
        left = batch[0].since + self._timeout - time.monotonic()
        try:
            moved = iter(await self._run(keys, blocks, left) if left > 0 else [False] * len(keys))
        except Exception as error:  # noqa: BLE001 - each of the callers gets it
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        for one in batch:
            answer = [next(moved) for _ in one.keys]
            if not one.answer.done():  # its caller may have been cancelled
                one.answer.set_result(answer)
