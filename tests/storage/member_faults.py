"""A program for test_stuck.py, to be run under tests/support/native: one member of a file store refuses for ever.

Member × operation × errno × what the store does meanwhile. In each cell one file or directory refuses one call; all
else must go on: others' objects are stored, loaded, removed and found again, and the store says which member it is. The
list of orders is no such member: a disk that cannot keep it is lost as a whole (docs/adr/0106).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from tests.storage.harness import Harness, Memory, file_config, memory_config
from tests.support.gated_storage import stack
from tests.support.native import Faults
from transferd.cli.verify import verify
from transferd.errors import StorageError
from transferd.runtime.clock import Clock
from transferd.storage import file_io
from transferd.storage.base import Found
from transferd.storage.file import FileStorage
from transferd.storage.keeping import Keeper, PinState
from transferd.storage.memory import MemoryStorage
from transferd.storage.paths import path_of
from transferd.storage.queues import EngineOwner
from transferd.storage.selection import Selection
from transferd.storage.stuck import RETRY_S

ERRORS = (errno.EPERM, errno.EIO, errno.EACCES, errno.ESTALE, errno.EBUSY)
FILE_CALLS = ("open", "pwrite", "rename", "unlink", "pread", "stat")
DIRECTORY_CALLS = ("open", "rename", "unlink", "mkdir", "rmdir", "opendir", "stat")
OWNER = EngineOwner("e", 1)
NBYTES, ROOM, MORE = 5000, 8, 4
MOST_S = 30.0


def objects(first: int, count: int) -> dict[str, bytes]:
    """Each in a leaf directory of its own."""
    return {
        f"demo/0123/g/{number:02x}{number:038x}/0": random.Random(number).randbytes(NBYTES)
        for number in range(first, first + count)
    }


OLD, NEW = objects(0, ROOM), objects(100, MORE)
OTHERS = dict(list(OLD.items())[:-1])
VICTIM = list(OLD)[-1]  # the deepest of its chain goes first


class Cell:
    """One store, full, whose least recently used object is the member that refuses, or lies in it."""

    def __init__(self, root: Path, what: str) -> None:
        self.root, self.what = root, what
        self.ahead = 0.0  # of the clock
        self.storage = self.new()
        self.broken: list[str] = []

    def new(self) -> FileStorage:
        storage = FileStorage(
            file_config(self.root, ROOM * NBYTES), clock=Clock(monotonic=lambda: time.monotonic() + self.ahead), unit=1
        )
        self.harness = Harness(storage, Memory(4 * 1024**2))
        return storage

    def expect(self, holds: object, otherwise: str) -> None:
        if not holds:
            self.broken.append(f"{self.what}: {otherwise}")

    async def put(self, which: dict[str, bytes]) -> None:
        self.harness.reuse_memory()
        outcomes = await self.harness.put(*which.items())
        refused = [str(one.error) for one in outcomes if one.found not in (Found.STORED, Found.EXISTS)]
        self.expect(not refused, f"{len(refused)} of {len(which)} were not stored: {refused[:1]}")

    async def get(self, which: dict[str, bytes], *, all_there: bool = True) -> None:
        self.harness.reuse_memory()
        answers = await self.harness.get(*((name, NBYTES) for name in which))
        wrong = sum(
            outcome.found is Found.FOUND and got != data
            for (outcome, got), data in zip(answers, which.values(), strict=True)
        )
        missing = [str(outcome) for outcome, _ in answers if outcome.found is not Found.FOUND]
        self.expect(not wrong, f"{wrong} objects have wrong bytes")
        self.expect(not (all_there and missing), f"{len(missing)} objects are not there: {missing[:1]}")

    @property
    def keeper(self) -> Keeper:
        assert self.storage.keeper is not None
        return self.storage.keeper

    async def settle(self) -> None:
        await self.storage._effects.end()
        await self.storage._look()
        await self.storage._effects.end()


async def evict(cell: Cell) -> None:
    await cell.put(NEW)
    await cell.get(NEW)


async def load(cell: Cell) -> None:
    await cell.get({VICTIM: OLD[VICTIM]}, all_there=False)
    await cell.get(OTHERS)


async def purge(cell: Cell) -> None:
    with contextlib.suppress(StorageError):  # it says that one could not be removed
        await cell.keeper.purge(Selection(frozenset(OLD)))
    still = sum(name in cell.storage._index for name in OLD)
    cell.expect(still <= 1, f"{still} objects are still stored")
    await cell.put(NEW)


async def prune(cell: Cell) -> None:
    index = cell.storage._index
    await cell.storage.drop([entry for name in OLD if (entry := index.get(name)) is not None])
    removed = await asyncio.to_thread(cell.storage._directory._pruning.finish)
    cell.expect(removed >= len(OTHERS), f"{removed} of {len(OLD)} empty directories were removed")
    await cell.put(NEW)


async def pin(cell: Cell) -> None:
    mine = dict(list(OTHERS.items())[:3])
    held = await cell.keeper.pin(OWNER, list(mine), 600.0, 0.5)
    cell.expect(all(state is not PinState.NOT for state in held), f"pinned: {held}")
    await cell.put(NEW)
    await cell.get(mine)
    ended = await cell.keeper.unpin(OWNER, None)
    cell.expect(ended == len(mine), f"{ended} of {len(mine)} pins ended")


async def drain(cell: Cell) -> None:
    """The store as the upper level of two leaves, and what it alone has is stored below."""
    await cell.storage.close()
    below = MemoryStorage(memory_config(100 * NBYTES))
    levels = stack(cell.new(), below)
    await levels.open()
    change = await levels.change("file", leaves=True)
    cell.expect(change.state == "drained", f"it is {change.state}")
    there = await below.exists(list(OTHERS))
    cell.expect(all(there), f"{there.count(False)} of {len(there)} objects have not gone below")
    await levels.close()
    cell.storage = cell.new()
    await cell.storage.open()
    await cell.put(NEW)


async def quarantine(cell: Cell) -> None:
    await cell.storage.quarantine(VICTIM)
    await cell.put(NEW)


async def scrub(cell: Cell) -> None:
    report = await asyncio.to_thread(verify, str(cell.root))
    cell.expect(report.objects >= len(OTHERS), f"verify saw {report.objects} objects")


async def shrink(cell: Cell) -> None:
    cell.storage.set_capacity(2 * NBYTES)
    while cell.storage._shrinking is not None:
        await asyncio.wait({cell.storage._shrinking})
    cell.expect(len(cell.storage._index) <= 2, f"{len(cell.storage._index)} objects are left of 2")


async def restart(cell: Cell) -> None:
    await cell.storage.close()
    cell.storage = cell.new()
    await cell.storage.open()
    await cell.get(OTHERS)
    await cell.put(NEW)


Row = Callable[[Cell], Awaitable[None]]


async def run_cell(faults: Faults, root: Path, member: str, path: str, call: str, error: int, row: Row) -> Cell:
    cell = Cell(root, f"{row.__name__}: {call} of the {member}, {errno.errorcode[error]}")
    await cell.storage.open()
    await cell.put(OLD)
    with faults.armed(call, error, count=-1, path=path):
        try:
            await asyncio.wait_for(row(cell), MOST_S)
        except StorageError as error:
            cell.broken.append(f"{cell.what}: {error}")
        await cell.settle()
        stuck = cell.storage.statistics()["disks"][0]
        told = not stuck["stuck"] or (path.strip("/") in stuck["stuck_why"])
        cell.expect(told, f"the member is not named: {stuck['stuck_why']!r}")
    cell.storage.set_capacity(ROOM * NBYTES)
    cell.ahead += RETRY_S + 1
    await cell.settle()
    if row not in (restart, drain):  # what could not be read at a start stays unread until the next one
        stuck = cell.storage.statistics()["disks"][0]
        cell.expect(not stuck["stuck"], f"mended, and still set aside: {stuck['stuck_why']!r}")
    await cell.put(objects(200, MORE))
    await cell.storage.close()
    return cell


ROWS: tuple[Row, ...] = (evict, load, purge, prune, pin, drain, quarantine, scrub, shrink, restart)


async def run(root: Path, errors: Sequence[int]) -> dict[str, Any]:
    faults, broken, hits, cells = Faults(), [], Counter[str](), 0
    place = "/objects/" + path_of(VICTIM)
    members = {
        "file": (place, FILE_CALLS),
        "directory": (place.rpartition("/")[0] + "/", DIRECTORY_CALLS),
        "quarantine": ("/quarantine", DIRECTORY_CALLS),
    }
    for member, (path, calls) in members.items():
        for call in calls:
            for row in ROWS:
                met = False
                for error in errors:
                    with tempfile.TemporaryDirectory(dir=root) as home:
                        at = path.rstrip("/") if call in ("opendir", "rmdir") else path
                        cell = await run_cell(faults, Path(home), member, at, call, error, row)
                    cells += 1
                    broken += cell.broken
                    hits[f"{member}, {call}"] += faults.hits
                    met = met or bool(faults.hits)
                    if not met:  # this row makes no such call, whatever the error
                        break
    return {"broken": broken, "cells": cells, "hits": dict(hits)}


def main() -> None:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    if sys.argv[2] == "Python":
        file_io.NATIVE = False
    print(json.dumps(asyncio.run(run(Path(sys.argv[1]), ERRORS[: int(sys.argv[3])]))))
