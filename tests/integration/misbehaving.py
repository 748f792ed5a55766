"""A storage backend that breaks its contract on demand: what the daemon's key names decides how.

Plugged into a real daemon by module path, to see what the flight recorder makes of bugs.
"""

from __future__ import annotations

from collections.abc import Sequence

from transferd.config import Config
from transferd.runtime.clock import Clock
from transferd.runtime.compat import Self
from transferd.storage.base import Fill, Item, Outcome
from transferd.storage.memory import MemoryStorage


class Misbehaving(MemoryStorage):
    """`storage.model` says what goes wrong: `stuck`, `bug`, or `crash`."""

    backend = "misbehaving"

    _how: str

    @classmethod
    def from_config(cls, config: Config, *, clock: Clock) -> Self:
        made = super().from_config(config, clock=clock)
        made._how = config.storage.model
        return made

    async def open(self) -> None:
        if self._how == "crash":
            raise ZeroDivisionError("a bug in open")

    async def store(  # type: ignore[override]
        self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]
    ) -> list[Outcome]:
        if self._how == "stuck":
            self.never_returns()
        if self._how == "bug":
            raise ZeroDivisionError("a bug in store")
        return await super().store(items, fill, slots)

    def never_returns(self) -> None:
        """What no backend may do: keep the event loop."""
        while True:
            pass
