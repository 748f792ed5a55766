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
        """ask: sends one probe. It bounds its own time, and acts on a StorageError before it raises that error."""
        self._ask = ask
        self._interval = interval
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._over = False

    def start(self) -> None:
        if not self._over:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._beat)

    def close(self) -> None:
        """Send no further probe. A running one ends like any call. Idempotent."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self._asking = asyncio.get_running_loop().create_task(self._once())

    async def _once(self) -> None:
        try:
            await self._ask()
        except StorageError:
            pass
        except Exception:
            log.exception("a probe of storage failed unexpectedly (bug)")
        self.start()
