"""The memory that a fake GPU knows of: its own, what it maps of others, and registered host memory."""

from __future__ import annotations

import fcntl
import itertools
import os
from dataclasses import dataclass
from typing import Literal

from transferd.blocks.layout.base import align
from transferd.errors import TierError
from transferd.tiers.segment import DIRECTORY, PREFIX, SharedSegment

_numbers = itertools.count()
POISON = 0xDB  # what fresh device memory holds: nobody may rely on zeros
GUARD = 4096  # bytes behind each allocation that are no part of it


@dataclass(eq=False, slots=True)
class Allocation:
    """A range that exists. kind: "device", "mapped" (another process's) or "host" (registered)."""

    kind: Literal["device", "mapped", "host"]
    start: int
    nbytes: int
    name: str = ""
    segment: SharedSegment | None = None

    def close(self) -> None:
        """Give its shared memory back. Idempotent."""
        if self.segment is not None:
            self.segment.close()

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
    """Allocations by address. Device memory is shared memory, one segment for each allocation."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
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
        segment = SharedSegment(f"{PREFIX}fake-gpu.{os.getpid()}.{next(_numbers)}", align(nbytes) + GUARD, create=True)
        made = Allocation("device", segment.address, nbytes, segment.name, segment)
        view = memoryview(segment.buffer)
        view[:] = bytes([POISON]) * len(view)
        view.release()
        self.owned[made.start] = made
        return made

    def free(self, allocation: Allocation) -> None:
        del self.owned[allocation.start]
        allocation.close()

    def open(self, name: str) -> Allocation:
        """Map another's. Raises TierError for one's own, as CUDA does, and for what is not there."""
        if any(allocation.name == name for allocation in self.owned.values()):
            raise TierError("memory is not opened by the process that made it")
        if not name.startswith(PREFIX) or not _lives(name):
            raise TierError(f"there is no {name}")
        nbytes = (DIRECTORY / name).stat().st_size
        segment = SharedSegment(name, nbytes, create=False)
        opened = Allocation("mapped", segment.address, nbytes - GUARD, name, segment)
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
            one.start < address + nbytes and address < one.start + one.nbytes + (GUARD if one.segment else 0)
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
