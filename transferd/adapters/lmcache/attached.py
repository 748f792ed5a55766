"""Objects of one model and layout at the daemon: an engine of slots, through which they are stored and loaded.

LMCache's memory is private by default, and its objects have several sizes at any multiple of 4096 bytes. So an object
is copied between LMCache's memory and a slot of the adapter's own, which the daemon maps. A transfer answers by its
deadline, whatever the daemon does: after that, nothing of it reads or writes LMCache's memory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from transferd.adapters.common.companion import DaemonFinder
from transferd.adapters.common.copied import LEAVE_S, SLACK_S
from transferd.adapters.common.entry import EngineFacts, OfferedMemory
from transferd.adapters.common.link import ANSWER_S, BlockTasks, Link, StorageTask
from transferd.adapters.common.read_leases import ReadLeases
from transferd.adapters.common.slots import PARTS, Bytes, Slots
from transferd.adapters.lmcache.batcher import Batcher
from transferd.adapters.lmcache.kinds import ObjectKind, facts, key_of
from transferd.adapters.lmcache.settings import LMCACHE, L2Settings
from transferd.errors import TransferError
from transferd.runtime.aio import Background
from transferd.runtime.compat import wait_for
from transferd.tasks import TaskResult


class ObjectTransfer:
    """One request of LMCache: which of its objects were moved so far. given_up: nothing may touch its buffers."""

    def __init__(self, keys: Sequence[str], objects: Sequence[Any]) -> None:
        self.keys, self.objects = keys, objects
        self.moved = [False] * len(keys)
        self.given_up = False
        self._copies: set[asyncio.Future[None]] = set()

    async def copy(self, pool: concurrent.futures.Executor, deed: Callable[[], None]) -> bool:
        """Copy in one of the pool's threads. Returns False, and does nothing, once the transfer is given up."""
        if self.given_up:
            return False
        copying = asyncio.get_running_loop().run_in_executor(pool, deed)
        self._copies.add(copying)
        try:
            await copying
        finally:
            self._copies.discard(copying)
        return not self.given_up

    async def give_up(self) -> None:
        """Wait for the copies that run; none begins any more."""
        self.given_up = True
        if self._copies:
            await asyncio.wait(self._copies)


class AttachedKind:
    """Thread-safe only where it says so; the rest belongs to one event loop. Raises TierError without memory.

    windows: of the engine's blocks.
    """

    windows = False

    def __init__(
        self,
        kind: ObjectKind,
        engine: str,
        chosen: L2Settings,
        finder: DaemonFinder,
        pool: concurrent.futures.Executor,
        life: str,
    ) -> None:
        self.kind = kind
        self._chosen, self._pool = chosen, pool
        count, memory = self._offered()
        self.facts = EngineFacts(
            name=engine,
            model=kind.model,
            generation=chosen.generation,
            identity="lmcache",
            ranks=1,
            blocks=count,
            page_bytes=[kind.nbytes],
            memory=memory,
            fingerprint=facts(kind, chosen, life),
            windows=self.windows,
        )
        self.link = Link(finder, engine, self.facts.enter)
        self.leases = ReadLeases()  # of objects that lookups keep
        self._tasks = BlockTasks(self.link, f"objects of {kind.model}")
        self._locks: Counter[str] = Counter()  # how many lookups keep a key
        self._running = Background(awaited=False)
        self._writes = Batcher(self._write, chosen.timeout, kind.nbytes)
        self._reads = Batcher(self._read, chosen.load_timeout, kind.nbytes)

    def _offered(self) -> tuple[int, OfferedMemory]:
        """How many blocks the engine has, and where. Raises TierError."""
        self.slots = Slots.within(self.kind.nbytes, self._chosen.buffer_bytes)
        return self.slots.count, self.slots.offered()

    async def _ready(self) -> None:
        """Wait for a daemon that was asked only just now to map the slots: a miss would cost a whole prefix."""
        if not self.link.ready and (left := self.link.patience) > 0:
            await asyncio.get_running_loop().run_in_executor(None, self.link.wait_ready, left)

    async def find(self, keys: Sequence[str]) -> list[bool]:
        """For each key whether its object can be loaded. Found objects are kept from eviction until `unlock`."""
        await self._ready()
        if not self._chosen.pin:
            return await self._asked(keys, use=True) or [False] * len(keys)
        until = time.monotonic() + self._chosen.pin
        found = await asyncio.wrap_future(self.link.lease(keys, self._chosen.pin))
        self._locks.update(key for key, one in zip(keys, found.there, strict=True) if one)
        self.leases.take(keys, found.places, until)
        return found.there

    async def look(self, keys: Sequence[str]) -> list[bool] | None:
        """For each key whether its object is stored, which counts as no use. None without an answer."""
        await self._ready()
        return await self._asked(keys, use=False)

    async def _asked(self, keys: Sequence[str], *, use: bool) -> list[bool] | None:
        answer: asyncio.Future[list[bool] | None] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(RuntimeError, TimeoutError):  # it has left, to give its place to another kind
            self.link.ask(keys, _to(answer), use=use)
            return await wait_for(answer, ANSWER_S)
        return None

    async def remove(self, keys: Sequence[Any]) -> bool:
        """Have objects removed from storage, by LMCache's keys. Whether the daemon has done it."""
        await self._ready()
        try:
            await asyncio.get_running_loop().run_in_executor(None, self.link.remove, list(map(key_of, keys)))
        except TransferError as error:
            LMCACHE.log.info("transferd: %d objects of %s are not removed yet: %s", len(keys), self.kind.model, error)
            return False
        return True

    def unlock(self, keys: Sequence[str]) -> None:
        """End what `find` began, once for each time that it found the key."""
        free = []
        for key in keys:
            if key not in self._locks:
                continue
            self._locks[key] -= 1
            if not self._locks[key]:
                del self._locks[key]
                free.append(key)
        if free:
            self.leases.end(free)
            self.link.unpin(free)

    async def store(self, transfer: ObjectTransfer) -> None:
        """Store the objects. Returns by the deadline; `transfer.moved` says which are stored."""
        await self._by_deadline(transfer, self._store, self._chosen.timeout)

    async def load(self, transfer: ObjectTransfer) -> None:
        """Load the objects. Returns by the deadline; `transfer.moved` says which have their bytes."""
        await self._by_deadline(transfer, self._load, self._chosen.load_timeout)

    async def _by_deadline(
        self,
        transfer: ObjectTransfer,
        move: Callable[[ObjectTransfer, range, list[int]], Awaitable[None]],
        timeout: float,
    ) -> None:
        await self._ready()
        running = self._running.begin(self._in_parts(transfer, move))
        _, late = await asyncio.wait([running], timeout=timeout + SLACK_S)
        if late:
            what = "transferd: no answer after %g s; %d of %d objects of %s are given up"
            LMCACHE.log.warning(
                what, timeout + SLACK_S, transfer.moved.count(False), len(transfer.keys), self.kind.model
            )
        await transfer.give_up()

    async def _in_parts(
        self, transfer: ObjectTransfer, move: Callable[[ObjectTransfer, range, list[int]], Awaitable[None]]
    ) -> None:
        """Move the objects as slots become free. Ends, and frees them, only when the daemon has settled everything."""
        parts: list[Awaitable[None]] = []
        start, most = 0, max(1, self.slots.count // PARTS)
        while start < len(transfer.keys) and not transfer.given_up:
            slots = await self.slots.take(min(most, len(transfer.keys) - start))
            which = range(start, start + len(slots))
            parts.append(asyncio.ensure_future(self._freed(move(transfer, which, slots), slots)))
            start += len(slots)
        await asyncio.gather(*parts)

    async def _freed(self, moving: Awaitable[None], slots: list[int]) -> None:
        try:
            await moving
        except Exception:  # noqa: BLE001 - one part must not take the slots of all along
            LMCACHE.log.exception("transferd: an error of the adapter, not of the daemon")
        finally:
            self.slots.give_back(slots)

    async def _store(self, transfer: ObjectTransfer, which: range, slots: list[int]) -> None:
        def fill() -> None:
            for i, slot in zip(which, slots, strict=True):
                np.copyto(self.slots.bytes[slot], _bytes_of(transfer.objects[i]))

        if await transfer.copy(self._pool, fill):
            await self._written(transfer, which, slots)

    async def _written(self, transfer: ObjectTransfer, which: range, blocks: list[int]) -> None:
        """Have these blocks stored as the objects at `which`."""
        stored = await self._writes.move([transfer.keys[i] for i in which], blocks)
        for i, one in zip(which, stored, strict=True):
            transfer.moved[i] = one

    async def _write(self, keys: list[str], blocks: list[int], timeout: float) -> list[bool]:
        return await self._carried_out(self._tasks.write(keys, blocks, timeout))

    async def _load(self, transfer: ObjectTransfer, which: range, slots: list[int]) -> None:
        if transfer.given_up:
            return
        loaded = await self._loaded(transfer, which, slots)

        def empty() -> None:
            for i, slot, one in zip(which, slots, loaded, strict=True):
                if one:
                    np.copyto(_bytes_of(transfer.objects[i]), self.slots.bytes[slot])
                    transfer.moved[i] = True

        if any(loaded):
            await transfer.copy(self._pool, empty)

    async def _loaded(self, transfer: ObjectTransfer, which: range, blocks: list[int]) -> list[bool]:
        """Have the objects at `which` loaded into these blocks. For each, whether it is there."""
        return await self._reads.move([transfer.keys[i] for i in which], blocks)

    async def _read(self, keys: list[str], blocks: list[int], timeout: float) -> list[bool]:
        return await self._carried_out(self._tasks.read(keys, blocks, timeout))

    async def _carried_out(self, task: StorageTask) -> list[bool]:
        """What a task has moved, once it is settled. Never returns if the adapter is closed before."""
        answer: asyncio.Future[TaskResult] = asyncio.get_running_loop().create_future()
        self.link.submit(task, _to(answer))
        return self._tasks.moved(task, await answer)

    def close(self) -> None:
        """Leave the daemon. From any thread, once the event loop has ended."""
        self.leave()
        self.slots.close()

    def leave(self) -> None:
        self.link.close(LEAVE_S)


def _bytes_of(one: Any) -> Bytes:
    """An object's bytes in LMCache's memory, without a copy."""
    found: Bytes = np.frombuffer(one.byte_array, dtype=np.uint8)
    return found


def _to(answer: asyncio.Future[Any]) -> Callable[[Any], None]:
    """Sets a future of this loop from another thread; does nothing once the loop has ended."""
    loop = asyncio.get_running_loop()

    def set_unless_cancelled(value: Any) -> None:
        if not answer.done():
            answer.set_result(value)

    def put(value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(set_unless_cancelled, value)

    return put
