"""What was announced for STORAGE, in a file beside the objects, so that a restart forgets nothing of it.

    <first of storage.file.path>/announced-<engine>    chunks: length, xxh3-64, and msgpack [generation, records]

A name on disk has no hash that routers know, no parent and no token ids; so we note them. Records are appended once a
second: a kill loses the last second's announcements, and a lost announcement only loses an opportunity. The file is
not trusted: who reads it back announces only what every rank's storage has, and reading ends at the first chunk that is
torn. When most records are of blocks that are gone, the file is written anew.

All I/O is in a thread of its own, so that a disk that hangs keeps nobody waiting. A file that cannot be written is
logged once, and then nothing is noted any more.
"""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import structlog
import xxhash

from transferd.blocks.formats import key_digest
from transferd.config import Config
from transferd.daemon.kv_events.announcements import Block, Residency
from transferd.errors import NoThreads
from transferd.runtime.aio import Timer, answered
from transferd.runtime.threads import Crew
from transferd.storage.registry import backends_of
from transferd.wire.kv_events import MEDIUM_STORAGE

log = structlog.get_logger(__name__)

Record = tuple[str, Block]
"""A block, after the digest in its objects' names."""

EVERY_S = 1.0  # between two writes
CLOSE_S = 1.0  # for the last write
FEW = 10_000  # records of blocks that are gone, in a file that is not written anew
A_CHUNK = 4096  # records
MODE = 0o600  # it has token ids
_HEAD = struct.Struct("<IQ")


class _Announcements(msgspec.Struct, array_like=True, gc=False):
    generation: str
    records: list[Record]


_decoder, _encoder = msgspec.msgpack.Decoder(_Announcements), msgspec.msgpack.Encoder()


def place_of(config: Config, engine: str, space: str) -> Path | None:
    """The file of one engine; None if no disk of this node holds blocks. space: the beginning of its objects' names."""
    disks = [one for kind in backends_of(config) for one in kind.directories(config.storage)]
    if not disks:
        return None
    # By way of the objects: beneath the mount point of a disk that is away there are none, so nothing is written there.
    return Path(disks[0].paths[0], "objects", "..") / f"announced-{key_digest(f'{engine} {space}')[:16]}"


class Remembered:
    """The file of one engine, in one generation at a time. Owns it and its thread from `read` to `close`.

    residency: what is announced now; borrowed.
    """

    def __init__(self, path: Path, residency: Residency) -> None:
        self._path = path
        self._residency = residency
        self._generation = ""
        self._written = 0  # records in the file, of all generations
        self._seen = 0  # of those, the ones that `read` has seen
        self._pending: list[Record] = []
        self._timer = Timer()
        self._crew = Crew("transferd-announced", 1)
        self._broken = False

    async def read(self, generation: str) -> list[Record]:
        """The records of this generation, in the order in which they were announced. Records of others are dropped."""
        self._generation = generation
        records: list[Record] = []
        await self._run(lambda: records.extend(self._read(generation)))
        return records

    def announced_again(self) -> None:
        """All that was read is announced again. Before that, a file that is written anew would lack the rest."""
        self._written += self._seen
        self._seen = 0

    def note(self, records: Sequence[Record]) -> None:
        """Append these soon."""
        if records and not self._broken:
            self._pending += records
            if not self._timer:
                self._timer.set(EVERY_S, self._flush)

    def forget(self, generation: str) -> None:
        """Everything was retracted; what follows is of this generation."""
        self._generation = generation
        self._pending.clear()
        self._written = self._seen = 0
        self._run(lambda: self._write_anew(generation, []))

    async def close(self) -> None:
        """Write what is pending, if that takes no longer than CLOSE_S. Nothing may be noted from now on."""
        self._flush()
        if not self._broken:
            await asyncio.wait([self._run(lambda: None)], timeout=CLOSE_S)
        self._crew.close(0.0)

    def _flush(self) -> None:
        self._timer.cancel()
        pending, self._pending, generation = self._pending, [], self._generation
        if not pending or self._broken:
            return
        self._written += len(pending)
        if self._written <= FEW + 2 * self._residency.statistics()[MEDIUM_STORAGE]:
            self._run(lambda: self._write(self._path, os.O_APPEND, generation, pending))
        else:
            live = self._residency.stored()
            self._written = len(live)
            self._run(lambda: self._write_anew(generation, live))

    def _run(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Do this in the thread, after all that came before it."""
        try:
            return self._crew.run(lambda: self._guarded(work))
        except NoThreads as error:
            self._fails(str(error))
            return answered(None)

    def _fails(self, problem: str) -> None:
        self._broken = True
        what = "cannot note which blocks were announced: after a restart, routers learn of them when they are used"
        log.warning(what, path=str(self._path), problem=problem)

    # --- in the thread ------------------------------------------------------------------------------

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            if not self._broken:
                work()
        except OSError as error:
            self._fails(error.strerror or str(error))

    def _read(self, generation: str) -> list[Record]:
        """Read the file, count its records, and cut it behind its last whole chunk. Raises OSError."""
        records: list[Record] = []
        try:
            data = memoryview(self._path.read_bytes())
        except FileNotFoundError:
            return []
        at = 0
        while len(data) - at > _HEAD.size:
            length, seal = _HEAD.unpack_from(data, at)
            body = data[at + _HEAD.size : at + _HEAD.size + length]
            if len(body) != length or xxhash.xxh3_64_intdigest(body) != seal:
                break
            try:
                chunk = _decoder.decode(body)
            except msgspec.DecodeError:  # of another version
                break
            self._seen += len(chunk.records)
            if chunk.generation == generation:
                records += chunk.records
            at += _HEAD.size + length
        os.truncate(self._path, at)
        return records

    def _write_anew(self, generation: str, records: Sequence[Record]) -> None:
        beside = self._path.with_suffix(".new")
        self._write(beside, os.O_TRUNC, generation, records)
        beside.replace(self._path)

    def _write(self, path: Path, how: int, generation: str, records: Sequence[Record]) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | how, MODE)
        with os.fdopen(fd, "wb") as file:
            for first in range(0, len(records), A_CHUNK):
                body = _encoder.encode(_Announcements(generation, list(records[first : first + A_CHUNK])))
                file.write(_HEAD.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body)
