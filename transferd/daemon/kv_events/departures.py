"""Reports objects that leave storage to the event feeds of all engines. (A storage can have only one listener.)"""

from __future__ import annotations

from collections.abc import Callable

from transferd.storage.base import Storage

Left = Callable[[str], None]


class Departures:
    """Passes the storage's reports on. Asks the storage for them only at the first `listen`, because they cost time."""

    def __init__(self, storage: Storage | None) -> None:
        self._storage = storage
        self._tells: bool | None = None  # whether the storage reports departures; None: not asked yet
        self._listeners: list[Left] = []

    def listen(self, left: Left) -> bool:
        """Call `left(name)` in the step in which a get stops finding an object. False: the storage cannot report it."""
        if self._tells is None:
            self._tells = self._storage is not None and self._storage.tell_departures(self._left)
        self._listeners.append(left)
        return self._tells

    def forget(self, left: Left) -> None:
        """Remove a listener. Idempotent."""
        if left in self._listeners:
            self._listeners.remove(left)

    def _left(self, name: str) -> None:
        for left in self._listeners:
            left(name)
