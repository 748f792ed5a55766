"""A pool of numbered blocks with what they hold, in order of use: the engine's view of a tier."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Entry:
    """A block that holds `content`. While `users` is above 0 it stays where it is."""

    content: int
    block: int
    users: int = 0


class BlockPool:
    """Blocks 0 … count-1: free, or holding an entry. Decides what may go; moves nothing itself."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._entries: OrderedDict[int, Entry] = OrderedDict()  # by content, least recently used first

    def find(self, content: int) -> Entry | None:
        """The entry that holds `content`, marked as used just now."""
        entry = self._entries.get(content)
        if entry is not None:
            self._entries.move_to_end(content)
        return entry

    @property
    def obtainable(self) -> int:
        """Blocks that are free or could be made so now."""
        return len(self._free) + sum(not entry.users for entry in self._entries.values())

    def take_free(self, most: int) -> list[int]:
        """Up to `most` free blocks; they are the caller's until `hold` or `give_back`."""
        taken = self._free[len(self._free) - min(most, len(self._free)) :]
        del self._free[len(self._free) - len(taken) :]
        return taken

    def evict(self, count: int) -> list[Entry]:
        """Forget the `count` least recently used entries that nobody uses; their blocks are the caller's."""
        victims = [entry for entry in self._entries.values() if not entry.users][:count]
        for entry in victims:
            del self._entries[entry.content]
        return victims

    def hold(self, content: int, block: int) -> Entry:
        """The block, which the caller has, holds `content` from now on; used by one."""
        assert content not in self._entries
        entry = self._entries[content] = Entry(content, block, users=1)
        return entry

    def forget(self, entry: Entry) -> None:
        """Its content is no good: the block is free again."""
        if self._entries.get(entry.content) is entry:
            del self._entries[entry.content]
            self._free.append(entry.block)

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(blocks)

    def __len__(self) -> int:
        return len(self._entries)
