"""Checks that the files of the index's objects are there: another program may have removed them.

A look at one object costs a system call. A write that finds its object stored looks at that object, so no write is
answered `ok` without a file. Every look at the disk checks a few of the oldest objects, which cleaners of temporary
files take first. If one of these, a load or the scrub misses a file, all objects are checked once, in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import structlog

from transferd.errors import StorageError
from transferd.runtime.aio import Paced
from transferd.runtime.threads import Direction, Threads
from transferd.storage.directory import ObjectDirectory
from transferd.storage.effects import Traffic
from transferd.storage.lru import Entry, LruIndex
from transferd.storage.queues import GONE

log = structlog.get_logger(__name__)

AT_ONCE = 512  # objects that a thread looks at before it lets others have its turn
PATIENCE_S = 0.2  # how long a part of a check of everything waits for traffic to pause
EVERY_S = 60.0  # how often everything is checked, at most
ACTION = "find out what removes files in the store's directory (a cleaner, a restored snapshot), and exclude it"


@dataclass(eq=False)
class PresenceCheck:
    """Looks at files, and drops from the index what is gone. Used on one event loop.

    busy: names with a running effect; they are not looked at.
    dropped: called after objects were dropped, with the number of objects that are gone, and the names of objects that
        were replaced by something else.
    """

    _directory: ObjectDirectory
    _index: LruIndex
    _threads: Threads
    _traffic: Traffic
    _busy: Collection[str]
    _dropped: Callable[[int, Sequence[str]], None]
    _over: bool = False
    _unsaid: int = 0  # objects that were gone since the last line in the log

    def __post_init__(self) -> None:
        self._everything = Paced(self._check_everything, EVERY_S)

    async def look(self, names: Sequence[str]) -> list[bool]:
        """For each name, whether the object is there. Raises StorageError if that cannot be found out."""
        entries = [self._index.get(name) for name in names]
        missing = await self._look_at(entries)
        if self._drop(entries, missing):
            self._everything.soon()
        return [not why for why in missing]

    def missed(self, count: int) -> None:
        """Check all objects, because so many had no file any more when they were to be read."""
        self._unsaid += count
        self._everything.soon()

    async def close(self) -> None:
        self._over = True
        await self._everything.close()

    async def _look_at(self, entries: Sequence[Entry | None]) -> list[str]:
        """Of each, why it is not there; "" if it is."""
        missing = self._directory.missing
        return await self._threads.run(
            Direction.OUT,
            lambda: [GONE if one is None else missing(one.name, one.nbytes) for one in entries],
            "look at objects",
        )

    def _drop(self, entries: Sequence[Entry | None], missing: Sequence[str]) -> int:
        """Drop objects that are not there and still in the index. Returns how many are gone."""
        gone, damaged = 0, []
        for entry, why in zip(entries, missing, strict=True):
            if entry is None or not why or entry.name in self._busy or not self._index.forget(entry.name, entry, why):
                continue
            if why == GONE:
                gone += 1
            else:
                damaged.append(entry.name)
        if gone or damaged:
            self._unsaid += gone
            self._dropped(gone, damaged)
        return gone

    async def _check_everything(self) -> None:
        names = self._index.names()
        for start in range(0, len(names), AT_ONCE):
            await self._traffic.quiet(PATIENCE_S)
            if self._over:
                return
            entries = [self._index.get(name) for name in names[start : start + AT_ONCE] if name not in self._busy]
            try:
                missing = await self._look_at(entries)
            except StorageError as error:
                log.warning("cannot look at the objects", problem=str(error))
                return
            self._drop(entries, missing)
        if self._unsaid:
            log.warning("objects were removed from outside", gone=self._unsaid, left=len(self._index), action=ACTION)
            self._unsaid = 0
