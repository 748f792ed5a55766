"""One load from a stack: each block from the first level that has it.

It works in rounds. In each, every open block is requested from the next level below the last one that was tried for
it, and the levels of a round work at the same time. A level that does not have the block, or fails, leaves it to the
next one. So does a level that is too slow, if another level may have the block: its blocks are LEFT, and the caller
loads them again in other slots. The first slots return when the slow level has ended its reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from transferd.errors import StorageError
from transferd.runtime.aio import every, resolve
from transferd.runtime.threads import Direction
from transferd.storage.base import LEFT, MISSING, Drainer, Found, Item, Outcome, Outcomes, with_slots_back
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.parts import StackParts
from transferd.storage.levels.promotion import Buffer, Buffers


class Taking:
    """The drain of one call to one level: it can be withdrawn, and copies blocks for their promotion.

    which: for each item of the call, its number for `drain`.
    promote: items to copy to buffers.
    """

    def __init__(self, drain: Drainer, which: Sequence[int], promote: Collection[int], buffers: Buffers) -> None:
        self.taken: dict[int, bool] = {}  # by item
        self.copies: dict[int, Buffer] = {}
        self._drain = drain
        self._which = which
        self._promote = promote
        self._buffers = buffers
        self._turns = [[True] for _ in which]  # popped once: by the thread that takes the item, or by `withdraw`
        self._over = False
        self._wake: asyncio.Future[None] | None = None

    @property
    def wanted(self) -> bool:
        return not self._over and self._drain.wanted

    def __call__(self, i: int, data: memoryview, /) -> bool:
        try:
            self._turns[i].pop()
        except IndexError:
            return self.taken.get(i, False)
        taken = False
        try:
            taken = self._drain(self._which[i], data)
            if taken and i in self._promote and (buffer := self._buffers.take(data.nbytes)) is not None:
                np.copyto(buffer, np.asarray(data))
                self.copies[i] = buffer
        finally:  # `withdraw` waits for this, whatever the drain raised
            self.taken[i] = taken
            if self._over and (wake := self._wake) is not None:
                wake.get_loop().call_soon_threadsafe(resolve, wake, None)
        return taken

    async def withdraw(self) -> list[int]:
        """Take nothing more. Returns the items that no thread has taken, once no thread is taking an item."""
        withdrawn = []
        loop = asyncio.get_running_loop()
        self._over = True
        for i, turn in enumerate(self._turns):
            try:
                turn.pop()
            except IndexError:
                continue
            withdrawn.append(i)
        left = set(withdrawn)
        while True:
            self._wake = loop.create_future()
            if all(i in self.taken or i in left for i in range(len(self._turns))):
                return withdrawn
            await self._wake


class StackLoad:
    """See the module."""

    def __init__(
        self,
        parts: StackParts,
        items: Sequence[Item],
        drain: Drainer | None,
        slots: Sequence[memoryview],
        *,
        first: int = 0,
    ) -> None:
        """first: the number of the first level to try. If it is not 0, this is a prefetch, which promotes nothing."""
        self._parts = parts
        self._promotes = not first
        self._born = parts.fences.number
        self._items = items
        self._drain = drain
        self._slots = slots
        self._outcomes: dict[int, Outcome] = {}
        self._next = [first] * len(items)  # the first level that was not tried
        self._errors: dict[int, StorageError] = {}
        self._late: list[asyncio.Future[Any]] = []

    async def run(self) -> list[Outcome]:
        todo = [i for i in range(len(self._items)) if i not in self._outcomes]
        while todo:
            groups = self._groups(todo)
            await self._ask_all(groups)
            todo = [i for i in todo if i not in self._outcomes]
        return Outcomes.after([self._outcomes[i] for i in range(len(self._items))], self._late)

    def _groups(self, todo: Sequence[int]) -> dict[StoreLevel, list[int]]:
        """The items to request from each level next. Decides items for which no level is left."""
        groups: dict[StoreLevel, list[int]] = {}
        left = list(todo)
        for level in self._parts.levels:
            which = [i for i in left if self._next[i] <= level.number]
            if not which or level.out:
                continue
            has = level.has([self._items[i].name for i in which])
            mine = [i for i, there in zip(which, has, strict=True) if there is not False and self._asks(level, i)]
            for i, there in zip(which, has, strict=True):
                if there is False:
                    self._parts.lost(level, self._items[i])
            if mine:
                groups[level] = mine
                taken = set(mine)
                left = [i for i in left if i not in taken]
        for i in left:
            error = self._errors.get(i)  # that level may have it, though others have not
            self._outcomes[i] = MISSING if error is None else Outcome(Found.FAILED, error)
        return groups

    def _asks(self, level: StoreLevel, i: int) -> bool:
        return self._items[i].name not in level.stuck and self._items[i].name not in level.hidden

    async def _ask_all(self, groups: dict[StoreLevel, list[int]]) -> None:
        """Load from the levels of a round, at the same time as far as slots allow."""
        if self._drain is None:
            await every(self._ask(level, which, [self._slots[i] for i in which]) for level, which in groups.items())
            return
        need = [level for level in groups if level.storage.slots_at_once]
        # The objects have left the memory since the caller called `slots_for`, or an earlier round's call uses them.
        if not self._slots or self._late:
            for level in need:
                self._outcomes.update(dict.fromkeys(groups.pop(level), LEFT))
            need = []
        free = [level for level in groups if not level.storage.slots_at_once]
        each = min(len(need), len(self._slots))
        some, rest = need[:each], need[each:]
        works = [self._ask(level, groups[level], ()) for level in free]
        works += [self._ask(level, groups[level], self._slots[k::each]) for k, level in enumerate(some)]
        await every(works)
        for level in rest:
            if self._late:  # its slots are in use
                self._outcomes.update(dict.fromkeys(groups[level], LEFT))
            else:
                await self._ask(level, groups[level], self._slots)

    async def _ask(self, level: StoreLevel, which: Sequence[int], slots: Sequence[memoryview]) -> None:
        parts, items = self._parts, [self._items[i] for i in which]
        promote = set()
        if self._promotes and level.number and parts.promotions.above(level) is not None:
            promote = {k for k, item in enumerate(items) if parts.promotions.wanted(level, item.name)}
        taking = None if self._drain is None else Taking(self._drain, which, promote, parts.promotions.buffers)
        if taking is not None and level.storage.slots_at_once:
            slots = slots[: max(1, min(len(slots), len(items)))]
        nbytes = sum(item.nbytes for item in items)
        until = min((item.use.until for item in items if item.use), default=None)
        limit = level.loads.limit_within(nbytes, until) if self._may_be_elsewhere(level, items) else None
        loading = await level.loads.wait(level.storage.load(items, taking, slots), limit, nbytes)
        if not loading.done():
            await self._leave(level, which, items, taking, loading)
            return
        try:
            outcomes = loading.result()
        except StorageError as error:
            outcomes = [Outcome(Found.FAILED, error)] * len(items)
        if isinstance(outcomes, Outcomes):  # the level hangs, and may still write to the slots
            self._late.append(parts.late.begin(outcomes.returned))
            if self._may_be_elsewhere(level, items):
                outcomes = [LEFT if outcome.found is Found.FAILED else outcome for outcome in outcomes]
        self.sort(level, which, outcomes)
        await self._promote(level, which, promote, taking)

    def _may_be_elsewhere(self, level: StoreLevel, items: Sequence[Item]) -> bool:
        if level.in_memory:
            return False
        for below in self._parts.levels[level.number + 1 :]:
            if not below.out:
                for item, there in zip(items, below.has([item.name for item in items]), strict=True):
                    waits = below.number in self._parts.unsaved.get(item.name, {})
                    if there or (there is None and not waits and not below.absent(item.name)):
                        return True
        return False

    async def _leave(
        self,
        level: StoreLevel,
        which: Sequence[int],
        items: Sequence[Item],
        taking: Taking | None,
        loading: asyncio.Future[list[Outcome]],
    ) -> None:
        """The level is too slow: take the objects that it has delivered, and leave the rest."""
        parts = self._parts
        left = range(len(items)) if taking is None else await taking.withdraw()
        taken = {} if taking is None else taking.taken
        for k, i in enumerate(which):
            self._outcomes[i] = level.found if taken.get(k) else LEFT
        level.stick([items[k].name for k in left], loading)
        self._late.append(parts.late.begin(with_slots_back(loading)))
        if taking is not None:
            parts.promotions.buffers.give_back(list(taking.copies.values()))

    def sort(self, level: StoreLevel, which: Sequence[int], outcomes: Sequence[Outcome]) -> None:
        for i, outcome in zip(which, outcomes, strict=True):
            self._next[i] = level.number + 1
            if outcome.found is Found.FOUND:
                self._outcomes[i] = level.found
                level.stored(self._items[i].name)
            elif outcome.found is Found.LEFT:
                self._outcomes[i] = outcome
            elif outcome.found is Found.MISSING:
                level.missed(self._items[i].name)
                self._parts.lost(level, self._items[i])
            elif isinstance(outcome.error, StorageError):
                self._errors.setdefault(i, outcome.error)

    async def _promote(self, level: StoreLevel, which: Sequence[int], promote: set[int], taking: Taking | None) -> None:
        if not promote:
            return
        parts = self._parts
        parts.promotions.remember(parts.levels[0].index.count)
        good = [k for k in promote if self._outcomes.get(which[k]) is level.found]
        if taking is not None:
            copies = dict(sorted(taking.copies.items()))  # root first, whichever thread was first
            parts.promotions.buffers.give_back([one for k, one in copies.items() if k not in good])
            copies = {k: one for k, one in copies.items() if k in good}
        else:
            copies = {}
            for k in good:
                if (buffer := parts.promotions.buffers.take(self._items[which[k]].nbytes)) is not None:
                    copies[k] = buffer

            def copy() -> None:
                for k, buffer in copies.items():
                    np.copyto(buffer, np.asarray(self._slots[which[k]]))

            if copies:
                await parts.threads.run(Direction.IN, copy, "copies for promotion")
        if copies:
            items = [self._items[which[k]] for k in copies]
            parts.promotions.begin(level, items, list(copies.values()), self._born)
