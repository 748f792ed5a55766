"""Native calls off the loop: a bounded number of threads, with a share for each kind of call.

A native call cannot be cancelled, and finalizing the interpreter while one runs crashes in the library's
destructors. So if the calls do not end in time, daemon/process.py ends the process without finalizing it, with
an exit code of its own.

Stores never make a load wait for a thread. The probe, and the look at our connections, have a thread each because all
others may hang.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from transferd.errors import StorageUnavailable
from transferd.runtime.aio import Background
from transferd.runtime.compat import timeout
from transferd.runtime.threads import Crew, whose
from transferd.storage.mooncake.client import Batch, Buffer

T = TypeVar("T")


class LeftRunning(StorageUnavailable):
    """A call hangs, and nobody waits for it any more. ended: done when the library no longer touches its buffers."""

    def __init__(self, why: StorageUnavailable, ended: asyncio.Future[Any]) -> None:
        super().__init__(str(why))
        self.ended = ended
        ended.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody is left to see it


class CallKind(enum.Enum):
    """A kind of call. The number in the value is how many of them may run at the same time."""

    STORE = "store", 8
    LOAD = "load", 8
    PROBE = "probe", 1
    LOOK = "look", 1  # at our own connections: short, and never in the library
    COPY = "copy", 1  # asks the master where objects are, and for copies of them

    @property
    def threads(self) -> int:
        return self.value[1]


class NativeCalls(Crew):
    """A crew that makes so many calls of each kind at a time. Owns its threads from `open` to `close`.

    wait: the most seconds that a call waits for a thread of its kind.
    """

    def __init__(self, wait: float) -> None:
        super().__init__("transferd-mooncake", sum(kind.threads for kind in CallKind))
        self._wait = wait
        self._free = {kind: asyncio.Semaphore(kind.threads) for kind in CallKind}
        self._calls = Background()

    def __len__(self) -> int:
        return len(self._calls)

    async def call(self, kind: CallKind, function: Callable[[], T], begun: Callable[[], None] | None = None) -> T:
        """Run `function` in a thread and return its result. Calls `begun` when a thread takes it.

        Raises StorageUnavailable if no thread came free in time; then nothing was called.
        """
        try:
            async with timeout(self._wait):
                await self._free[kind].acquire()
        except TimeoutError:
            raise StorageUnavailable(
                f"mooncake: {kind.threads} {kind.name.lower()} calls are running and none ended within {self._wait:g} s"
            ) from None
        try:
            if begun is not None:
                begun()
            return await self._calls.begin(self.run(function, f"{kind.name.lower()} call"))
        finally:
            self._free[kind].release()

    async def idle(self, within: float) -> bool:
        """Wait until no call runs. Returns False if one still runs after `within` seconds."""
        return await self._calls.settled(within)


PATIENCE_S = 0.1  # longer than a call that moves its bytes
MOST_BYTES = 32 * 1024**2  # of a merged call: larger ones gain nothing, and a hung peer blocks more
MOST_OBJECTS = 128


_Waiting = tuple[Batch, asyncio.Future[dict[str, T]]]
"""What waits for a call, and its answer."""


# The library waits for a TCP transfer by polling: every running data call occupies a CPU core. And every call makes
# two requests to the master. So many small calls at once cost more than their bytes; a sequence of large calls does
# not. A call that hangs must not block the others: after PATIENCE_S the next one starts beside it, up to `most`.
class Merger(Generic[T]):
    """Makes calls on batches of keys: all that arrive while one call runs become the next one. Engines take turns.

    call: makes one call, with an answer for each key; no key occurs twice in it. If it raises, every batch in it gets
    the error.
    counts: `batches_merged` counts the batches that joined another's call. most: calls at a time.
    """

    def __init__(
        self, call: Callable[[Batch], Awaitable[dict[str, T]]], counts: Counter[str], most: float = math.inf
    ) -> None:
        self._call = call
        self._counts = counts
        self._most = most
        self._under_way = 0
        self._queues: OrderedDict[str, deque[_Waiting[T]]] = OrderedDict()  # by engine, the next one first
        self._running = Background()
        self._fresh: object | None = None  # the call that began less than PATIENCE_S ago

    async def run(self, batch: Batch) -> dict[str, T]:
        """The answers for this batch. Do not cancel it: the call goes on (see `uncancelled`)."""
        answer: asyncio.Future[dict[str, T]] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(whose.get(), deque()).append((batch, answer))
        self._next()
        return await answer

    def _next(self) -> None:
        if self._fresh is not None or not self._queues or self._under_way >= self._most:
            return
        self._running.begin(self._make(self._take()))

    def _take(self) -> list[_Waiting[T]]:
        """Batches of each engine in turn, each engine's in their order, while they fit. Stop at a repeated key."""
        group: list[_Waiting[T]] = []
        keys: set[str] = set()
        nbytes = 0
        while self._queues:
            owner, queue = next(iter(self._queues.items()))
            batch, _ = queue[0]
            nbytes += sum([buffer.nbytes for buffer in batch.values()])
            too_much = nbytes > MOST_BYTES or len(keys) + len(batch) > MOST_OBJECTS
            if group and (too_much or not keys.isdisjoint(batch)):
                break
            keys.update(batch)
            group.append(queue.popleft())
            self._queues.move_to_end(owner)
            if not queue:
                del self._queues[owner]
        self._under_way += 1
        self._counts["batches_merged"] += len(group) - 1
        self._fresh = group
        return group

    async def _make(self, group: list[_Waiting[T]]) -> None:
        timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._free, group)
        try:
            joined: dict[str, Buffer] = {}
            for batch, _ in group:
                joined |= batch
            answers = await self._call(joined)
        except Exception as error:  # noqa: BLE001 - the callers handle it
            for _, answer in group:
                answer.set_exception(error)
        else:
            for batch, answer in group:
                answer.set_result({key: answers[key] for key in batch})
        finally:
            timer.cancel()
            self._under_way -= 1
            self._free(group)

    def _free(self, group: object) -> None:
        if self._fresh is group:
            self._fresh = None
        self._next()
