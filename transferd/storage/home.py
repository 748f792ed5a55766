"""Where a store lives: the rule that says whether a directory is the one that was opened, or may take its place.

A store whose file system is unmounted leaves an empty directory at its path, or none, on the file system beneath. What
lies there is never used, for one path as for several: it would fill another disk, where nobody counts or evicts it. So
a running daemon remembers the devices of the directories above its own, if they are others. It opens the path again

* on the same device: the directory is there again, or was removed, and is made anew;
* on a device that is none of those above: the disk was mounted again, which may change its number, or replaced.

At a start only the disks of a store that are there can know more: their orders (orders.py) name the mount point of each
directory. A path whose mount point has nothing mounted is left out until something is.

Blocking; called from I/O threads.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from transferd.storage.lock import StoreLock, changed
from transferd.storage.opening import opened
from transferd.wire.answers import StoreDirectory

DIRECTORY_MODE = 0o700  # clients may be in the daemon's group (for its socket), and must not reach stored objects
AWAY = "its file system is not mounted, so the path leads to the one beneath"


class Home:
    """See the module. objects, quarantine, spares: the directories at the root, with a slash."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.objects = f"{root}/objects/"
        self.quarantine = f"{root}/quarantine/"
        self.spares = f"{root}/spares/"
        self.lock = StoreLock(root)
        self._objects_at = (0, 0)  # device and inode, once it was opened
        self._above: frozenset[int] | None = None
        self.mount_point = ""  # of the file system on which the store was opened, unless that is the root's

    def make(self) -> None:
        """Make missing directories, unless the disk is away. Raises OSError."""
        with self._nearest() as (base, fd):
            if self._device_of(fd) in (self._above or ()):
                raise OSError(errno.ENODEV, AWAY, os.fspath(self.root))
            self._make(base, fd, self.objects)
            # A store can do without: a quarantine is made when it is needed, and without spares nothing is kept.
            for other in (self.quarantine, self.spares):
                with contextlib.suppress(OSError):
                    self._make(base, fd, other)

    def _make(self, base: Path, fd: int, directory: str) -> None:
        """Relative to what was looked at, `base`: it may be unmounted in this moment."""
        below = ""
        for part in Path(directory).relative_to(base).parts:
            below = f"{below}/{part}" if below else part
            ours = (base / below).is_relative_to(self.root)
            with contextlib.suppress(FileExistsError):  # if it is no directory, its first use says so
                os.mkdir(below, DIRECTORY_MODE if ours else 0o777, dir_fd=fd)

    def opened(self) -> None:
        """Note that the store is opened here. Raises OSError."""
        there = os.stat(self.objects)
        self._objects_at = there.st_dev, there.st_ino
        real = Path(os.path.realpath(self.root))
        device = os.stat(real).st_dev
        if device in (self._above or ()):  # it was unmounted after `make`
            raise OSError(errno.ENODEV, AWAY, os.fspath(self.root))
        self._above = frozenset(os.stat(path).st_dev for path in real.parents) - {device}
        own = [real, *itertools.takewhile(lambda path: os.stat(path).st_dev == device, real.parents)]
        self.mount_point = "" if own[-1] == own[-1].parent else str(own[-1])

    def is_beneath(self, mount_point: str) -> bool:
        """Whether nothing is mounted there, so that the path leads beneath the store. It is `away` from then on."""
        if os.path.ismount(mount_point):
            return False
        with self._nearest() as (_, fd):
            self._above = (self._above or frozenset()) | {self._device_of(fd)}
        return True

    @property
    def place(self) -> StoreDirectory:
        return StoreDirectory(self.objects, *self._objects_at)

    def lost(self) -> str:
        """Why the directory at the path is not the one that was opened; "" if it is."""
        return self.lock.problem() or changed("objects directory", self.objects, self._objects_at, follow=True)

    def away(self) -> str:
        """Why a store cannot be opened again at the path now; "" if it can, also if it would be made anew."""
        try:
            if self._above is None:  # it was never opened, so nobody knows which device it is to be on
                return "" if os.path.isdir(self.objects) else "there is no store"
            with self._nearest() as (_, fd):
                return AWAY if self._device_of(fd) in self._above else ""
        except OSError as error:
            return error.strerror or str(error)

    @contextlib.contextmanager
    def _nearest(self) -> Iterator[tuple[Path, int]]:
        """The root, or the nearest directory above it that is there, and its open file. Raises OSError."""
        base = next((path for path in (self.root, *self.root.parents) if path.exists()), Path("/"))
        with opened(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
            yield base, fd

    def _device_of(self, fd: int) -> int:
        return os.fstat(fd).st_dev
