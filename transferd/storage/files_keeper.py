"""Purges, pins and shares of files, on one disk or several: orders that lie on each disk (orders.py, docs/adr/0106).

A purge, in this order. Everything that fits leaves the indexes. Then the order is recorded on every disk that can be
reached; a disk that cannot take it is lost at once, and returns when it has applied it. The bytes go, once running
loads have ended, and with them those of stores and removals that began before. At last each disk records that it has
applied the order. A daemon that is killed in between, and a disk that was away, does the rest before it serves again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from typing import Protocol, TypeVar

from transferd.errors import StorageError
from transferd.runtime.aio import Background, every, in_turns
from transferd.runtime.loop_turns import OneATurn
from transferd.storage.keeping import AT_ONCE, Dropped, IndexKeeper, Keeper, PinState
from transferd.storage.ledger import Ledger
from transferd.storage.orders import NOBODY, By, OrderBook, Overdue, digest
from transferd.storage.queues import EngineOwner
from transferd.storage.selection import Selection
from transferd.wire.answers import Purged

T = TypeVar("T")

ASK_S = 10.0  # how often a place is asked whether it still takes an order while somebody waits for it


class Place(Protocol):
    """One directory of files. lost: why it is out of use; "" while it works.

    unread: why a directory or file of it was not looked at when it was opened.
    tried: the ids of purges that its readable objects have seen since it was opened.
    """

    ledger: Ledger
    lost: str
    unread: Sequence[str]
    tried: set[str]

    path: str
    index_keeper: IndexKeeper

    async def record(self, applied: Collection[str] = ()) -> bool:
        """Write its list. Returns whether it is there. If the medium fails, the place is lost.

        applied: the ids of purges that it has done now.
        """

    def look(self, names: Sequence[str]) -> Awaitable[list[bool]]:
        """For each name, whether its object is in the index and on the medium. Raises StorageError."""

    async def empty_quarantine(self, selection: Selection) -> None:
        """Remove what was set aside and may fit. Raises StorageError."""


class FilesKeeper(Keeper):
    """See the module. All places are given the engines; only those that work do the rest. Used on one loop."""

    outlives = True

    def __init__(self, places: Sequence[Place], wall: Callable[[], float]) -> None:
        """wall: Unix time."""
        self.places = places
        self._all = [place.index_keeper for place in places]
        self.works = Background()  # on places that may hang
        self.book = OrderBook(wall)

    @property
    def _live(self) -> list[Place]:
        return [place for place in self.places if not place.lost]

    @property
    def _keepers(self) -> list[IndexKeeper]:
        return [place.index_keeper for place in self._live]

    # --- purges -------------------------------------------------------------------------------------

    async def purge(self, selection: Selection, *, dry_run: bool = False, by: By = NOBODY) -> Purged:
        if dry_run:
            would = await every([keeper.drop(selection, dry_run=True) for keeper in self._keepers])
            return sum((one.total for one in would), Purged())
        named = None
        if selection.names is not None:
            named = [name async for name in in_turns(map(digest, selection.names))]
        order = self.book.purge(selection, by, self.space_of(selection.owner), named)
        live = self._live
        for place in live:  # a disk that returns meanwhile does not apply it there: the lists no longer know owners
            place.tried.add(order.id)
        dropped = await every([self._dropped(place, selection) for place in live])
        await self._end_pins([name for one in dropped for name in one.pinned])
        kept_by, left = await self.record(), list[StorageError]()
        removed = await every([self._removed(place, one, left) for place, one in zip(live, dropped, strict=True)])
        total = sum((one for one in removed if one is not None), Purged())
        returned = [place for place in self._live if place not in live]  # a store that failed elsewhere may end there
        if returned and selection.unused_s is None:
            again = Selection(
                frozenset(name for one in dropped for name in one.coming if selection.fits(name)), selection.owner
            )
            await every([self._purged(place, again, left) for place in returned])
        gone = [place for place, total in zip(live, removed, strict=True) if total is not None]
        await every([place.record([order.id]) for place in gone if order.id not in place.ledger.listed.applied])
        reached = [place for place in self._live if order.id in place.ledger.listed.applied]
        await self._tidy()
        if left:
            raise left[0]
        not_reached = [place.path for place in self.places if place not in reached]
        return Purged(total.objects, total.bytes, not_reached, kept_by)

    async def _while_it_answers(self, place: Place, work: Awaitable[T]) -> T | None:
        """The result of work on a place. None if the place fails, or hangs, and so fails; the work then goes on."""
        working = self.works.begin(work)
        while not working.done() and not place.lost:
            await asyncio.wait([working], timeout=ASK_S)
            if not working.done():
                await place.record()
        return working.result() if working.done() else None

    async def _removed(self, place: Place, dropped: Dropped, left: list[StorageError]) -> Purged | None:
        """What has gone; None if the place failed meanwhile: it does the rest when it returns.

        left: gets an error if objects are still stored. Who purges is told, and for this place the order ends all the
        same: it would take what is stored from now on at the next start.
        """
        try:
            removed = await self._while_it_answers(place, place.index_keeper.removed(dropped))
            await self._while_it_answers(place, place.empty_quarantine(dropped.selection))
        except StorageError as error:
            if not place.lost:
                left.append(error)
                return Purged()
        if (unread := place.unread) and not place.lost:
            what = f"{len(unread)} directories or files cannot be read, and may hold what was to go: {unread[0]}"
            left.append(StorageError(f"{what}; mend them, restart, and purge again"))
        return None if place.lost else removed

    async def _dropped(self, place: Place, selection: Selection) -> Dropped:
        dropping = self._while_it_answers(place, place.index_keeper.drop(selection))
        return await dropping or Dropped(selection, [])

    async def _purged(self, place: Place, selection: Selection, left: list[StorageError]) -> Purged | None:
        return await self._removed(place, await self._dropped(place, selection), left)

    async def catch_up(self) -> None:
        """A disk has brought orders that the others do not know: apply them there."""
        for place in self._live:
            left = self.book.left_for(place.ledger.listed)
            if orders := [one for one in left if one.id not in place.tried]:
                place.tried.update(one.id for one in orders)
                by_age = [[order] for order in orders if order.fits.unused_s is not None]  # each of an age of its own
                others = [order for order in orders if order.fits.unused_s is None]
                for group in [others, *by_age] if others else by_age:
                    overdue, every_name = Overdue(group), place.index_keeper.names()
                    names = [name async for name in in_turns(every_name, AT_ONCE) if overdue.fits(name, 0.0)]
                    await self._purged(place, Selection(frozenset(names), unused_s=self.book.unused_s(group[0])), [])
                if not place.lost and not place.unread:
                    await place.record([one.id for one in orders])
        await self._tidy()

    async def record(self) -> list[str]:
        """Write the lists of all places that work. Returns the paths of those that have them."""
        live = self._live
        taken = await every([place.record() for place in live])
        return [place.path for place, has in zip(live, taken, strict=True) if has and not place.lost]

    async def _tidy(self) -> None:
        places, left_for = self.places, self.book.left_for
        applied = all(not place.lost and not left_for(place.ledger.listed) for place in places)
        if self.book.tidy(applied=applied):
            await self.record()

    # --- pins ---------------------------------------------------------------------------------------

    async def pin_all(
        self, owner: Hashable, names: Sequence[str], ttl_s: float, coming: Collection[str] = ()
    ) -> list[PinState]:
        here = self.pin_now(owner, names, ttl_s)
        pinned = {name for name, is_here in zip(names, here, strict=True) if is_here or name in coming}
        if pinned and isinstance(owner, EngineOwner):
            self.book.pin(owner, pinned, ttl_s)
            await self.record()
        durable = await self.durable(names)  # which may find that files or disks are gone
        await self._turns.turn()
        # What has come since without having been asked for is not pinned.
        here = [was and now is not None for was, now in zip(here, self.depths(names), strict=True)]
        states = zip(names, here, durable, strict=True)
        return [PinState.DURABLE if safe and name in pinned else PinState(is_here) for name, is_here, safe in states]

    async def durable(self, names: Sequence[str]) -> list[bool]:
        found = set[str]()
        for place in self._live:
            if not place.ledger.behind:  # else its list lacks the pins
                its = [name for name in names if name in place.index_keeper]
                with contextlib.suppress(StorageError):
                    looked = await self._while_it_answers(place, place.look(its)) or ()
                    found.update(name for name, there in zip(its, looked, strict=False) if there)
        return [name in found for name in names]

    async def unpin(self, owner: Hashable, names: Sequence[str] | None) -> int:
        ended = await super().unpin(owner, names)
        if isinstance(owner, EngineOwner) and await self._end_pins(names, owner):
            await self.record()
        return ended

    async def _end_pins(self, names: Sequence[str] | None, owner: EngineOwner | None = None) -> bool:
        """As OrderBook.unpin, in turns of the loop."""
        if names is None:
            return any([self.book.end(some, owner) async for some in OneATurn().each(self.book.digests, AT_ONCE)])
        return any([self.book.unpin(some, owner) async for some in OneATurn().each(names, AT_ONCE)])
