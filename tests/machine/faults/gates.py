"""Gates: where a fault meets a real process at exactly the moment it is meant for.

A gated daemon runs the real device tier and the real storage backend, plugged in by module path:

    [cache]    device  = "tests.machine.faults.gates:GatedShm"
    [storage]  backend = "tests.machine.faults.gates:GatedMooncake"   (or GatedFile)

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
| load    | half of the objects of a load are loaded |
| scatter | half of the runs of a copy into device memory are done |
| result  | a copy into device memory is complete; the rank has not been told yet |
| round   | in the bystander (bystander.py), between two rounds of its tasks |
"""

# mypy: disable-error-code="safe-super"
# Behind _Gated stands a backend, so `super()` finds one.

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any

from transferd.blocks.copyplan import CopyPlan
from transferd.runtime.compat import timeout
from transferd.storage.base import Drainer, Fill, Item, Outcome, Storage
from transferd.storage.file import FileStorage
from transferd.storage.lru import Use
from transferd.storage.mooncake import MooncakeStorage
from transferd.tiers.base import HostMemory
from transferd.tiers.shm import ShmDeviceTier

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


def halves(plan: CopyPlan) -> tuple[CopyPlan, CopyPlan]:
    """The first and the second half of a plan's runs."""
    middle = len(plan.runs) // 2
    first, second = plan.runs[:middle].copy(), plan.runs[middle:].copy()
    return CopyPlan(int(first[:, 2].sum()), runs=first), CopyPlan(int(second[:, 2].sum()), runs=second)


class GatedShm(ShmDeviceTier):
    """Shared memory as a device; every copy pauses halfway, and a copy in also at its end."""

    addressable = False  # so that every block goes through the tier, and can pause

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
    """Before a backend: stores and loads pause halfway. Lookups pause before they begin, where the backend has them."""

    async def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> list[Outcome]:
        if not _meant(items[0].name):
            return await super().store(items, fill, slots)
        assert fill is None
        middle = len(items) // 2
        first = await super().store(items[:middle], None, slots[:middle])
        await gate("store", rank=_rank(items[0].name))
        return first + await super().store(items[middle:], None, slots[middle:])

    async def load(self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]) -> list[Outcome]:
        if not _meant(items[0].name):
            return await super().load(items, drain, slots)
        assert drain is None
        middle = len(items) // 2
        first = await super().load(items[:middle], None, slots[:middle])
        await gate("load", rank=_rank(items[0].name))
        return first + await super().load(items[middle:], None, slots[middle:])


def _meant(name: str) -> bool:
    """Whether an object belongs to the engine that faults are for; the bystander's pass."""
    return name.startswith(f"{MODEL}/")


def _rank(name: str) -> int:
    return int(name.rpartition("/")[2])


class GatedFile(_Gated, FileStorage):
    """The file backend with gates."""

    def find(self, names: Sequence[str], use: Use | None) -> None:  # type: ignore[override]
        """Nothing: `exists` may pause."""

    async def exists(self, names: Sequence[str]) -> list[bool]:
        if _meant(names[0]):
            await gate("match", rank=_rank(names[0]))
        return FileStorage.find(self, names, Use())


class GatedMooncake(_Gated, MooncakeStorage):
    """The Mooncake backend with gates."""

    async def exists(self, names: Sequence[str]) -> list[bool]:
        if _meant(names[0]):
            await gate("match", rank=_rank(names[0]))
        return await super().exists(names)
