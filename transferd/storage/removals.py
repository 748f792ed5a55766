"""Damaged objects that are being removed from a remote store, which takes a while.

Until the removal has ended, such an object counts as missing, and a store of its name waits: it would be taken for
stored already, or the removal would take the new copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from transferd.runtime.aio import uncancelled


class Removals:
    """Used on one loop."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Future[None]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._running

    async def run(self, name: str, removal: Coroutine[Any, Any, None]) -> None:
        """Remove an object. Raises what the removal raises."""
        await self.ended([name])
        ended = self._running[name] = asyncio.get_running_loop().create_future()
        try:
            await uncancelled(removal)
        finally:
            del self._running[name]
            ended.set_result(None)

    async def ended(self, names: Iterable[str]) -> None:
        """Wait until none of these is being removed."""
        while running := {self._running[name] for name in names if name in self._running}:
            await asyncio.wait(running)
