"""Merges calls of one kind: all that arrive while one runs become the next call.

The library waits for a TCP transfer by polling its state: every running data call occupies a CPU core besides
those that move bytes. And every call makes two requests to the master. So many small calls at once, such as the
chunks of several tasks, cost more than their bytes. A sequence of large calls does not; each takes everything
that has arrived meanwhile.

Engines (`whose`) take turns: a batch waits for at most one batch of each other engine per batch of its own.

A call that hangs must not block the others: after `PATIENCE_S` the next one starts beside it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from transferd.runtime.threads import whose
from transferd.storage.mooncake.client import KeyBatch

PATIENCE_S = 0.1  # longer than a call that moves its bytes
MOST_BYTES = 32 * 1024**2  # of a merged call: larger ones gain nothing, and a hung peer blocks more
MOST_OBJECTS = 128


@dataclass(slots=True, eq=False)
class _Waiting:
    batch: KeyBatch
    answer: asyncio.Future[list[int]]


class Merger:
    """Makes calls on batches of keys.

    call: makes one call; no key occurs twice in it. If it raises, every batch in it gets the error.
    """

    def __init__(self, call: Callable[[KeyBatch], Awaitable[list[int]]]) -> None:
        self.calls = 0
        self.merged = 0  # batches that joined another's call
        self._call = call
        self._queues: OrderedDict[str, deque[_Waiting]] = OrderedDict()  # by engine, the next one first
        self._running: set[asyncio.Task[None]] = set()
        self._fresh: object | None = None  # the call that began less than PATIENCE_S ago

    async def run(self, batch: KeyBatch) -> list[int]:
        """The codes for this batch. Do not cancel it: the call goes on (see `uncancelled`)."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(batch, loop.create_future())
        self._queues.setdefault(whose.get(), deque()).append(waiting)
        self._next()
        return await waiting.answer

    def _next(self) -> None:
        if self._fresh is not None or not self._queues:
            return
        task = asyncio.get_running_loop().create_task(self._make(self._take()))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def _take(self) -> list[_Waiting]:
        """Batches of each engine in turn, each engine's in their order, while they fit.

        Stop at a repeated key: its code would be ambiguous.
        """
        group: list[_Waiting] = []
        keys: set[str] = set()
        nbytes = 0
        while self._queues:
            owner, queue = next(iter(self._queues.items()))
            batch = queue[0].batch
            nbytes += sum(batch.sizes)
            too_much = nbytes > MOST_BYTES or len(keys) + len(batch.keys) > MOST_OBJECTS
            if group and (too_much or not keys.isdisjoint(batch.keys)):
                break
            keys.update(batch.keys)
            group.append(queue.popleft())
            self._queues.move_to_end(owner)
            if not queue:
                del self._queues[owner]
        self.calls += 1
        self.merged += len(group) - 1
        self._fresh = group
        return group

    async def _make(self, group: list[_Waiting]) -> None:
        timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._free, group)
        try:
            answers = await self._call(KeyBatch.joined([waiting.batch for waiting in group]))
        except Exception as error:  # noqa: BLE001 - the callers handle it
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
