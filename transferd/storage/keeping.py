"""Actions of operators and engines on stored objects: purge, pin, and keep a share for an engine.

`Keeper` is the contract; a backend with an index has one (`Storage.keeper`). `IndexKeeper` is that of an
indexed store (indexed.py), and `FilesKeeper` (files_keeper.py) that of one or several directories of files.

A purge drops objects from the index in steps of the loop, and its effects follow: from the step that drops an object no
load finds it (and KV events report that), but its bytes stay until the loads that already run have ended. Objects that
are being stored when a purge begins are purged when they have been stored. Objects stored after its end stay.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import enum
import functools
import operator
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from transferd.errors import RequestError, StorageError
from transferd.runtime.aio import Background, begun, every
from transferd.runtime.loop_turns import InPieces, OneATurn
from transferd.storage.lru import Entry, LruIndex
from transferd.storage.orders import NOBODY, By
from transferd.storage.pins import MOST_PINNED, AskedPins, Pins
from transferd.storage.queues import nobody, space_of
from transferd.storage.running import RunningCalls
from transferd.storage.selection import Selection
from transferd.wire.answers import Purged

AT_ONCE = 512  # objects that one step of the loop looks at, pins or unpins


class PinState(enum.IntEnum):
    """How a pin holds an object."""

    NOT = 0  # it is not there
    PINNED = 1
    DURABLE = 2  # and a restart leaves both: the object is on a medium that outlives the daemon, and so is the pin


class Holding(NamedTuple):
    """One owner's objects in a store; in several, the sum of each. share: bytes kept for the owner.

    evicted: as in Queue.
    """

    owner: Hashable
    objects: int
    bytes: int
    share: int
    pinned: int  # bytes
    evicted: Counter[Hashable]


def check_pins(one: AskedPins, share: float) -> None:
    """Raise RequestError, code `share_exceeded`, if an owner may not pin this. share: of the store."""
    new, taken, most = one.new, one.taken, int(share * one.capacity)
    if new + taken <= most and one.pinned <= MOST_PINNED * one.capacity:
        return
    what = f"these {one.objects} objects add {new} bytes to the {taken} that the engine has pinned"
    bound = f"an engine may pin {most} bytes (engines.pin_share), all together {MOST_PINNED:.0%} of the store"
    raise RequestError(f"{what}: {bound}; pin fewer, or unpin others", code="share_exceeded")


class Keeper(abc.ABC):
    """See the module. Used on the event loop. What is not overridden asks the keepers of several stores.

    outlives: its objects and pins outlive the daemon, and objects that are pinned before they come are pinned then.
    """

    outlives = False
    _all: Sequence[Keeper] = ()

    @property
    def _keepers(self) -> Sequence[Keeper]:
        """Those of stores that work now. All of them are told of engines."""
        return self._all

    def claim(self, owner: Hashable, space: str, share: float) -> None:
        """Note that an engine with objects in `space` (queues.py) has come. share: of the capacity."""
        for keeper in self._all:
            keeper.claim(owner, space, share)

    def leave(self, owner: Hashable) -> None:
        """Note that the engine has left. Its share is kept for a while, and its pins until their own ends."""
        for keeper in self._all:
            keeper.leave(owner)

    def space_of(self, owner: Hashable) -> str | None:
        """The space of an owner's objects; None if it is not known, or if there is no owner."""
        return next((space for keeper in self._all if (space := keeper.space_of(owner))), None)

    def retire(self, dead: Callable[[str], bool]) -> None:
        """Evict these objects first, unless they are used again: no engine serves their generation any more.

        dead: whether an object of this name is one.
        """
        for keeper in self._all:
            keeper.retire(dead)

    def holdings(self) -> list[Holding]:
        """The objects of each owner. In several stores, a block counts in each that has it."""
        each = defaultdict[Hashable, list[tuple[Any, ...]]](list)
        for keeper in self._keepers:
            for owner, *figures in keeper.holdings():
                each[owner].append(tuple(figures))
        add = functools.partial(functools.reduce, operator.add)
        return [Holding(owner, *map(add, zip(*some, strict=True))) for owner, some in each.items()]

    def of_level(self, name: str) -> Keeper | None:  # noqa: ARG002 - a store of one backend is one level
        """That of one level of storage alone, if it has one."""
        return self

    @abc.abstractmethod
    async def purge(self, selection: Selection, *, dry_run: bool = False, by: By = NOBODY) -> Purged:
        """Remove the objects that fit. Returns their number and bytes, also if they only would be removed.

        by: who wants that. Raises StorageError if some could not be removed.
        """

    def depths(self, names: Sequence[str]) -> list[int | None]:
        """For each object that a pin can hold, its depth in its chain at its last use; None for the others."""
        each = [keeper.depths(names) for keeper in self._keepers]
        return [next((depths[i] for depths in each if depths[i] is not None), None) for i in range(len(names))]

    async def pin(self, owner: Hashable, names: Sequence[str], ttl_s: float, share: float) -> list[PinState]:
        """Pin those of these objects that are there. share: of the capacity, that the owner may pin.

        Returns how each of these is held. Raises RequestError, code `share_exceeded`; then nothing is pinned.
        """
        async with self._asking:  # else two requests could be given the same room
            check_pins(await self.asked(owner, list(dict.fromkeys(names))), share)
            works = [begun(self.pin_all(owner, some, ttl_s)) async for some in OneATurn().each(names, AT_ONCE)]
        return [state for states in await every(works) for state in states]

    @functools.cached_property
    def _asking(self) -> asyncio.Lock:
        return asyncio.Lock()

    @functools.cached_property
    def _turns(self) -> OneATurn:
        """Those of the pieces of requests: after each wait, many could go on at once."""
        return OneATurn()

    async def hold(self, owner: Hashable, names: Sequence[str], ttl_s: float, share: float) -> None:
        """Like `pin`, for as long as this process lives at most: no medium is told, and nothing waited for.

        names: AT_ONCE at most; they are pinned in the step in which they are looked at.
        """
        check_pins(await self.asked(owner, names), share)
        self.pin_now(owner, names, ttl_s)

    async def asked(self, owner: Hashable, names: Sequence[str]) -> AskedPins:
        """The bytes that pinning these would add. Each name stands there once."""
        each = [await keeper.asked(owner, names) for keeper in self._keepers]
        return AskedPins(*map(sum, zip(*each, strict=True)))

    async def pin_all(
        self,
        owner: Hashable,
        names: Sequence[str],
        ttl_s: float,
        coming: Collection[str] = (),  # noqa: ARG002 - see `outlives`
    ) -> list[PinState]:
        """Pin without a look at the owner's share. coming: of these, objects that will be stored here.

        If this keeper's objects outlive the daemon, those are pinned as soon as they come. Returns how each of these
        is held here now.
        """
        return [PinState(pinned) for pinned in self.pin_now(owner, names, ttl_s)]

    def pin_now(self, owner: Hashable, names: Sequence[str], ttl_s: float) -> list[bool]:
        """Pin those of these that are there, each in the lowest store that has it. Returns which."""
        held = dict.fromkeys(names, False)
        for keeper in reversed(self._keepers):
            rest = [name for name, pinned in held.items() if not pinned]
            held.update(zip(rest, keeper.pin_now(owner, rest, ttl_s), strict=True))
        return [held[name] for name in names]

    async def durable(self, names: Sequence[str]) -> list[bool]:
        """For each of these objects, whether a restart leaves the object and its pins."""
        each = await every([keeper.durable(names) for keeper in self._keepers])
        return [any(safe[i] for safe in each) for i in range(len(names))]

    async def unpin(self, owner: Hashable, names: Sequence[str] | None) -> int:
        """End the owner's pins of these objects, or all of its pins. Returns how many objects it had pinned of them."""
        return sum([await keeper.unpin(owner, names) for keeper in self._keepers])


class Purging(Protocol):
    """The part of a store that a keeper needs.

    stores: those that run now, in whichever place of the store. leaving: objects that are being removed, or written.
    """

    stores: RunningCalls
    leaving: Collection[str]

    async def ages(self, entries: Sequence[Entry]) -> list[float]:
        """For how many seconds each of these objects was neither stored nor used; 0 for pinned ones."""

    def drop(self, entries: Sequence[Entry]) -> asyncio.Future[int]:
        """Drop these objects from the index at once. The future has how many could not be removed, once all ended.

        Do not cancel it.
        """

    def drop_bad(self, fits: Callable[[str], bool]) -> asyncio.Future[int]:
        """The same of bad objects that fit, which are in no index and could not be put aside yet."""

    def removed(self, drops: Sequence[asyncio.Future[int]], /) -> Awaitable[Collection[asyncio.Future[int]]]:
        """Wait for the ends of drops. Returns those that wait for a load that hangs."""

    async def at_end(self) -> Collection[asyncio.Future[None]]:
        """Wait for the stores and removals that run now, unless they hang. Returns the ends of stores that hang."""


@dataclass(slots=True)
class Dropped:
    """What a purge has dropped from one index. ends: of the removals, each with how many objects are still stored."""

    selection: Selection
    coming: list[str]  # objects of stores that began before the end of the drop
    total: Purged = dataclasses.field(default_factory=Purged)
    ends: list[asyncio.Future[int]] = dataclasses.field(default_factory=list)
    pinned: list[str] = dataclasses.field(default_factory=list)  # objects that had pins
    # Objects that something else was removing meanwhile: what cannot be removed comes back.
    leaving: set[str] = dataclasses.field(default_factory=set)


class IndexKeeper(Keeper):
    """The keeper of one index. Changed on the event loop only."""

    def __init__(self, index: LruIndex, store: Purging) -> None:
        self._index = index
        self._store = store
        self.pins = Pins(index)
        self.names = index.names
        # Who has pinned an object of this name before it came, and for how many seconds from now.
        self.pinned_by: Callable[[str], Iterable[tuple[Hashable, float]]] | None = None
        self._left = 0  # objects that running purges have yet to look at
        self._purged = 0
        self._late = Background()
        self._retiring = InPieces()

    def claim(self, owner: Hashable, space: str, share: float) -> None:
        self._index.claim(owner, space, share)

    def leave(self, owner: Hashable) -> None:
        self._index.disown(owner)

    def retire(self, dead: Callable[[str], bool]) -> None:
        self._retiring.run(self._index.chains.retire(dead))

    def space_of(self, owner: Hashable) -> str | None:
        queues = self._index.queues() if owner else ()
        return next((one.space for one in queues if one.owner == owner and one.space), None)

    def holdings(self) -> list[Holding]:
        index = self._index
        return [
            Holding(one.owner, one.objects, one.used, index.kept(one), one.pinned, one.evicted)
            for one in index.queues()
        ]

    # --- purge --------------------------------------------------------------------------------------

    async def purge(self, selection: Selection, *, dry_run: bool = False, by: By = NOBODY) -> Purged:  # noqa: ARG002
        dropped = await self.drop(selection, dry_run=dry_run)
        return dropped.total if dry_run else await self.removed(dropped)

    async def drop(self, selection: Selection, *, dry_run: bool = False) -> Dropped:
        """Drop what fits from the index, and begin to remove it. Then await `removed`."""
        names = list(selection.names) if selection.names is not None else self._index.names()
        dropped = Dropped(selection, self._store.stores.names, leaving=set(self._store.leaving))
        self._left += len(names)
        left = len(names)
        try:
            for start in range(0, len(names), AT_ONCE):
                some = names[start : start + AT_ONCE]
                dropped.leaving.update(name for name in some if name in self._store.leaving)
                await self._drop_some(some, dropped, dry_run=dry_run)
                self._left -= len(some)
                left -= len(some)
                await asyncio.sleep(0)
        finally:
            self._left -= left
        dropped.coming += self._store.stores.names
        return dropped

    async def removed(self, dropped: Dropped) -> Purged:
        """Wait until no byte of what fits is left, also of what was being stored, or removed for another reason."""
        hanging = await self._store.at_end()
        # What was put back is nobody's; what an engine has stored meanwhile stays.
        entries = map(self._index.get, dropped.leaving)
        back = [one.name for one in entries if one is not None and one.owner == nobody(space_of(one.name))]
        await self._drop_some(back, dropped, dry_run=False)
        if dropped.selection.unused_s is None:  # else they are new
            await self._drop_some(list(dict.fromkeys(dropped.coming)), dropped, dry_run=False)
            if hanging:
                self._late.begin(self._drop_late(hanging, dropped))
        dropped.ends.append(self._store.drop_bad(dropped.selection.fits))
        if await self._store.removed(dropped.ends):
            what = "a load of these objects hangs, and some are still stored until it ends"
            raise StorageError(f"{what}: look at the disk, and purge again")
        if stuck := sum(end.result() for end in dropped.ends):
            what = f"{stuck} objects could not be removed, and are still stored"
            raise StorageError(f"{what}: look at the disk, and purge again")
        return dropped.total

    async def _drop_late(self, hanging: Collection[asyncio.Future[None]], dropped: Dropped) -> None:
        """Purge what comes by stores that hung during a purge, when they end."""
        coming = set(dropped.coming).intersection(self._store.stores.names)
        await asyncio.wait(hanging)
        await self._drop_some(list(coming), dropped, dry_run=False)

    async def _drop_some(self, names: Sequence[str], dropped: Dropped, *, dry_run: bool) -> None:
        selection = dropped.selection
        present = [entry for name in names if selection.fits(name) and (entry := self._index.get(name)) is not None]
        if selection.owner is not None:
            present = [entry for entry in present if entry.owner == selection.owner]
        if selection.unused_s is not None and present:
            ages = await self._store.ages(present)
            # It may have been used, or have left, meanwhile.
            uses = [(entry, age) for entry, age in zip(present, ages, strict=True) if entry.group is not None]
            present = [entry for entry, age in uses if age >= selection.unused_s]
        dropped.total += Purged(len(present), sum(self._index.size(entry.nbytes) for entry in present))
        if present and not dry_run:
            self._purged += len(present)
            dropped.pinned += [entry.name for entry in present if entry.pinned]
            dropped.ends.append(self._store.drop(present))
            self.pins.forget(present)

    # --- pins ---------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def depths(self, names: Sequence[str]) -> list[int | None]:
        return [None if (entry := self._index.get(name)) is None else entry.depth for name in names]

    async def asked(self, owner: Hashable, names: Sequence[str]) -> AskedPins:
        total = self.pins.asked(owner, ())
        async for some in OneATurn().each(names, AT_ONCE):
            one = self.pins.asked(owner, self._present(some))
            more = one.pinned - self.pins.pinned
            objects, new = total.objects + one.objects, total.new + one.new
            total = one._replace(objects=objects, new=new, pinned=total.pinned + more)
        return total

    def pin_now(self, owner: Hashable, names: Sequence[str], ttl_s: float) -> list[bool]:
        self.pins.pin(owner, self._present(names), ttl_s)
        return [name in self._index for name in names]

    def stored(self, name: str) -> None:
        """Note that an object has come, which may be pinned already."""
        if self.pinned_by is not None and (entry := self._index.get(name)) is not None:
            for owner, left_s in self.pinned_by(name):
                self.pins.pin(owner, [entry], left_s)

    def _present(self, names: Sequence[str]) -> list[Entry]:
        return [entry for name in dict.fromkeys(names) if (entry := self._index.get(name)) is not None]

    async def unpin(self, owner: Hashable, names: Sequence[str] | None) -> int:
        named = [entry.name for entry in self.pins.of(owner)] if names is None else names
        pieces = OneATurn().each(named, AT_ONCE)
        return sum([self.pins.unpin(owner, self._present(some)) async for some in pieces])

    def close(self) -> None:
        """Forget all pins, and their timers."""
        self.pins.close()

    def statistics(self) -> dict[str, int]:
        """purged, purging (left to look at), pinned, pinned_bytes, pins_expired."""
        return {
            "purged": self._purged,
            "purging": self._left,
            "pinned": len(self.pins),
            "pinned_bytes": sum(queue.pinned for queue in self._index.queues()),
            "pins_expired": self.pins.expired,
        }
