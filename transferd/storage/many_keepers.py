"""The keepers of several stores as one: shares and pins are of all of them together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

from transferd.runtime.aio import every
from transferd.storage.keeping import Holding, IndexKeeper, Keeper, check_pins
from transferd.storage.selection import Purged, Selection


class ManyKeepers(Keeper):
    """keepers: those of the stores that work now."""

    def __init__(self, keepers: Callable[[], Sequence[IndexKeeper]]) -> None:
        self._keepers = keepers

    def claim(self, owner: Hashable, space: str, share: float) -> None:
        for keeper in self._keepers():
            keeper.claim(owner, space, share)

    def leave(self, owner: Hashable) -> None:
        for keeper in self._keepers():
            keeper.leave(owner)

    def holdings(self) -> list[Holding]:
        each = defaultdict[Hashable, list[Holding]](list)
        for keeper in self._keepers():
            for one in keeper.holdings():
                each[one.owner].append(one)
        return [sum(rows[1:], rows[0]) for rows in each.values()]

    async def purge(self, selection: Selection, *, dry_run: bool = False) -> Purged:
        purged = await every([keeper.purge(selection, dry_run=dry_run) for keeper in self._keepers()])
        return sum(purged, Purged())

    def pin(self, owner: Hashable, names: Sequence[str], ttl_s: float, share: float) -> list[bool]:
        keepers = self._keepers()
        check_pins([keeper.asked(owner, names) for keeper in keepers], share)
        each = [keeper.pin_all(owner, names, ttl_s) for keeper in keepers]
        return [any(pinned) for pinned in zip(*each, strict=True)]

    def unpin(self, owner: Hashable, names: Sequence[str] | None) -> int:
        return sum(keeper.unpin(owner, names) for keeper in self._keepers())

    def statistics(self) -> dict[str, int]:
        total: dict[str, int] = defaultdict(int)
        for keeper in self._keepers():
            for key, value in keeper.statistics().items():
                total[key] += value
        return dict(total)
