"""The adapter's own memory, for engines with memory that no other process can map: the daemon maps slots in a memfd.

The adapter copies a block into a slot before a store and out of it after a load. So the daemon never touches the
engine's memory. A slot stays taken until the daemon's result is settled; the engine gets its answer at the deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from transferd.adapters.common.entry import OfferedMemory
from transferd.adapters.common.memory import shared_memory_at
from transferd.errors import TierError

LEAST_SLOTS, MOST_SLOTS = 4, 4096
PARTS = 4  # of the slots in one task, so that copies and storage overlap

Bytes = npt.NDArray[np.uint8]


class Slots:
    """`count` slots of `nbytes` bytes. Used on one event loop. The memory ends with this object and the daemon's map.

    bytes: [count, nbytes], the content. Raises TierError if there is not enough memory for them.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes, self.count = nbytes, count
        self._stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._file = os.memfd_create("transferd-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._file, count * self._stride)
            self._memory = mmap.mmap(self._file, count * self._stride)
        except OSError as error:
            raise TierError(f"no memory for {count} slots of {nbytes} bytes: {error.strerror}") from error
        whole: Bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self.bytes = whole.reshape(count, self._stride)[:, :nbytes]
        self._free = deque(range(count))
        self._waiting = asyncio.Semaphore(count)

    @classmethod
    def within(cls, nbytes: int, room: int) -> Slots:
        """As many slots as `room` bytes hold, within reason. Raises TierError."""
        return cls(nbytes, min(MOST_SLOTS, max(LEAST_SLOTS, room // nbytes)))

    def offered(self, segments: Sequence[int] = ()) -> OfferedMemory:
        """What the engine of these slots offers. segments: the bytes of each of a block's; one, if none are given."""
        mapped = shared_memory_at(self.bytes.__array_interface__["data"][0], self.count * self._stride)
        begins = itertools.accumulate(segments[:-1], initial=0)
        return OfferedMemory(0, mapped, [(begin, self._stride) for begin in begins])

    async def take(self, most: int) -> list[int]:
        """Numbers of free slots, at least one and at most `most`. Waits while none is free."""
        await self._waiting.acquire()
        taken = [self._free.popleft()]
        while len(taken) < most and not self._waiting.locked():
            await self._waiting.acquire()  # at once, as it is not locked
            taken.append(self._free.popleft())
        return taken

    def give_back(self, slots: Sequence[int]) -> None:
        """Return slots that no task of the daemon uses any more."""
        for slot in slots:
            self._free.append(slot)
            self._waiting.release()

    def close(self) -> None:
        """Close the file. The memory stays as long as views of it exist."""
        os.close(self._file)
