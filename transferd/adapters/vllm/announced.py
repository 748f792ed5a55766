"""Which stored blocks an engine has announced to routers, so that it can retract those that have left the store.

The store evicts without a word to the engine. So the engine asks about its announcements, a few with each question,
those first about which it has not asked for the longest time.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

MOST = 1_000_000  # announcements at a time; beyond it the oldest are retracted
A_QUESTION = 4096  # keys
EVERY_S = 1.0  # between two questions


class AnnouncedBlocks:
    """For each key the name under which routers know the block, and when it was announced, in seconds.

    Methods return the names to retract. most: announcements at a time.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._blocks: OrderedDict[str, tuple[Any, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: str) -> bool:
        return key in self._blocks

    def add(self, key: str, name: Any, now: float) -> list[Any]:
        self._blocks[key] = (name, now)
        self._blocks.move_to_end(key)
        return [self._blocks.popitem(last=False)[1][0]] if len(self._blocks) > self._most else []

    def gone(self, keys: Iterable[str], asked: float) -> list[Any]:
        """These blocks were not stored at this time. Those announced since then may have been stored since then."""
        old = [key for key in keys if key in self._blocks and self._blocks[key][1] < asked]
        return [self._blocks.pop(key)[0] for key in old]

    def clear(self) -> list[Any]:
        names = [name for name, _ in self._blocks.values()]
        self._blocks.clear()
        return names

    def next_question(self) -> list[str]:
        """The keys to ask about now."""
        keys = list(itertools.islice(self._blocks, A_QUESTION))
        for key in keys:
            self._blocks.move_to_end(key)
        return keys
