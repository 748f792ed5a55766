"""A storage that takes only whole slots, such as a Mooncake pool, as one that makes and takes objects in threads."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence

from transferd.runtime.aio import Later
from transferd.runtime.threads import Direction, Threads
from transferd.storage.base import FOUND, LEFT, Drainer, Fill, Found, FrontStorage, Item, Outcome, Outcomes, Storage

SLOTS = 16  # at a time: a call has a high fixed cost


class WholeSlots(FrontStorage):
    """See the module. threads: borrowed."""

    def __init__(self, behind: Storage, threads: Threads) -> None:
        super().__init__(behind)
        self.slots_at_once = SLOTS
        self._threads = threads

    def join(self, wrap: Callable[[Storage], Storage]) -> Storage:
        self._behind = self._behind.join(wrap)
        return self

    def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> Awaitable[list[Outcome]]:
        if fill is None:
            return self._behind.store(items, None, slots)
        return Later(functools.partial(self._make, items, fill, slots))

    def load(
        self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]
    ) -> Awaitable[list[Outcome]]:
        if drain is None:
            return self._behind.load(items, None, slots)
        return Later(functools.partial(self._take, items, drain, slots))

    async def _make(self, items: Sequence[Item], fill: Fill, slots: Sequence[memoryview]) -> list[Outcome]:
        outcomes = [LEFT] * len(items)
        for start in range(0, len(items), len(slots)):
            which = range(start, min(start + len(slots), len(items)))
            own = [slots[i - start][: items[i].nbytes] for i in which]

            def make(which: range = which, own: Sequence[memoryview] = own) -> list[bool]:
                return [fill(i, slot, False) for i, slot in zip(which, own, strict=True)]

            made = await self._threads.run(Direction.OUT, make, "objects for a pool")
            good = [i for i, there in zip(which, made, strict=True) if there]
            if good:
                views = [own[i - start] for i in good]
                answers = await self._behind.store([items[i] for i in good], None, views)
                for i, answer in zip(good, answers, strict=True):
                    outcomes[i] = answer
                if isinstance(answers, Outcomes):  # the slots are in use
                    return Outcomes.after(outcomes, {answers.returned})
        return outcomes

    async def _take(self, items: Sequence[Item], drain: Drainer, slots: Sequence[memoryview]) -> list[Outcome]:
        outcomes, late = [LEFT] * len(items), list[asyncio.Future[None]]()
        for start in range(0, len(items), len(slots)):
            if not drain.wanted or late:  # `late`: the slots are in use
                break
            which = range(start, min(start + len(slots), len(items)))
            own = [slots[i - start][: items[i].nbytes] for i in which]
            answers = await self._behind.load([items[i] for i in which], None, own)
            if isinstance(answers, Outcomes):
                late.append(answers.returned)
            there = [i for i, answer in zip(which, answers, strict=True) if answer.found is Found.FOUND]

            def take(there: Sequence[int] = there, own: Sequence[memoryview] = own, start: int = start) -> list[bool]:
                return [drain(i, own[i - start]) for i in there]

            taken = dict(zip(there, await self._threads.run(Direction.IN, take, "objects of a pool"), strict=True))
            for i, answer in zip(which, answers, strict=True):
                outcomes[i] = (FOUND if taken[i] else LEFT) if i in taken else answer
        return Outcomes.after(outcomes, late)
