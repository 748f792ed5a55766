"""Finds out which announced blocks a pool has lost: the pool's master evicts by itself and tells nobody.

    every second: has the pool lost objects? ─ yes ─▶ all that is announced, a little at a time: does it still have it?

Mooncake's master can publish events since 0.3.13, but the wheels are built without that (docs/events.md). So we look. A
look takes no lease, so it does not change what is evicted next. What only the pool can have, and has not, the storage
reports as departed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import structlog

from transferd.errors import TransferError
from transferd.storage.base import Index, PoolNode

log = structlog.get_logger(__name__)

EVERY_S = 1.0  # between two questions whether the pool has lost objects
BLIND_S = 60.0  # after a question that nobody answered
REST = 9  # after a look, times what it took

Announced = Callable[[], Iterator[list[str]]]
"""Yields the names of all announced objects, a few hundred at a time."""


class PoolWatch:
    """Looks while somebody announces. index: that of the storage that the pool is a part of."""

    def __init__(self, pool: PoolNode, index: Index) -> None:
        self._pool, self._index = pool, index
        self._announced: list[Announced] = []
        self._task: asyncio.Task[None] | None = None

    def add(self, announced: Announced) -> None:
        self._announced.append(announced)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def remove(self, announced: Announced) -> None:
        """Undo `add`. Idempotent."""
        if announced in self._announced:
            self._announced.remove(announced)
        if not self._announced and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        seen, failed = None, False
        while True:
            await asyncio.sleep(BLIND_S if failed else EVERY_S)
            try:
                now = await self._pool.losses()
                if now != seen:
                    await self._look()
                seen, failed = now, False
            except TransferError as error:
                if not failed:
                    what = "cannot find out what the pool evicts: routers hear of it when a block is looked up"
                    log.warning(what, problem=str(error))
                failed = True

    async def _look(self) -> None:
        for announced in list(self._announced):
            for names in announced():
                began = time.monotonic()
                # What a level knows without asking is reported by that level.
                await self._pool.report_lost([name for name in names if self._index.find([name], None) != [True]])
                await asyncio.sleep(REST * (time.monotonic() - began))
