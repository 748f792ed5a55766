"""Asks a backend on another machine something cheap now and then, so that its silence is noticed without a task.

Whoever answers, and what silence means, is the backend's: it opens its breaker as for any call that fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from transferd.errors import StorageError


class Heartbeat:
    """One question at a time, `interval` seconds after the last answer, from `start` to `close`."""

    def __init__(self, ask: Callable[[], Awaitable[object]], interval: float) -> None:
        """ask: bounded by itself; a StorageError of it has been dealt with."""
        self._ask = ask
        self._interval = interval
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._over = False

    def start(self) -> None:
        if not self._over:
            self._timer = asyncio.get_running_loop().call_later(self._interval, self._beat)

    def close(self) -> None:
        """Ask no more. A question under way ends as any call does. Idempotent."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        self._asking = asyncio.get_running_loop().create_task(self._once())

    async def _once(self) -> None:
        with contextlib.suppress(StorageError):
            await self._ask()
        self.start()
