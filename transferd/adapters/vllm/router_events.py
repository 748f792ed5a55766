"""An engine's KV events about the store, for routers: which blocks it has, and which have left it.

A block is announced once it was stored, or a look-up has found it. The store does not report evictions to the engine.
So the engine asks about its announcements, a few at a time, and retracts those of evicted blocks. It retracts all of
them when a reset makes the stored blocks unreachable. It retracts none while the daemon does not answer, because a
stopped daemon keeps its files.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transferd.adapters.common.link import Link

MOST = 1_000_000  # announcements at a time; beyond it the oldest are retracted
A_QUESTION = 4096  # keys
EVERY_S = 1.0  # between two questions


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block as routers know it."""

    key: str  # in the store
    name: Any  # the block's name in a removal
    event: Callable[[], Any]  # makes its announcement


class RouterEvents:
    """For the scheduler's thread, unless it says otherwise. removed: makes the events that retract blocks, by name."""

    def __init__(self, link: Link, removed: Callable[[Sequence[Any]], Iterable[Any]]) -> None:
        self._link, self._removed = link, removed
        self._announced = AnnouncedBlocks()
        self._events: list[Any] = []
        self._untaken: set[str] = set()  # keys of the announcements among them
        self._answers: queue.SimpleQueue[tuple[float, list[str], list[StoredBlock]]] = queue.SimpleQueue()
        self._asking = False
        self._next = 0.0

    def stored(self, block: StoredBlock) -> None:
        """The store has got a block."""
        again = block.key in self._announced  # the store had lost it, unnoticed
        self._retract(self._announced.add(block.key, block.name, time.monotonic()))
        if not again:
            self._events.append(block.event())
            self._untaken.add(block.key)

    def found(self, asked: float, missing: list[str], there: list[StoredBlock]) -> None:
        """Take a look-up's answer, from any thread.

        asked: when the look-up began, in seconds.
        missing: keys.
        """
        self._answers.put((asked, missing, there))

    def ask(self) -> None:
        """Ask about some announcements, unless that is under way or was done lately. It counts as no use of them."""
        now = time.monotonic()
        if self._asking or now < self._next or not self._announced or not self._link.ready:
            return
        keys, self._asking, self._next = self._announced.next_question(), True, now + EVERY_S

        def answer(found: list[bool] | None) -> None:
            self._asking = False
            if found is not None:
                self.found(now, [key for key, there in zip(keys, found, strict=True) if not there], [])

        self._link.ask(keys, answer, use=False)

    def take(self) -> list[Any]:
        """The events since the last call, in order."""
        while not self._answers.empty():
            asked, missing, there = self._answers.get_nowait()
            for block in there:
                if block.key not in self._announced:
                    self.stored(block)
            self._retract(self._announced.gone(missing, asked))
        events, self._events = self._events, []
        self._untaken.clear()
        return events

    def forgotten(self) -> None:
        """vLLM has reset its prefix cache: its AllBlocksCleared names no medium, so it also ends our announcements.

        Events of ours that were not taken yet follow it. The other blocks are announced again once a look-up finds
        them.
        """
        self._announced.keep(self._untaken)

    def clear(self) -> None:
        """Retract all announcements, because no block can be loaded any more."""
        while not self._answers.empty():
            self._answers.get_nowait()
        self._retract(self._announced.clear())

    def _retract(self, names: Sequence[Any]) -> None:
        if names:
            self._events += self._removed(names)


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

    def keep(self, keys: Collection[str]) -> None:
        self._blocks = OrderedDict((key, block) for key, block in self._blocks.items() if key in keys)

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
