"""Promotion: a block that was found in a lower level is copied up, when it has been used often enough.

The thread that fills the block also copies its bytes to a spare buffer, while they are in the caches. The store
above follows in the background. Buffers are bounded: a load never waits for a buffer, but may promote fewer blocks.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transferd.blocks.layout.base import align
from transferd.errors import StorageError
from transferd.runtime.aio import Background
from transferd.storage.base import Found, Item, Outcome
from transferd.storage.levels.copying import Copying
from transferd.storage.levels.level import MIB, Names, StoreLevel
from transferd.storage.levels.write_back import HANGS_S, Carry
from transferd.storage.running import RunningCalls
from transferd.tiers.staging import SLOT_ALIGNMENT

Buffer = npt.NDArray[np.uint8]

BUFFER_BYTES = 32 * 1024**2  # of all promotions that run
TIMES = 4  # so many times the objects of the level above are remembered
FEWEST = 4096
RECENT = 4096  # promotions with a remembered source, for the case that the source was damaged


class Buffers:
    """Spare memory for objects of any length up to BUFFER_BYTES, registered with `levels` from `open` to `close`.

    Any thread may take some.
    """

    def __init__(self, levels: Sequence[StoreLevel]) -> None:
        self.carry = Carry(levels)
        self._lock = threading.Lock()
        self._memory: Buffer | None = None
        self.used: list[tuple[int, int]] = []  # (start, behind its end), ascending

    def open(self) -> None:
        """Raises StorageError."""
        self._memory = np.frombuffer(self.carry.slots([BUFFER_BYTES])[0], np.uint8)

    def close(self) -> None:
        """Call it when all are back."""
        self._memory = None
        self.carry.close()

    def take(self, nbytes: int) -> Buffer | None:
        """A buffer, if one is free."""
        memory, step = self._memory, align(nbytes, SLOT_ALIGNMENT)
        if memory is None:
            return None
        with self._lock:
            starts = [0, *(behind for _, behind in self.used)]
            ends = [*(first for first, _ in self.used), BUFFER_BYTES]
            place = next((i for i, start in enumerate(starts) if ends[i] - start >= step), None)
            if place is None:
                return None
            start = starts[place]
            self.used.insert(place, (start, start + step))
        return memory[start : start + nbytes]

    def give_back(self, buffers: Sequence[Buffer]) -> None:
        memory = self._memory
        if memory is None:
            return
        with self._lock:
            for one in buffers:
                start = one.ctypes.data - memory.ctypes.data
                self.used.remove(next(used for used in self.used if used[0] == start))


class Promotions:
    """All copies up of a stack: promotions and prefetches. Used on one loop; only `Buffers` is used in threads."""

    def __init__(self, copying: Copying) -> None:
        self.buffers = Buffers(copying.levels[:-1])
        self.running = Background(awaited=False)
        self.coming = RunningCalls()  # that bring objects up
        self.awaited: Counter[str] = Counter()  # names that prefetches have yet to bring: the next load does it
        self._copying = copying
        self._uses = Names(FEWEST)
        self._sources: OrderedDict[str, tuple[StoreLevel, StoreLevel]] = OrderedDict()  # from where, and to where
        self._repairs = Names(FEWEST)  # names whose copy above was damaged

    def above(self, level: StoreLevel) -> StoreLevel | None:
        """The level to which blocks of this one are copied: the next one above that works and can take them."""
        above = reversed(self._copying.levels[: level.number])
        return next((one for one in above if one.known and not one.out_for_stores), None)

    def wanted(self, level: StoreLevel, name: str) -> bool:
        """Note a use of a block that is in this level. Returns whether to copy the block up."""
        if name in self._repairs or name in self.awaited:
            return True
        return bool(level.promote) and self._uses.count(name) >= level.promote

    def remember(self, objects: int | None) -> None:
        """objects: how many the level above has."""
        self._uses.set_most(max(FEWEST, TIMES * (objects or 0)))

    def begin(self, source: StoreLevel, items: Sequence[Item], buffers: Sequence[Buffer], born: int) -> None:
        """Store these above. Owns the buffers. born: the number of the latest purge when their load began."""
        self.running.begin(self._promote(source, items, buffers, born))

    async def _promote(self, source: StoreLevel, items: Sequence[Item], buffers: Sequence[Buffer], born: int) -> None:
        fresh = [i for i, item in enumerate(items) if not self.coming.has(item.name)]
        above, slots = [items[i] for i in fresh], [buffers[i].data for i in fresh]
        try:
            if (target := self.above(source)) is not None:
                bring = self.bring(above, [source] * len(above), slots, target, born, "promoted")
                await (await target.stores.wait(bring, HANGS_S + sum(map(len, slots)) / MIB, measured=False))
        except StorageError:
            pass  # a later use promotes them
        finally:
            self.buffers.give_back(buffers)

    async def bring(
        self,
        items: Sequence[Item],
        sources: Sequence[StoreLevel],
        slots: Sequence[memoryview],
        target: StoreLevel,
        born: int,
        how: str,
    ) -> list[tuple[Item, Outcome, str]]:
        """Copy objects to a level above (`Copying.copy`). how: for the statistics. Raises StorageError."""
        with self.coming.of([item.name for item in items]):
            copies = await self._copying.copy(items, sources, slots, target, born)
        for source, (item, outcome, why) in zip(sources, copies, strict=True):
            if outcome.found is Found.STORED and not why:
                target.counts[how] += 1
                target.stored(item.name)
                self._repairs.discard(item.name)
                self._sources[item.name] = source, target
                self._sources.move_to_end(item.name)
                if len(self._sources) > RECENT:
                    self._sources.popitem(last=False)
        return copies

    def damaged(self, name: str, level: StoreLevel) -> StoreLevel | None:
        """Note that this level's copy is damaged. Returns the level that has a copy of that copy, if there is one.

        The next use of the block repairs it from a level below.
        """
        self._repairs.add(name)
        source, target = self._sources.pop(name, (None, None))
        return target if source is level else None
