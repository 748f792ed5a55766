"""Files whose reads and writes do not return while there is a file PATH.hangs: a disk or a mount that hangs.

Plugged into a real daemon by module path, as `tests.support.hung_files:HungFiles`. The store's threads really hang.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from transferd.config import Config, FileStorageSection, StorageSection
from transferd.runtime.clock import Clock
from transferd.runtime.compat import Self
from transferd.storage.base import Drainer
from transferd.storage.batch import Answer, NativeBatch, Read, StoreBatch, Write
from transferd.storage.disks import Disk, Disks
from transferd.storage.file import FileStorage

HANGS = ".hangs"


class HungFiles(FileStorage):
    """See the module."""

    backend = "hung"

    def _native_store(self, batch: StoreBatch, writes: Sequence[Write]) -> NativeBatch[Write] | None:
        return None if self._hangs else super()._native_store(batch, writes)

    def _native_load(
        self, drain: Drainer | None, slots: list[memoryview], reads: Sequence[Read]
    ) -> NativeBatch[Read] | None:
        return None if self._hangs else super()._native_load(drain, slots, reads)

    def _write_run(self, batch: StoreBatch, run: Sequence[Write]) -> None:
        self._hang()
        super()._write_run(batch, run)

    def _read_run(self, drain: Drainer | None, slots: list[memoryview], run: Sequence[Read]) -> list[Answer]:
        self._hang()
        return super()._read_run(drain, slots, run)

    @property
    def _hangs(self) -> bool:
        return os.path.exists(self.path + HANGS)

    def _hang(self) -> None:
        while self._hangs:
            time.sleep(0.02)


class HungDisk(HungFiles, Disk):
    """One of several disks."""


class HungDisks(Disks):
    """Several disks, plugged into a real daemon in the same way."""

    @classmethod
    def from_config(cls, config: Config, *, clock: Clock) -> Self:
        return cls([HungDisk(section, clock=clock) for section in config.storage.file.disks])

    @classmethod
    def directories(cls, storage: StorageSection) -> list[FileStorageSection]:  # noqa: ARG003
        return []  # else the registry takes `Disks`
