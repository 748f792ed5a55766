"""Calls of one kind that come while one is under way go together in the next one.

The library waits for a TCP transfer by asking for its state in a loop: every data call under way takes a
processor besides those that move bytes. And every call asks the master twice. So many small calls at once,
which is what chunks of several tasks are, cost more than their bytes; one large call after another does
not, and the next one is as large as what has come meanwhile.

A call that does not end must not keep others waiting: after `PATIENCE_S` the next one starts beside it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from transferd.storage.mooncake.client import KeyBatch

PATIENCE_S = 0.1  # longer than a call that moves its bytes
MOST_BYTES = 32 * 1024**2  # of a merged call: beyond it nothing is won, and a peer that hangs holds up more
MOST_OBJECTS = 128


@dataclass(slots=True, eq=False)
class _Waiting:
    batch: KeyBatch
    answer: asyncio.Future[list[int]]


class Merger:
    """Makes calls on batches of keys. call: makes one, with each key once; what it raises, every caller of it gets."""

    def __init__(self, call: Callable[[KeyBatch], Awaitable[list[int]]]) -> None:
        self.calls = 0
        self.merged = 0  # batches that went along in another's call
        self._call = call
        self._queue: deque[_Waiting] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._fresh: object | None = None  # the call that began less than PATIENCE_S ago

    async def run(self, batch: KeyBatch) -> list[int]:
        """The answers for this batch. Must not be cancelled: the call goes on (see `uncancelled`)."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(batch, loop.create_future())
        self._queue.append(waiting)
        self._next()
        return await waiting.answer

    def _next(self) -> None:
        if self._fresh is not None or not self._queue:
            return
        task = asyncio.get_running_loop().create_task(self._make(self._take()))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _take(self) -> list[_Waiting]:
        """The first that wait, as far as they fit in one call; of a key that is twice in it nobody knows the answer."""
        group = [self._queue.popleft()]
        keys, nbytes = set(group[0].batch.keys), sum(group[0].batch.sizes)
        while self._queue:
            batch = self._queue[0].batch
            nbytes += sum(batch.sizes)
            if nbytes > MOST_BYTES or len(keys) + len(batch.keys) > MOST_OBJECTS or not keys.isdisjoint(batch.keys):
                break
            keys.update(batch.keys)
            group.append(self._queue.popleft())
        self.calls += 1
        self.merged += len(group) - 1
        self._fresh = group
        return group

    async def _make(self, group: list[_Waiting]) -> None:
        timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._free, group)
        try:
            answers = await self._call(KeyBatch.joined([waiting.batch for waiting in group]))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the callers'
            for waiting in group:
                waiting.answer.set_exception(error)
        else:
            start = 0
            for waiting in group:
                end = start + len(waiting.batch.keys)
                waiting.answer.set_result(answers[start:end])
                start = end
        finally:
            timer.cancel()
            self._free(group)

    def _free(self, group: object) -> None:
        if self._fresh is group:
            self._fresh = None
            self._next()
