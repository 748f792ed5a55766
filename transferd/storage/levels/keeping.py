"""Purges, pins and shares over several levels."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from transferd.errors import RequestError
from transferd.runtime.aio import every
from transferd.storage.keeping import Holding, Keeper
from transferd.storage.levels.parts import StackParts
from transferd.storage.selection import Selection
from transferd.tasks import Purged


class LevelsKeeper(Keeper):
    """The keepers of the levels as one. A share is kept in each level; a pin in the lowest one that has the object."""

    def __init__(self, parts: StackParts) -> None:
        self._parts = parts
        each = [(level, level.storage.keeper) for level in parts.levels]
        self._keepers = [keeper for _, keeper in each if keeper is not None]
        self._without = [level.name for level, keeper in each if keeper is None]

    def claim(self, owner: Hashable, space: str, share: float) -> None:
        for keeper in self._keepers:
            keeper.claim(owner, space, share)

    def leave(self, owner: Hashable) -> None:
        for keeper in self._keepers:
            keeper.leave(owner)

    def holdings(self) -> list[Holding]:
        """The sums over the levels: a block counts in each level that has it."""
        total: dict[Hashable, Holding] = {}
        for keeper in self._keepers:
            for one in keeper.holdings():
                total[one.owner] = total[one.owner] + one if one.owner in total else one
        return list(total.values())

    async def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        """Remove the objects that fit from every level, and those on their way between levels."""
        if self._without and not dry_run:
            what = f"the level {', '.join(self._without)} cannot remove objects on request"
            how = (
                "change the generation, which makes them unreachable, and let a rule of the bucket or pool remove them"
            )
            raise RequestError(f"{what}: {how}", code="bad_value")
        if dry_run:
            return await self._of_all(selection, dry_run=True)
        parts = self._parts
        with parts.fences.purge(selection):
            # Only a level has an object's owner and age. With such a selection queued objects stay, and go with their
            # copy above.
            if selection.owner is None and selection.unused_s is None:
                for back in parts.write_backs:
                    back.spoil([name for name in back.pending() if selection.fits(name)], "purged")
            total = await self._of_all(selection, dry_run=False)
            # What has read an object before the fence removes it, if it has stored the object since.
            for back in parts.write_backs:
                await back.copied()
            await parts.promotions.settled()
            await parts.withdrawn()
        return total

    async def _of_all(self, selection: Selection, *, dry_run: bool) -> Purged:
        purged = await every([keeper.purge(selection, dry_run=dry_run) for keeper in self._keepers])
        return sum(purged, Purged())

    def pin(self, owner: Hashable, names: Sequence[str], ttl_s: float, share: float) -> list[bool]:
        pinned = dict.fromkeys(names, False)
        for keeper in reversed(self._keepers):
            rest = [name for name, done in pinned.items() if not done]
            pinned.update(zip(rest, keeper.pin(owner, rest, ttl_s, share), strict=True))
        return [pinned[name] for name in names]

    def unpin(self, owner: Hashable, names: Sequence[str] | None) -> int:
        return sum(keeper.unpin(owner, names) for keeper in self._keepers)

    async def pins_kept(self) -> None:
        await every([keeper.pins_kept() for keeper in self._keepers])

    def statistics(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for keeper in self._keepers:
            for key, value in keeper.statistics().items():
                total[key] = total.get(key, 0) + value
        return total
