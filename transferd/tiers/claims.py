"""Which rank of which engine has which bytes of memory, over all engines of a daemon: no byte is two ranks'.

Memory is known by what it is (extents.py), never by a name, a descriptor or a handle: several of those may lead to the
same bytes. It counts until it is unmapped, so a leaving engine keeps its bytes. Changed on the loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field

from transferd.errors import RequestError
from transferd.runtime.threads import Direction, Threads
from transferd.tiers.extents import SMALL, Extents, overlap


@dataclass(slots=True, eq=False)
class MemoryClaim:
    """One rank's bytes. leaving: they will be unmapped soon, so whoever wants them may wait for that."""

    engine: str
    rank: int
    extents: Extents
    leaving: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Claims:
    """The claims of all ranks, by the memory that their extents are in."""

    def __init__(self) -> None:
        self._by_memory: dict[Hashable, list[MemoryClaim]] = {}
        self._comparing = asyncio.Lock()  # nobody else may claim between a comparison and its claim

    async def take(self, engine: str, rank: int, extents: Extents, threads: Threads) -> MemoryClaim:
        """Claim these bytes until `give_back`. Waits for another engine that is leaving.

        Many extents are compared in one of `threads`. Raises RequestError with code `already_attached` if another rank
        has one of the bytes.
        """
        claim = MemoryClaim(engine, rank, extents)
        while (other := await self._claimed(claim, threads)) is not None:
            if other.ended.is_set():  # while they were compared
                continue
            if not other.leaving or other.engine == engine:  # an engine changes its own ranks one after the other
                whose = f"rank {other.rank}" + ("" if other.engine == engine else f" of the engine {other.engine!r}")
                what = f"the memory offered for rank {rank} overlaps that of {whose}; each rank needs its own"
                raise RequestError(what, code="already_attached")
            await other.ended.wait()
        return claim

    def give_back(self, claim: MemoryClaim) -> None:
        """Call it once the bytes are unmapped."""
        for memory in {extent.memory for extent in claim.extents}:
            self._by_memory[memory].remove(claim)
            if not self._by_memory[memory]:
                del self._by_memory[memory]
        claim.ended.set()

    async def _claimed(self, claim: MemoryClaim, threads: Threads) -> MemoryClaim | None:
        """Enter the claim, or return one that is in the way."""
        memories = {extent.memory for extent in claim.extents}
        async with self._comparing:
            others = list(dict.fromkeys(other for memory in memories for other in self._by_memory.get(memory, ())))

            def compared() -> MemoryClaim | None:
                return next((other for other in others if overlap(claim.extents, other.extents)), None)

            if len(claim.extents) * len(others) <= SMALL:
                found = compared()
            else:
                found = await threads.run(Direction.SETUP, compared, f"comparing the memory of rank {claim.rank}")
            if found is None:
                for memory in memories:
                    self._by_memory.setdefault(memory, []).append(claim)
                return None
        return found
