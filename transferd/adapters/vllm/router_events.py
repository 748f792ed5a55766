"""An engine's KV events about the store, for routers: which blocks it has, and which have left it.

A block is announced once it was stored, or a look-up has found it. The store evicts without a word to the engine, so
the engine asks about its announcements, a few at a time, and retracts what is gone. It retracts all of them when a
reset makes the stored blocks unreachable. Without an answer nothing is retracted: a daemon that is away keeps its
files.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transferd.adapters.vllm.announced import EVERY_S, AnnouncedBlocks


class StoreQuestions(Protocol):
    """The link to the daemon, as far as it is needed here."""

    @property
    def ready(self) -> bool: ...
    def ask(
        self, keys: Sequence[str], answer: Callable[[list[bool] | None], None] = ..., *, use: bool = ...
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block as routers know it. key: in the store. name: what a removal says of it. event: makes its announcement."""

    key: str
    name: Any
    event: Callable[[], Any]


class RouterEvents:
    """For the scheduler's thread, unless it says otherwise. removed: makes the events that retract blocks, by name."""

    def __init__(
        self, link: StoreQuestions, removed: Callable[[Sequence[Any]], Iterable[Any]], every: float = EVERY_S
    ) -> None:
        self._link, self._removed, self._every = link, removed, every
        self._announced = AnnouncedBlocks()
        self._events: list[Any] = []
        self._answers: queue.SimpleQueue[tuple[float, list[str], list[StoredBlock]]] = queue.SimpleQueue()
        self._asking = False
        self._next = 0.0

    def stored(self, block: StoredBlock) -> None:
        """The store has got a block."""
        again = block.key in self._announced  # the store had lost it, unnoticed
        self._retract(self._announced.add(block.key, block.name, time.monotonic()))
        if not again:
            self._events.append(block.event())

    def found(self, asked: float, missing: list[str], there: list[StoredBlock]) -> None:
        """Take what a look-up has found. asked: when, in seconds. missing: keys. In any thread."""
        self._answers.put((asked, missing, there))

    def ask(self) -> None:
        """Ask about some announcements, unless that is under way or was done lately. It counts as no use of them."""
        now = time.monotonic()
        if self._asking or now < self._next or not self._announced or not self._link.ready:
            return
        keys, self._asking, self._next = self._announced.next_question(), True, now + self._every

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
        return events

    def clear(self) -> None:
        """No block can be loaded any more."""
        while not self._answers.empty():
            self._answers.get_nowait()
        self._retract(self._announced.clear())

    def _retract(self, names: Sequence[Any]) -> None:
        if names:
            self._events += self._removed(names)
