"""Records of the layouts in use in a pool, so that an operator sees a mismatch instead of guessing.

The fingerprint is part of every object's name, so blocks of another layout or tensor-parallel size are misses that can
never become hits. So every daemon writes a small record of its layout into the pool and reads those of others:

    transferd/layouts/<model>/0 … SLOTS-1    RECORD_BYTES each: "<fingerprint> <identity>", then zeros

A layout has one record, however many daemons use it. A daemon takes the first free slot. A put never replaces
an object, so the daemon reads the slot back to learn who was first. The pool evicts and loses records like any
object, so the daemon reads them again from time to time, but only after a lookup with absent keys. The daemon logs each
other layout once, and counts lookups whose first absent key exists under another layout of the same model (of rank 0,
which every layout has). No answer waits for any of this (docs/adr/0011-layouts-in-a-pool.md).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import re
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain

import structlog

from transferd.blocks.formats import quote_part
from transferd.blocks.layout.base import BlockLayout
from transferd.errors import StorageError
from transferd.runtime.aio import uncancelled
from transferd.runtime.clock import Clock
from transferd.storage.mooncake import error_codes
from transferd.storage.mooncake.client import Batch, Buffer, PoolClient
from transferd.storage.mooncake.loads import Loads

log = structlog.get_logger(__name__)

PREFIX = "transferd/layouts/"  # of the keys of all records
SLOTS = 8
RECORD_BYTES = 512
LOOK_EVERY_S = 1.0
MOST_WAITING = 1024  # lookups that wait for this check; any more are not counted
_RECORD = re.compile(rb"([0-9a-f]{16}) ([^\0]*)\0*\Z")

Native = Callable[[Callable[[PoolClient], dict[str, int]], int], Awaitable[dict[str, int]]]


class LayoutRecords:
    """The layouts of one model in one pool that one daemon has found.

    Owns the buffer for records, `nbytes` at `address`: register it before the first `look`, unregister it after
    `settled` and the last call. native: makes one native call, which moves so many objects; raises StorageError.
    loads: reads records, each node's apart: one that is silent costs its own.
    """

    def __init__(self, model: str, layout: BlockLayout, native: Native, clock: Clock, loads: Loads) -> None:
        self.others: dict[str, str] = {}  # fingerprint: identity
        self.misses = 0  # lookups that another layout could have answered
        self._model = quote_part(model)
        self._layout = layout
        self._native = native
        self._clock = clock
        self._loads = loads
        self._memory = mmap.mmap(-1, SLOTS * RECORD_BYTES)
        self.nbytes = len(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._announced = False
        self._looked_at = -LOOK_EVERY_S
        self._absent: deque[str] = deque(maxlen=MOST_WAITING)
        self._looking: asyncio.Task[None] | None = None

    def absent(self, name: str) -> None:
        """Report a lookup's first absent name. Returns at once; the check runs in the background."""
        if not name.endswith("/0"):
            return
        self._absent.append(name)
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._find_out())

    async def settled(self, within: float | None = None) -> None:
        """Wait until no check runs, at most so many seconds."""
        if self._looking is not None:
            await asyncio.wait([self._looking], timeout=within)

    async def look(self) -> None:
        """Read the records of others, and write ours if it is missing. Raises StorageError."""
        self._looked_at = self._clock.monotonic()
        self._announced = False
        free = await self._read(range(SLOTS))
        for _ in range(SLOTS):
            if self._announced or not free:
                return
            await self._write(free[0])
            free = await self._read(free)  # another daemon may have been first

    async def _read(self, slots: Iterable[int]) -> list[int]:
        """Remember the records in these slots. Returns the empty slots."""
        batch = self._batch(slots)
        read = await uncancelled(self._loads.run(batch))
        answers = {slot: read[key] for slot, key in zip(slots, batch, strict=True)}
        for slot, code in answers.items():
            if code == RECORD_BYTES:
                self._note(self._memory[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES])
        return [slot for slot, code in answers.items() if code in error_codes.NOT_THERE]

    async def _write(self, slot: int) -> None:
        record = f"{self._layout.fingerprint} {self._layout.identity}".encode()[:RECORD_BYTES]
        self._memory[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = record.ljust(RECORD_BYTES, b"\0")
        batch = self._batch([slot])
        await self._native(lambda client: client.put(batch), 1)

    def _batch(self, slots: Iterable[int]) -> Batch:
        return {
            f"{PREFIX}{self._model}/{slot}": Buffer(self.address + slot * RECORD_BYTES, RECORD_BYTES) for slot in slots
        }

    def _note(self, record: bytes) -> None:
        match = _RECORD.match(record)
        if match is None:
            return  # perhaps a record of another version
        fingerprint = match[1].decode()
        if fingerprint == self._layout.fingerprint:
            self._announced = True
        elif fingerprint not in self.others:
            identity = self.others[fingerprint] = match[2].decode("utf-8", "replace")
            log.warning(
                "another layout of this model is in the pool: its blocks are misses here",
                model=self._model,
                ours=f"{self._layout.fingerprint} {self._layout.identity}",
                theirs=f"{fingerprint} {identity}",
            )

    async def _find_out(self) -> None:
        try:
            while self._absent:
                names = list(self._absent)
                self._absent.clear()
                with contextlib.suppress(StorageError):
                    if self._clock.monotonic() - self._looked_at >= LOOK_EVERY_S:
                        await self.look()
                    await self._count(names)
        finally:
            self._looking = None

    async def _count(self, names: Iterable[str]) -> None:
        ours = f"{self._model}/{self._layout.fingerprint}/"
        rests = [name.removeprefix(ours) for name in names if name.startswith(ours)]
        theirs = [[f"{self._model}/{fingerprint}/{rest}" for fingerprint in self.others] for rest in rests]
        if keys := list(chain.from_iterable(theirs)):
            found = await self._native(lambda client: client.exists(keys), 0)
            self.misses += sum(any(found[key] == 1 for key in of_one) for of_one in theirs)
