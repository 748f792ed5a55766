"""SimOffload: the offload seam without threads: functions run on the loop, at a virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from tests.support.simulation.faults import Dice, Gate, OffloadFaults, take
from transferd.runtime.threads import Direction

T = TypeVar("T")


class SimOffload:
    """Offload with `threads` workers per direction that exist in name only.

    A function has its effect at one moment between its start and its end, as the seed chooses: whoever
    takes memory back before the end is found out. As with threads, cancelling the future of a
    function that waits for a worker takes it back, and of one that has started changes nothing.

    faults: the plan, may be replaced at any time. dice: for scripts, operation "run". gates: per
    direction, hold what would start now.
    """

    def __init__(
        self, threads: int = 4, *, faults: OffloadFaults | None = None, rng: random.Random | None = None
    ) -> None:
        self.faults = faults or OffloadFaults()
        self.dice = Dice(rng, "offload")
        self.gates = {direction: Gate() for direction in Direction}
        self.started = 0
        self._idle = dict.fromkeys(Direction, threads)
        self._queues: dict[Direction, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = {
            direction: deque() for direction in Direction
        }
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    def run(self, direction: Direction, function: Callable[[], T]) -> asyncio.Future[T]:
        if self._closed:
            raise RuntimeError("this offload is closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queues[direction].append((function, future))
        self._start(direction)
        return future

    def close(self) -> None:
        """Take back what has not started. What has started runs to its end by itself."""
        self._closed = True
        for queue in self._queues.values():
            while queue:
                queue.popleft()[1].cancel()

    def _start(self, direction: Direction) -> None:
        queue = self._queues[direction]
        while queue and self._idle[direction]:
            function, future = queue.popleft()
            if future.cancelled():
                continue
            self._idle[direction] -= 1
            task = asyncio.get_running_loop().create_task(self._work(direction, function, future), name="offload")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _work(self, direction: Direction, function: Callable[[], T], future: asyncio.Future[T]) -> None:
        await self.gates[direction].passed()
        self.started += 1
        result: T | None = None
        error: BaseException | None = None
        seconds = self.faults.latency.draw(self.dice.rng)
        effect = seconds * self.dice.rng.random()
        failed = self.dice.draw("run", self.faults.of_run()) is not None
        await take(effect)
        if failed:
            error = OSError("can't start new thread (simulated)")
        else:
            try:
                result = function()
            except Exception as raised:  # noqa: BLE001 - it belongs to whoever asked for the function
                error = raised
        await take(seconds - effect)
        self._idle[direction] += 1
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type] # a T whenever there is no error
        if not self._closed:
            self._start(direction)
