"""What last happened to stored objects: when each was stored and by whom, and when, why and for whom it left.

Each backend, or level of storage, notes its own objects (Index.trace). The newest MOST to 2 * MOST of a place are
remembered. It is for people: an object that was found at start, or that nobody remembers, has no history.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from transferd.storage.base import Noted
from transferd.storage.queues import STORED, EngineOwner

MOST = 8192


class Happened(NamedTuple):
    """One thing that happened to an object. at: monotonic seconds. before: how it was stored, if that is known."""

    at: float
    what: str
    engine: str
    before: Happened | None


_Event = tuple[float, str, Hashable, Any]  # a Happened as it is kept; with the owner, and `before` in this form


class KeyHistory:
    """See the module. now: monotonic seconds."""

    def __init__(self, now: Callable[[], float], most: int = MOST) -> None:
        self._now, self._most = now, most
        self._places: dict[str, list[dict[str, _Event]]] = {}  # the newer half, and the older one

    def at(self, place: str) -> Noted:
        """What a place calls for each object. It costs less than a microsecond."""
        halves, now, most = self._places.setdefault(place, [{}, {}]), self._now, self._most

        def noted(name: str, what: str, whose: Hashable) -> None:
            newer = halves[0]
            before = None if what == STORED else newer.get(name) or halves[1].get(name)
            newer[name] = now(), what, whose, before if before is not None and before[1] == STORED else None
            if len(newer) > most:
                halves[:] = {}, newer

        return noted

    def of(self, name: str) -> dict[str, Happened]:
        """What happened to an object last, by place."""
        found = {place: newer.get(name) or older.get(name) for place, (newer, older) in self._places.items()}
        return {place: _happened(event) for place, event in found.items() if event is not None}


def _happened(event: _Event) -> Happened:
    at, what, whose, before = event
    engine = whose.engine if isinstance(whose, EngineOwner) else ""
    return Happened(at, what, engine, None if before is None else _happened(before))
