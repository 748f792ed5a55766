"""Probes a remote backend at intervals, so that an outage is noticed even when no task runs.

The backend itself acts on the outcome: a failed probe opens its breaker like any failed call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from transferd.errors import StorageError

log = structlog.get_logger(__name__)


class Prober:
    """Sends one probe at a time, `interval` seconds after the last answer, from `start` to `close`."""

    def __init__(self, ask: Callable[[], Awaitable[object]], interval: float) -> None:
        """ask: sends one probe. It bounds its time, runs to its end, and acts on a StorageError before it raises it."""
        self._ask = ask
        self._interval = interval
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def close(self) -> None:
        """Send no further probe. A running one ends like any call. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval)
            try:
                await self._ask()
            except StorageError:
                pass
            except Exception:
                log.exception("a probe of storage failed unexpectedly (bug)")
