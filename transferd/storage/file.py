"""Storage in a directory tree, one file per object, which survives a restart.

Three parts: indexed.py decides (LRU within `storage.file.capacity`, who waits for whom), directory.py
touches the disk, and this file joins them. The capacity counts the bytes of objects; the quarantine
(a few files) and the file system's own overhead come on top.

The order of use survives, too: an orderly close writes it into the files' modification times, and a
read refreshes a time that has become old, so that after a kill the order is nearly right.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from transferd.config import Config, FileStorageSection, StorageSection
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.compat import Self
from transferd.runtime.threads import Direction, ThreadPools, Threads
from transferd.storage.batch import Answer
from transferd.storage.directory import ObjectDirectory
from transferd.storage.file_io import leave_files
from transferd.storage.indexed import IndexedStorage
from transferd.storage.lru import Entry
from transferd.storage.scrub import Scrub

log = structlog.get_logger(__name__)

# Threads for each direction. A hot page cache needs one or two; a disk needs a queue, while other threads copy.
MIN_THREADS, MAX_THREADS, DIRECT_THREADS = 2, 8, 12


class FileStorage(IndexedStorage):
    """Objects as files under `section.path`, which is one directory (disks.py has several).

    scrub_rate: bytes per second at which stored objects are checked; 0 = off.
    threads: where system calls run. Default: threads of its own, as many as cores, within MIN_THREADS and MAX_THREADS;
    DIRECT_THREADS with direct I/O, whose threads mostly wait.
    """

    backend = "file"

    def __init__(
        self,
        section: FileStorageSection,
        *,
        scrub_rate: int = 0,
        clock: Clock = SYSTEM_CLOCK,
        threads: Threads | None = None,
    ) -> None:
        size = DIRECT_THREADS if section.direct_io else max(MIN_THREADS, min(os.cpu_count() or 1, MAX_THREADS))
        threads = threads or ThreadPools(size, name="transferd-file")
        super().__init__(section.capacity, threads, shares=size, now=clock.monotonic)
        self._near = not section.direct_io  # whether the CPU reads what is written; else a device does
        self._path = section.paths[0]
        self._clock = clock
        self._directory = ObjectDirectory(
            Path(self._path), fsync=section.fsync, direct_io=section.direct_io, clock=clock
        )
        self._possible: Callable[[str, int], bool] = lambda _name, _nbytes: True
        self._scrub_rate = scrub_rate
        self._scrub = Scrub(self._directory, self._threads, clock, self._traffic, self.quarantine)

    @classmethod
    def from_config(cls, config: Config, *, clock: Clock) -> Self:
        return cls(config.storage.file, scrub_rate=config.storage.scrub_rate, clock=clock)

    def expect(self, possible: Callable[[str, int], bool]) -> None:
        """Set the test for plausible objects. `open` sets other files aside."""
        self._possible = possible

    async def open(self) -> None:
        """Create and lock the directory and find its objects; evicts down to the capacity in the background.

        Raises ConfigError, naming the path, if it cannot be used or another daemon uses it.
        """
        began = self._clock.monotonic()
        self._threads.open()
        await self._threads.run(Direction.OUT, self._directory.open, "open of the store")
        try:
            files = await self._threads.run(Direction.OUT, self._directory.scan, "scan of the store")
        except BaseException:
            self._directory.close()
            raise
        found, impossible = [], []
        for file in files:
            if self._possible(file.name, file.nbytes):
                found.append((file.name, file.nbytes))
            else:
                impossible.append(file.name)
        if impossible:  # for example after a power failure, which leaves files without their bytes
            log.warning("objects of impossible length were set aside", path=self._path, objects=len(impossible))
            self._put_aside(impossible)
        self._evict_in_background(self._index.adopt(found))
        log.info(
            "file storage is open",
            path=self._path,
            objects=len(self._index),
            bytes=self._index.bytes,
            seconds=round(self._clock.monotonic() - began, 3),
        )
        self._scrub.set_rate(self._scrub_rate)

    def reconfigure(self, storage: StorageSection) -> None:
        """Apply `storage.scrub_rate` and `storage.file.capacity`. Objects beyond a smaller capacity are evicted."""
        self.set_capacity(storage.file.capacity)
        self._scrub.set_rate(storage.scrub_rate)

    async def ages(self, entries: Sequence[Entry]) -> list[float]:
        """Of objects found at start, the modification time says when they were used."""
        ages = await super().ages(entries)
        old = [i for i, entry in enumerate(entries) if not entry.touched]
        if old:
            look = functools.partial(self._directory.unused_for, [entries[i].name for i in old])
            seconds = await self._threads.run(Direction.OUT, look, "ages of objects")
            for i, unused_s in zip(old, seconds, strict=True):
                ages[i] = unused_s
        return ages

    async def close(self) -> None:
        await self._scrub.close()
        await super().close()

    def abandon(self) -> list[str]:
        self._directory.close()
        return super().abandon()

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {"scrub": self._scrub.statistics()}

    async def _release(self) -> None:
        # Objects used in this run are the most recent ones; all others keep their older times.
        used = itertools.takewhile(lambda item: item[1].touched, self._index.hottest_first())
        order = [name for name, _ in used]
        try:
            await self._threads.run(Direction.OUT, lambda: self._directory.finish(order), "end of the store")
        finally:
            self._directory.close()

    def _write(self, name: str, data: memoryview, spare: str | None) -> None:
        self._directory.write(name, data, spare)

    def _retire(self, name: str, nbytes: int) -> str | None:  # noqa: ARG002 - `write` takes the file, and looks at it
        return name

    def _read(self, name: str, data: memoryview) -> bool:
        return self._directory.read(name, data) is True

    def _deliver(self, name: str, slot: memoryview, take: Callable[[memoryview], bool]) -> Answer:
        return self._directory.read(name, slot, take)

    def _leave(self) -> None:
        leave_files()

    def _remove(self, name: str) -> None:
        self._directory.remove(name)

    def _set_aside(self, name: str) -> None:
        self._directory.set_aside(name)
