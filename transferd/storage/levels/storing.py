"""Stores in a stack: to the first level that takes an object, and from there to those below, which lack it.

If a call to a level takes far longer than usual, the level hangs: its objects go on to the next level within the
task's time. The call keeps the caller's slots until it ends (`Outcomes.returned`), so objects that `fill` makes are
LEFT: the caller stores them again in other slots. Until that call has ended, no other store goes to the level.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Sequence

from transferd.errors import StorageError, StorageUnavailable
from transferd.storage.base import LEFT, Fill, Found, Item, Outcome, Outcomes
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.parts import StackParts
from transferd.storage.levels.write_back import Unsaved, WriteBack
from transferd.storage.lru import Use

WAIT_S = 10.0  # how long a store without a deadline waits for room in a lower level


class Storing:
    """All stores of a stack. Used on one loop."""

    def __init__(self, parts: StackParts) -> None:
        self._parts = parts

    async def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> list[Outcome]:
        """See Storage.store. Each item has a use. Never cancel it."""
        parts = self._parts
        if any(item.use and item.use.shared for item in items) and (away := self._shared_is_away()):
            return [Outcome(Found.FAILED, StorageUnavailable(away))] * len(items)
        nbytes = sum(item.nbytes for item in items)
        within = min([WAIT_S, *(max(0.0, item.use.until - parts.now()) / 2 for item in items[:1] if item.use)])
        until = parts.now() + within
        target = next((level.number for level in parts.levels if not level.out_for_stores), len(parts.levels))
        below = [one for one in parts.write_backs if one.level.number > target]
        room = {one for one in below if await one.room(nbytes, max(0.0, until - parts.now()))}
        one = _Store(self, parts, items, fill, slots, room)
        try:
            with parts.traffic:
                await one.run()
        finally:
            for back in room:
                back.came(nbytes)
        return await one.outcomes()

    def save(
        self,
        level: StoreLevel,
        name: str,
        use: Use,
        depth: int,
        stored: int | None = None,
        room: Collection[WriteBack] = (),
    ) -> list[asyncio.Future[StorageError | None]]:
        """Queue an object that this level has for each lower level that lacks the object.

        stored: its length, if it has just been stored in this level, and so is held.
        room: the levels in whose queues its store had room.

        Returns the futures that the store has to wait for.
        """
        parts = self._parts
        lacking = [one for one in parts.write_backs if one.level.number > level.number and self.lacks(one.level, name)]
        one = parts.unsaved.get(name)
        if not lacking:
            if stored is not None and one is None:
                level.storage.index.release(name, use)
            return []
        if one is None:
            nbytes = stored if stored is not None else level.storage.index.hold(name)
            if nbytes is None:  # it has just left, or this level cannot hold it
                return []
            one = Unsaved(name, nbytes, level, use, depth, parts.now(), set(), check=stored is None)
            parts.unsaved[name] = one
        elif stored is not None and one.source is not level:
            level.storage.index.release(name, use)
        elif stored is not None and one.nbytes != stored:  # a copy of a damaged predecessor is still under way
            for back in parts.write_backs:
                back.resized(one, stored)
            one.nbytes = stored
        urgent = self.urgent(use)
        ends = []
        for back in lacking:
            number = back.level.number
            if not back.add(one, urgent=number in urgent, has_room=back in room):
                continue
            one.waiting.add(number)
            if number in urgent:
                if number not in one.ends:
                    one.ends[number] = asyncio.get_running_loop().create_future()
                ends.append(asyncio.shield(one.ends[number]))
                back.awaits(one)
        if not one.waiting:
            self._forget(one)
        return ends

    def lacks(self, level: StoreLevel, name: str) -> bool:
        """Whether an object is to be copied to this level."""
        if level.leaving:
            return False
        if level.known:
            return level.has([name]) == [False] and not level.storage.unusable()
        return name not in level.settled

    def urgent(self, use: Use) -> set[int]:
        """The levels that a store by this use waits for."""
        levels = self._parts.levels
        urgent = {level.number for level in levels if level.through}
        shared = next((level.number for level in levels if level.shared), 0)
        if use.shared and shared:
            urgent.add(shared)
        return urgent

    def _shared_is_away(self) -> str:
        """Why nothing can be stored where other nodes see it, though there is such a level."""
        shared = next((level for level in self._parts.levels if level.shared), None)
        return f"the level {shared.name}, which other nodes see, is taken out" if shared and shared.leaving else ""

    def settled(self, one: Unsaved, level: StoreLevel) -> None:
        """Note that a level has the object, or will not get it."""
        one.waiting.discard(level.number)
        if not one.waiting:
            self._forget(one)

    def _forget(self, one: Unsaved) -> None:
        if self._parts.unsaved.get(one.name) is one:
            del self._parts.unsaved[one.name]
        one.source.storage.index.release(one.name, one.use)


class _Store:
    """One call. room: the lower levels in whose queues its objects have room."""

    def __init__(
        self,
        storing: Storing,
        parts: StackParts,
        items: Sequence[Item],
        fill: Fill | None,
        slots: Sequence[memoryview],
        room: Collection[WriteBack],
    ) -> None:
        self._storing = storing
        self._parts = parts
        self._items = items
        self._fill = fill
        self._slots = slots
        self._room = room
        self._outcomes: dict[int, Outcome] = {}
        self._waits: dict[int, list[asyncio.Future[StorageError | None]]] = {}
        self._late: list[asyncio.Future[None]] = []
        self._left: set[int] = set()  # objects that the caller makes again, in other slots

    async def run(self) -> None:
        todo = list(range(len(self._items)))
        for level in self._parts.levels:
            if todo:
                todo = await self._store_in(level, todo)

    async def outcomes(self) -> list[Outcome]:
        """Wait for the lower levels that must also have the object."""
        for i, ends in self._waits.items():
            for end in ends:
                if (error := await end) is not None:
                    self._outcomes[i] = Outcome(Found.FAILED, error)
        outcomes = [LEFT if i in self._left else self._outcomes[i] for i in range(len(self._items))]
        return Outcomes(outcomes, asyncio.ensure_future(_ended(self._late))) if self._late else outcomes

    async def _store_in(self, level: StoreLevel, todo: Sequence[int]) -> list[int]:
        """Store these in one level. Returns those that it did not take."""
        which = [i for i in todo if not level.skips(self._items[i].name)]
        if why := level.out_for_stores or ("" if which else "it has not ended an earlier store of these"):
            for i in todo:
                self._outcomes.setdefault(i, Outcome(Found.FAILED, StorageUnavailable(f"{level.name}: {why}")))
            return list(todo)
        make = None if self._fill is None else functools.partial(_fill, self._fill, which)
        slots = self._slots if self._fill is not None else [self._slots[i] for i in which]
        if self._fill is not None and level.storage.slots_at_once:
            slots = slots[: level.storage.slots_at_once]
        items, parts = [self._items[i] for i in which], self._parts
        began, nbytes = parts.now(), sum(item.nbytes for item in items)
        storing = asyncio.ensure_future(level.storage.store(items, make, slots))
        await asyncio.wait([storing], timeout=self._limit(level, items, nbytes))
        if not storing.done():
            self._leave(level, which, storing, began, nbytes)
            if self._fill is None:
                return list(todo)
            self._left.update(todo)  # the slots are in use
            return []
        try:
            answers: Sequence[Outcome] = storing.result()
        except StorageError as error:
            answers = [Outcome(Found.FAILED, error)] * len(which)
        else:
            level.stores.ended(parts.now() - began, nbytes)
        taken = self._taken(level, which, answers)
        return [i for i in todo if i not in taken]

    def _taken(self, level: StoreLevel, which: Sequence[int], answers: Sequence[Outcome]) -> set[int]:
        """Keep a level's answers. Returns the objects that it has now."""
        taken = set()
        for i, answer in zip(which, answers, strict=True):
            if answer.found is Found.FAILED:
                self._outcomes.setdefault(i, answer)
            else:
                taken.add(i)
                self._outcomes[i] = answer
                if ends := self._stored(level, self._items[i], answer, self._room):
                    self._waits[i] = ends
        return taken

    def _limit(self, level: StoreLevel, items: Sequence[Item], nbytes: int) -> float | None:
        """How many seconds the level may take; None, without a bound, if no level below it could take these."""
        if level.in_memory or all(below.out_for_stores for below in self._parts.levels[level.number + 1 :]):
            return None
        return level.stores.limit_within(nbytes, min((item.use.until for item in items if item.use), default=None))

    def _leave(
        self,
        level: StoreLevel,
        which: Sequence[int],
        storing: asyncio.Future[list[Outcome]],
        began: float,
        nbytes: int,
    ) -> None:
        """The level hangs: go on without it."""
        parts, items = self._parts, [self._items[i] for i in which]
        level.stores.late()
        level.stick(item.name for item in items)
        returned: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ended(done: asyncio.Future[list[Outcome]]) -> None:
            level.unstick(item.name for item in items)
            level.stores.returned(None if done.exception() else parts.now() - began, nbytes)
            if done.exception() is None:
                for item, answer in zip(items, done.result(), strict=True):
                    self._stored(level, item, answer, ())
            returned.set_result(None)

        storing.add_done_callback(ended)
        self._late.append(returned)
        parts.watch(returned)

    def _stored(
        self, level: StoreLevel, item: Item, answer: Outcome, room: Collection[WriteBack]
    ) -> list[asyncio.Future[StorageError | None]]:
        """Take up a level's answer for an object. Returns the futures that the store has to wait for."""
        if answer.found not in (Found.STORED, Found.EXISTS):
            return []
        assert item.use is not None
        level.stored(item.name)
        stored = item.nbytes if answer.found is Found.STORED else None
        return self._storing.save(level, item.name, item.use, item.depth, stored, room)


def _fill(fill: Fill, which: Sequence[int], i: int, data: memoryview, near: bool) -> bool:
    return fill(which[i], data, near)


async def _ended(late: Sequence[asyncio.Future[None]]) -> None:
    await asyncio.wait(late)
