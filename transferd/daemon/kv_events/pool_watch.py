"""Finds out which announced blocks a pool has lost: the pool's master evicts by itself and tells nobody.

    every second: has the pool lost objects? ─ yes ─▶ all that is announced, a little at a time: does it still have it?

Mooncake's master can publish events since 0.3.13, but the wheels are built without that (docs/events.md). So we look. A
look takes no lease, so it does not change what is evicted next. What only the pool can have, and has not, the storage
reports as departed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from transferd.daemon.kv_events.feed import KvEventFeed
from transferd.errors import TransferError
from transferd.storage.base import Index, PoolNode, Storage

log = structlog.get_logger(__name__)

EVERY_S = 1.0  # between two questions whether the pool has lost objects
BLIND_S = 60.0  # after a question that nobody answered
REST = 9  # after a look, times what it took


async def watch_pool(storage: Storage, feeds: Callable[[], Sequence[KvEventFeed]]) -> None:
    """Look until cancelled, while somebody announces.

    storage: the pool is a part of it. feeds: returns those of all engines.
    """
    pool, seen, failed = storage.pool, None, False
    assert pool is not None
    while True:
        await asyncio.sleep(BLIND_S if failed else EVERY_S)
        try:
            if feeds() and (now := await pool.losses()) != seen:
                for feed in feeds():
                    await _look(pool, storage.index, feed)
                seen = now
            failed = False
        except TransferError as error:
            if not failed:
                what = "cannot find out what the pool evicts: routers hear of it when a block is looked up"
                log.warning(what, problem=str(error))
            failed = True


async def _look(pool: PoolNode, index: Index, feed: KvEventFeed) -> None:
    for names in feed.objects():
        began = time.monotonic()
        # What a level knows without asking is reported by that level.
        await pool.report_lost([name for name in names if index.find([name], None) != [True]])
        await asyncio.sleep(REST * (time.monotonic() - began))
