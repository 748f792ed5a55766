"""Stores in a stack: to the first level that takes an object, and from there to those below, which lack it.

A store ends when the first level has the bytes. What a task owes to lower levels is proving.py's, without slots.

If a call to a level takes far longer than usual, the level hangs: its objects go on to the next level within the
task's time. The call keeps the caller's slots until it ends (`Outcomes.returned`), so objects that `fill` makes are
LEFT: the caller stores them again in other slots. Until that call has ended, no other store goes to the level.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence
from typing import Any

from transferd.errors import StorageError, StorageUnavailable
from transferd.runtime.aio import is_awaited
from transferd.storage.base import LEFT, NAME, NBYTES, Fill, Found, Item, Outcome, Outcomes, with_slots_back
from transferd.storage.lent import chosen, chosen_call
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.parts import StackParts
from transferd.storage.levels.write_back import WriteBack

WAIT_S = 10.0  # how long a store without a deadline waits for room in a lower level


class StackStore:
    """One store. Each item has a use. Never cancel it.

    It never waits for a copy to a lower level, and so keeps no slots for one: `Levels.prove` does.
    """

    def __init__(
        self, parts: StackParts, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]
    ) -> None:
        self._parts = parts
        self._items = items
        self._fill = fill
        self._slots = slots
        self._room = set[WriteBack]()  # the lower levels in whose queues its objects have room
        self._outcomes: dict[int, Outcome] = {}
        self._late: list[asyncio.Future[Any]] = []
        self._born = 0  # the number of the latest fence when it began to store

    async def run(self) -> list[Outcome]:
        parts = self._parts
        nbytes = sum(map(NBYTES, self._items))
        await self._wait_for_room(nbytes)
        self._born, todo = parts.fences.number, list(range(len(self._items)))
        try:
            with parts.stores.of(list(map(NAME, self._items))), parts.traffic:
                for level in parts.levels:
                    if todo:
                        todo = await self._store_in(level, todo)
        finally:
            for back in self._room:
                back.came(nbytes)
        return Outcomes.after(list(map(self._outcomes.__getitem__, range(len(self._items)))), self._late)

    async def _wait_for_room(self, nbytes: int) -> None:
        """Wait until so many bytes may wait for the levels below the first one that works, with the slots in hand."""
        parts, now, works = self._parts, self._parts.now(), False
        use = self._items[0].use if self._items else None
        ends = math.inf if use is None else use.until
        until = min(now + WAIT_S, max(now, (now + ends) / 2))
        for above, back in zip(parts.levels, parts.write_backs, strict=False):
            works = works or not above.out_for_stores
            waits = back.level.section.write_back != "postpone"
            if works and await back.room(nbytes, max(0.0, until - parts.now()) if waits else 0.0):
                self._room.add(back)

    async def _store_in(self, level: StoreLevel, todo: Sequence[int]) -> list[int]:
        """Store these in one level. Returns those that it did not take."""
        which = [i for i in todo if self._items[i].name not in level.stuck] if level.stuck else todo
        if why := level.out_for_stores or ("" if which else "it has not ended an earlier store of these"):
            for i in todo:
                self._outcomes.setdefault(i, Outcome(Found.FAILED, StorageUnavailable(f"{level.name}: {why}")))
            return list(todo)
        items, make, slots = self._items, self._fill, self._slots
        if len(which) < len(items):
            items, make = chosen(items, which), chosen_call(make, which)
            slots = chosen(slots, which) if make is None else slots
        if make is not None and level.storage.slots_at_once:
            slots = slots[: level.storage.slots_at_once]
        nbytes = sum(map(NBYTES, items))
        if not level.known:
            level.overwrite_hidden(items)
        limit, call = self._limit(level, items, nbytes), level.storage.store(items, make, slots)
        if not isinstance(call, asyncio.Future):
            await is_awaited(call)  # and so the slots are kept
        storing = await level.stores.wait(call, limit, nbytes)
        if not storing.done():
            self._leave(level, items, storing)
            if self._fill is None:
                return list(todo)
            self._outcomes.update(dict.fromkeys(todo, LEFT))  # the slots are in use
            return []
        try:
            answers: Sequence[Outcome] = storing.result()
        except StorageError as error:
            answers = [Outcome(Found.FAILED, error)] * len(which)
        taken = self._taken(level, which, answers)
        rest = [i for i in todo if i not in taken] if len(taken) < len(todo) else []
        if isinstance(answers, Outcomes):  # the slots are in use
            self._late.append(answers.returned)
            if self._fill is not None:
                self._outcomes.update(dict.fromkeys(rest, LEFT))
                return []
        return rest

    def _taken(self, level: StoreLevel, which: Sequence[int], answers: Sequence[Outcome]) -> set[int]:
        """Keep a level's answers. Returns the objects that it has now."""
        taken = set()
        for i, answer in zip(which, answers, strict=True):
            if answer.found is Found.FAILED:
                self._outcomes.setdefault(i, answer)
            else:
                taken.add(i)
                self._outcomes[i] = answer
                self._stored(level, self._items[i], answer, self._room)
        return taken

    def _limit(self, level: StoreLevel, items: Sequence[Item], nbytes: int) -> float | None:
        """How many seconds the level may take; None, without a bound, if no level below it could take these."""
        if level.in_memory or all(below.out_for_stores for below in self._parts.levels[level.number + 1 :]):
            return None
        return level.stores.limit_within(nbytes, min((item.use.until for item in items if item.use), default=None))

    def _leave(self, level: StoreLevel, items: Sequence[Item], storing: asyncio.Future[list[Outcome]]) -> None:
        """The level hangs: go on without it."""
        level.stick([item.name for item in items], storing)

        def ended(done: asyncio.Future[list[Outcome]]) -> None:
            if done.exception() is None:
                for item, answer in zip(items, done.result(), strict=True):
                    self._stored(level, item, answer, ())

        storing.add_done_callback(ended)
        self._late.append(self._parts.late.begin(with_slots_back(storing)))

    def _stored(self, level: StoreLevel, item: Item, answer: Outcome, room: Collection[WriteBack]) -> None:
        """Take up a level's answer for an object."""
        if answer.found not in (Found.STORED, Found.EXISTS):
            return
        assert item.use is not None
        if self._parts.fences.forbids(item.name, self._born, None, item.use):  # it was purged meanwhile
            if answer.found is Found.STORED:
                self._parts.withdraw(level, item.name)
            return
        level.wrote(item.name)
        stored = item.nbytes if answer.found is Found.STORED else None
        for back in self._parts.write_backs[level.number :]:
            back.offer(item.name, item.use, item.depth, level, stored, has_room=back in room)
        if stored is not None:
            self._parts.let_go(level, item.name, item.use)
