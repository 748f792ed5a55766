"""How much of its file system a store may use: decisions from the figures of `disk_of`."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from transferd.config.size import Reserve
from transferd.observability.units import size

GIB = 1024**3
SMALL = 10  # of a small disk, the reserve is at most a tenth of the store's capacity, and of the disk


class DiskState(NamedTuple):
    """A store's file system and directory, as they are now."""

    total: int = 0
    free: int = 0  # to this user
    files: int = 0  # inodes; 0 if the file system has no fixed number
    files_free: int = 0
    read_only: bool = False
    lost: str = ""  # why the store is not ours


def disk_of(path: str, lost: str = "") -> DiskState:
    """The file system that a directory is on, as it is now. Raises OSError."""
    there = os.statvfs(path)
    return DiskState(
        total=there.f_blocks * there.f_frsize,
        free=there.f_bavail * there.f_frsize,
        files=there.f_files,
        files_free=there.f_favail,
        read_only=bool(there.f_flag & os.ST_RDONLY),
        lost=lost,
    )


def reserved(reserve: Reserve, total: int, capacity: int) -> int:
    """How many bytes of a file system of `total` bytes are kept free.

    A percentage means at least a GiB. If that is more than the percentage, so on a small disk, the reserve is a GiB,
    or a tenth of the capacity or of the disk if that is less.
    """
    if reserve.nbytes is not None:
        return reserve.nbytes
    share = int(total * (reserve.percent or 0) / 100)
    if not share or share >= GIB:
        return share
    return min(GIB, capacity // SMALL, total // SMALL)


def bounds(capacity: int, reserve: Reserve, disk: DiskState, used: int, objects: int) -> tuple[int, float]:
    """The bytes and objects that keep a store's reserve of bytes and inodes free. used, objects: what it has now."""
    if not disk.total:
        return capacity, math.inf
    keep = reserved(reserve, disk.total, capacity)
    room = min(capacity, used + disk.free - keep)
    if not disk.files:
        return max(0, room), math.inf
    most = objects + disk.files_free - math.ceil(disk.files * keep / disk.total)
    return max(0, room), max(0, most)


def misfit(capacity: int, reserve: Reserve, disk: DiskState, used: int | None = None) -> str:
    """Why a store of this capacity does not fit on its file system; "" if it does.

    used: the bytes that it holds already; None if unknown: then only the size of the file system counts.
    """
    if not disk.total:
        return ""
    keep = reserved(reserve, disk.total, capacity)
    room = disk.total - keep if used is None else min(disk.total - keep, used + disk.free - keep)
    if capacity <= room:
        return ""
    free = "" if used is None else f", {size(disk.free)} of them free"
    return (
        f"{size(capacity)} do not fit on its file system, which has {size(disk.total)}{free}; storage.file.reserve "
        f"keeps {size(keep)} free, so the store can hold {size(max(0, room))}"
    )


def disk_for(capacity: int, reserve: Reserve) -> int:
    """The smallest file system, in bytes, on which a store of this capacity keeps its reserve free."""
    if reserve.nbytes is not None:
        return capacity + reserve.nbytes
    share = (reserve.percent or 0) / 100
    large = math.ceil(capacity / (1 - share))
    return large if not share or large * share >= GIB else capacity + min(GIB, capacity // SMALL)
