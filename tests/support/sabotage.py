"""A real daemon whose one rank goes wrong on demand: parts for its configuration, ordered about by a file.

    cache.device     "tests.support.sabotage:SabotagedDevice"      shared memory
    storage.backend  "tests.support.sabotage:SabotagedStorage"     the memory backend
    environment      TRANSFERD_SABOTAGE = path of the file

`Saboteur` writes the file from another process. Every copy and every storage call looks at it first, so an
order holds for what begins after `order` has returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from transferd.blocks.copyplan import CopyPlan
from transferd.errors import StorageError, TierError
from transferd.storage.base import Drainer, Fill, Found, Item, Outcome
from transferd.storage.lru import Use
from transferd.storage.memory import MemoryStorage
from transferd.tiers.base import HostMemory
from transferd.tiers.shm import ShmDeviceTier

FILE_VARIABLE = "TRANSFERD_SABOTAGE"
LOOK_AGAIN_S = 0.02  # while stalled

Operation = Literal["copy_out", "copy_in", "exists", "put", "get"]


class Order(msgspec.Struct, frozen=True):
    """What goes wrong on which rank. `stall`: the operation does not go on until the order is lifted."""

    operation: Operation
    rank: int
    how: Literal["fail", "stall"] = "fail"


class Saboteur:
    """Gives orders to a daemon that was started with this file in its environment."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lift()

    @contextlib.contextmanager
    def order(self, operation: Operation, rank: int, how: Literal["fail", "stall"] = "fail") -> Iterator[None]:
        """In force inside the context."""
        _mark(self.file).unlink(missing_ok=True)
        self._write(msgspec.json.encode(Order(operation, rank, how)))
        try:
            yield
        finally:
            self.lift()

    @property
    def stalls(self) -> bool:
        """The order in force has stalled an operation: what a test does now happens in the middle of it."""
        return _mark(self.file).exists()

    def lift(self) -> None:
        self._write(b"")

    def _write(self, data: bytes) -> None:
        fresh = self.file.with_suffix(".new")
        fresh.write_bytes(data)
        fresh.replace(self.file)


def _order(operation: Operation) -> Order | None:
    data = Path(os.environ[FILE_VARIABLE]).read_bytes()
    order = msgspec.json.decode(data, type=Order) if data else None
    return order if order is not None and order.operation == operation else None


async def _fails(operation: Operation, rank: int | None = None) -> Order | None:
    """The order that this operation must fail by, after waiting out one to stall."""
    while (order := _order(operation)) is not None and rank in (None, order.rank):
        if order.how == "fail":
            return order
        _mark(Path(os.environ[FILE_VARIABLE])).touch()
        await asyncio.sleep(LOOK_AGAIN_S)
    return None


def _mark(file: Path) -> Path:
    """Where a stalled operation says so."""
    return file.with_suffix(".stalls")


class SabotagedDevice(ShmDeviceTier):
    """Shared memory whose copies fail half done, or stall, as ordered."""

    addressable = False  # or reads would do without copies

    async def copy_out(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._go("copy_out", super().copy_out, plan, host)

    async def copy_in(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._go("copy_in", super().copy_in, plan, host)

    async def _go(self, operation: Operation, copy: Any, plan: CopyPlan, host: HostMemory) -> None:
        if await _fails(operation, self.rank) is None:
            await copy(plan, host)
            return
        half = plan.runs[: len(plan.runs) // 2]
        await copy(CopyPlan(int(half[:, 2].sum()), runs=half), host)
        raise TierError(f"{operation} of rank {self.rank} fails as ordered")


class SabotagedStorage(MemoryStorage):
    """Memory whose objects of one rank fail, or stall, as ordered."""

    backend = "sabotaged"

    async def exists(self, names: Sequence[str]) -> list[bool]:
        if await self._struck("exists", names):
            raise StorageError("exists fails as ordered")
        return MemoryStorage.find(self, names, Use())

    def find(self, names: Sequence[str], use: Use | None) -> None:  # type: ignore[override]
        """Nothing: `exists` may fail."""

    async def store(self, items: Sequence[Item], fill: Fill | None, slots: Sequence[memoryview]) -> list[Outcome]:
        struck = await self._struck("put", [item.name for item in items])
        return [_FAILED] * len(items) if struck else await super().store(items, fill, slots)

    async def load(self, items: Sequence[Item], drain: Drainer | None, slots: Sequence[memoryview]) -> list[Outcome]:
        struck = await self._struck("get", [item.name for item in items])
        return [_FAILED] * len(items) if struck else await super().load(items, drain, slots)

    async def _struck(self, operation: Operation, names: Sequence[str]) -> bool:
        order = _order(operation)
        if order is None or not names or rank_in(names[0]) != order.rank:  # a call is one rank's
            return False
        return await _fails(operation) is not None


_FAILED = Outcome(Found.FAILED, StorageError("this object fails as ordered"))
_RANK = re.compile(r"[/_](\d+)(?:_(?:key|value|key_scale|value_scale|indexer))?\Z")


def rank_in(name: str) -> int | None:
    """Whose object this is, in either key schema."""
    match = _RANK.search(name)
    return None if match is None else int(match[1])
