"""The memory that a fake GPU knows of: its own, what it maps of others, and registered host memory."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from transferd.blocks.layout.base import align
from transferd.errors import TierError
from transferd.tiers.offered import DIRECTORY
from transferd.tiers.segment import PREFIX, SharedSegment

Handles = Literal["blocks", "allocations"]
_numbers = itertools.count()
POISON = 0xDB  # what fresh device memory holds: nobody may rely on zeros
GUARD = 4096  # bytes behind each allocation that are no part of it
BLOCK = 2 << 20  # allocations begin at a multiple of it, or share such a block if they are smaller


class _Block:
    """Shared memory for one large allocation, or for several small ones. Closed with the last of them."""

    def __init__(self, nbytes: int) -> None:
        name = f"{PREFIX}fake-gpu.{os.getpid()}.{next(_numbers)}"
        self.segment = SharedSegment(name, align(nbytes) + GUARD + BLOCK, create=True)
        self.offset = -self.segment.address % BLOCK  # of its first byte in the segment
        self.start = self.segment.address + self.offset
        self.used = 0
        self.holders = 0
        ctypes.memset(self.start, POISON, align(nbytes) + GUARD)

    def take(self, nbytes: int) -> int:
        """The address of the next `nbytes`, with a guard behind them."""
        address = self.start + self.used
        self.used += align(nbytes) + GUARD
        self.holders += 1
        return address

    def give(self) -> None:
        self.holders -= 1
        if not self.holders:
            self.segment.close()


@dataclass(eq=False, slots=True)
class Allocation:
    """A range that exists. kind: "device", "mapped" (another process's) or "host" (registered).

    handle: what an IPC handle of it says: a segment, and the offset and bytes of what opening it maps.
    """

    kind: Literal["device", "mapped", "host"]
    start: int
    nbytes: int
    handle: str = ""
    release: Callable[[], None] | None = None

    def close(self) -> None:
        """Give its shared memory back. Idempotent."""
        release, self.release = self.release, None
        if release is not None:
            release()

    def __str__(self) -> str:
        return f"{self.kind} memory of {self.nbytes} bytes at {self.start:#x}"


def _lives(name: str) -> bool:
    """The process that made a segment still has it: it holds a lock on it (segment.py)."""
    try:
        with (DIRECTORY / name).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


class Memory:
    """Allocations by address. Device memory is shared memory, one segment for each block of it.

    handles: what a handle of a small allocation names: the block that it shares with others, or itself.
    """

    def __init__(self, capacity: int, handles: Handles = "blocks") -> None:
        self.capacity = capacity
        self.handles = handles
        self._block: _Block | None = None  # that small allocations are taken from
        self.owned: dict[int, Allocation] = {}
        self.opened: dict[int, Allocation] = {}
        self.registered: dict[int, Allocation] = {}

    @property
    def used(self) -> int:
        return sum(allocation.nbytes for allocation in self.owned.values())

    def allocate(self, nbytes: int) -> Allocation | None:
        """None when there is no room."""
        if nbytes <= 0 or self.used + nbytes > self.capacity:
            return None
        small = nbytes < BLOCK
        block = self._block
        if not small or block is None or not block.holders or block.used + align(nbytes) + GUARD > BLOCK:
            block = _Block(max(nbytes, BLOCK))
        if small:
            self._block = block
        start = block.take(nbytes)
        whole = small and self.handles == "blocks"
        named, size = (block.start, BLOCK) if whole else (start, nbytes)
        handle = f"{block.segment.name}:{named - block.segment.address}:{size}"
        made = self.owned[start] = Allocation("device", start, nbytes, handle, block.give)
        return made

    def free(self, allocation: Allocation) -> None:
        del self.owned[allocation.start]
        allocation.close()

    def open(self, handle: str) -> Allocation:
        """Map another's. Raises TierError for one's own, as CUDA does, and for what is not there."""
        name, _, place = handle.partition(":")
        if any(allocation.handle.partition(":")[0] == name for allocation in self.owned.values()):
            raise TierError("memory is not opened by the process that made it")
        if not name.startswith(PREFIX) or not _lives(name):
            raise TierError(f"there is no {name}")
        offset, nbytes = (int(number) for number in place.split(":"))
        segment = SharedSegment(name, (DIRECTORY / name).stat().st_size, create=False)
        opened = Allocation("mapped", segment.address + offset, nbytes, handle, segment.close)
        self.opened[opened.start] = opened
        return opened

    def close(self, allocation: Allocation) -> None:
        del self.opened[allocation.start]
        allocation.close()

    def register(self, address: int, nbytes: int) -> bool:
        """False when part of it is registered already."""
        if any(one.start < address + nbytes and address < one.start + one.nbytes for one in self.registered.values()):
            return False
        self.registered[address] = Allocation("host", address, nbytes)
        return True

    def _all(self) -> list[Allocation]:
        return [*self.owned.values(), *self.opened.values(), *self.registered.values()]

    def find(self, address: int, nbytes: int) -> Allocation | None:
        """The allocation that holds all of a range."""
        return next(
            (one for one in self._all() if one.start <= address and address + nbytes <= one.start + one.nbytes), None
        )

    def touches(self, address: int, nbytes: int) -> bool:
        """A range has a byte in some allocation, or in the guard behind one."""
        return any(
            one.start < address + nbytes and address < one.start + one.nbytes + (GUARD if one.kind != "host" else 0)
            for one in self._all()
        )

    def lives(self, allocation: Allocation) -> bool:
        """It has not been given back."""
        return any(one is allocation for one in self._all())

    def ranges(self) -> list[tuple[int, int]]:
        """(start, end) of all that a kernel may touch."""
        return [(one.start, one.start + one.nbytes) for one in self._all()]

    def leaks(self) -> list[str]:
        return [str(allocation) for allocation in self._all()]
