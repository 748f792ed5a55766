"""A storage backend whose calls take as long as a file says: `storage.model` is the file's path, its content seconds.

Plugged into a real daemon by module path, as `tests.support.slow_store:SlowStore`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from transferd.config import Config
from transferd.runtime.clock import Clock
from transferd.runtime.compat import Self
from transferd.storage.base import Drainer, Fill, Item, Outcome
from transferd.storage.memory import MemoryStorage

LOOK_S = 0.05


def let_wait(file: Path, seconds: float) -> None:
    """Say how long each call waits from now on. The daemon reads the old number or the new one, never an empty file."""
    new = file.with_suffix(".new")
    new.write_text(str(seconds))
    new.replace(file)


class SlowStore(MemoryStorage):
    """Memory that waits first."""

    backend = "slow"
    _file: Path

    @classmethod
    def from_config(cls, config: Config, *, clock: Clock) -> Self:
        made = super().from_config(config, clock=clock)
        made._file = Path(config.storage.model)
        return made

    async def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> list[Outcome]:
        await self._wait()
        return await super().store(items, fill, slots)

    async def load(self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]) -> list[Outcome]:
        await self._wait()
        return await super().load(items, drain, slots)

    async def _wait(self) -> None:
        waited = 0.0
        while (left := float(self._file.read_text()) - waited) > 0:  # it may say less meanwhile
            await asyncio.sleep(step := min(left, LOOK_S))
            waited += step
