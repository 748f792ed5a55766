"""A program for test_file_faults.py, to be run under tests/support/native: a file store whose system calls fail.

For each call, each error and each moment at which the call comes in a put: what the put says must be true
afterwards, and what a get delivers must be what was stored.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import random
import sys
from collections import Counter
from pathlib import Path

from tests.storage.harness import Harness, Memory, file_config
from tests.support.native import SHORT, Faults
from transferd.errors import StorageFull
from transferd.storage import file_io, spares
from transferd.storage.base import Found, Outcome
from transferd.storage.file import FileStorage
from transferd.storage.paths import path_of

FULL = (errno.ENOSPC, errno.EDQUOT)
PUT = {
    "open": (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.EIO, errno.EINTR),
    "pwrite": (*FULL, errno.EIO, errno.EINTR, errno.EROFS, SHORT),
    "fallocate": (*FULL, errno.EIO, errno.EINTR),
    "rename": (*FULL, errno.EIO, errno.EACCES),
    "mkdir": (*FULL, errno.EIO),
    "fsync": (*FULL, errno.EIO, errno.EINTR),
    "unlink": (errno.EIO, errno.EROFS),
}
GET = {"open": (errno.EMFILE, errno.EIO, errno.EACCES, errno.EINTR), "pread": (errno.EIO, errno.EINTR, SHORT)}
MOMENTS = 12  # of a put of OBJECTS, at which a call may fail; later ones come no more
OBJECTS = 3
NBYTES = 5000


class World:
    """One store, and what must be in it."""

    def __init__(self, root: Path, section: dict[str, bool]) -> None:
        self.root = root
        self.syncs = bool(section.get("fsync"))
        self.faults = Faults()
        self.storage = FileStorage(file_config(root, 1024**3, **section))
        self.harness = Harness(self.storage, Memory(4 * 1024**2))
        self.broken: list[str] = []
        self.counts: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self._numbers = iter(range(1, 10**9))

    def fresh(self) -> dict[str, bytes]:
        """Objects that nobody has stored, in a directory of their own each."""
        numbers = [next(self._numbers) for _ in range(OBJECTS)]
        # The first digits of a digest choose the directory, so that mkdir comes as well.
        return {f"demo/0123/g{n % 97}/{n % 256:02x}{n:038x}/0": random.Random(n).randbytes(NBYTES) for n in numbers}

    async def check(self, objects: dict[str, bytes], outcomes: list[Outcome] | None, what: str) -> None:
        """Nothing fails any more: what is stored must be whole, what was said must be so."""
        self.harness.reuse_memory()
        answers = await self.harness.get(*((name, NBYTES) for name in objects))
        for i, ((name, data), (outcome, got)) in enumerate(zip(objects.items(), answers, strict=True)):
            said = None if outcomes is None else outcomes[i].found
            if outcome.found is Found.FOUND and got != data:
                self.broken.append(f"{what}: {name} has wrong bytes")
            if outcome.found is Found.FAILED:
                self.broken.append(f"{what}: {name} cannot be read: {outcome.error}")
            if said in (Found.STORED, Found.EXISTS) and outcome.found is not Found.FOUND:
                self.broken.append(f"{what}: {name} was said to be stored and is {outcome.found}")
        for name, data in objects.items():
            path = self.root / "objects" / path_of(name)
            if path.is_file() and path.read_bytes() != data:
                self.broken.append(f"{what}: half an object lies under {name}")


async def put_under(world: World, call: str, error: int, moment: int) -> bool:
    """Fail one call of a put. False: the put made no such call any more."""
    objects, what = world.fresh(), f"put, {call} {moment}, {errno.errorcode.get(error, 'short')}"
    world.harness.reuse_memory()
    with world.faults.armed(call, error, skip=moment, path="/objects/"):
        outcomes = await world.harness.put(*objects.items())
    hits = world.faults.hits
    world.hits[call] += hits
    for outcome in outcomes:
        world.counts["stored" if outcome.found is Found.STORED else "failed"] += 1
        if outcome.error is not None and error in FULL and not isinstance(outcome.error, StorageFull):
            world.broken.append(f"{what}: told as {outcome.error!r}")
        if outcome.error is not None and error == errno.EINTR:
            world.broken.append(f"{what}: {outcome.error!r} though nothing is wrong")
    await world.check(objects, outcomes, what)
    again = await world.harness.put(*objects.items())
    if any(outcome.found is Found.FAILED for outcome in again):
        world.broken.append(f"{what}: a second put does not heal it")
    await world.check(objects, again, f"{what}, again")
    if world.storage.statistics()["in_flight_bytes"]:
        world.broken.append(f"{what}: room stays reserved")
    return bool(hits)


async def get_under(world: World, call: str, error: int, moment: int) -> None:
    objects, what = world.fresh(), f"get, {call} {moment}, {errno.errorcode.get(error, 'short')}"
    world.harness.reuse_memory()
    await world.harness.put(*objects.items())
    with world.faults.armed(call, error, skip=moment, path="/objects/"):
        answers = await world.harness.get(*((name, NBYTES) for name in objects))
    world.hits[call] += world.faults.hits
    for (name, data), (outcome, got) in zip(objects.items(), answers, strict=True):
        if outcome.found is Found.FOUND and got != data:
            world.broken.append(f"{what}: {name} has wrong bytes")
        if error in (errno.EINTR, SHORT) and outcome.found is not Found.FOUND:
            world.broken.append(f"{what}: {name} is {outcome} though nothing is wrong with it")
    healed = await world.harness.put(*objects.items())
    await world.check(objects, healed, what)


async def run(world: World) -> None:
    await world.storage.open()
    for call, errors in PUT.items():
        for error in errors:
            if call == "unlink":  # comes only after another failure: the clean-up of a put that failed
                continue
            for moment in range(MOMENTS):
                if not await put_under(world, call, error, moment):
                    break
    for call, errors in GET.items():
        for error in errors:
            for moment in range(OBJECTS):
                await get_under(world, call, error, moment)
    await unlinks(world)
    await unreadable(world)
    if world.syncs:
        await unsynced(world)
    await world.storage.close()


async def unlinks(world: World) -> None:
    """An eviction that fails: the object is still there, and still right. Or its file could not become a spare."""
    for call, error in itertools.product(("unlink", "rename"), PUT["unlink"]):
        spares.MOST = 4096 if call == "rename" else 0
        objects = world.fresh()
        world.harness.reuse_memory()
        await world.harness.put(*objects.items())
        with world.faults.armed(call, error, count=-1, path="/objects/"):
            world.storage.set_capacity(1)
            await world.storage._effects.end()
        world.hits[call] += world.faults.hits
        world.storage.set_capacity(1024**3)
        await world.storage._effects.end()
        await world.check(objects, None, f"eviction, {call} {errno.errorcode[error]}")


async def unreadable(world: World) -> None:
    """A disk may try for a minute before it says that it cannot read: it is asked once."""
    objects = world.fresh()
    world.harness.reuse_memory()
    await world.harness.put(*objects.items())
    with world.faults.armed("pread", errno.EIO, count=-1, path="/objects/"):
        answers = await world.harness.get(*((name, NBYTES) for name in objects))
    if world.faults.hits != OBJECTS or any(outcome.found is not Found.FAILED for outcome, _ in answers):
        world.broken.append(f"{world.faults.hits} reads of {OBJECTS} objects, {[str(o.found) for o, _ in answers]}")


async def unsynced(world: World) -> None:
    """The medium does not take the bytes: no file gets its object's name, because fsync comes before the rename."""
    objects = world.fresh()
    world.harness.reuse_memory()
    with world.faults.armed("fsync", errno.EIO, count=-1, path="~"):  # files that are not complete, no directories
        outcomes = await world.harness.put(*objects.items())
    if not world.faults.hits or any(outcome.found is not Found.FAILED for outcome in outcomes):
        world.broken.append(f"told {[str(outcome.found) for outcome in outcomes]} of files that were not synced")
    if any((world.root / "objects" / path_of(name)).exists() for name in objects):
        world.broken.append("a file that was not synced has its object's name")


def main() -> None:
    if sys.argv[3] == "Python":
        file_io.NATIVE = False
    world = World(Path(sys.argv[1]) / "store", json.loads(sys.argv[2]))
    asyncio.run(run(world))
    print(json.dumps({"broken": world.broken[:20], "hits": dict(world.hits), **world.counts}))
