"""Turns of the event loop: how long work on request may run before timers and everybody else run again.

Frames of connections and requests over HTTP are worked on in turns. A turn ends by the clock, whatever its work costs.
What comes later in the turn waits for the next one. Who has cost least goes first: each worker has a `Spent`, and a
worker that was idle starts where the last one served was, so nobody can save time up and nobody starves. So an engine
that pings waits for one costly request, not for all that many others have asked for.

Longer work (a look-up of many keys) is done in pieces, one in a turn: `OneATurn`. Work that nobody waits for is a
generator, which yields after each piece: `InPieces`.

While there is work, a timer measures how long the loop's longest step has been (`LoopTurns.longest_s`).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Generator, Sequence
from typing import Any, Protocol, TypeVar

TURN_S = 0.004
FRAMES = 64  # pieces of one worker at a time
SHARE = 16  # the same for one that has waited, as others may
PIECE_S = 0.002  # of one turn, for work that a generator does
now = time.perf_counter
LOOK_S = 0.005  # between two looks at how long a step was
IDLE_S = 0.0005  # of CPU between two looks: the loop does nothing, so the next look comes with the next message


T = TypeVar("T")


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
    longest_s: the longest time so far for which the loop ran no timer, within LOOK_S. CPU time of its thread, so a busy
        machine makes it no longer. Work is measured from the first message on.
    """

    def __init__(self) -> None:
        self.until = self.longest_s = 0.0
        self._look: asyncio.TimerHandle | None = None
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
        if self._look is None:
            self._look_later()
        return self.until

    def _look_later(self) -> None:
        self._look = self._loop.call_later(LOOK_S, self._looked, now(), time.thread_time())

    def _looked(self, since: float, used: float) -> None:
        self._look = None
        used = time.thread_time() - used
        self.longest_s = max(self.longest_s, min(used, now() - since))
        if used > IDLE_S:
            self._look_later()

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
        self._taken = asyncio.Lock()

    async def turn(self) -> None:
        """Wait until this piece may run."""
        await self._taken.acquire()
        asyncio.get_running_loop().call_soon(self._taken.release)

    async def each(self, items: Sequence[T], size: int) -> AsyncIterator[Sequence[T]]:
        """These in pieces of `size`, each in its turn; one piece, which may be empty, comes at once."""
        for start in range(0, max(len(items), 1), size):
            if len(items) > size:
                await self.turn()
            yield items[start : start + size]


def finished(work: Generator[None, None, T]) -> T:
    """What a generator returns that does its work in pieces; all of them now."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            value: T = end.value
            return value


class InPieces:
    """Runs generators to their ends in the order in which they came: PIECE_S at once, the rest in later turns."""

    def __init__(self) -> None:
        self._works: deque[Generator[None, None, Any]] = deque()
        self._next: asyncio.Handle | None = None

    def run(self, work: Generator[None, None, Any]) -> None:
        self._works.append(work)
        if self._next is None:
            self._go_on()

    def _go_on(self) -> None:
        self._next, until = None, now() + PIECE_S
        while self._works:
            for _ in self._works[0]:
                if now() >= until:
                    self._next = asyncio.get_running_loop().call_soon(self._go_on)
                    return
            self._works.popleft()
