"""The order of use of a store's objects, in a file beside them, so that a killed daemon leaves it behind.

    <root>/order    MAGIC, then batches: _HEAD (mark, number of records, checksum of the records), the records

A record says that an object belongs to a use, at a depth (lru.py); the object is named by a hash. The last record of an
object counts. A record with the depth CONTINUED says that all objects of use `name` belong to use `use` from then on.
Records are written within JOURNAL_S of the use (file.py). Those of objects that have gone stay until `rewrite`, which
drops all records of uses before the first one that still has objects. Those of retired uses (RESTORED) stay until the
next start: without one, an object that is to go first would count as new.

After a kill the file is whole, because the page cache belongs to the kernel. After a power failure the end may be torn:
reading stops there. Objects without a record count as more recent than all others, in the order of their age.

Blocking; `note` is for the event loop, everything else for I/O threads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from transferd.config.environment import open_regular
from transferd.storage.opening import READ_FLAGS, opened
from transferd.storage.queues import RESTORED

MAGIC = b"transferd order 1\n"
RECORD = np.dtype([("name", "<u8"), ("use", "<u8"), ("depth", "<u4")])
CONTINUED = 2**32 - 1
DEEPEST = CONTINUED - 1
# The file is written anew once it has twice as many records as after the last time, and this many more.
SLACK = 65_536
MOST_WAITING = 2**18  # records that wait to be written: some 40 MB
PIECE = 65_536  # records that are read or written at once, so that a large file takes little memory meanwhile
_MODE = 0o640
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_HEAD = struct.Struct("<4sIQ")
_MARK = b"uses"
_PACK = struct.Struct("<QQI").pack

Records = npt.NDArray[np.void]


def hash_of(name: str) -> int:
    """A name's hash in the file: 64 bits, so of a million names two share one once in forty million stores."""
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


class UseJournal:
    """See the module's docstring. syncs: wait for the medium after each batch.

    lost: why the directory is another one than before; "" if it is the same. Nothing is written into another one.

    Keeps no descriptor: an open file would keep an operator from remounting the file system.
    """

    def __init__(self, path: str, *, syncs: bool, lost: Callable[[], str] = lambda: "") -> None:
        self._path = path
        self._lost = lost
        self._syncs = syncs
        self._bytes = 0  # of the file that can be read
        self._records = self._kept = 0  # in the file: now, and when it was last written anew
        self._noted: list[tuple[str | int, int, int]] = []
        self._lock = threading.Lock()  # held by the thread that writes to the file
        self.problem = ""  # why the last batch was not written

    # --- on the event loop --------------------------------------------------------------------------

    def note(self, name: str, use: int, depth: int) -> None:
        """Have the next `flush` write a record. While the disk hangs in one, the oldest that wait are dropped."""
        self._noted.append((name, use, min(depth, DEEPEST)))
        if len(self._noted) > MOST_WAITING:
            del self._noted[: MOST_WAITING // 2]
            self.problem = "the disk has taken no record for a while"

    def note_continued(self, use: int, by: int) -> None:
        """Have the next `flush` write that another use has taken over all objects of a use."""
        self._noted.append((use, by, CONTINUED))

    @property
    def grown(self) -> bool:
        """Whether the file should be written anew."""
        return self._records > 2 * self._kept + SLACK

    # --- in threads ---------------------------------------------------------------------------------

    def read(self) -> Records:
        """The last record of each object, sorted by `name`. Empty if there is no file, or it is not ours."""
        self._bytes = 0
        with contextlib.suppress(OSError):
            return self._read()
        return np.empty(0, RECORD)

    def start(self, records: Records) -> None:
        """Write the file anew with these records. If that fails, go on with the file that was read."""
        with self._lock:
            self._noted.clear()
            self._attempt(lambda: self._replace(records))

    def flush(self) -> None:
        """Append the noted records. Returns at once if another thread is appending."""
        if not self._noted or not self._lock.acquire(blocking=False):
            return
        try:
            count = len(self._noted)
            noted = self._noted[:count]
            del self._noted[:count]  # the event loop may append meanwhile
            self._attempt(lambda: self._append(noted))
        finally:
            self._lock.release()

    def rewrite(self, first_use: int) -> None:
        """Write the file anew, without records that were replaced or belong to earlier uses, except retired ones."""

        def write() -> None:
            records = self._read()
            self._replace(records[(records["use"] >= first_use) | (records["use"] == RESTORED)])

        with self._lock:
            self._attempt(write)
            self._kept = self._records  # also if that has failed: not again at once

    # --- inside -------------------------------------------------------------------------------------

    def _read(self) -> Records:
        """See `read`. Raises OSError if the file cannot be read."""
        batches, nbytes = [np.empty(0, RECORD)], 0
        with contextlib.suppress(FileNotFoundError, ValueError), open_regular(self._path, READ_FLAGS) as file:
            for batch in _batches_of(file):
                batches.append(batch)
                nbytes = file.tell()
        self._bytes = nbytes
        return _latest(np.concatenate(batches))

    def _attempt(self, write: Callable[[], None]) -> None:
        problem = self._lost()
        if not problem:
            try:
                write()
            except OSError as error:  # a full or failing disk: after a kill, the order of these objects is lost
                problem = error.strerror or str(error)
        self.problem = problem

    def _append(self, noted: Sequence[tuple[str | int, int, int]]) -> None:
        named = [(hash_of(name) if isinstance(name, str) else name, use, depth) for name, use, depth in noted]
        batch = _batch(b"".join(itertools.starmap(_PACK, named)))
        with opened(self._path, _APPEND | os.O_CREAT, _MODE) as fd:
            size = os.fstat(fd).st_size
            self._bytes = self._bytes if size >= self._bytes else 0  # somebody has removed or cut it
            if size != self._bytes:  # torn, or another program's file
                os.ftruncate(fd, self._bytes)
            write_all(fd, batch if self._bytes else MAGIC + batch)
            if self._syncs:
                os.fdatasync(fd)
            self._bytes += len(batch) + (0 if self._bytes else len(MAGIC))
            self._records += len(noted)

    def _replace(self, records: Records) -> None:
        self._records = self._kept = len(records)
        pieces = (_batch(records[start : start + PIECE].tobytes()) for start in range(0, len(records), PIECE))
        self._bytes = write_anew(self._path, [MAGIC], pieces)


def write_anew(path: str, *pieces: Iterable[bytes]) -> int:
    """Replace a file, also on the medium, in one step. Returns its length. Raises OSError; then the old one stays."""
    new = f"{path}~0"
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(new)
        with opened(new, _APPEND | os.O_CREAT | os.O_EXCL, _MODE) as fd:
            for piece in itertools.chain(*pieces):
                write_all(fd, piece)
            os.fsync(fd)
            written = os.fstat(fd).st_size
        os.rename(new, path)
        sync_directory(os.path.dirname(path))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
    return written


def sync_directory(path: str) -> None:
    with opened(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
        os.fsync(fd)


def _batch(body: bytes) -> bytes:
    return _HEAD.pack(_MARK, len(body) // RECORD.itemsize, xxhash.xxh3_64_intdigest(body)) + body


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _batches_of(file: BinaryIO) -> Iterator[Records]:
    """The records of a file, batch by batch, up to the first torn one. After each, the file stands behind it."""
    left = os.fstat(file.fileno()).st_size
    if file.read(len(MAGIC)) != MAGIC:
        return
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        mark, count, checksum = _HEAD.unpack(head)
        nbytes = count * RECORD.itemsize
        body = file.read(nbytes) if mark == _MARK and 0 < nbytes < left else b""
        if not body or len(body) != nbytes or xxhash.xxh3_64_intdigest(body) != checksum:
            return
        yield np.frombuffer(body, RECORD)


def _latest(records: Records) -> Records:
    """The last record of each name, sorted by name, with the use that it belongs to in the end."""
    continued = records[records["depth"] == CONTINUED]
    records = records[records["depth"] != CONTINUED]
    ordered = records[np.argsort(records["name"], kind="stable")]
    last = np.ones(len(ordered), bool)
    last[:-1] = ordered["name"][1:] != ordered["name"][:-1]
    latest = ordered[last]
    if len(continued):
        by: dict[int, int] = {}
        for old, new in sorted(zip(continued["name"].tolist(), continued["use"].tolist(), strict=True), reverse=True):
            by[old] = by.get(new, new)  # numbers only grow, so the later ones are known
        latest["use"] = [by.get(use, use) for use in latest["use"].tolist()]
    return latest
