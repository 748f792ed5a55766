"""Reports of daemons in tests: what a report says is so now.

A daemon bounds what reports cost, by their CPU time: beyond that, a report may be a second old. So whether a test sees
what has just happened would depend on how fast the machine is.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from transferd.client.client import Client
from transferd.client.sync_client import SyncClient
from transferd.runtime.clock import SYSTEM_CLOCK

LOOK_S = 0.005


def costs_nothing() -> None:
    """Have the daemons of this process make a new report for all who ask. Those with a clock of their own do not."""
    object.__setattr__(SYSTEM_CLOCK, "cpu", lambda: 0.0)


async def new_stats(client: Client) -> dict[str, Any]:
    """A report that was made after this call. For daemons that are started the usual way (forks.py)."""
    before = (await client.stats())["uptime_s"]
    while (stats := await client.stats())["uptime_s"] == before:  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(LOOK_S)
    return dict(stats)


def new_sync_stats(client: SyncClient) -> dict[str, Any]:
    """The same for a client without an event loop."""
    before = client.stats()["uptime_s"]
    while (stats := client.stats())["uptime_s"] == before:
        time.sleep(LOOK_S)
    return dict(stats)
