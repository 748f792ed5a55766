"""Which rank of which engine has which bytes of memory, over all engines of a daemon: no byte is two ranks'.

Memory is known by what it is (extents.py), never by a name, a descriptor or a handle: several of those may lead to the
same bytes. It counts from the time when it is mapped or made until it is unmapped, so an engine that is still leaving
keeps its bytes. Changed on the loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from transferd.errors import RequestError
from transferd.tiers.extents import Extent, overlap


@dataclass(slots=True, eq=False)
class MemoryClaim:
    """One rank's bytes. leaving: they will be unmapped soon, so whoever wants them may wait for that."""

    engine: str
    rank: int
    extents: Sequence[Extent]
    leaving: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Claims:
    """The claims of all ranks, by the memory that their extents are in."""

    def __init__(self) -> None:
        self._by_memory: dict[Hashable, list[MemoryClaim]] = {}

    async def take(self, engine: str, rank: int, extents: Sequence[Extent]) -> MemoryClaim:
        """MemoryClaim these bytes until `give_back`. Waits for another engine that is leaving.

        Raises RequestError with code `already_attached` if another rank has one of them.
        """
        claim = MemoryClaim(engine, rank, extents)
        while (other := self._in_the_way(claim)) is not None:
            if not other.leaving or other.engine == engine:  # an engine changes its own ranks one after the other
                whose = f"rank {other.rank}" + ("" if other.engine == engine else f" of the engine {other.engine!r}")
                what = f"the memory offered for rank {rank} overlaps that of {whose}; each rank needs its own"
                raise RequestError(what, code="already_attached")
            await other.ended.wait()
        for memory in {extent.memory for extent in extents}:
            self._by_memory.setdefault(memory, []).append(claim)
        return claim

    def give_back(self, claim: MemoryClaim) -> None:
        """The bytes are unmapped."""
        for memory in {extent.memory for extent in claim.extents}:
            self._by_memory[memory].remove(claim)
            if not self._by_memory[memory]:
                del self._by_memory[memory]
        claim.ended.set()

    def _in_the_way(self, claim: MemoryClaim) -> MemoryClaim | None:
        others = {other: None for one in claim.extents for other in self._by_memory.get(one.memory, ())}
        return next((other for other in others if overlap(claim.extents, other.extents)), None)
