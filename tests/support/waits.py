"""Waits for what another process or thread does and tells nobody of. Bounded in time, and never waited out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from transferd.client.client import Client

WITHIN_S = 20.0  # by default. A test of what ends by itself after some time must give less
LOOK_S = 0.005


async def until(true: Callable[[], object], what: str = "", *, within: float = WITHIN_S, look: float = LOOK_S) -> None:
    """Wait on the event loop.

    what: what to say if it has not happened within so many seconds.
    look: seconds between two looks; 0 looks in each turn of the loop, for what may be over soon.
    """
    give_up = time.monotonic() + within
    while not true():
        assert time.monotonic() < give_up, what
        await asyncio.sleep(look)


async def stats_until(client: Client, true: Callable[[dict[str, Any]], object], *, within: float = WITHIN_S) -> None:
    """Wait until the daemon's statistics are so."""
    give_up = time.monotonic() + within
    while not true(stats := await client.stats()):
        assert time.monotonic() < give_up, stats
        await asyncio.sleep(LOOK_S)


def wait_until(true: Callable[[], object], what: str = "", *, within: float = WITHIN_S) -> None:
    """Wait in a thread that has no event loop."""
    give_up = time.monotonic() + within
    while not true():
        assert time.monotonic() < give_up, what
        time.sleep(LOOK_S)
