"""The medium of a directory of objects: it is unmounted, comes back as it was, empty, or as an older image, and fails.

medium = Medium(path, loop.time)
files = SimFiles(section_of([medium], capacity), [medium], clock, threads)     # the real file storage on it
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.simulation.clock import SimClock
from tests.support.simulation.disks import DyingDirectory, DyingLedger, SimHome
from tests.support.simulation.threads import SimThreads
from transferd.config import FileStorageSection
from transferd.config.size import Capacities
from transferd.storage.base import Fill
from transferd.storage.disks import Disk, Disks
from transferd.storage.file import FileStorage
from transferd.storage.paths import path_of

SCRUB_RATE = 65_536  # bytes a second: what vanished is noticed, also if a faster level hides it from loads


class Medium:
    """What lies under one path, be it mounted or not.

    fault: the errno that it answers with; 0 if it is well. away: whether it is not mounted. gone: when an object has
    left it, by its name. writes: objects written to it so far.
    """

    def __init__(self, root: Path, now: Callable[[], float]) -> None:
        self.writes = 0
        self.went = 0.0  # when it went away, the last time
        self.root = root
        self.away = False
        self.gone: dict[str, float] = {}
        self.directory: DyingDirectory | None = None  # of the daemon that lives
        self._now = now
        self._fault = 0
        self._pulled, self._image = Path(f"{root}.pulled"), Path(f"{root}.image")

    @property
    def fault(self) -> int:
        return self._fault

    @fault.setter
    def fault(self, fault: int) -> None:
        self._fault = fault
        if self.directory is not None:
            self.directory.fault = fault

    @property
    def unwell(self) -> bool:
        return self.away or bool(self._fault)

    def _file(self, name: str) -> Path:
        return (self._pulled if self.away else self.root) / "objects" / path_of(name)

    def has(self, name: str) -> bool:
        return self._file(name).is_file()

    def set_aside(self) -> set[str]:
        """What lies in its quarantine."""
        return {path.name for path in ((self._pulled if self.away else self.root) / "quarantine").glob("*")}

    def remove(self, name: str) -> None:
        """Somebody removes a file."""
        if not self.away and self.has(name):
            self._file(name).unlink()
            self.left(name)

    def flip(self, name: str, chance: random.Random) -> None:
        """A bit of a file rots."""
        if not self.away and self.has(name):
            data = bytearray(self._file(name).read_bytes())
            if data:
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
                self._file(name).write_bytes(data)
                self.left(name)  # what it was

    def left(self, name: str) -> None:
        self.gone[name] = self._now()

    def go(self) -> None:
        """It is unmounted: what is at its path now is the empty directory that it was mounted on."""
        self.away, self.went = True, self._now()
        self.root.rename(self._pulled)
        self.root.mkdir()

    def take_image(self) -> None:
        shutil.rmtree(self._image, ignore_errors=True)
        shutil.copytree(self.root, self._image)

    def come_back(self, how: str) -> None:
        """how: "same", "empty", or "image", an older copy of it. Raises AssertionError if somebody wrote beneath it."""
        self.fault = 0
        if not self.away:
            return
        beneath = sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*"))
        assert not beneath, f"mount: {beneath[:4]} were written beneath a disk that was not mounted"
        self.root.rmdir()
        if how == "same" or (how == "image" and not self._image.exists()):
            self._pulled.rename(self.root)
        else:
            shutil.rmtree(self._pulled)
            if how == "empty":
                self.root.mkdir()
            else:
                shutil.copytree(self._image, self.root)
        self.away = False


def section_of(media: Sequence[Medium], capacity: int) -> FileStorageSection:
    """The file storage of these media. capacity: bytes of each."""
    paths = [str(medium.root) for medium in media]
    return FileStorageSection(path=paths[0] if len(paths) == 1 else paths, capacity=Capacities(capacity))


class SimFiles:
    """One life of the file storage on these media. threads(what, size): makes its threads."""

    def __init__(
        self,
        section: FileStorageSection,
        media: Sequence[Medium],
        clock: SimClock,
        threads: Callable[[str, int], SimThreads],
    ) -> None:
        made: list[FileStorage] = []
        for number, (one, medium) in enumerate(zip(section.disks, media, strict=True)):
            kind = FileStorage if len(media) == 1 else Disk
            disk = kind(one, scrub_rate=SCRUB_RATE, clock=clock, threads=threads(f"disk {number}", 3), unit=4096)
            if isinstance(disk, Disk):
                disk._drawing = bytes([number])  # not from a path that is another one in each run
            directory = disk._directory
            directory.__class__ = WatchedDirectory
            directory.home.__class__ = SimHome
            disk.ledger.__class__ = DyingLedger
            disk.ledger.medium = directory  # type: ignore[attr-defined]
            assert isinstance(directory, WatchedDirectory)
            directory.medium, directory.fault = medium, medium.fault
            medium.directory = directory
            made.append(disk)
        self.storage = made[0] if len(made) == 1 else Disks([disk for disk in made if isinstance(disk, Disk)])


class WatchedDirectory(DyingDirectory):
    """A DyingDirectory whose medium hears what leaves it."""

    medium: Medium

    def remove(self, name: str, *, keep: bool = False) -> None:
        super().remove(name, keep=keep)
        self.medium.left(name)

    def set_aside(self, name: str) -> str:
        where = super().set_aside(name)
        self.medium.left(name)
        return where

    def write_run(self, items: Sequence[Any], fill: Fill | None, near: bool) -> int:
        done = super().write_run(items, fill, near)
        self.medium.writes += done
        for _, _, displaced, _ in items[:done]:
            if displaced is not None:
                self.medium.left(displaced)
        return done

    def write(self, name: str, data: memoryview) -> None:
        super().write(name, data)
        self.medium.writes += 1
