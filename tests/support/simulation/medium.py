"""The medium of a directory of objects: it is unmounted, returns as it was, empty or as an image, fails and hangs.

medium = Medium(path, loop.time)
files = SimFiles(section_of([medium], capacity), [medium], clock, threads)     # the real file storage on it
"""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.simulation.clock import SimClock
from tests.support.simulation.threads import SimThreads
from transferd.config import FileStorageSection
from transferd.config.size import Capacities
from transferd.runtime.native import NativeCall
from transferd.storage.base import Outcome, Take
from transferd.storage.batch import Answer, Damaged, NativeBatch, Read, Write
from transferd.storage.directory import ObjectDirectory
from transferd.storage.disks import Disk, Disks
from transferd.storage.file import FileStorage
from transferd.storage.found import FoundObjects
from transferd.storage.home import Home
from transferd.storage.ledger import Ledger
from transferd.storage.orders import Listed
from transferd.storage.paths import path_of
from transferd.storage.room import DiskState

MOUNTED, BENEATH = 1, 2  # devices
PULLED = ".pulled"  # where the directory of a disk is while the disk is not mounted
SCRUB_RATE = 65_536  # bytes a second: what vanished is noticed, also if a faster level hides it from loads


class _CallOfMedium(NativeCall):
    """A native call that ends when its medium fails: what is left then is left to the slow twins.

    victims: objects whose files it takes, some in each step.
    """

    __slots__ = ("_medium", "_victims")

    def __init__(self, call: NativeCall, medium: Medium, victims: Sequence[str] = ()) -> None:
        super().__init__(call.native, calls=call.calls)
        self._medium, self._victims = medium, victims

    def step(self) -> bool:
        if self._medium.fault:
            return False
        for name in self._victims:
            self._medium.left(name)
        return super().step()


class Medium:
    """What lies under one path, be it mounted or not.

    fault: the errno that it answers with; 0 if it is well. away: whether it is not mounted. hangs: whether no call to
    it ends. gone: when an object has left it, by its name. writes: objects written to it so far. deaths, returns: how
    often it was not well any more, and was again.
    """

    def __init__(self, root: Path, now: Callable[[], float]) -> None:
        self.writes = 0
        self.went = 0.0  # when it went away, the last time
        self.root = root
        self.away = False
        self.gone: dict[str, float] = {}
        self.disk: FileStorage | None = None  # of the daemon that lives
        self.fault = self.deaths = self.returns = 0
        self.hangs = self.only_calls = False
        self._threads: list[SimThreads] = []
        self._now = now
        self._pulled, self._image = Path(f"{root}{PULLED}"), Path(f"{root}.image")

    @property
    def unwell(self) -> bool:
        return self.away or self.hangs or bool(self.fault)

    @property
    def serves(self) -> bool:
        """Whether the store uses it, as far as it knows."""
        return self.disk is not None and not self.disk.lost

    @property
    def good(self) -> bool:
        """Whether the store uses it, and it is still the one that the store opened: it notices that at a write."""
        return self.disk is not None and self.serves and not self.disk._directory.home.lock.problem()

    def serve(self, disk: FileStorage, threads: SimThreads) -> None:
        """From now on it is this daemon's. threads: those that call it."""
        self.disk, self._threads = disk, [threads]
        if self.hangs:
            self.hang(only_calls=self.only_calls)

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

    def fail(self, fault: int) -> None:
        self.deaths += 1
        self.fault = fault

    def hang(self, *, only_calls: bool = False) -> None:
        """No call to it ends until it is well again. only_calls: no load and no store, and all else does."""
        self.deaths += not self.hangs
        self.hangs, self.only_calls = True, only_calls
        for threads in self._threads:
            threads.only_calls = only_calls
            for gate in threads.gates.values():
                gate.hold()

    def heal(self) -> None:
        """It answers again; what is not mounted stays so."""
        self.returns += self.hangs or bool(self.fault)
        self.fault, self.hangs = 0, False
        for threads in self._threads:
            for gate in threads.gates.values():
                gate.release()

    def go(self) -> None:
        """It is unmounted: what is at its path now is the empty directory that it was mounted on."""
        self.deaths += 1
        self.away, self.went = True, self._now()
        self.root.rename(self._pulled)
        self.root.mkdir()

    def take_image(self) -> None:
        shutil.rmtree(self._image, ignore_errors=True)
        shutil.copytree(self.root, self._image)

    def come_back(self, how: str) -> None:
        """how: "same", "empty", or "image", an older copy of it. Raises AssertionError if somebody wrote beneath it."""
        self.heal()
        if not self.away:
            return
        self.returns += 1
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
            directory, ledger = disk._directory, disk.ledger
            directory.__class__, directory.home.__class__, ledger.__class__ = SimDirectory, SimHome, SimLedger
            assert isinstance(directory, SimDirectory)
            assert isinstance(ledger, SimLedger)
            directory.medium = ledger.medium = medium
            medium.serve(disk, disk._threads)  # type: ignore[arg-type]
            made.append(disk)
        self.storage = made[0] if len(made) == 1 else Disks([disk for disk in made if isinstance(disk, Disk)])


class SimHome(Home):
    """A disk is mounted at its path unless `Medium.go` has pulled it: all of them lie on one real device."""

    def _device_of(self, fd: int) -> int:
        there = os.readlink(f"/proc/self/fd/{fd}")
        return MOUNTED if there == str(self.root) and not Path(f"{self.root}{PULLED}").exists() else BENEATH

    def opened(self) -> None:
        super().opened()
        self._above = frozenset({BENEATH})

    def is_beneath(self, mount_point: str) -> bool:
        if not Path(f"{self.root}{PULLED}").exists():
            return False
        self._above = frozenset({BENEATH})
        return True


class SimDirectory(ObjectDirectory):
    """An ObjectDirectory whose medium fails, and hears what leaves it. A fault EROFS is one of changes only."""

    medium: Medium

    def _answers(self, verb: str, *, changes: bool = True) -> None:
        if self.medium.fault and (changes or self.medium.fault != errno.EROFS):
            raise self._translated(verb, _error(self.medium), 0, str(self._root))

    def open(self) -> None:
        if self.medium.fault:
            raise self.unusable(error := _error(self.medium)) from error
        super().open()

    def scan(self) -> FoundObjects:
        if self.medium.fault == errno.EIO:
            raise self.unusable(_error(self.medium))
        return super().scan()

    def state(self) -> DiskState:
        return super().state()._replace(read_only=self.medium.fault == errno.EROFS)

    def try_out(self) -> None:
        self._answers("try")
        super().try_out()

    def write(self, name: str, data: memoryview) -> None:
        self._answers("write")
        super().write(name, data)
        self.medium.writes += 1

    def storing(self, *how: Any) -> NativeBatch[Write]:
        native = super().storing(*how)

        def ended() -> Sequence[Answer | None]:
            made = native.ended()
            self.medium.writes += made.count(True)
            for write, done in zip(native.work, made, strict=True):
                if done and write.victims:
                    self.medium.left(write.victims[0].name)
            return made

        victims = [write.victims[0].name for write in native.work if write.victims]
        return dataclasses.replace(native, call=_CallOfMedium(native.call, self.medium, victims), ended=ended)

    def loading(self, *how: Any) -> NativeBatch[Read]:
        native = super().loading(*how)
        return dataclasses.replace(native, call=_CallOfMedium(native.call, self.medium))

    def read(self, name: str, slot: memoryview, take: Take | None = None) -> bool | Outcome:
        if self.medium.fault == errno.EIO:
            raise Damaged(self._translated("read", _error(self.medium), 0, str(self._root)))
        return super().read(name, slot, take)

    def missing(self, name: str, nbytes: int) -> str:
        self._answers("find", changes=False)
        return super().missing(name, nbytes)

    def remove(self, name: str, *, keep: bool = False) -> None:
        self._answers("remove")
        super().remove(name, keep=keep)
        self.medium.left(name)

    def set_aside(self, name: str) -> str:
        self._answers("remove")
        where = super().set_aside(name)
        self.medium.left(name)
        return where


class SimLedger(Ledger):
    """The list of orders on such a medium."""

    medium: Medium

    def write(self, listed: Listed) -> None:
        if self.medium.fault:
            self.listed, self.behind = listed, True
            raise _error(self.medium)
        super().write(listed)


def _error(medium: Medium) -> OSError:
    return OSError(medium.fault, os.strerror(medium.fault))
