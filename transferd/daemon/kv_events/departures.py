"""Reports objects that leave storage, or change levels, to the event feeds of all engines.

A storage can have only one listener.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transferd.storage.base import Storage

Left = Callable[[str], None]


class Departures:
    """Passes the storage's reports on. Requests them only at the first `listen`, because they cost time."""

    def __init__(self, storage: Storage | None) -> None:
        self._storage = storage
        self._reports_all: bool | None = None  # whether the storage reports every departure; None before `listen`
        self._listeners: list[Left] = []
        self._levels: Sequence[str] | None = None  # names; None before `listen_to_levels`
        self._moves: list[Left] = []

    def listen(self, left: Left) -> bool:
        """Call `left(name)` in the step in which a load stops finding an object.

        Returns False if the storage cannot report every such object.
        """
        if self._reports_all is None:
            self._reports_all = self._storage is not None and self._storage.index.tell_departures(self._left)
        self._listeners.append(left)
        return self._reports_all

    def forget(self, left: Left) -> None:
        """Remove a listener. Idempotent."""
        for listeners in (self._listeners, self._moves):
            if left in listeners:
                listeners.remove(left)

    def listen_to_levels(self, changed: Left) -> Sequence[str]:
        """Call `changed(name)` in the step in which other levels have an object. Returns their names, if any."""
        if self._levels is None:
            levels = None if self._storage is None else self._storage.levels
            if levels is not None:
                levels.tell(self._changed)
            self._levels = () if levels is None else levels.names
        self._moves.append(changed)
        return self._levels

    def _changed(self, name: str) -> None:
        for changed in self._moves:
            changed(name)

    def _left(self, name: str) -> None:
        for left in self._listeners:
            left(name)
