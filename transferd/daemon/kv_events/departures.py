"""Reports objects that leave storage, or change levels, to the event feeds of all engines.

A storage can have only one listener.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from transferd.storage.base import Storage

Left = Callable[[str], None]


class Departures:
    """Passes the storage's reports on. Requests them only at the first `listen`, because they cost time."""

    def __init__(self, storage: Storage | None) -> None:
        self._storage = storage
        self._reports_all: bool | None = None  # whether the storage reports every departure; None before `listen`
        self._left: dict[Hashable, Left] = {}  # by who listens
        self._levels: Sequence[str] | None = None  # names; None before `listen_to_levels`
        self._moved: dict[Hashable, Left] = {}

    def listen(self, who: Hashable, left: Left) -> bool:
        """Call `left(name)` in the step in which a load stops finding an object.

        Returns False if the storage cannot report every such object.
        """
        if self._reports_all is None:
            self._reports_all = self._storage is not None and self._storage.index.tell_departures(self._object_left)
        self._left[who] = left
        return self._reports_all

    def forget(self, who: Hashable) -> None:
        """Remove a listener. Idempotent."""
        self._left.pop(who, None)
        self._moved.pop(who, None)

    def listen_to_levels(self, who: Hashable, changed: Left) -> Sequence[str]:
        """Call `changed(name)` in the step in which other levels have an object. Returns their names, if any."""
        if self._levels is None:
            levels = None if self._storage is None else self._storage.levels
            if levels is not None:
                levels.tell(self._object_moved)
            self._levels = () if levels is None else levels.names
        self._moved[who] = changed
        return self._levels

    def _object_moved(self, name: str) -> None:
        for moved in self._moved.values():
            moved(name)

    def _object_left(self, name: str) -> None:
        for left in self._left.values():
            left(name)
