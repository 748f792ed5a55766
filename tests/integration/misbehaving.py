"""A storage backend that breaks its contract on demand: what the daemon's key names decides how.

Plugged into a real daemon by module path, to see what the flight recorder makes of bugs.
"""

from __future__ import annotations

from collections.abc import Sequence

from transferd.storage.base import Blob, Outcome
from transferd.storage.memory import MemoryStorage


class Misbehaving(MemoryStorage):
    """`storage.model` says what goes wrong: `stuck`, `bug`, or `crash`."""

    backend = "misbehaving"

    def __init__(self, config, *, clock) -> None:  # type: ignore[no-untyped-def]
        super().__init__(config, clock=clock)
        self._how = config.storage.model

    async def open(self) -> None:
        if self._how == "crash":
            raise ZeroDivisionError("a bug in open")

    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        if self._how == "stuck":
            self.never_returns()
        if self._how == "bug":
            raise ZeroDivisionError("a bug in put")
        return await super().put(blobs)

    def never_returns(self) -> None:
        """What no backend may do: keep the event loop."""
        while True:
            pass
