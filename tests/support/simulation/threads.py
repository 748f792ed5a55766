"""SimThreads: the real crews of runtime/threads.py on simulated threads, which work at a virtual time.

Only what a host provides is simulated here: starting a thread, which may be refused, and a queue that threads
wait at. Who may start, queue, withdraw and run what is the real code's, so a bug in it shows in a simulation.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.support.simulation.faults import Dice, Gate, ThreadFaults, note, take
from transferd.errors import NoThreads
from transferd.runtime.native import NativeCall
from transferd.runtime.threads import CLOSE_S, Crew, Direction, ThreadPools, Work


class SimThreads(ThreadPools):
    """ThreadPools with `size` threads per direction, and as many for set-up, which exist in name only.

    A function has its effect at one moment between its start and its end, as the seed chooses: whoever
    takes memory back before the end is found out.

    faults: the plan, may be replaced at any time. dice: for scripts, operation "start" of a thread. gates, ends: per
    direction, hold what would start now, and what would end. only_calls: the gates hold loads and stores alone, and
    these also between two of their items.
    """

    def __init__(self, size: int = 4, *, faults: ThreadFaults | None = None, rng: random.Random | None = None) -> None:
        self.faults = faults or ThreadFaults()
        self.dice = Dice(rng, "threads")
        self.gates = {direction: Gate() for direction in Direction}
        self.ends = {direction: Gate() for direction in Direction}
        self.started = 0
        self.only_calls = False
        super().__init__(size, setup=size)

    def _crew(self, name: str, size: int) -> Crew:
        return _SimCrew(name, size, self, Direction(name.rpartition("-")[2]))

    def close(self, within: float = CLOSE_S) -> list[str]:
        """Withdraw what has not begun. What has begun runs to its end by itself."""
        return super().close(0.0)


class _SimThread:
    """Like a threading.Thread that was started, as far as a crew asks."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ident = None

    def join(self, timeout: float | None = None) -> None:
        """A simulated thread cannot be waited for by a caller that keeps the loop."""


class _SimCrew(Crew):
    """A crew whose threads are tasks of the loop."""

    def __init__(self, name: str, size: int, owner: SimThreads, direction: Direction) -> None:
        super().__init__(name, size)
        self._owner = owner
        self._begins, self._ends = owner.gates[direction], owner.ends[direction]
        self._queue: Any = _SimQueue(self._serve_next)
        self._tasks: dict[asyncio.Task[None], Work[object]] = {}
        self._busy = 0

    def _start(self, name: str) -> Any:
        if self._owner.dice.draw("start", self._owner.faults.of_start()) is not None:
            raise NoThreads(f"cannot start the thread {name} (simulated)")
        note(f"thread {name} started")
        asyncio.get_running_loop().call_soon(self._serve_next)  # it looks for what waits, as a thread does
        return _SimThread(name)

    def _serve_next(self) -> None:
        """A thread that is idle takes what has waited longest."""
        waiting = self._queue.waiting
        while waiting and self._busy < len(self._threads):
            work = waiting.popleft()
            if work is None or work.done():
                continue
            self._busy += 1
            task = asyncio.get_running_loop().create_task(self._work(work), name="work")
            self._tasks[task] = work
            task.add_done_callback(self._tasks.pop)

    def close(self, within: float = CLOSE_S) -> list[str]:
        """As Crew.close. A thread about to take a function that was withdrawn ends here: it runs nothing."""
        running = super().close(within)
        for task, work in self._tasks.items():
            if work.done():
                task.cancel()
        return running

    async def _held(self, work: Work[object]) -> None:
        if not self._owner.only_calls or any(map(_is_call, work._function)):
            await self._begins.passed()

    async def _work(self, work: Work[object]) -> None:
        await self._held(work)
        dice = self._owner.dice
        self._owner.started += 1
        seconds = self._owner.faults.latency.draw(dice.rng)
        effect = seconds * dice.rng.random()
        await take(effect)
        ended = work.execute(give_way := lambda: dice.rng.random() < 0.5)
        while work.begun and not ended:  # between two items of a batch, other threads may come
            await take(effect)
            if self._owner.only_calls:
                await self._held(work)
            ended = work.execute(give_way)
        if ended:
            await take(seconds - effect)
            await self._ends.passed()
            work.deliver()
        self._busy -= 1
        self._serve_next()


def _is_call(function: object) -> bool:
    """Whether it is a share of a load or a store: those of removals call a plain function."""
    shared = getattr(function, "_shared", None)
    return isinstance(function, NativeCall) or (shared is not None and isinstance(shared.effect, functools.partial))


class _SimQueue:
    """A SimpleQueue that calls somebody instead of waking a thread."""

    def __init__(self, arrived: Callable[[], None]) -> None:
        self.waiting: deque[Work[object] | None] = deque()
        self._arrived = arrived

    def put(self, work: Work[object] | None) -> None:
        self.waiting.append(work)
        self._arrived()

    def close(self) -> list[Work[object]]:
        waiting = [work for work in self.waiting if work is not None]
        self.waiting.clear()
        return waiting
