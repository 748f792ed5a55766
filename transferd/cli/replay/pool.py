"""A pool of numbered blocks with what they hold: the engine's view of one tier. Decides; moves nothing.

A block is in one of three places: *free*; *given out* to a caller that is about to fill it; or held by an
`Entry`, which is *used* by some number of users or *idle*. Idle entries may be evicted, the one that fell
idle longest ago first. Whoever releases a chain of blocks leaves first, root last, so evicts it in that
order too: what is left of a chain is always a prefix, and prefixes are what a cache can use.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Entry:
    """A block that holds `content`. While `users` is above 0 it stays where it is."""

    content: int
    block: int
    users: int = 1


class BlockPool:
    """Blocks 0 … count-1 of one tier, with an index by content. Every method runs in O(blocks it names)."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._entries: dict[int, Entry] = {}
        self._idle: OrderedDict[int, Entry] = OrderedDict()  # longest idle first

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def obtainable(self) -> int:
        """Blocks that `take` can give out now."""
        return len(self._free) + len(self._idle)

    @property
    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def find(self, content: int) -> Entry | None:
        return self._entries.get(content)

    def hold(self, entry: Entry) -> None:
        """One more user: the entry stays until as many `release`s."""
        entry.users += 1
        self._idle.pop(entry.content, None)

    def release(self, entry: Entry) -> None:
        """One user less; at none it is idle, and the last to be evicted."""
        assert entry.users > 0
        entry.users -= 1
        if not entry.users:
            self._idle[entry.content] = entry

    def take(self, count: int) -> tuple[list[int], list[Entry]]:
        """Give out `count` blocks: free ones, then those of evicted entries, which are returned too.

        The blocks of the evicted are among the blocks given out; their bytes are still there.
        The caller makes sure that `obtainable` is enough.
        """
        assert 0 <= count <= self.obtainable
        fresh = [self._free.pop() for _ in range(min(count, len(self._free)))]
        evicted = [self._idle.popitem(last=False)[1] for _ in range(count - len(fresh))]
        for entry in evicted:
            del self._entries[entry.content]
        return fresh + [entry.block for entry in evicted], evicted

    def put(self, content: int, block: int) -> Entry:
        """A block that was given out holds `content` from now on; used by one."""
        assert content not in self._entries
        entry = self._entries[content] = Entry(content, block)
        return entry

    def give_back(self, blocks: Sequence[int]) -> None:
        """Blocks that were given out and not put."""
        self._free.extend(blocks)


class Admission:
    """Lets requests in while all their blocks fit on the device together. First come, first served.

    A request reserves all the blocks it will hold before it holds any. Every block in use belongs to a
    request that was let in, so one that was let in always finds the blocks it needs: nobody ever holds
    blocks while waiting for blocks, which is how engines without this rule deadlock.
    """

    def __init__(self, blocks: int) -> None:
        self._left = blocks
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, blocks: int) -> None:
        """Wait until `blocks` fit. Not for cancelling: whoever is cancelled here ends the replay."""
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
