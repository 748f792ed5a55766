"""Actions of operators and engines on stored objects: purge, pin, and keep a share for an engine.

`Keeper` is the contract; a backend with an index has one (`Storage.keeper`). `IndexKeeper` is that of an
indexed store (indexed.py), and `ManyKeepers` that of several together (disks.py).

A purge drops objects from the index in steps of the loop, and its effects follow: from the step that drops an object no
load finds it (and KV events report that), but its bytes stay until the loads that already run have ended. Objects that
are being stored when a purge begins are purged when they have been stored. Objects stored after its end stay.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from transferd.errors import RequestError, StorageError
from transferd.runtime.aio import every
from transferd.storage.lru import Entry, LruIndex
from transferd.storage.pins import MOST_PINNED, AskedPins, Pins
from transferd.storage.queues import HELD_S
from transferd.storage.selection import Selection
from transferd.tasks import Purged

MOST_MISSED = 64  # purges that are remembered while a store is out of use
AT_ONCE = 512  # objects that one step of the loop looks at


@dataclass(frozen=True, slots=True)
class Holding:
    """One owner's objects in a store. share: bytes kept for the owner."""

    owner: Hashable
    objects: int = 0
    bytes: int = 0
    share: int = 0
    pinned: int = 0  # bytes

    def __add__(self, other: Holding) -> Holding:
        """The sum of the same owner's objects in two stores."""
        return Holding(
            self.owner,
            self.objects + other.objects,
            self.bytes + other.bytes,
            self.share + other.share,
            self.pinned + other.pinned,
        )


def check_pins(asked: Sequence[AskedPins], share: float) -> None:
    """Raise RequestError, code `share_exceeded`, if an owner may not pin this. share: of all stores together."""
    new, taken = sum(one.new for one in asked), sum(one.taken for one in asked)
    most = int(share * sum(one.capacity for one in asked))
    if new + taken <= most and all(one.pinned <= MOST_PINNED * one.capacity for one in asked):
        return
    objects = sum(one.objects for one in asked)
    what = f"these {objects} objects add {new} bytes to the {taken} that the engine has pinned"
    bound = f"an engine may pin {most} bytes (engines.pin_share), all together {MOST_PINNED:.0%} of the store"
    raise RequestError(f"{what}: {bound}; pin fewer, or unpin others", code="share_exceeded")


class Keeper(abc.ABC):
    """See the module. Used on the event loop."""

    @abc.abstractmethod
    def claim(self, owner: Hashable, space: str, share: float) -> None:
        """Note that an engine with objects in `space` (queues.py) has come. share: of the capacity."""

    @abc.abstractmethod
    def leave(self, owner: Hashable) -> None:
        """Note that the engine has left. Its share is kept for a while, and its pins until their own ends."""

    @abc.abstractmethod
    def holdings(self) -> list[Holding]:
        """The objects of each owner."""

    @abc.abstractmethod
    async def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        """Remove the objects that fit. Returns their number and bytes, also if they only would be removed.

        Raises StorageError if some could not be removed.
        """

    @abc.abstractmethod
    def pin(self, owner: Hashable, names: Sequence[str], ttl_s: float, share: float) -> list[bool]:
        """Pin those of these objects that are there; returns which. share: of the capacity, that the owner may pin.

        Raises RequestError, code `share_exceeded`; then nothing is pinned.
        """

    @abc.abstractmethod
    def unpin(self, owner: Hashable, names: Sequence[str] | None) -> int:
        """End the owner's pins of these objects, or all of its pins. Returns how many objects it had pinned of them."""

    @abc.abstractmethod
    async def pins_kept(self) -> None:
        """Wait until a restart of the daemon leaves the pins as they are now, where the objects outlive it."""

    @abc.abstractmethod
    def statistics(self) -> dict[str, int]:
        """purged, purging (left to look at), pinned, pinned_bytes, pins_expired."""


class Purging(abc.ABC):
    """The part of a store that a keeper needs."""

    async def keep_pins(self) -> None:
        """Write the pins to the medium, if the objects outlive the daemon."""

    @abc.abstractmethod
    async def ages(self, entries: Sequence[Entry]) -> list[float]:
        """For how many seconds each of these objects was neither stored nor used; 0 for pinned ones."""

    @abc.abstractmethod
    def drop(self, entries: Sequence[Entry]) -> asyncio.Future[int]:
        """Drop these objects from the index at once. The future has how many could not be removed, once all ended."""

    @abc.abstractmethod
    def storing(self) -> tuple[list[str], list[asyncio.Future[None]]]:
        """The objects of the stores that run now, and futures of their ends."""


class IndexKeeper(Keeper):
    """The keeper of one index. Changed on the event loop only."""

    def __init__(self, index: LruIndex, store: Purging) -> None:
        self._index = index
        self._store = store
        self.pins = Pins(index)
        self._left = 0  # objects that running purges have yet to look at
        self._purged = 0
        self._held: dict[Hashable, asyncio.TimerHandle] = {}  # shares of engines that have left
        self._missed: list[tuple[float, Selection]] = []  # purges while the store was out of use, and when

    def claim(self, owner: Hashable, space: str, share: float) -> None:
        if (timer := self._held.pop(owner, None)) is not None:
            timer.cancel()
        self._index.claim(owner, space, share)

    def leave(self, owner: Hashable) -> None:
        self._index.disown(owner)
        self._held[owner] = asyncio.get_running_loop().call_later(HELD_S, self._gone_for_long, owner)

    def _gone_for_long(self, owner: Hashable) -> None:
        del self._held[owner]
        self._index.keep_no_share(owner)

    def holdings(self) -> list[Holding]:
        capacity = self._index.capacity
        return [
            Holding(one.owner, one.objects, one.used, one.kept(capacity), one.pinned) for one in self._index.accounts()
        ]

    # --- purge --------------------------------------------------------------------------------------

    async def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        index = self._index
        storing, stored = self._store.storing()
        coming = [] if selection.unused_s is not None else list(dict.fromkeys(storing))  # else they are new
        names = list(selection.names) if selection.names is not None else index.names()
        total, ends, pinned = Purged(), list[asyncio.Future[int]](), len(self.pins)
        self._left += len(names)
        left = len(names)
        try:
            for start in range(0, len(names), AT_ONCE):
                some = names[start : start + AT_ONCE]
                total += await self._purge_some(some, selection, ends, dry_run=dry_run)
                self._left -= len(some)
                left -= len(some)
                await asyncio.sleep(0)
        finally:
            self._left -= left
        if stored and coming and not dry_run:
            await asyncio.wait(stored)
            total += await self._purge_some(coming, selection, ends, dry_run=False)
        if len(self.pins) < pinned:
            await self.pins_kept()
        if stuck := sum(await every(ends)):
            what = f"{stuck} of {total.objects} objects could not be removed, and are still stored"
            raise StorageError(f"{what}: look at the disk, and purge again")
        return total

    def miss(self, selection: Selection) -> None:
        """Note a purge while this store is out of use: `catch_up` repeats it."""
        if len(self._missed) < MOST_MISSED:
            self._missed.append((asyncio.get_running_loop().time(), selection))
        else:
            self._missed = [(0.0, Selection())]  # everything: stored blocks can be computed again

    async def catch_up(self) -> None:
        """Repeat missed purges. The objects' owners are not known any more, so objects of all engines are purged."""
        while self._missed:
            then, one = first = self._missed[0]
            unused = None if one.unused_s is None else one.unused_s + asyncio.get_running_loop().time() - then
            await self.purge(dataclasses.replace(one, owner=None, unused_s=unused))
            if self._missed[0] is first:  # else all was missed meanwhile, and takes its place
                del self._missed[0]

    async def _purge_some(
        self, names: Sequence[str], selection: Selection, ends: list[asyncio.Future[int]], *, dry_run: bool
    ) -> Purged:
        present = [entry for name in names if selection.fits(name) and (entry := self._index.get(name)) is not None]
        if selection.owner is not None:
            present = [one for one in present if one.account is not None and one.account.owner == selection.owner]
        if selection.unused_s is not None and present:
            ages = await self._store.ages(present)
            # It may have been used, or have left, meanwhile.
            uses = [(entry, age) for entry, age in zip(present, ages, strict=True) if entry.group is not None]
            present = [entry for entry, age in uses if age >= selection.unused_s]
        purged = Purged(len(present), sum(self._index.size(entry.nbytes) for entry in present))
        if present and not dry_run:
            self._purged += len(present)
            ends.append(self._store.drop(present))
        return purged

    # --- pins ---------------------------------------------------------------------------------------

    def pin(self, owner: Hashable, names: Sequence[str], ttl_s: float, share: float) -> list[bool]:
        check_pins([self.asked(owner, names)], share)
        return self.pin_all(owner, names, ttl_s)

    def asked(self, owner: Hashable, names: Sequence[str]) -> AskedPins:
        """The bytes that pinning these would add."""
        return self.pins.asked(owner, self._present(names))

    def pin_all(self, owner: Hashable, names: Sequence[str], ttl_s: float) -> list[bool]:
        """Pin those of these that are there, without a look at the owner's share."""
        self.pins.pin(owner, self._present(names), ttl_s)
        return [name in self._index for name in names]

    def _present(self, names: Sequence[str]) -> list[Entry]:
        return [entry for name in dict.fromkeys(names) if (entry := self._index.get(name)) is not None]

    def unpin(self, owner: Hashable, names: Sequence[str] | None) -> int:
        if names is None:
            return self.pins.end(owner)
        return self.pins.unpin(owner, self._present(names))

    async def pins_kept(self) -> None:
        await self._store.keep_pins()

    def close(self) -> None:
        """End all timers."""
        self.pins.close()
        for timer in self._held.values():
            timer.cancel()

    def statistics(self) -> dict[str, int]:
        return {
            "purged": self._purged,
            "purging": self._left,
            "pinned": len(self.pins),
            "pinned_bytes": sum(account.pinned for account in self._index.accounts()),
            "pins_expired": self.pins.expired,
        }


class ManyKeepers(Keeper):
    """Several keepers as one. All of them are given the engines; only keepers of working stores do the rest."""

    def __init__(self, everyone: Sequence[IndexKeeper], keepers: Callable[[], Sequence[IndexKeeper]]) -> None:
        self._all = everyone
        self._keepers = keepers

    def claim(self, owner: Hashable, space: str, share: float) -> None:
        for keeper in self._all:
            keeper.claim(owner, space, share)

    def leave(self, owner: Hashable) -> None:
        for keeper in self._all:
            keeper.leave(owner)

    def holdings(self) -> list[Holding]:
        each = defaultdict[Hashable, list[Holding]](list)
        for keeper in self._keepers():
            for one in keeper.holdings():
                each[one.owner].append(one)
        return [sum(rows[1:], rows[0]) for rows in each.values()]

    async def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        """Stores that are out of use repeat the purge when they return."""
        working = self._keepers()
        for keeper in () if dry_run else self._all:
            if keeper not in working:
                keeper.miss(selection)
        purged = await every([keeper.purge(selection, dry_run=dry_run) for keeper in working])
        return sum(purged, Purged())

    def pin(self, owner: Hashable, names: Sequence[str], ttl_s: float, share: float) -> list[bool]:
        keepers = self._keepers()
        check_pins([keeper.asked(owner, names) for keeper in keepers], share)
        each = [keeper.pin_all(owner, names, ttl_s) for keeper in keepers]
        return [any(pinned) for pinned in zip(*each, strict=True)]

    def unpin(self, owner: Hashable, names: Sequence[str] | None) -> int:
        return sum(keeper.unpin(owner, names) for keeper in self._keepers())

    async def pins_kept(self) -> None:
        await every([keeper.pins_kept() for keeper in self._keepers()])

    def statistics(self) -> dict[str, int]:
        total: dict[str, int] = defaultdict(int)
        for keeper in self._keepers():
            for key, value in keeper.statistics().items():
                total[key] += value
        return dict(total)
