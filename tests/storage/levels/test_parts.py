"""Calls that outlive their task are waited for, and their failures are nobody's."""

from __future__ import annotations

import asyncio

from tests.storage.harness import memory_config
from tests.support.simulation.threads import SimThreads
from transferd.config import LevelSection
from transferd.errors import StorageError
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.parts import StackParts
from transferd.storage.memory import MemoryStorage


def parts() -> StackParts:
    levels = [
        StoreLevel(i, f"l{i}", MemoryStorage(memory_config(10)), LevelSection(), SYSTEM_CLOCK.monotonic) for i in (0, 1)
    ]
    return StackParts(levels, SYSTEM_CLOCK.monotonic, SimThreads())


async def test_late_calls_are_waited_for_even_if_they_fail() -> None:
    shared = parts()
    late: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    shared.late.begin(late)
    waiting = asyncio.ensure_future(shared.late.settled())
    await asyncio.sleep(0)
    assert not waiting.done()
    late.set_exception(StorageError("late"))
    await waiting
    assert len(shared.late) == 0
