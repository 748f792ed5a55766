"""Storage in a directory tree: one file an object, found again after a restart.

    <path>/lock                                       held by the daemon that uses the directory
    <path>/objects/<model>/<fingerprint>/<generation>/<2 digits>/<key digest>.<rank>
    <path>/quarantine/                                objects that failed their check, newest few

A file appears under its name by rename, whole; temporary names begin with a dot and end in `.tmp`,
and those of a dead writer are removed at start. The index (lru.py) is the truth of what there is;
it is changed on the event loop only, and files follow in I/O threads: *decide, then do*. A file that
somebody else deleted is a miss and leaves the index.

Recency survives a restart through the files' modification times, which a read refreshes.

No fsync unless `storage.file.fsync` is set: a killed process loses nothing, and after a power failure
the checksum of every object decides. ENOSPC evicts and tries once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import structlog

from transferd.clock import SYSTEM_CLOCK, Clock
from transferd.config import Config
from transferd.errors import ConfigError, StorageError, StorageFull
from transferd.storage.base import EXISTS, FOUND, MISSING, STORED, Blob, Found, Outcome, Storage
from transferd.storage.lru import LruIndex

log = structlog.get_logger(__name__)

T = TypeVar("T")
IO_THREADS = 4
QUARANTINE_FILES = 16
TEMPORARY = ".tmp"
# After ENOSPC: free this many times the object, so that its neighbours do not fail one by one.
ENOSPC_FREE_FACTOR = 16

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class FileStorage(Storage):
    """Objects as files under `storage.file.path`, within `storage.file.capacity` bytes."""

    backend = "file"

    def __init__(self, config: Config, *, clock: Clock = SYSTEM_CLOCK) -> None:  # noqa: ARG002 - the registry's form
        section = config.storage.file
        self._root = Path(section.path)
        self._objects = self._root / "objects"
        self._quarantine = self._root / "quarantine"
        self._fsync = section.fsync
        self._index = LruIndex(section.capacity)
        self._threads: ThreadPoolExecutor | None = None
        self._lock = -1
        self._temporary = itertools.count()
        self._hits = self._misses = self._errors = self._evicted = self._quarantined = 0

    # --- life ---------------------------------------------------------------------------------------

    async def open(self) -> None:
        self._threads = ThreadPoolExecutor(IO_THREADS, thread_name_prefix="transferd-file")
        found = await self._run(self._prepare)
        for _, name, nbytes in sorted(found):
            self._evict(self._index.add(name, nbytes))
        log.info("file storage open", path=str(self._root), objects=len(self._index), bytes=self._index.bytes)

    def _prepare(self) -> list[tuple[float, str, int]]:
        """Create, lock and scan the directory."""
        try:
            for directory in (self._objects, self._quarantine):
                directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            probe = self._objects / f".probe{TEMPORARY}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError("storage.file.path", f"is not usable: {error.strerror}", str(self._root)) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError("storage.file.path", "is in use by another daemon", str(self._root)) from error
        return list(self._scan(self._objects))

    def _scan(self, directory: Path) -> Iterator[tuple[float, str, int]]:
        """(modification time, name, size) of every object; removes what dead writers left."""
        for entry in os.scandir(directory):
            if entry.is_dir(follow_symlinks=False):
                yield from self._scan(Path(entry.path))
            elif entry.name.endswith(TEMPORARY) and entry.name.startswith("."):
                os.unlink(entry.path)
            elif entry.is_file(follow_symlinks=False):
                name = self._name_of(Path(entry.path))
                if name is not None:
                    status = entry.stat(follow_symlinks=False)
                    yield status.st_mtime, name, status.st_size

    def _path_of(self, name: str) -> Path:
        """Names come from keys.py, which has quoted every part: none holds a slash or is `..`."""
        model, fingerprint, generation, digest, rank = name.split("/")
        return self._objects / _part(model) / fingerprint / _part(generation) / digest[:2] / f"{digest}.{rank}"

    def _name_of(self, path: Path) -> str | None:
        """The name whose object this file would be; None for files that are not ours."""
        parts = path.relative_to(self._objects).parts
        if len(parts) != 5 or "." not in parts[4]:
            return None
        model, fingerprint, generation, _, file = parts
        digest, _, rank = file.rpartition(".")
        name = f"{model[1:]}/{fingerprint}/{generation[1:]}/{digest}/{rank}"
        return name if self._path_of(name) == path else None

    async def close(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            await asyncio.get_running_loop().run_in_executor(None, threads.shutdown)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # --- objects ------------------------------------------------------------------------------------

    async def exists(self, names: Sequence[str]) -> list[bool]:
        return [name in self._index for name in names]

    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        new = [blob for blob in blobs if not self._index.touch(blob.name)]
        written = await self._run(lambda: [self._write(blob) for blob in new]) if new else []
        outcomes: dict[str, Outcome] = {}
        for blob, error in zip(new, written, strict=True):
            if error is not None and error.errno in _FULL:
                error = await self._write_after_making_room(blob)
            outcomes[blob.name] = self._written(blob, error)
        return [outcomes.get(blob.name, EXISTS) for blob in blobs]

    def _written(self, blob: Blob, error: OSError | None) -> Outcome:
        if error is None:
            self._evict(self._index.add(blob.name, blob.data.nbytes))
            return STORED
        self._errors += 1
        if error.errno in _FULL:
            what = f"no room for an object of {blob.data.nbytes} bytes in {self._root}: {error.strerror}"
            return Outcome(Found.FAILED, StorageFull(what))
        return Outcome(Found.FAILED, StorageError(f"cannot write in {self._root}: {error.strerror}"))

    async def _write_after_making_room(self, blob: Blob) -> OSError | None:
        room = ENOSPC_FREE_FACTOR * blob.data.nbytes
        evicted = self._index.evict_to(max(0, self._index.bytes - room))
        self._evicted += len(evicted)
        log.warning("no space left, evicted objects to try once more", objects=len(evicted), path=str(self._root))

        def again() -> OSError | None:
            self._unlink_all(evicted)
            return self._write(blob)

        return await self._run(again)

    def _write(self, blob: Blob) -> OSError | None:
        """In a thread: the object under its name, whole, or the error that prevented it."""
        if blob.data.nbytes > self._index.capacity:
            return OSError(errno.ENOSPC, f"larger than storage.file.capacity, {self._index.capacity}")
        path = self._path_of(blob.name)
        temporary = path.parent / f".{path.name}.{next(self._temporary)}{TEMPORARY}"
        try:
            fd = _create(temporary)
            try:
                _write_all(fd, blob.data)
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(temporary, path)
            if self._fsync:
                _fsync_directory(path.parent)
        except OSError as error:
            _unlink(temporary)
            return error
        return None

    async def get(self, blobs: Sequence[Blob]) -> list[Outcome]:
        known = [self._index.touch(blob.name) for blob in blobs]
        wanted = [blob for blob, there in zip(blobs, known, strict=True) if there]
        lengths = await self._run(lambda: [self._read(blob) for blob in wanted]) if wanted else []
        outcomes = {blob.name: self._read_outcome(blob, n) for blob, n in zip(wanted, lengths, strict=True)}
        self._misses += known.count(False)
        return [outcomes.get(blob.name, MISSING) for blob in blobs]

    def _read_outcome(self, blob: Blob, length: int | OSError) -> Outcome:
        if length == blob.data.nbytes:
            self._hits += 1
            return FOUND
        if isinstance(length, OSError) and length.errno != errno.ENOENT:
            self._errors += 1
            return Outcome(Found.FAILED, StorageError(f"cannot read in {self._root}: {length.strerror}"))
        self._misses += 1
        self._index.discard(blob.name)  # deleted behind our back, evicted meanwhile, or of another length
        return MISSING

    def _read(self, blob: Blob) -> int | OSError:
        """In a thread: the file's whole length if it fits and was read, else how much there is, or the error."""
        try:
            fd = os.open(self._path_of(blob.name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(fd).st_size
                if size != blob.data.nbytes:
                    return size
                done = 0
                while done < size:
                    count = os.preadv(fd, [blob.data[done:]], done)
                    if count == 0:
                        return done
                    done += count
                os.utime(fd)
                return done
            finally:
                os.close(fd)
        except OSError as error:
            return error

    async def quarantine(self, name: str) -> None:
        self._index.discard(name)
        self._quarantined += 1
        await self._run(lambda: self._put_aside(name))

    def _put_aside(self, name: str) -> None:
        path = self._path_of(name)
        try:
            os.rename(path, self._quarantine / f"{path.name}.{next(self._temporary)}")
            kept = sorted(self._quarantine.iterdir(), key=lambda file: file.stat().st_mtime)
            for file in kept[:-QUARANTINE_FILES]:
                _unlink(file)
        except OSError:
            _unlink(path)  # unreachable is what matters

    # --- room ---------------------------------------------------------------------------------------

    def reconfigure(self, config: Config) -> None:
        """Take over a new capacity; evicts at once if it is smaller."""
        self._index.capacity = config.storage.file.capacity
        self._evict(self._index.evict_to(self._index.capacity))

    def _evict(self, names: list[str]) -> None:
        if not names or self._threads is None:
            return
        self._evicted += len(names)
        # A put of the same name may come before the unlink; then the object is gone early, which is a miss.
        self._threads.submit(self._unlink_all, names)

    def _unlink_all(self, names: Sequence[str]) -> None:
        for name in names:
            _unlink(self._path_of(name))

    async def _run(self, work: Callable[[], T]) -> T:
        if self._threads is None:
            raise StorageError("file storage is closed")
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def statistics(self) -> dict[str, Any]:
        return {
            "objects": len(self._index),
            "bytes": self._index.bytes,
            "capacity": self._index.capacity,
            "hits": self._hits,
            "misses": self._misses,
            "errors": self._errors,
            "evictions": self._evicted,
            "quarantined": self._quarantined,
        }


def _part(text: str) -> str:
    """A name part as a directory name: never empty, never a dot."""
    return f"={text}"


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o640)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, flags, 0o640)


def _write_all(fd: int, data: memoryview) -> None:
    done = 0
    while done < data.nbytes:
        done += os.pwrite(fd, data[done:], done)


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _unlink(path: Path) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
