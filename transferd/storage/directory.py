"""A directory of objects: every system call of the file backend. Blocking; called from I/O threads.

    <root>/lock          locked (flock) while a daemon uses the directory; contains its pid, for people
    <root>/objects/      the objects, see paths.py
    <root>/quarantine/   bad objects, the newest few, outside the capacity

An object is written under a temporary name and renamed when it is complete, so half an object never
appears under its name, even if the process is killed. Temporary files found at start belong to dead
writers (this process holds the lock) and are removed. Files that are not ours are never touched.
Directories without objects are removed (pruning.py), so old generations leave nothing behind.

Without `fsync` nothing waits for the medium. A killed process loses nothing, because the page cache
belongs to the kernel; after a power failure the footer's checksum shows which objects are complete.
With `fsync`, the object's bytes and its directory entry are on the medium before `write` returns.

file_io.py reads the bytes of a file, and put_file.py writes them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from transferd.errors import ConfigError, StorageError, StorageFull
from transferd.runtime.clock import Clock
from transferd.storage.base import LEFT, Outcome
from transferd.storage.batch import Damaged, StillStored
from transferd.storage.examine import READ_FLAGS, Examination
from transferd.storage.file_io import FULL, NO_DIRECT_IO, CachedIO, DirectIO, Loaded
from transferd.storage.paths import is_directory_of_ours, is_set_aside, is_temporary, name_of, path_of, temporary_of
from transferd.storage.pruning import Pruning
from transferd.storage.put_file import Reached, put_file

T = TypeVar("T")

FILE_MODE = 0o640
DIRECTORY_MODE = 0o700  # clients may be in the daemon's group (for its socket), and must not reach stored objects
QUARANTINE_FILES = 16
QUARANTINE_BYTES = 64 * 1024**2
# How old the modification time of a file that is being read may get. After a kill, only these times
# show the order of use; an orderly close writes the exact order.
TOUCH_INTERVAL_S = 60.0
# How often to re-create a directory that another thread removes, because it is empty, at the same moment.
DIRECTORY_TRIES = 100
WRITE_FLAGS = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
# What `open` with these flags and O_NONBLOCK says of a file that cannot be overwritten, but removed or moved: it is a
# link, a FIFO, a directory; another program has a lease on it; its mode forbids it; it runs as a program.
NOT_TO_OVERWRITE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EAGAIN, errno.EACCES, errno.ETXTBSY)
NEVER_READABLE = (errno.EIO, errno.ELOOP, errno.EISDIR, errno.ENXIO)
# The most modification times to write at close; each takes about 4 µs.
TOUCH_AT_CLOSE = 500_000

_CODES = {
    errno.EROFS: "storage_read_only",
    errno.EACCES: "storage_denied",
    errno.EPERM: "storage_denied",
    errno.EIO: "storage_io",
}


class StoredFile(NamedTuple):
    """An object as the scan found it. Instances sort by use, the least recent first."""

    mtime_ns: int
    name: str
    nbytes: int


class ObjectDirectory:
    """See the module's docstring. Thread-safe as long as no two effects on one name overlap (indexed.py)."""

    def __init__(self, root: Path, *, fsync: bool, direct_io: bool = False, clock: Clock) -> None:
        self._root = root
        self._lock_path = root / "lock"
        self._objects = f"{root}/objects/"
        self._quarantine = f"{root}/quarantine/"
        self._pruning = Pruning(self._objects)
        self._fsync = fsync
        self._io = DirectIO() if direct_io else CachedIO()
        self._clock = clock
        self._lock = -1
        self._numbers = itertools.count()

    # --- life ---------------------------------------------------------------------------------------

    def open(self) -> None:
        """Create missing directories and take the lock. Raises ConfigError; then no lock is held."""
        try:
            self._root.parent.mkdir(parents=True, exist_ok=True)
            for directory in (self._objects, self._quarantine):
                _make_directory(directory)
            _keep_others_out(self._root)
            self._lock = os.open(self._lock_path, READ_FLAGS | os.O_CREAT, FILE_MODE)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise self._unusable(error) from error
        try:
            self._take_lock()
            self._probe()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock. Idempotent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def _take_lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._lock).st_mode):
            problem = "cannot be used: its lock is not a regular file"
            raise ConfigError("storage.file.path", problem, str(self._lock_path))
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            problem = f"is in use by another daemon (pid {holder}), and one directory serves one"
            raise ConfigError("storage.file.path", problem, str(self._root)) from error
        except OSError as error:
            raise self._unusable(error) from error
        with contextlib.suppress(OSError):  # the pid is only for people; a full disk must not prevent the start
            self._lock_path.write_text(f"{os.getpid()}\n")

    def _probe(self) -> None:
        """Check that files can be created among the objects, and find out what the file system supports."""
        path = f"{self._objects}probe@0~0"
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            os.close(os.open(path, flags, FILE_MODE))
            try:
                self._probe_io(path, flags)
            finally:
                os.unlink(path)
        except OSError as error:
            raise self._unusable(error) from error

    def _probe_io(self, path: str, flags: int) -> None:
        try:
            fd = os.open(path, flags | self._io.flags)
            try:
                self._io.probe(fd)
            finally:
                os.close(fd)
        except OSError as error:
            if not self._io.flags or error.errno != errno.EINVAL:
                raise
            raise ConfigError("storage.file.direct_io", NO_DIRECT_IO.format(self._root), True) from error

    def _unusable(self, error: OSError | ValueError) -> ConfigError:
        if isinstance(error, ValueError):
            return ConfigError("storage.file.path", f"cannot be used: {error}", str(self._root))
        where = "" if error.filename is None else f" at {os.fspath(error.filename)}"
        return ConfigError("storage.file.path", f"cannot be used{where}: {error.strerror}", str(self._root))

    def scan(self) -> list[StoredFile]:
        """Every object, the least recently used first. Removes dead writers' temporary files and empty directories."""
        try:
            return sorted(self._scan(""))
        except OSError as error:
            raise self._unusable(error) from error

    def objects(self, below: str = "") -> Iterator[StoredFile]:
        """Every object, in the directory's own order. May miss objects that are added or removed meanwhile.

        Changes nothing. Raises OSError for a directory that cannot be read.
        """
        try:
            entries = os.scandir(self._objects + below)
        except FileNotFoundError:
            return
        with entries:
            for entry in entries:
                path = below + entry.name
                if entry.is_dir(follow_symlinks=False):
                    if is_directory_of_ours(entry.name):
                        yield from self.objects(f"{path}/")
                elif entry.is_file(follow_symlinks=False) and (name := name_of(path)) is not None:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        yield StoredFile(status.st_mtime_ns, name, status.st_size)

    def path(self, name: str) -> str:
        """The path at which the object of this name is, or would be."""
        return self._objects + path_of(name)

    def unused_for(self, names: Sequence[str]) -> list[float]:
        """For how many seconds each object was neither written nor read; 0 if it cannot be told."""
        now, ages = self._clock.wall(), []
        for name in names:
            try:
                ages.append(max(0.0, now - os.stat(self.path(name), follow_symlinks=False).st_mtime))
            except OSError:
                ages.append(0.0)
        return ages

    def examination(self, name: str) -> Examination:
        """An Examination of the object of this name, not yet begun."""
        return Examination(name, self.path(name), keep_out=bool(self._io.flags))

    def _scan(self, below: str) -> Iterator[StoredFile]:
        with os.scandir(self._objects + below) as entries:
            for entry in entries:
                path = below + entry.name
                if entry.is_dir(follow_symlinks=False):
                    if is_directory_of_ours(entry.name):
                        yield from self._scan(f"{path}/")
                        with contextlib.suppress(OSError):  # not empty, nearly always
                            os.rmdir(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    continue
                elif is_temporary(path):
                    os.unlink(entry.path)
                elif (name := name_of(path)) is not None:
                    status = entry.stat(follow_symlinks=False)
                    yield StoredFile(status.st_mtime_ns, name, status.st_size)

    def check_there(self) -> None:
        """Raise StorageError if what is at the root's path is not the directory that was opened, but another disk's."""
        try:
            there, held = os.stat(self._lock_path), os.fstat(self._lock)
        except OSError as error:
            raise self._gone(error.strerror or str(error)) from error
        if (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
            raise self._gone("another directory is in its place")

    def _gone(self, why: str) -> StorageError:
        what = f"the directory {self._root} that was opened is gone ({why}): mount it again, and restart the daemon"
        return StorageError(what, code="storage_gone")

    def try_out(self) -> None:
        """Write, read and remove a file, all the way to the medium. Raises StorageError."""
        self.check_there()
        path = f"{self._objects}probe@0~0"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
            try:
                os.pwrite(fd, bytes(4096), 0)
                os.fsync(fd)
                os.pread(fd, 4096, 0)
            finally:
                os.close(fd)
                os.unlink(path)
        except OSError as error:
            if error.errno not in FULL:  # a full disk works
                raise self._translated("try", error, 0) from error

    # --- effects ------------------------------------------------------------------------------------

    def write(self, name: str, data: memoryview, displaced: str | None = None) -> None:
        """Store an object. Raises StorageFull, StorageError; then no object has this name.

        displaced: an object to remove. If its file has the same length, it is written over. It already has pages and
        blocks, so that takes half of the time of a new file, or a tenth in a virtual machine whose host reclaims free
        pages. No one may be reading the file. If the process dies meanwhile, the next start removes that file like any
        temporary one. Raises StillStored if that object cannot be removed.
        """
        path = self._objects + path_of(name)
        spare = None if displaced is None else self._objects + path_of(displaced)
        temporary = temporary_of(spare or path, next(self._numbers))
        try:
            if spare is None or not self._put(spare, temporary, path, data):
                temporary = temporary_of(path, next(self._numbers))
                self._put(None, temporary, path, data)
            self._pruning.arrived(path)
            if self._fsync:
                _sync_directory(os.path.dirname(path))
        except OSError as error:
            for left in (temporary, path):
                with contextlib.suppress(OSError):
                    os.unlink(left)
            raise self._translated("write", error, data.nbytes) from error
        finally:
            if spare is not None:
                self._pruning.left(spare)

    def _put(self, spare: str | None, temporary: str, path: str, data: memoryview) -> bool:
        """Write the file at `temporary`, and rename it to `path`. Raises OSError, StillStored.

        spare: the path of the file to take; None: make one. False means that there is no file to overwrite. If there is
        something else, it is removed, because somebody may have put it there, or linked to the file as a backup; a
        directory stays.
        """
        io = self._io
        direct, flags = io.direct_bytes(data.nbytes), WRITE_FLAGS | io.flags

        def attempt() -> tuple[int, int]:
            ended = put_file(spare, temporary, path, data, direct, flags, FILE_MODE, io.preallocates, self._fsync)
            if spare is None and ended == (Reached.NOT_OPENED, errno.ENOENT):
                raise FileNotFoundError(*_described(errno.ENOENT))
            return ended

        reached, error = self._within(path, attempt)
        if reached == Reached.NAMED:
            return True
        if reached == Reached.NOT_NAMED and error == errno.ENOENT:  # a spare file comes from another directory
            self._within(path, lambda: os.rename(temporary, path))
            return True
        if reached == Reached.NOT_RETIRED:
            if error != errno.ENOENT:
                raise StillStored(self._translated("remove", OSError(*_described(error)), 0))
            return False
        unfit = reached == Reached.UNFIT or (reached == Reached.NOT_OPENED and error in NOT_TO_OVERWRITE)
        if spare is not None and unfit:
            with contextlib.suppress(FileNotFoundError):
                try:
                    os.unlink(temporary)
                except IsADirectoryError:  # not ours to remove
                    os.rename(temporary, spare)
            return False
        raise OSError(*_described(error))

    def _within(self, path: str, make: Callable[[], T]) -> T:
        """Call `make`, which creates something at this path. Creates the directory, which may vanish at any moment."""
        for _ in range(DIRECTORY_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return make()
            with contextlib.suppress(FileNotFoundError):
                self._make_directory(os.path.dirname(path))
        return make()

    def _make_directory(self, directory: str) -> None:
        _make_directory(directory)
        while self._fsync and len(directory) >= len(self._objects):
            directory = os.path.dirname(directory)
            _sync_directory(directory)

    def read(self, name: str, slot: memoryview, take: Callable[[memoryview], bool] | None = None) -> bool | Outcome:
        """Fill the slot with the object, or have `take` take it: from a mapping of its file, or from the slot.

        Returns False if there is no such object; LEFT if `take` did not take it. Raises Damaged for another length,
        StorageError.
        """
        path = self.path(name)
        try:
            loaded = self._io.load_file(path, slot, READ_FLAGS, maps=take is not None)
        except OSError as error:
            raise self._unreadable(error, slot.nbytes) from error

        def work(fd: int) -> bool | Outcome:
            # Fetch first: an attempt to read what is not there has the kernel bring it in small pages.
            if take is not None and self._io.fetch(fd, slot.nbytes):
                fetched = self._io.load_file(path, slot, READ_FLAGS, maps=True, fetched=True)
                if fetched is not None and (taken := _taken(fetched, slot, take)) is not None:
                    return taken
            self._io.read(fd, slot)
            return take is None or take(slot) or LEFT

        taken = None if loaded is None else _taken(loaded, slot, take)
        if loaded is None or taken is None:
            return self._opened(path, slot.nbytes, self._io.flags, work)
        self._keep_recent(path, loaded.modified)
        return taken

    def _opened(self, path: str, nbytes: int, flags: int, work: Callable[[int], T]) -> T | bool:
        """The result of `work` on the open file; False if there is no file."""
        try:
            fd = os.open(path, READ_FLAGS | flags)
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
                    raise Damaged
                result = work(fd)
                self._keep_recent(fd, status.st_mtime)
                return result
            finally:
                os.close(fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unreadable(error, nbytes) from error

    def _unreadable(self, error: OSError, nbytes: int) -> StorageError | Damaged:
        """What to raise for an object that cannot be read. Damaged: nor will it be the next time."""
        translated = self._translated("read", error, nbytes)
        return Damaged(translated) if error.errno in NEVER_READABLE else translated

    def _keep_recent(self, file: int | str, modified: float) -> None:
        """Refresh the modification time of a file that is being read, if it has become old."""
        if abs(self._clock.wall() - modified) > TOUCH_INTERVAL_S:  # a clock may be set back
            with contextlib.suppress(OSError):  # recency is a hint; a read-only medium still serves
                os.utime(file, follow_symlinks=isinstance(file, int))

    def remove(self, name: str) -> None:
        """Remove the object, if there is one. Raises StorageError."""
        path = self._objects + path_of(name)
        try:
            os.unlink(path)
        except (FileNotFoundError, IsADirectoryError):  # a directory in its place is no object
            pass
        except OSError as error:
            raise self._translated("remove", error, 0) from error
        self._pruning.left(path)

    def set_aside(self, name: str) -> str:
        """Move an object into the quarantine and remove the oldest ones there. If the move fails, unlink the object.

        Returns the object's path in the quarantine.
        """
        path = self._objects + path_of(name)
        number = int(self._clock.wall() * 1e9) + next(self._numbers)
        kept = temporary_of(f"{self._quarantine}{os.path.basename(path)}", number)
        try:
            os.rename(path, kept)
            os.utime(kept)
            self._pruning.left(path)
            self._trim_quarantine()
        except FileNotFoundError:
            pass
        except OSError:
            self.remove(name)
        return kept

    def _trim_quarantine(self) -> None:
        with os.scandir(self._quarantine) as entries:
            ours = [(e.stat(follow_symlinks=False), e.path) for e in entries if is_set_aside(e.name)]
        ours.sort(key=lambda file: file[0].st_mtime_ns, reverse=True)
        total = 0
        for count, (status, path) in enumerate(ours, start=1):
            total += status.st_size
            if count > QUARANTINE_FILES or total > QUARANTINE_BYTES:
                os.unlink(path)

    def finish(self, hottest_first: list[str]) -> None:
        """The last effect: remove empty directories, and write the order of use into the files' modification times.

        Both are best effort. The next start reads those times.
        """
        self._pruning.finish()
        now = int(self._clock.wall() * 1e9)
        for age, name in enumerate(hottest_first[:TOUCH_AT_CLOSE]):
            with contextlib.suppress(OSError):
                os.utime(self._objects + path_of(name), ns=(now - age, now - age), follow_symlinks=False)

    def _translated(self, verb: str, error: OSError, nbytes: int) -> StorageError:
        """Our error for an OSError: the only place that translates an errno."""
        what = f"cannot {verb} an object in {self._root}: {error.strerror}"
        if error.errno in FULL:
            return StorageFull(f"no room for an object of {nbytes} bytes in {self._root}: {error.strerror}")
        return StorageError(what, code=_CODES.get(error.errno or 0))


def _taken(loaded: Loaded, slot: memoryview, take: Callable[[memoryview], bool] | None) -> bool | Outcome | None:
    """What `take` made of a loaded file: True or LEFT. None: the file lost bytes while it was mapped."""
    if loaded.view is None:
        return take is None or take(slot) or LEFT
    assert take is not None
    try:
        taken = take(loaded.view)
    finally:
        lost = loaded.unmap()
    return None if lost else taken or LEFT


def _described(code: int) -> tuple[int, str]:
    """The arguments of an OSError."""
    return code, os.strerror(code)


def _make_directory(path: str) -> None:
    """Create a directory and its missing parents, accessible only to the daemon's user. Raises OSError."""
    try:
        os.mkdir(path, DIRECTORY_MODE)
    except FileExistsError:
        return  # if it is not a directory, its first use reports that
    except FileNotFoundError:
        _make_directory(os.path.dirname(path.rstrip("/")))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, DIRECTORY_MODE)


def _keep_others_out(root: Path) -> None:
    """Remove the permissions for group and others that an earlier release, or a person, gave to a store."""
    status = root.stat()
    if status.st_mode & 0o027 and status.st_uid == os.geteuid():
        root.chmod(DIRECTORY_MODE)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
