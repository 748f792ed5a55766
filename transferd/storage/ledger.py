"""A disk's list of orders (orders.py), in a file beside its objects, so that no restart and no absence forgets one.

    <root>/orders   MAGIC, then records: _HEAD (mark, length, checksum of the body), the body (JSON)

The first record is a `Head`, all others are `OrderRecord`s. A record is on the medium when `append` returns, whatever
`storage.file.fsync` says: orders are rare. After a power failure the end may be torn: it is cut. A record before the
end that cannot be read makes the whole list useless.

Blocking; called from I/O threads, one call at a time.
"""

from __future__ import annotations

import os
import stat
import struct
import uuid
from collections.abc import Callable, Iterable, Sequence

import msgspec
import xxhash

from transferd.storage.examine import READ_FLAGS
from transferd.storage.journal import write_all, write_anew
from transferd.storage.orders import Epoch, Head, Listed, OrderRecord

MAGIC = b"transferd orders 1\n"
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_HEAD = struct.Struct("<4sIQ")
_MARK = b"ordr"
_LONGEST = 64 * 1024**2  # of a file that is read

# Made once: in any thread, a first use of a type by msgspec is not safe (runtime/compat.py).
_HEADS, _ORDERS = msgspec.json.Decoder(Head), msgspec.json.Decoder(OrderRecord)


class Ledger:
    """See the module. lost: why the directory is another one than before; "" if it is the same.

    store: names the store on this disk, once it is read or written.
    listed: what the file says, and with `behind` what it should say.
    behind: the file lacks what `listed` has, because the disk was full.
    """

    def __init__(self, path: str, lost: Callable[[], str]) -> None:
        self._path = path
        self._lost = lost
        self._bytes = 0
        self.store = ""
        self.listed = Listed()
        self.behind = False

    @property
    def nbytes(self) -> int:
        return self._bytes

    def store_there(self) -> str:
        """The name of the store whose list is at the path now; "" if there is none that can be read."""
        listed, _ = self._read()
        return "" if listed.head is None else listed.head.store

    def read(self) -> Listed:
        """Read the file anew."""
        self.listed, self._bytes = self._read()
        self.store = self.listed.head.store if self.listed.head is not None else self.store or uuid.uuid4().hex
        return self.listed

    def append(self, orders: Sequence[OrderRecord]) -> None:
        """Add orders. Raises OSError."""
        for order in orders:
            self.listed.add(order)
        self.behind, was_behind = True, self.behind
        if problem := self._lost():
            raise FileNotFoundError(problem)
        try:
            fd = os.open(self._path, _APPEND)
            try:
                if was_behind or os.fstat(fd).st_size < self._bytes:
                    raise FileNotFoundError(self._path)
                os.ftruncate(fd, self._bytes)  # without a torn end
                data = b"".join(map(_record, orders))
                write_all(fd, data)
                os.fdatasync(fd)
            finally:
                os.close(fd)
            self._bytes += len(data)
            self.behind = False
        except FileNotFoundError:  # someone has removed or cut it
            assert self.listed.head is not None
            self._replace(self.listed.head, [*self.listed.orders, *_applied(self.listed.applied)])

    def write(self, epoch: Epoch, since: float, orders: Iterable[OrderRecord]) -> None:
        """Replace the file. Raises OSError."""
        head = epoch.head(self.store, since)
        self.listed, self.behind = Listed(head), True
        for order in (orders := list(orders)):
            self.listed.add(order)
        if problem := self._lost():
            raise FileNotFoundError(problem)
        self._replace(head, orders)

    def _replace(self, head: Head, orders: Sequence[OrderRecord]) -> None:
        self._bytes = write_anew(self._path, [MAGIC, _record(head)], map(_record, orders))
        self.behind = False

    def _read(self) -> tuple[Listed, int]:
        """The list, and the length of its file up to a torn end."""
        try:
            with open(os.open(self._path, READ_FLAGS), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return Listed(problem="it is not a regular file"), 0
                data = file.read(_LONGEST)
        except FileNotFoundError:
            return Listed(), 0
        except OSError as error:
            return Listed(problem=error.strerror or str(error)), 0
        return _decoded(data)


def _decoded(data: bytes) -> tuple[Listed, int]:
    listed, at = Listed(), len(MAGIC)
    if data[:at] != MAGIC:
        return Listed(problem="it does not begin like a list of orders"), 0
    while at < len(data):
        body = _body_at(data, at)
        if body is None:
            if _torn(data, at):
                break
            return Listed(problem=f"the record at byte {at} is damaged"), 0
        try:
            if listed.head is None:
                listed.head = _HEADS.decode(body)
            else:
                listed.add(_ORDERS.decode(body))
        except msgspec.DecodeError as error:
            return Listed(problem=f"the record at byte {at} cannot be read: {error}"), 0
        at += _HEAD.size + len(body)
    return (listed, at) if listed.head is not None else (Listed(problem="it has no first record"), 0)


def _body_at(data: bytes, at: int) -> bytes | None:
    if len(data) - at < _HEAD.size:
        return None
    mark, nbytes, checksum = _HEAD.unpack_from(data, at)
    body = data[at + _HEAD.size : at + _HEAD.size + nbytes]
    good = mark == _MARK and len(body) == nbytes and xxhash.xxh3_64_intdigest(body) == checksum
    return body if good else None


def _torn(data: bytes, at: int) -> bool:
    """Whether what cannot be read here is the last write, which a power failure has cut or left without its bytes."""
    return all(_body_at(data, later) is None for later in _marks(data, at + 1))


def _marks(data: bytes, at: int) -> Iterable[int]:
    while (at := data.find(_MARK, at)) >= 0:
        yield at
        at += 1


def _applied(ids: Iterable[str]) -> list[OrderRecord]:
    return [OrderRecord(one, "applied") for one in ids]


def _record(content: Head | OrderRecord) -> bytes:
    body = msgspec.json.encode(content)
    return _HEAD.pack(_MARK, len(body), xxhash.xxh3_64_intdigest(body)) + body
