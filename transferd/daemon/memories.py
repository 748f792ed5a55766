"""How many memories engines may have mapped here: each takes a descriptor and a few maps of this process.

An engine decides over how many memories its blocks are spread (tiers/shm.py), so all of them together have a bound, and
one user has at most half of it.
"""

from __future__ import annotations

from collections.abc import Iterable

from transferd.errors import TransferError
from transferd.runtime.descriptors import soft_limit
from transferd.runtime.limits import most_maps
from transferd.tiers.base import DeviceHandle
from transferd.tiers.offered import MORE
from transferd.tiers.shm import KIND

MAPS_EACH = 3  # the file, and what is reserved before and behind it
OF_DESCRIPTORS, OF_MAPS = 4, 2  # all memories together take a quarter, and a half, of these
FEWEST = 256  # one user may always have so many


def most_memories() -> int:
    """The most memories of all engines together."""
    return min(soft_limit() // OF_DESCRIPTORS, most_maps() // OF_MAPS // MAPS_EACH)


def memories_of(handle: DeviceHandle) -> int:
    """How many memories the handle of an offer names; 0 if it names none of shared memory."""
    more = handle.data.get(MORE)
    return 0 if handle.kind != KIND else 1 + (len(more) if isinstance(more, list) else 0)


def check_memories(new: int, engine: str, uid: int | None, mapped: Iterable[tuple[int | None, int]]) -> None:
    """Raise `no_room` unless an engine of this user may map so many more.

    mapped: of each engine, its user and how many it has mapped.
    """
    most, each = most_memories(), list(mapped)
    of_all = sum(number for _, number in each)
    of_user = sum(number for whose, number in each if whose == uid)
    bounds = {"all engines": (of_all, most), "those of one user": (of_user, max(most // 2, min(FEWEST, most)))}
    for whose, (have, bound) in bounds.items():
        if have + new > bound:
            what = f"engine {engine!r} offers {new} more memories, and {whose} may have {bound} mapped"
            raise TransferError(f"{what}: put the blocks into fewer, larger memories", code="no_room")
