"""Promotion: a block that was found in a lower level is copied up, when it has been used often enough.

The thread that fills the block also copies its bytes to a spare buffer, while they are in the caches. The store
above follows in the background. Buffers are bounded: a load never waits for a buffer, but may promote fewer blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from transferd.blocks.layout.base import align
from transferd.errors import StorageError
from transferd.storage.base import Found, Item, Storage, with_slots_back
from transferd.storage.levels.fences import Fences
from transferd.storage.levels.level import Names, StoreLevel
from transferd.storage.levels.write_back import CarryMemory
from transferd.tiers.staging import SLOT_ALIGNMENT

Buffer = npt.NDArray[np.uint8]

BUFFER_BYTES = 32 * 1024**2  # of all promotions that run
TIMES = 4  # so many times the objects of the level above are remembered
FEWEST = 4096
RECENT = 4096  # promotions with a remembered source, for the case that the source was damaged


class Buffers:
    """Spare memory for objects of any length up to BUFFER_BYTES, registered with `storages` from `open` to `close`.

    Any thread may take some.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self.taken = 0
        self._lock = threading.Lock()
        self._memory: CarryMemory | None = None
        self._used: list[tuple[int, int]] = []  # (start, behind its end), ascending
        self._storages: Sequence[Storage] = ()

    def open(self, storages: Sequence[Storage]) -> None:
        """Raises StorageError."""
        self._memory, self._storages = CarryMemory(BUFFER_BYTES), storages
        for storage in storages:
            storage.register(self._memory)
        self.nbytes = BUFFER_BYTES

    def close(self) -> None:
        """Call it when all are back."""
        memory, self._memory = self._memory, None
        if memory is not None:
            for storage in self._storages:
                storage.unregister(memory)

    def take(self, nbytes: int) -> Buffer | None:
        """A buffer, if one is free."""
        memory, step = self._memory, align(nbytes, SLOT_ALIGNMENT)
        if memory is None:
            return None
        with self._lock:
            starts = [0, *(behind for _, behind in self._used)]
            ends = [*(first for first, _ in self._used), BUFFER_BYTES]
            place = next((i for i, start in enumerate(starts) if ends[i] - start >= step), None)
            if place is None:
                return None
            start = starts[place]
            self._used.insert(place, (start, start + step))
            self.taken += step
        return np.frombuffer(memory.view, np.uint8, nbytes, start)

    def give_back(self, buffers: Sequence[Buffer]) -> None:
        memory = self._memory
        if memory is None:
            return
        with self._lock:
            for one in buffers:
                start = one.ctypes.data - memory.address
                place = next(i for i, (first, _) in enumerate(self._used) if first == start)
                first, behind = self._used.pop(place)
                self.taken -= behind - first


class Promotions:
    """All promotions of a stack. Used on one loop; only `Buffers` is used in threads.

    withdraw: removes an object from a level, where it must not stay.
    """

    def __init__(
        self, levels: Sequence[StoreLevel], fences: Fences, withdraw: Callable[[StoreLevel, str], Awaitable[object]]
    ) -> None:
        self.buffers = Buffers()
        self._levels = levels
        self._fences = fences
        self._withdraw = withdraw
        self._uses = Names(FEWEST)
        self._running: set[asyncio.Task[None]] = set()
        self._coming: set[str] = set()  # names that are being stored above
        self._sources: OrderedDict[str, tuple[StoreLevel, StoreLevel]] = OrderedDict()  # from where, and to where
        self._repairs = Names(FEWEST)  # names whose copy above was damaged
        self.awaited: Counter[str] = Counter()  # names that prefetches have yet to bring: the next load does it

    def above(self, level: StoreLevel) -> StoreLevel | None:
        """The level to which blocks of this one are copied: the next one above that works and can take them."""
        for one in reversed(self._levels[: level.number]):
            if one.known and not one.out_for_stores:
                return one
        return None

    def wanted(self, level: StoreLevel, name: str) -> bool:
        """Note a use of a block that is in this level. Returns whether to copy the block up."""
        asked = name in self._repairs or name in self.awaited
        if not level.promote and not asked:
            return False
        return self._uses.count(name) >= level.promote or asked

    def remember(self, objects: int | None) -> None:
        """objects: how many the level above has."""
        self._uses.set_most(max(FEWEST, TIMES * (objects or 0)))

    def begin(self, source: StoreLevel, items: Sequence[Item], buffers: Sequence[Buffer], born: int) -> None:
        """Store these above. Owns the buffers. born: the number of the latest purge when their load began."""
        target = self.above(source)
        names = [item.name for item in items]
        forbids = self._fences.forbids
        fresh = [
            i for i, name in enumerate(names) if name not in self._coming and not forbids(name, born, source.number)
        ]
        if target is None or not fresh:
            self.buffers.give_back(buffers)
            return
        self._coming.update(names[i] for i in fresh)
        self.run(self._store(source, target, items, buffers, fresh, born))

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run this; `settled` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _store(
        self,
        source: StoreLevel,
        target: StoreLevel,
        items: Sequence[Item],
        buffers: Sequence[Buffer],
        fresh: Sequence[int],
        born: int,
    ) -> None:
        above = []
        for item in [items[i] for i in fresh]:
            assert item.use is not None
            above.append(source.handed_on(item.name, item.nbytes, item.use, item.depth))
        try:
            outcomes = await with_slots_back(target.storage.store(above, None, [buffers[i].data for i in fresh]))
            for item, outcome in zip(above, outcomes, strict=True):
                if outcome.found is Found.STORED and self._fences.forbids(item.name, born, source.number):
                    with contextlib.suppress(StorageError):  # else the others would be held for ever
                        await self._withdraw(target, item.name)
                elif outcome.found is Found.STORED:
                    assert item.use is not None
                    target.storage.index.release(item.name, item.use)
                    target.counts["promoted"] += 1
                    target.stored(item.name)
                    self._repairs.discard(item.name)
                    self.note(item.name, source, target)
        except StorageError:
            target.counts["promotions_failed"] += 1
        finally:
            self.came(item.name for item in above)
            self.buffers.give_back(buffers)

    def note(self, name: str, source: StoreLevel, target: StoreLevel) -> None:
        """Note that the copy in `target` was made from the copy in `source`."""
        self._sources[name] = source, target
        self._sources.move_to_end(name)
        if len(self._sources) > RECENT:
            self._sources.popitem(last=False)

    def damaged(self, name: str, level: StoreLevel) -> StoreLevel | None:
        """Note that this level's copy is damaged. Returns the level that has a copy of that copy, if there is one.

        The next use of the block repairs it from a level below.
        """
        self._repairs.add(name)
        source, target = self._sources.pop(name, (None, None))
        return target if source is level else None

    def comes(self, name: str) -> bool:
        """Whether this block is being copied up."""
        return name in self._coming

    def mark(self, names: Iterable[str]) -> None:
        """Note that these begin to come up by other means. None may be coming already (`comes`). Then call `came`."""
        self._coming.update(names)

    def came(self, names: Iterable[str]) -> None:
        """Note that these have come, or not."""
        self._coming.difference_update(names)

    async def settled(self) -> None:
        """Wait for all promotions that run now."""
        if self._running:
            await asyncio.wait(set(self._running))
