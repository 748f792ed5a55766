"""Copies between levels: write-back, promotion and prefetch read in one level, and commit in another under a fence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transferd.errors import StorageError
from transferd.runtime.aio import Background, answered
from transferd.storage.base import MISSING, Found, Item, Outcome, with_slots_back
from transferd.storage.effects import Traffic
from transferd.storage.keeping import Keeper
from transferd.storage.levels.fences import Fences
from transferd.storage.levels.level import StoreLevel
from transferd.storage.lru import Use
from transferd.storage.selection import Selection


@dataclass(slots=True, eq=False)
class CopyDown:
    """An object that one lower level does not have yet. Its source holds the object until the copy has ended."""

    name: str
    nbytes: int
    source: StoreLevel
    use: Use  # the last one
    depth: int  # in that use
    since: float  # when the copy was queued
    check: bool = False  # the level may have the object, so ask first
    tries: int = 0  # refusals that pass
    end: asyncio.Future[StorageError | None] | None = None  # for tasks that wait: None, or why it was given up


class Copying:
    """What all kinds of copies share. now: monotonic seconds. Used on one loop.

    unsaved: the copies that wait or run to lower levels, by name, and by the number of the level.
    """

    def __init__(self, levels: Sequence[StoreLevel], now: Callable[[], float]) -> None:
        self.levels = list(levels)
        self.now = now
        self.fences = Fences()
        self.traffic = Traffic()
        self.late = Background()  # calls that outlive their task, and that a close waits for
        self.unsaved: dict[str, dict[int, CopyDown]] = {}
        self._withdrawing = Background()
        self.configured()

    def configured(self) -> None:
        """Note that the levels have other settings."""
        self._through = frozenset(level.number for level in self.levels[1:] if level.through)
        self._handed_over = self._through.union([level.number for level in self.levels[1:] if level.shared][:1])

    def urgent(self, use: Use) -> frozenset[int]:
        """The levels that a store by this use must reach before its answer."""
        return self._handed_over if use.shared else self._through

    async def copy(
        self,
        items: Sequence[Item],
        sources: Sequence[StoreLevel],
        slots: Sequence[memoryview],
        level: StoreLevel,
        born: int,
    ) -> list[tuple[Item, Outcome, str]]:
        """Store objects in a level. For each: as the level got it, its answer, and why it must not be there, or "".

        What must not be there is not stored, or removed again. What stays is held only if it is to be copied on.
        sources: where they were read. born: the number of the latest fence when that began. Raises StorageError.
        """
        copies, allowed, own = list[tuple[Item, Outcome, str]](), list[Item](), list[memoryview]()
        for asked, source, slot in zip(items, sources, slots, strict=True):
            item = source.handed_on(asked)
            why = self.fences.forbids(item.name, born, source)
            copies.append((item, MISSING, why))
            if not why:
                allowed.append(item)
                own.append(slot)
        if not level.known:
            level.overwrite_hidden(allowed)
        answers = iter(await with_slots_back(level.storage.store(allowed, None, own)) if allowed else ())
        for i, source in enumerate(sources):
            item, outcome, why = copies[i]
            if not why and (outcome := next(answers)).found in (Found.STORED, Found.EXISTS):
                why = self.fences.forbids(item.name, born, source)
            copies[i] = item, outcome, why
        for item, outcome, _ in reversed(copies if level is not self.levels[-1] else ()):  # the last one holds nothing
            if outcome.found is Found.STORED and item.use is not None:
                self.let_go(level, item.name, item.use)
        for item, outcome, why in copies:
            if why and outcome.found is Found.STORED:
                # Also a level where a purge removes nothing puts aside what is damaged.
                await (self.put_aside if why == "quarantined" else self.withdraw)(level, item.name)
        return copies

    def first_with(self, name: str, below: int) -> StoreLevel | None:
        """The first of the levels above the one of this number that has an object, and can be read."""
        return next((one for one in self.levels[:below] if not one.out and one.has([name]) == [True]), None)

    def let_go(self, level: StoreLevel, name: str, use: Use) -> None:
        """End the hold of an object that a level has stored, or was to be copied from, unless a copy still needs it."""
        for one in self.unsaved.get(name, {}).values():
            if one.source is level:
                return
        level.index.release(name, use)

    def withdraw(self, level: StoreLevel, name: str) -> asyncio.Future[Any]:
        """Begin to remove an object that was purged while it came to this level. `withdrawn` waits for it.

        The future raises nothing: an object that cannot be removed is the level's to report (stuck.py).
        """
        level.unsettle(name)
        keeper = level.storage.keeper
        if keeper is None:  # its objects are others' as well
            return answered(None)
        return self._withdrawing.begin(self.late.begin(_removed(keeper, name)))

    async def withdrawn(self) -> None:
        """Wait until all objects that must not stay have gone."""
        await self._withdrawing.settled()

    def put_aside(self, level: StoreLevel, name: str) -> asyncio.Future[object]:
        """Begin a quarantine now: a level with an index has dropped the object when this returns."""
        level.unsettle(name)
        return self.late.begin(level.storage.quarantine(name))


async def _removed(keeper: Keeper, name: str) -> None:
    with contextlib.suppress(StorageError):
        await keeper.purge(Selection(names=frozenset([name])))
