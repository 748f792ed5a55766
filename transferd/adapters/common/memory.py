"""Finds the shared memory that an address belongs to, according to the kernel.

An engine's tensors and memoryviews are addresses in its own process; the daemon needs a file and an offset. We read
the kernel's list of mappings instead of trusting the engine. So an allocator's header in front of the data (torch: 64
bytes) is accounted for, and so is memory whose name was unlinked.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from transferd.errors import TierError
from transferd.tiers.offered import DIRECTORY, identity_of

MAPS = Path("/proc/self/maps")
DESCRIPTORS = Path("/proc/self/fd")
DELETED = " (deleted)"


@dataclass(frozen=True, slots=True)
class Mapped:
    """A range of a mapped file."""

    path: str
    identity: tuple[int, int]  # the file's device and inode
    offset: int  # bytes from the file's start
    nbytes: int

    @property
    def name(self) -> str:
        """The file's name in /dev/shm; "" if it has none (any more)."""
        path = Path(self.path)
        try:
            found = path.lstat()
        except OSError:
            return ""
        same = (found.st_dev, found.st_ino) == self.identity
        return path.name if same and path.parent == DIRECTORY else ""

    def descriptor(self) -> int:
        """A descriptor under which this process has the file open. Borrowed. Raises TierError if there is none."""
        for entry in DESCRIPTORS.iterdir():
            with contextlib.suppress(OSError):  # the descriptor that lists the directory
                if identity_of(int(entry.name)) == self.identity:
                    return int(entry.name)
        raise TierError(f"the memory of {self.path} has neither a name in {DIRECTORY} nor an open descriptor")


class KernelMapping(NamedTuple):
    """A range of this process's addresses. writable: and readable."""

    start: int
    end: int
    writable: bool
    shared: bool
    offset: int
    identity: tuple[int, int]
    path: str


def shared_memory_at(address: int, nbytes: int) -> Mapped:
    """The shared memory that contains these bytes of this process. Raises TierError if others cannot map it."""
    reached, first = address, None
    for part in mappings():
        if part.end <= reached:
            continue
        if part.start > reached:
            break
        if first is None:
            if not part.shared or not part.identity[1]:
                where = part.path or "anonymous memory"
                raise TierError(f"the bytes at {address:#x} are private ({where}): no other process can map them")
            first = part
        elif (part.identity, part.offset - part.start) != (first.identity, first.offset - first.start):
            break
        reached = part.end
        if reached >= address + nbytes:
            offset = first.offset + address - first.start
            return Mapped(first.path.removesuffix(DELETED), first.identity, offset, nbytes)
    raise TierError(f"the {nbytes} bytes at {address:#x} are not one range of one mapped file")


def bytes_at(address: int, nbytes: int) -> memoryview:
    """This process's bytes at an address. Whoever uses them keeps the memory."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


def mappings() -> Iterator[KernelMapping]:
    """The mappings of this process, by address."""
    for line in MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        where, permissions, offset, device, inode, *path = line.split(maxsplit=5)
        start, end = (int(text, 16) for text in where.split("-"))
        major, minor = (int(text, 16) for text in device.split(":"))
        identity = os.makedev(major, minor), int(inode)
        writable, shared = permissions.startswith("rw"), permissions[3] == "s"
        yield KernelMapping(start, end, writable, shared, int(offset, 16), identity, path[0] if path else "")
