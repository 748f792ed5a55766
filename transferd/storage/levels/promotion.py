"""Promotion: a block that was found in a lower level is copied up, when it has been used often enough.

The thread that fills the block also copies its bytes to a spare buffer, while they are in the caches. The store
above follows in the background. Buffers are bounded: a load never waits for a buffer, but may promote fewer blocks.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from transferd.blocks.layout.base import align
from transferd.errors import StorageError
from transferd.runtime.aio import Background
from transferd.storage.base import Found, Item
from transferd.storage.levels.copying import Copying
from transferd.storage.levels.level import Names, StoreLevel
from transferd.storage.levels.write_back import Carry
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
    """All promotions of a stack. Used on one loop; only `Buffers` is used in threads."""

    def __init__(self, copying: Copying) -> None:
        self.buffers = Buffers(copying.levels[:-1])
        self._copying = copying
        self._uses = Names(FEWEST)
        self.running = Background(awaited=False)
        self._coming: set[str] = set()  # names that are being stored above
        self._sources: OrderedDict[str, tuple[StoreLevel, StoreLevel]] = OrderedDict()  # from where, and to where
        self._repairs = Names(FEWEST)  # names whose copy above was damaged
        self.awaited: Counter[str] = Counter()  # names that prefetches have yet to bring: the next load does it

    def above(self, level: StoreLevel) -> StoreLevel | None:
        """The level to which blocks of this one are copied: the next one above that works and can take them."""
        for one in reversed(self._copying.levels[: level.number]):
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
        target, forbids = self.above(source), self._copying.fences.forbids
        fresh = [
            (item, buffer.data)
            for item, buffer in zip(items, buffers, strict=True)
            if item.name not in self._coming and not forbids(item.name, born, source)
        ]
        if target is None or not fresh:
            self.buffers.give_back(buffers)
            return
        self._coming.update(item.name for item, _ in fresh)
        self.running.begin(self._store(source, target, fresh, buffers, born))

    async def _store(
        self,
        source: StoreLevel,
        target: StoreLevel,
        fresh: Sequence[tuple[Item, memoryview]],
        buffers: Sequence[Buffer],
        born: int,
    ) -> None:
        above, slots = [item for item, _ in fresh], [slot for _, slot in fresh]
        try:
            with contextlib.suppress(StorageError):  # a later use promotes them
                copies = await self._copying.copy(above, [source] * len(above), slots, target, born)
                for item, outcome, why in copies:
                    if outcome.found is Found.STORED and not why:
                        self.stored(item, source, target, "promoted")
        finally:
            self.came(item.name for item in above)
            self.buffers.give_back(buffers)

    def stored(self, item: Item, source: StoreLevel, target: StoreLevel, how: str) -> None:
        """Note that `target` has stored its copy of an object, made from that in `source`. how: for the statistics."""
        assert item.use is not None
        target.index.release(item.name, item.use)
        target.counts[how] += 1
        target.stored(item.name)
        self._repairs.discard(item.name)
        self._sources[item.name] = source, target
        self._sources.move_to_end(item.name)
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
