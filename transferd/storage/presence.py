"""Checks that the files of the index's objects are there: another program may have removed them.

A look at one object costs a system call. A write that finds its object stored looks at that object, so no write is
answered `ok` without a file. Every look at the disk checks a few of the oldest objects, which cleaners of temporary
files take first. If one of these, a load or the scrub misses a file, all objects are checked once, in the background.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import structlog

from transferd.errors import StorageError
from transferd.runtime.aio import Paced
from transferd.runtime.threads import Direction, Threads
from transferd.storage.directory import FileState, ObjectDirectory
from transferd.storage.effects import Traffic
from transferd.storage.lru import Entry, LruIndex
from transferd.storage.queues import DAMAGED, GONE

log = structlog.get_logger(__name__)

AT_ONCE = 512  # objects that a thread looks at before it lets others have its turn
PATIENCE_S = 0.2  # how long a part of a check of everything waits for traffic to pause
EVERY_S = 60.0  # how often everything is checked, at most
ACTION = "find out what removes files in the store's directory (a cleaner, a restored snapshot), and exclude it"


class PresenceCheck:
    """Looks at files, and drops from the index what is gone. Used on one event loop.

    busy: names with a running effect; they are not looked at.
    dropped: called after objects were dropped, with the number of objects that are gone, and the names of objects that
        were replaced by something else.
    """

    def __init__(
        self,
        directory: ObjectDirectory,
        index: LruIndex,
        threads: Threads,
        traffic: Traffic,
        busy: Collection[str],
        dropped: Callable[[int, Sequence[str]], None],
    ) -> None:
        self._directory = directory
        self._index = index
        self._threads = threads
        self._traffic = traffic
        self._busy = busy
        self._dropped = dropped
        self._everything = Paced(self._check_everything, EVERY_S)
        self._over = False
        self._unsaid = 0  # objects that were gone since the last line in the log

    async def look(self, names: Sequence[str]) -> list[bool]:
        """For each name, whether the object is there. Raises StorageError if that cannot be found out."""
        entries = [self._index.get(name) for name in names]
        found = await self._look_at(entries)
        if self._drop(entries, found):
            self._everything.soon()
        return [one is FileState.THERE for one in found]

    def missed(self, count: int) -> None:
        """Check all objects, because so many had no file any more when they were to be read."""
        self._unsaid += count
        self._everything.soon()

    async def close(self) -> None:
        self._over = True
        await self._everything.close()

    async def _look_at(self, entries: Sequence[Entry | None]) -> list[FileState]:
        return await self._threads.run(
            Direction.OUT, lambda: [self._holds(entry) for entry in entries], "look at objects"
        )

    def _holds(self, entry: Entry | None) -> FileState:
        return FileState.GONE if entry is None else self._directory.holds(entry.name, entry.nbytes)

    def _drop(self, entries: Sequence[Entry | None], found: Sequence[FileState]) -> int:
        """Drop objects that are not there and still in the index. Returns how many are gone."""
        gone, damaged = 0, []
        for entry, presence in zip(entries, found, strict=True):
            if entry is None or presence is FileState.THERE or entry.name in self._busy:
                continue
            if self._index.forget(entry.name, entry, GONE if presence is FileState.GONE else DAMAGED):
                if presence is FileState.GONE:
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
                found = await self._look_at(entries)
            except StorageError as error:
                log.warning("cannot look at the objects", problem=str(error))
                return
            self._drop(entries, found)
        if self._unsaid:
            log.warning("objects were removed from outside", gone=self._unsaid, left=len(self._index), action=ACTION)
            self._unsaid = 0
