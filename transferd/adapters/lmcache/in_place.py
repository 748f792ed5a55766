"""Objects where LMCache has them: the daemon maps its L1, and each object is a window of that (docs/adr/0102).

There is no copy, and no deadline of the adapter's either: an object's buffer belongs to the daemon until the result is
settled, and LMCache gives it to others as soon as it has an answer. So under a suspended daemon, LMCache waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from transferd.adapters.common.entry import OfferedMemory
from transferd.adapters.common.memory import Mapped, shared_memory_at
from transferd.adapters.lmcache.attached import AttachedKind, ObjectTransfer
from transferd.adapters.lmcache.settings import LMCACHE
from transferd.errors import TierError
from transferd.runtime.aio import every

MOST_IN_TASK = 256  # objects


@dataclass(frozen=True, slots=True)
class SharedL1:
    """LMCache's memory, which the daemon can map."""

    mapped: Mapped
    address: int  # in this process
    align: int  # objects begin at multiples of it

    def windows(self, nbytes: int) -> int:
        """How many windows of this size it has."""
        return (self.mapped.nbytes - nbytes) // self.align + 1

    def window_of(self, address: int, nbytes: int) -> int | None:
        """The number of the window that begins at this address, or None."""
        window, rest = divmod(address - self.address, self.align)
        return window if not rest and 0 <= window < self.windows(nbytes) else None


def shared_l1(described: Any) -> SharedL1 | None:
    """The memory of LMCache's L1MemoryDesc. Returns None and logs one line if the daemon cannot map it."""
    try:
        if described is None:
            raise TierError("LMCache does not say where its L1 is")
        address, nbytes = int(described.ptr), int(described.size)
        return SharedL1(shared_memory_at(address, nbytes), address, int(described.align_bytes))
    except TierError as error:
        what = "transferd: objects are copied, although in_place is set: %s; start LMCache with --no-l1-use-lazy"
        LMCACHE.log.warning(what, error)
        return None


class InPlaceKind(AttachedKind):
    """An AttachedKind that moves objects in LMCache's own memory: its blocks are the windows of L1."""

    windows = True

    def __init__(self, l1: SharedL1, *given: Any) -> None:
        self._l1 = l1
        super().__init__(*given)

    def _offered(self) -> tuple[int, OfferedMemory]:
        count = self._l1.windows(self.kind.nbytes)
        if count < 1:
            raise TierError(f"an object has {self.kind.nbytes} bytes, and L1 only {self._l1.mapped.nbytes}")
        return count, OfferedMemory(0, self._l1.mapped, [(0, self._l1.align)])

    async def _by_deadline(
        self,
        transfer: ObjectTransfer,
        move: Callable[[ObjectTransfer, range, list[int]], Awaitable[None]],
        timeout: float,  # noqa: ARG002 - the daemon keeps it, and nobody may give up before that
    ) -> None:
        await self._ready()
        windows = [self._l1.window_of(int(one.data_ptr), self.kind.nbytes) for one in transfer.objects]
        if None in windows:
            what = "transferd: %d of %d objects of %s do not lie in LMCache's L1"
            LMCACHE.log.warning(what, windows.count(None), len(windows), self.kind.model)
            return
        parts = [
            range(start, min(start + MOST_IN_TASK, len(windows))) for start in range(0, len(windows), MOST_IN_TASK)
        ]
        await every(move(transfer, part, [windows[i] or 0 for i in part]) for part in parts)

    async def _store(self, transfer: ObjectTransfer, which: range, slots: list[int]) -> None:
        await self._written(transfer, which, slots)

    async def _load(self, transfer: ObjectTransfer, which: range, slots: list[int]) -> None:
        for i, one in zip(which, await self._loaded(transfer, which, slots), strict=True):
            transfer.moved[i] = one

    def close(self) -> None:
        self.leave()
