"""The file backend on a bad day: now and then a call fails, an object fails, or everything takes a while.

The dice are seeded, so a run's faults are the same share of the same calls.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from transferd.errors import StorageError, StorageUnavailable
from transferd.storage.base import Drainer, Fill, Found, Item, Outcome
from transferd.storage.file import FileStorage

CALL_FAILS = 0.002
OBJECT_FAILS = 0.002
SLOW = 0.005
SLOW_S = 0.2


class BadDayFile(FileStorage):
    """The file backend with faults in front of it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._dice = random.Random(20)

    async def exists(self, names: Sequence[str]) -> list[bool]:
        await self._roll()
        return await super().exists(names)

    async def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> list[Outcome]:
        await self._roll()
        return [self._spoilt(outcome) for outcome in await super().store(items, fill, slots)]

    async def load(self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]) -> list[Outcome]:
        await self._roll()
        return [self._spoilt(outcome) for outcome in await super().load(items, drain, slots)]

    async def _roll(self) -> None:
        if self._dice.random() < SLOW:
            await asyncio.sleep(SLOW_S)
        if self._dice.random() < CALL_FAILS:
            raise StorageUnavailable("the storage does not answer (a soak's fault)")

    def _spoilt(self, outcome: Outcome) -> Outcome:
        if self._dice.random() >= OBJECT_FAILS:
            return outcome
        return Outcome(Found.FAILED, StorageError("this object failed (a soak's fault)"))
