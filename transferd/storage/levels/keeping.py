"""Purges, pins and shares over several levels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Hashable, Sequence

from transferd.runtime.aio import every
from transferd.runtime.compat import wait_for
from transferd.runtime.loop_turns import OneATurn
from transferd.storage.keeping import AT_ONCE, Keeper, PinState, check_pins
from transferd.storage.levels.level import StoreLevel
from transferd.storage.levels.parts import StackParts
from transferd.storage.levels.proving import Proving
from transferd.storage.lru import Use
from transferd.storage.orders import NOBODY, By
from transferd.storage.pins import AskedPins
from transferd.storage.selection import Selection
from transferd.wire.answers import Purged

COPIES_S = 10.0  # how long a pin waits for the copies of what it pins


class LevelsKeeper(Keeper):
    """The keepers of the levels as one. A share is kept in each level, and a pin is of the object, wherever it is."""

    def __init__(self, parts: StackParts, proving: Proving, pass_uses: Callable[[], None]) -> None:
        """pass_uses: pass the uses of faster levels to those below now; they decide whose an object is, and how old."""
        self._parts = parts
        self._pass_uses = pass_uses
        self._proving = proving
        each = [(level, level.storage.keeper) for level in parts.levels]
        self._with = {level: keeper for level, keeper in each if keeper is not None}
        self._all = list(self._with.values())
        self._without = [level for level, keeper in each if keeper is None]

    @property
    def _in_use(self) -> dict[StoreLevel, Keeper]:
        return {level: keeper for level, keeper in self._with.items() if not level.leaving} or self._with

    def of_level(self, name: str) -> Keeper | None:
        return next((keeper for level, keeper in self._with.items() if level.name == name), None)

    async def purge(self, selection: Selection, *, dry_run: bool = False, by: By = NOBODY) -> Purged:
        """Remove the objects that fit from every level, and those on their way between levels.

        A level that cannot remove objects keeps them, for others; it is in `Purged.shared`, and hides them here.
        """
        self._pass_uses()
        if dry_run:
            return await self._of_all(selection, by, dry_run=True)
        parts = self._parts
        with parts.fences.purge(selection):
            if selection.unused_s is None:  # of their age there nobody here knows
                space, owner = self.space_of(selection.owner), selection.owner
                if space is None and owner is not None and any(one.owner == owner for one in self.holdings()):
                    space = ""  # of names without one
                hides = dataclasses.replace(selection, space=space)
                for level in self._without:
                    level.hidden.purge(hides)
            # Only a level has an object's owner and age. With such a selection queued objects stay, and go with their
            # copy above.
            if selection.owner is None and selection.unused_s is None:
                for back in parts.write_backs:
                    await back.withdraw("purged", lambda one: selection.fits(one.name))
            total = await self._of_all(selection, by, dry_run=False)
            # What has read an object before the fence removes it, if it has stored the object since.
            await parts.settled(parts.write_backs)
        return total + Purged(shared=[level.name for level in self._without])

    async def purge_shared(self, selection: Selection, *, dry_run: bool) -> Purged:
        """See Storage.purge_shared. Call it after a purge: what fits is hidden until it has gone."""
        reached = [level for level in self._without if level.shared]
        numbers = [level.hidden.number for level in reached]  # a later purge may name what the listing has passed by
        purged = await every([level.storage.purge_shared(selection, dry_run=dry_run) for level in reached])
        for level, number in () if dry_run else zip(reached, numbers, strict=True):
            level.hidden.removed(selection, number)
            level.forget_hints()
        return sum(purged, Purged(shared=[level.name for level in self._without if level not in reached]))

    async def _of_all(self, selection: Selection, by: By, *, dry_run: bool) -> Purged:
        purged = await every([keeper.purge(selection, dry_run=dry_run, by=by) for keeper in self._keepers])
        return sum(purged, Purged())

    async def asked(self, owner: Hashable, names: Sequence[str]) -> AskedPins:
        """Counts each object once: in the lowest level, or above it if its copy has yet to come."""
        *above, lowest = self._in_use.values()
        asked, rest = await lowest.asked(owner, names), await _all_absent(lowest, names)
        for keeper in reversed(above):
            more = await keeper.asked(owner, rest)
            check_pins(more, 1.0)  # it holds them until their copies have come
            asked = AskedPins(*map(sum, zip(asked, more._replace(capacity=0, pinned=more.new), strict=True)))
            rest = await _all_absent(keeper, rest)
        return asked

    async def pin_all(
        self,
        owner: Hashable,
        names: Sequence[str],
        ttl_s: float,
        coming: Collection[str] = (),  # noqa: ARG002 - nothing comes from outside
    ) -> list[PinState]:
        """Pin the objects themselves: one that the lowest level does not have yet also above, until it has come."""
        *above, lowest = self._in_use.values()
        rest = _absent(lowest, names)
        there = {name for name, depth in zip(rest, self.depths(rest), strict=True) if depth is not None}
        held = await every(
            [
                lowest.pin_all(owner, names, ttl_s, there),
                *(keeper.pin_all(owner, rest, ttl_s) for keeper in above),
            ]
        )
        await self._turns.turn()
        states = dict(zip(names, held[0], strict=True))
        for each in held[1:]:
            states.update((name, max(states[name], state)) for name, state in zip(rest, each, strict=True))
        known = set(rest)
        if gone := [name for name in _absent(lowest, names) if name not in known]:  # as it has only now found out
            states.update(zip(gone, await self.pin_all(owner, gone, ttl_s), strict=True))
        if there and lowest.outlives:
            await self._copied([name for name in rest if name in there])
            await self._turns.turn()
            for name, safe in zip(rest, await lowest.durable(rest), strict=True):
                if safe:
                    states[name] = PinState.DURABLE
            came = [name for name in rest if states[name] is PinState.DURABLE]
            for keeper in above:
                await keeper.unpin(owner, came)
        return [states[name] for name in names]

    async def _copied(self, names: Sequence[str]) -> None:
        """Have the copies of these to the lowest level made before others, and wait for them, for a while."""
        *_, lowest = self._in_use
        objects = [(name, 0, depth) for depth, name in enumerate(names)]
        proving = self._proving.prove_in(lowest, objects, Use(counts=False), self._parts.now())
        with contextlib.suppress(TimeoutError):
            await wait_for(proving, COPIES_S)


async def _all_absent(keeper: Keeper, names: Sequence[str]) -> list[str]:
    return [name async for some in OneATurn().each(names, AT_ONCE) for name in _absent(keeper, some)]


def _absent(keeper: Keeper, names: Sequence[str]) -> list[str]:
    return [name for name, depth in zip(names, keeper.depths(names), strict=True) if depth is None]
