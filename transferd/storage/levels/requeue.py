"""After a restart, queues copies again: of objects that a level has kept and a remote level below may lack.

The queue of copies does not outlive the process, and a remote level has no index. At most `write_back_bytes` waited in
the queue, and those objects were stored last. So at the start, as many bytes of the objects that were used last are
looked up below, and copied if they are missing there: a batch at a time, each when nothing else waits. All other
objects are looked up when they are loaded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from transferd.runtime.aio import in_turns
from transferd.storage.base import Found, Item, Outcome
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.parts import StackParts
from transferd.storage.levels.storing import Storing
from transferd.storage.levels.write_back import BATCH, GIVE_WAY_S, WriteBack
from transferd.storage.lru import Use


class Requeue:
    """See the module. Used on one loop, from `open` to `close`."""

    def __init__(self, parts: StackParts, storing: Storing) -> None:
        self._parts = parts
        self._storing = storing
        self._remote: list[WriteBack] = []
        self._running: set[asyncio.Task[Any]] = set()

    def open(self) -> None:
        self._remote = [back for back in self._parts.write_backs if not back.level.known]
        for back in self._remote:
            source = next((one for one in reversed(self._parts.levels[: back.level.number]) if one.known), None)
            if source is not None:
                self._running.add(asyncio.get_running_loop().create_task(self._at_start(back, source)))

    async def close(self) -> None:
        running, self._running = self._running, set()
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    async def _at_start(self, back: WriteBack, source: StoreLevel) -> None:
        room, names = int(back.level.section.write_back_bytes), []
        async for name, nbytes in in_turns(source.storage.index.hottest_first()):
            room -= nbytes
            if room < 0:
                break
            names.append(name)
        use = Use()  # one, so that they keep their order
        for start in range(0, len(names), BATCH):
            await back.idle()
            await self._parts.traffic.quiet(GIVE_WAY_S)
            for depth, name in enumerate(names[start : start + BATCH], start):
                if name not in self._parts.unsaved and self._storing.lacks(back.level, name):
                    self._storing.save(source, name, use, depth)

    def loaded(self, items: Sequence[Item], outcomes: Sequence[Outcome]) -> None:
        """After a load: queue objects that a remote level below may lack, if nothing else waits there."""
        waiting = [back for back in self._remote if not len(back)]
        for item, outcome in zip(items, outcomes, strict=True):
            if not waiting or outcome.found is not Found.FOUND or item.use is None or item.name in self._parts.unsaved:
                continue
            level = self._parts.levels[outcome.level]
            if level.known and any(
                back.level.number > level.number and self._storing.lacks(back.level, item.name) for back in waiting
            ):
                self._storing.save(level, item.name, item.use, item.depth)
