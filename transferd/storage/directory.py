"""A directory of objects: every system call of the file backend.

Blocking; called from I/O threads, but for what prepares native calls and reads their answers.

    <root>/lock          locked (flock) while a daemon uses the directory; contains its pid, for people
    <root>/objects/      the objects, see paths.py
    <root>/order         their order of use, see journal.py
    <root>/announced-*   what KV events have announced, see daemon/kv_events/remembered.py
    <root>/quarantine/   the newest few bad objects, and whatever lay in an object's place; outside the capacity
    <root>/spares/       empty files, see spares.py

An object is written under a temporary name and renamed when it is complete, so half an object never
appears under its name, even if the process is killed. Temporary files found at start belong to dead
writers (this process holds the lock) and are removed. Files that are not ours are never touched.
Directories without objects are removed (pruning.py), so old generations leave nothing behind.
Whatever else lies in the place of an object, or of a directory on the way to it, is moved to the quarantine.

The directory is ours as long as the lock's path leads to the file that we have locked. If that file is removed, another
daemon can lock a new one. So each effect checks the path first; once it leads elsewhere, all raise StorageUnavailable.

Without `fsync` nothing waits for the medium. A killed process loses nothing, because the page cache
belongs to the kernel; after a power failure the footer's checksum shows which objects are complete.
With `fsync`, the object's bytes and its directory entry are on the medium before `write` returns.

file_io.py writes and reads the bytes of a file.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from transferd.blocks.formats import FOOTER_BYTES
from transferd.errors import ConfigError, Refusal, StorageError, StorageFull, StorageUnavailable
from transferd.runtime.clock import Clock
from transferd.runtime.native import NativeCall
from transferd.storage import file_io
from transferd.storage.base import LEFT, Drainer, Fill, Item, Outcome, Take
from transferd.storage.batch import Answer, Damaged, NativeBatch, Read, Write
from transferd.storage.examine import Examination
from transferd.storage.file_io import FULL, NO_DIRECT_IO, WRITE_FLAGS, CachedIO, DirectIO
from transferd.storage.found import FoundObjects
from transferd.storage.home import DIRECTORY_MODE, Home
from transferd.storage.journal import sync_directory
from transferd.storage.lent import lent_by
from transferd.storage.opening import READ_FLAGS, opened
from transferd.storage.paths import (
    is_directory_of_ours,
    is_temporary,
    names_in,
    path_of,
    temporary_of,
)
from transferd.storage.pruning import Pruning
from transferd.storage.quarantine import Quarantine
from transferd.storage.queues import DAMAGED, GONE
from transferd.storage.room import DiskState, disk_of
from transferd.storage.spares import Spares

if file_io.NATIVE:
    from transferd.storage import _files

T = TypeVar("T")

FILE_MODE = 0o640
# How often to re-create a directory that another thread removes, because it is empty, at the same moment.
DIRECTORY_TRIES = 100
FEW_INODES = 10  # if less than this part of the inodes is free, empty directories go at once
ALL = (0, 2**62, 0)  # of an object, as _files.c counts what is wanted
NEVER_READABLE = (errno.EIO, errno.ELOOP, errno.EISDIR, errno.ENXIO)
# Errors of a write if something lies in the place of its object, or of a directory on the way to it.
IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ELOOP, errno.ENOENT)

_CODES: dict[int, tuple[str, Refusal]] = {
    errno.EROFS: ("storage_read_only", "denied"),
    errno.EACCES: ("storage_denied", "denied"),
    errno.EPERM: ("storage_denied", "denied"),
    errno.EIO: ("storage_io", "passing"),
}


class ObjectDirectory:
    """See the module's docstring. Thread-safe as long as no two effects on one name overlap (indexed.py)."""

    def __init__(self, root: Path, *, fsync: bool, direct_io: bool = False, clock: Clock) -> None:
        self._root = root
        self.home = Home(root)
        self._objects = self.home.objects
        self._pruning = Pruning(self._objects)
        self._fsync = fsync
        self._io = DirectIO() if direct_io else CachedIO()
        self._clock = clock
        self.unit = 1  # how many bytes the file system allocates at a time
        self._numbers = itertools.count()
        self._spares = Spares(self.home.spares, self._numbers)
        self._quarantine = Quarantine(self.home.quarantine, clock, self._numbers, self._make_ours, self._spares.release)

    # --- life ---------------------------------------------------------------------------------------

    def open(self) -> None:
        """Take the lock, unless it is ours; make missing directories. Holds no lock after a ConfigError."""
        try:
            try:
                self.home.make()
                _keep_others_out(self._root)
                self.home.lock.take()
            except (OSError, ValueError) as error:  # ValueError: a NUL in the path
                raise self.unusable(error) from error
            self._probe()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock. Idempotent."""
        self.home.lock.release()

    def state(self) -> DiskState:
        """The file system as it is now, and whether the directory is still ours."""
        lost = self.home.lost()
        try:
            disk = disk_of(str(self._root), lost)
            if not lost and disk.files_free < disk.files // FEW_INODES:
                self._spares.remove()
                self._pruning.finish()
                disk = disk_of(str(self._root))
            return disk
        except OSError as error:
            return DiskState(lost=lost or f"it cannot be read ({error.strerror})")

    def _check_ours(self) -> None:
        """Raise StorageUnavailable if another daemon might use the directory."""
        if problem := self.home.lock.problem():
            raise StorageUnavailable(f"the store {self._root} is not this daemon's any more: {problem}")

    def _probe(self) -> None:
        """Check that files can be created among the objects, and find out what the file system supports."""
        try:
            self.home.opened()
            with self._trial(os.O_WRONLY) as fd:
                self.unit = allocated_at_once(fd)
            with self._trial(os.O_WRONLY | self._io.flags) as fd:
                self._io.probe(fd)
        except OSError as error:
            if self._io.flags and error.errno == errno.EINVAL:
                raise ConfigError("storage.file.direct_io", NO_DIRECT_IO.format(self._root), True) from error
            raise self.unusable(error) from error

    @contextlib.contextmanager
    def _trial(self, flags: int) -> Iterator[int]:
        """An open file among the objects, which is removed afterwards. Raises OSError."""
        path = f"{self._objects}probe@0~0"
        with opened(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, FILE_MODE) as fd:
            try:
                yield fd
            finally:
                with contextlib.suppress(FileNotFoundError):  # another trial has removed it
                    os.unlink(path)

    def unusable(self, error: OSError | ValueError) -> ConfigError:
        """Our error for a directory that cannot be opened."""
        if isinstance(error, ValueError):
            return ConfigError("storage.file.path", f"cannot be used: {error}", str(self._root))
        where = "" if error.filename is None else f" at {os.fspath(error.filename)}"
        how = ": let the daemon's user read and write it" if error.errno == errno.EACCES else ""
        return ConfigError("storage.file.path", f"cannot be used{where}: {error.strerror}{how}", str(self._root))

    def scan(self) -> FoundObjects:
        """Every object. Removes dead writers' temporary files and empty directories. Raises ConfigError.

        What refuses below the root of the objects is left alone, and noted in `refused`.
        """
        found = FoundObjects()

        def refused(error: OSError) -> None:
            if error.filename == self._objects:
                raise self.unusable(error) from error
            found.refused.append(f"{error.strerror} ({error.filename})")

        self._spares.remove()  # what an earlier process has left
        for name, status in self.objects(refused, tidy=True):
            found.add(name, status.st_size, status.st_mtime_ns)
        return found

    def objects(
        self, refused: Callable[[OSError], object], *, tidy: bool = False
    ) -> Iterator[tuple[str, os.stat_result]]:
        """The name and status of every object, in no order. May miss objects that are added or removed meanwhile.

        refused: called with the error of each directory or file that cannot be looked at.
        tidy: remove dead writers' temporary files and, at the end, empty directories.
        """
        waiting, seen = [""], list[str]()
        while waiting:
            seen.append(below := waiting.pop())
            try:
                with os.scandir(self._objects + below) as listed:
                    entries = list(listed)
            except OSError as error:
                if tidy or not isinstance(error, FileNotFoundError):
                    refused(error)
                continue
            name_in = names_in(below)
            for entry in entries:
                try:
                    if entry.is_dir(follow_symlinks=False):
                        if is_directory_of_ours(entry.name):
                            waiting.append(f"{below}{entry.name}/")
                    elif not entry.is_file(follow_symlinks=False):
                        continue
                    elif (name := name_in(entry.name)) is not None:
                        yield name, entry.stat(follow_symlinks=False)
                    elif tidy and is_temporary(below + entry.name):
                        os.unlink(entry.path)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    refused(error)
        for below in reversed(seen[1:] if tidy else ()):
            with contextlib.suppress(OSError):  # not empty, nearly always
                os.rmdir(self._objects + below)

    def path(self, name: str) -> str:
        """The path at which the object of this name is, or would be."""
        return self._objects + path_of(name)

    def unused_for(self, names: Sequence[str]) -> list[float]:
        """For how many seconds each object was neither written nor read; 0 if its file cannot be found."""
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

    def try_out(self) -> None:
        """Write, read and remove a file, all the way to the medium. Raises StorageError."""
        if problem := self.home.lost():  # its disk is gone
            what = f"the directory {self._root} that was opened is gone ({problem}): mount it again"
            raise StorageError(what, code="storage_gone", refusal="silent")
        try:
            with self._trial(os.O_RDWR) as fd:
                os.pwrite(fd, bytes(4096), 0)
                os.fsync(fd)
                os.pread(fd, 4096, 0)
        except OSError as error:
            if error.errno not in FULL:  # a full disk works
                raise self._translated("try", error, 0, self._objects) from error

    # --- effects ------------------------------------------------------------------------------------

    def storing(
        self,
        writes: Sequence[Write],
        fill: Fill | None,
        slots: list[memoryview],
        run: int,
        near: bool,
        chore: Callable[[Callable[[], object], str], object],
    ) -> NativeBatch[Write]:
        """A native call that stores objects of one length, without what `write` must do.

        writes: a victim, one at most, has a file that nothing reads. That is written over: it has pages and blocks, so
            that takes half of the time of a new one, or a tenth in a virtual machine whose host reclaims free pages.
            If the process dies meanwhile, the next start removes that file like any temporary one.
        slots: of the batch. run: how many objects a thread stores at a time.
        chore: has a thread do what is left to do, whose name is the second argument.
        """
        lent, orders, spares = lent_by(fill), [], list[str | None]()
        for write in writes:
            position, path = write.position, self.path(write.item.name)
            victim = self.path(write.victims[0].name) if write.victims else None
            spare = None if victim else self._spares.take()  # it stays where it is until it is filled
            temporary = spare or temporary_of(victim or path, next(self._numbers))
            data, number = slots[position] if fill is None else None, lent.numbers[position] if lent else 0
            orders.append((path, data, position, number, temporary, victim or spare))
            spares.append(spare)
        flags, allocates = WRITE_FLAGS | self._io.flags, self._io.preallocates
        # With `fsync`, also the directory of a new one must be on the medium: `write` makes it.
        modes = FILE_MODE, 0 if self._fsync else DIRECTORY_MODE
        how = flags, *modes, allocates, self._fsync, *self.home.lock.identity
        try:
            shared, nbytes = slots if fill is not None else [], writes[0].item.nbytes
            call = _files.prepared_store(orders, shared, nbytes, run, lent and lent.blocks, fill, near, *how)
        except BaseException:
            chore(lambda: self._spares.give_back(filter(None, spares)), "files that are not needed")
            raise

        def ended() -> Sequence[Answer | None]:
            made, due = [answer == 1 or None for answer in _files.answers(call)], False
            unused = [spare for spare, done in zip(spares, made, strict=True) if spare is not None and not done]
            for write in itertools.compress(writes, made):
                for victim in write.victims:
                    due |= self._pruning.note(self.path(victim.name))
            if due or unused:
                chore(lambda: self._tidy(unused, due=due), "files that are not needed")
            return made

        return NativeBatch(writes, NativeCall(call, calls=fill is not None and lent is None), ended)

    def _tidy(self, unused: Sequence[str], *, due: bool) -> None:
        self._spares.give_back(unused)
        if due:
            self._pruning.finish()

    def write(self, name: str, data: memoryview) -> None:
        """Store an object. Raises StorageFull, StorageUnavailable, StorageError; then no object has this name."""
        self._check_ours()
        path = self.path(name)
        try:
            try:
                self._place(path, data)
            except OSError as error:
                # Spares and empty directories take inodes.
                full = error.errno in FULL
                if not (self._spares.remove() + self._pruning.finish() if full else self._cleared(path, error)):
                    raise
                self._place(path, data)
            if self._fsync:
                sync_directory(os.path.dirname(path))
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise self._translated("write", error, data.nbytes, path) from error

    def _place(self, path: str, data: memoryview) -> None:
        """Write the object's file. Leaves no temporary file behind. Raises OSError."""
        temporary = temporary_of(path, next(self._numbers))
        try:
            self._within(path, lambda: self._io.put(temporary, path, data, FILE_MODE, syncs=self._fsync))
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _cleared(self, path: str, error: OSError) -> bool:
        """Move what lies in the place of this object, or of a directory on the way to it, to the quarantine.

        error: the error of the write. Returns whether something lay there. Raises OSError if it cannot be moved.
        """
        if error.errno not in IN_THE_WAY:
            return False
        places = [path[:end] for end in range(len(self._objects), len(path)) if path[end] == "/"]
        for place in places:
            if os.path.lexists(place) and not os.path.isdir(place):
                self._quarantine.take(place)
                return True
        if os.path.isdir(path) and not os.path.islink(path):
            self._quarantine.take(path)
            return True
        return False

    def _within(self, path: str, make: Callable[[], T]) -> T:
        """Call `make`, which creates something at this path. Creates its directory, which may vanish at any moment."""
        for _ in range(DIRECTORY_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return make()
            with contextlib.suppress(FileNotFoundError):
                self._make_directory(os.path.dirname(path))
        return make()

    def _make_ours(self, directory: str) -> None:
        self._check_ours()  # its disk may have gone a moment ago: nothing is made beneath
        _make_directory(directory)

    def _make_directory(self, directory: str) -> None:
        self._make_ours(directory)
        while self._fsync and len(directory) >= len(self._objects):
            directory = os.path.dirname(directory)
            sync_directory(directory)

    def loading(
        self, reads: Sequence[Read], drain: Drainer | None, slots: list[memoryview], run: int
    ) -> NativeBatch[Read]:
        """A native call that loads objects of one length, without what `read` must do. slots: of the batch."""
        lent, first = lent_by(drain), reads[0].item
        blocks, numbers, busy = lent or (None, None, bytearray())
        orders = [
            (self.path(item.name), slots[i] if drain is None else None, i, numbers[i] if numbers else 0)
            for i, item in ((read.position, read.item) for read in reads)
        ]
        wanted = ALL if drain is None or first.span is None else (*first.span, FOOTER_BYTES)
        shared, flags = [] if drain is None else slots, READ_FLAGS | self._io.flags
        call = _files.prepared_load(orders, shared, first.nbytes, run, blocks, drain, busy, flags, wanted)

        def ended() -> list[Answer | None]:
            return [self._answer(read.item, said) for read, said in zip(reads, _files.answers(call), strict=True)]

        return NativeBatch(reads, NativeCall(call, calls=drain is not None and lent is None), ended)

    def _answer(self, item: Item, said: int) -> Answer | None:
        """What became of an object, as _files.c says it; None if it is left to `read`."""
        if said in (0, 1):
            return bool(said) or LEFT
        if said < 0:
            return None
        # the disk cannot read it, and may have tried for a minute
        return self._unreadable(OSError(said, os.strerror(said)), item.nbytes, self.path(item.name))

    def read(self, name: str, slot: memoryview, take: Take | None = None) -> bool | Outcome:
        """Fill the slot with the object, and pass it to `take`.

        Returns False if there is no such object, LEFT if `take` did not take it. Raises Damaged for another length,
        StorageError.
        """
        path = self.path(name)
        try:
            with opened(path, READ_FLAGS | self._io.flags) as fd:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or status.st_size != slot.nbytes:
                    raise Damaged
                self._io.read(fd, slot)
                return take is None or take(slot) or LEFT
        except (FileNotFoundError, NotADirectoryError):
            self._check_ours()  # an object of a disk that is not mounted is not lost
            return False
        except OSError as error:
            raise self._unreadable(error, slot.nbytes, path) from error

    def _unreadable(self, error: OSError, nbytes: int, path: str) -> StorageError | Damaged:
        """The exception for an object that cannot be read: Damaged if a retry cannot help."""
        translated = self._translated("read", error, nbytes, path)
        return Damaged(translated) if error.errno in NEVER_READABLE else translated

    def missing(self, name: str, nbytes: int) -> str:
        """Why the object's file is not there in its length, GONE or DAMAGED; "" if it is. Raises StorageError."""
        try:
            status = os.stat(self._objects + path_of(name), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            self._check_ours()
            return GONE
        except OSError as error:
            raise self._translated("find", error, nbytes, self.path(name)) from error
        return "" if stat.S_ISREG(status.st_mode) and status.st_size == nbytes else DAMAGED

    def remove(self, name: str, *, keep: bool = False) -> None:
        """Remove the object, if there is one. keep: its file may become a spare. Raises StorageError."""
        self._check_ours()
        path = self._objects + path_of(name)
        try:
            (self._spares.release if keep else os.unlink)(path)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):  # there is no object at this path
            pass
        except OSError as error:
            raise self._translated("remove", error, 0, path) from error
        self._pruning.left(path)

    def set_aside(self, name: str) -> str:
        """Move an object into the quarantine and remove the oldest ones there. If the move fails, unlink the object.

        Returns the object's path in the quarantine.
        """
        self._check_ours()
        path, kept = self._objects + path_of(name), ""
        try:
            kept = self._quarantine.take(path)
            os.utime(kept, follow_symlinks=False)
            self._pruning.left(path)
            self._quarantine.trim()
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError:
            self.remove(name)
        return kept

    def empty_quarantine(self, until: float) -> None:
        """Remove what was set aside up to this Unix time, and empty directories. Raises StorageError."""
        self._pruning.finish()
        try:
            self._quarantine.empty(until)
        except OSError as error:
            raise self._translated("remove", error, 0, self._quarantine.path) from error

    def finish(self) -> None:
        """The last effect: remove spares and empty directories, as far as that works."""
        if not self.home.lock.problem():
            self._spares.remove()
            self._pruning.finish()

    def _translated(self, verb: str, error: OSError, nbytes: int, path: str) -> StorageError:
        """Our error for an OSError of this file: the only place that translates an errno."""
        what = f"cannot {verb} an object in {self._root}: {error.strerror} ({path})"
        if error.errno in FULL:
            return StorageFull(f"no room for an object of {nbytes} bytes in {self._root}: {error.strerror}")
        code, refusal = _CODES.get(error.errno or 0, (None, None))
        return StorageError(what, code=code, refusal=refusal)


def allocated_at_once(fd: int) -> int:
    """How many bytes the file system allocates at least, for a file. fd: an empty file in it, open for writing."""
    block = os.fstatvfs(fd).f_frsize
    with contextlib.suppress(OSError):  # a full disk, or a file system that cannot
        os.posix_fallocate(fd, 0, 1)
    return max(block, os.fstat(fd).st_blocks * 512, 1)


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
