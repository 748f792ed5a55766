"""Gates: where a fault meets a real process at exactly the moment it is meant for.

A gated daemon runs the real device tier and the real storage backend, plugged in by module path:

    [cache]    device  = "tests.faults.gates:GatedShm"
    [storage]  backend = "tests.faults.gates:GatedMooncake"   (or GatedFile)

At each gate the process says over a unix socket where it is, and goes on when it is told to. So a
runner that holds an answer back knows that the process stands in the middle of a copy, half of its bytes
moved, and nobody has to sleep for luck. Without a runner (no TRANSFERD_FAULT_GATES, nobody listening, an
answer that does not come within GATE_TIMEOUT_S) a gate is open.

| phase   | where the gate is |
|---|---|
| push    | in the engine: the request has been handed to its socket, no answer was awaited yet |
| match   | a storage lookup was asked for and has not begun |
| gather  | half of the runs of a copy out of device memory are done |
| store   | half of the objects of a put are stored |
| load    | half of the objects of a get are loaded; in place: one object |
| scatter | half of the runs of a copy into device memory are done; in place: of one block |
| result  | a copy into device memory, or a load of a block in place, is complete; the rank has not been told yet |
| round   | in the bystander (bystander.py), between two rounds of its tasks |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Sequence
from typing import Any

from transferd.blocks.copyplan import CopyPlan
from transferd.blocks.footer import FOOTER_BYTES
from transferd.runtime.compat import timeout
from transferd.storage.base import Backing, Blob, InPlace, Outcome, Place, ReadNow, Storage
from transferd.storage.file import FileStorage
from transferd.storage.lru import Use
from transferd.storage.mooncake import MooncakeStorage
from transferd.tiers.base import HostMemory
from transferd.tiers.shm import ShmDeviceTier
from transferd.workers import block_memory

VARIABLE = "TRANSFERD_FAULT_GATES"
GATE_TIMEOUT_S = 180.0
MODEL = "faults"  # of the engine that faults are for


async def gate(phase: str, **told: Any) -> str:
    """Say "I am here", and wait for the word to go on, which is returned ("" when nobody is there)."""
    path = os.environ.get(VARIABLE)
    if not path:
        return ""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return ""
    try:
        writer.write(json.dumps({"phase": phase, "pid": os.getpid(), **told}).encode() + b"\n")
        async with timeout(GATE_TIMEOUT_S):
            return (await reader.readline()).decode().strip()
    except (OSError, TimeoutError):
        return ""
    finally:
        writer.close()


def gate_of_thread(phase: str, **told: Any) -> None:
    """`gate`, for an I/O thread, which stands still meanwhile."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as keeper:
        keeper.settimeout(GATE_TIMEOUT_S)
        keeper.connect(path)
        keeper.sendall(json.dumps({"phase": phase, "pid": os.getpid(), **told}).encode() + b"\n")
        keeper.recv(100)


class HalfwayBlock:
    """A block that pauses in the middle of its first piece of more than one part, as a copy in does."""

    def __init__(self, block: InPlace, rank: int) -> None:
        self.nbytes = block.nbytes
        self._block = block
        self._rank = rank
        self._paused = False

    @property
    def wanted(self) -> bool:
        return self._block.wanted

    def load_file(self, path: str, flags: int) -> None:
        """Nothing: only `read` can pause."""

    def leave(self) -> None:
        self._block.leave()

    def load(self, read: ReadNow, _: Backing | None = None) -> bool:
        def halfway(buffers: Sequence[memoryview], offset: int) -> int:
            middle = len(buffers) // 2
            if self._paused or not middle:
                return read(buffers, offset)
            self._paused = True
            done = read(buffers[:middle], offset)
            gate_of_thread("scatter", rank=self._rank, nbytes=self.nbytes)
            return done + read(buffers[middle:], offset + done)

        return self._block.load(halfway)


def halves(plan: CopyPlan) -> tuple[CopyPlan, CopyPlan]:
    """The first and the second half of a plan's runs."""
    middle = len(plan.runs) // 2
    first, second = plan.runs[:middle].copy(), plan.runs[middle:].copy()
    return CopyPlan(int(first[:, 2].sum()), runs=first), CopyPlan(int(second[:, 2].sum()), runs=second)


class GatedShm(ShmDeviceTier):
    """Shared memory as a device; every copy pauses halfway, and a copy in also at its end."""

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        block_memory.NATIVE = False  # in this process, stores go through the tier, and so can pause

    async def copy_out(self, plan: CopyPlan, host: HostMemory) -> None:
        first, second = halves(plan)
        await super().copy_out(first, host)
        await gate("gather", rank=self.rank, nbytes=plan.nbytes)
        await super().copy_out(second, host)

    async def copy_in(self, plan: CopyPlan, host: HostMemory) -> None:
        first, second = halves(plan)
        await super().copy_in(first, host)
        await gate("scatter", rank=self.rank, nbytes=plan.nbytes)
        await super().copy_in(second, host)
        await gate("result", rank=self.rank, nbytes=plan.nbytes)


class _Gated(Storage):
    """Before a backend: puts and gets pause halfway. Lookups pause before they begin, where the backend has them."""

    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        if not _meant(blobs[0].name):
            return await super().put(blobs)
        middle = len(blobs) // 2
        first = await super().put(blobs[:middle])
        await gate("store", rank=_rank(blobs[0].name))
        return first + await super().put(blobs[middle:])

    async def get(self, blobs: Sequence[Blob]) -> list[Outcome]:
        if not _meant(blobs[0].name):
            return await super().get(blobs)
        middle = len(blobs) // 2
        first = await super().get(blobs[:middle])
        await gate("load", rank=_rank(blobs[0].name))
        return first + await super().get(blobs[middle:])

    async def get_in_place(self, places: Sequence[Place], at_once: int | None = None) -> list[Outcome]:
        if not _meant(places[0].name):
            return await super().get_in_place(places, at_once)
        rank = _rank(places[0].name)
        outcomes: list[Outcome] = []
        for place in places:
            halfway = Place(place.name, HalfwayBlock(place.data, rank), place.use, place.depth)
            outcomes += await super().get_in_place([halfway], at_once)
            await gate("load", rank=rank)
            await gate("result", rank=rank, nbytes=place.data.nbytes - FOOTER_BYTES)
        return outcomes


def _meant(name: str) -> bool:
    """Whether an object belongs to the engine that faults are for; the bystander's pass."""
    return name.startswith(f"{MODEL}/")


def _rank(name: str) -> int:
    return int(name.rpartition("/")[2])


class GatedFile(_Gated, FileStorage):
    """The file backend with gates. It looks a chain up by itself, and `exists` by that."""

    def look_up(self, names: Sequence[str], use: Use) -> Awaitable[list[bool]]:  # type: ignore[override]
        async def gated() -> list[bool]:
            if _meant(names[0]):
                await gate("match", rank=_rank(names[0]))
            return await FileStorage.look_up(self, names, use)

        return gated()


class GatedMooncake(_Gated, MooncakeStorage):
    """The Mooncake backend with gates."""

    async def exists(self, names: Sequence[str]) -> list[bool]:
        if _meant(names[0]):
            await gate("match", rank=_rank(names[0]))
        return await super().exists(names)
