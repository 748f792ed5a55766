"""Turns of the event loop: how long work on request may run before timers and everybody else run again.

Frames of connections and requests over HTTP are worked on in turns. A turn ends by the clock, whatever its work costs.
What comes later in the turn waits for the next one. Who has cost least goes first: each worker has a `Spent`, and a
worker that was idle starts where the last one served was, so nobody can save time up and nobody starves. So an engine
that pings waits for one costly request, not for all that many others have asked for.

Longer work (a look-up of many keys) is done in pieces, one in a turn: `OneATurn`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol

TURN_S = 0.004
FRAMES = 64  # pieces of one worker at a time
SHARE = 16  # the same for one that has waited, as others may
now = time.perf_counter


class Spent:
    """What one peer has cost of the loop's time, in seconds since an origin that moves on with those served."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = 0.0


class Worker(Protocol):
    """Whoever waits for a turn."""

    @property
    def closed(self) -> bool: ...

    @property
    def spent(self) -> Spent: ...

    def work(self, most: int) -> None:
        """Do at least one piece, at most so many, and no other after `LoopTurns.until`; then call `LoopTurns.took`."""


class LoopTurns:
    """The turns of one event loop.

    until: when the current turn ends, by `now`.
    """

    def __init__(self) -> None:
        self.until = 0.0
        self._waiting: list[tuple[float, int, Worker]] = []  # a heap, by what they had spent
        self._numbers = itertools.count()
        self._served = 0.0  # what the last one served had spent
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Handle | None = None

    @property
    def free(self) -> bool:
        """Whether whoever asks may work right now: nobody waits, and this turn is not over."""
        if self._next is None:
            self._renew()
        return not self._waiting and now() < self.until

    def begin(self) -> float:
        """Begin a turn, for a caller that the loop calls once in each of its own; return when it ends."""
        self.until = now() + TURN_S
        return self.until

    def took(self, worker: Worker, seconds: float) -> None:
        """Note what a worker has cost."""
        worker.spent.at = max(worker.spent.at, self._served) + seconds

    def reached(self, spent: float) -> None:
        """Note what the one who has cost least of those that are served now has spent."""
        self._served = max(self._served, spent)

    def wait(self, worker: Worker) -> None:
        """Have `worker.work` called in one of the next turns."""
        spent = worker.spent.at = max(worker.spent.at, self._served)
        heapq.heappush(self._waiting, (spent, next(self._numbers), worker))
        if self._next is None:
            self._renew()

    def _renew(self) -> None:
        self.begin()
        self._next = self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self._next = None
        if not self._waiting:
            return
        self._renew()
        for _ in range(len(self._waiting)):
            self._served, _, worker = heapq.heappop(self._waiting)
            if not worker.closed:
                worker.work(SHARE)
            if now() >= self.until:
                break


_of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopTurns] = weakref.WeakKeyDictionary()


def loop_turns() -> LoopTurns:
    """The turns of the running loop, which all that work on request share."""
    loop = asyncio.get_running_loop()
    if (turns := _of_loops.get(loop)) is None:
        turns = _of_loops[loop] = LoopTurns()
    return turns


class OneATurn:
    """Lets one piece of longer work run in each turn of the loop, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False

    async def turn(self) -> None:
        """Wait until this piece may run."""
        loop = asyncio.get_running_loop()
        if self._taken:
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.append(future)
            await future
        else:
            self._taken = True
            loop.call_soon(self._next, loop.call_soon)

    def _next(self, call_soon: Callable[..., object]) -> None:
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():  # else its caller was cancelled
                future.set_result(None)
                call_soon(self._next, call_soon)
                return
        self._taken = False
