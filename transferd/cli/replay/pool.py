"""A pool of numbered blocks and their contents: the engine's view of one tier. It decides, and moves no bytes.

A block is *free*, *given out* to a caller that is about to fill it, or held by a `PooledBlock`. A PooledBlock without
users is *idle*. Idle blocks may be evicted, the one that has been idle longest first.
Callers release a chain from its leaves to its root, and eviction follows that order: the remaining part of a chain
is always a prefix, which a cache can use.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class PooledBlock:
    """A block that holds `content`. It is not evicted while `users` is above 0."""

    content: int
    block: int
    users: int = 1


class BlockPool:
    """Blocks 0 … count-1 of one tier, with an index by content. Every method runs in O(blocks it names)."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._entries: dict[int, PooledBlock] = {}
        self._idle: OrderedDict[int, PooledBlock] = OrderedDict()  # longest idle first

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def obtainable(self) -> int:
        """How many blocks `take` can give out now."""
        return len(self._free) + len(self._idle)

    @property
    def entries(self) -> list[PooledBlock]:
        return list(self._entries.values())

    def find(self, content: int) -> PooledBlock | None:
        return self._entries.get(content)

    def hold(self, entry: PooledBlock) -> None:
        """Add a user. Each user calls `release` once."""
        entry.users += 1
        self._idle.pop(entry.content, None)

    def release(self, entry: PooledBlock) -> None:
        """Remove a user. After its last user, the entry is idle: it is evicted after all other idle entries."""
        assert entry.users > 0
        entry.users -= 1
        if not entry.users:
            self._idle[entry.content] = entry

    def take(self, count: int) -> tuple[list[int], list[PooledBlock]]:
        """Give out `count` blocks: free ones, then those of evicted entries. Returns blocks and evicted entries.

        The evicted entries' blocks still contain their bytes. The caller makes sure that `obtainable` is enough.
        """
        assert 0 <= count <= self.obtainable
        fresh = [self._free.pop() for _ in range(min(count, len(self._free)))]
        evicted = [self._idle.popitem(last=False)[1] for _ in range(count - len(fresh))]
        for entry in evicted:
            del self._entries[entry.content]
        return fresh + [entry.block for entry in evicted], evicted

    def put(self, content: int, block: int) -> PooledBlock:
        """Record that a block that was given out now holds `content`, with one user."""
        assert content not in self._entries
        entry = self._entries[content] = PooledBlock(content, block)
        return entry

    def give_back(self, blocks: Sequence[int]) -> None:
        """Return blocks that were given out and not put."""
        self._free.extend(blocks)


class Admission:
    """Admits requests while all their blocks fit on the device together. First come, first served.

    A request reserves all the blocks it will hold before it holds any. Every block in use belongs to an admitted
    request, so an admitted request always finds the blocks it needs. Engines deadlock if requests hold blocks while
    they wait for others; here a waiting request holds none.
    """

    def __init__(self, blocks: int) -> None:
        self._left = blocks
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, blocks: int) -> None:
        """Wait until `blocks` fit. A cancellation here ends the replay."""
        if not self._waiting and blocks <= self._left:
            self._left -= blocks
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((blocks, turn))
        await turn

    def leave(self, blocks: int) -> None:
        self._left += blocks
        while self._waiting and self._waiting[0][0] <= self._left:
            wanted, turn = self._waiting.popleft()
            if not turn.done():
                self._left -= wanted
                turn.set_result(None)
