"""The books of one put into an indexed store (indexed.py): what is decided, what is written, what waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from transferd.errors import StorageError
from transferd.storage.base import Blob, Outcome
from transferd.storage.lru import Use, Victim


@dataclass(slots=True)
class Write:
    """One object on its way in. `position` is its place in the caller's batch."""

    position: int
    blob: Blob
    use: Use
    victims: list[Victim]  # make room: removed before the write, left in this list if that failed
    error: StorageError | None = None


@dataclass(slots=True)
class Batch:
    """The blobs of one put on their way.

    todo: positions that are not decided. outcomes: by position, of those that are. waits: what the rest waits for.
    written: done when the wave that was decided last has been written. alone: the use of blobs that name none.
    """

    blobs: Sequence[Blob]
    todo: Sequence[int]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    waits: set[asyncio.Future[None]] = field(default_factory=set)
    written: asyncio.Future[None] | None = None
    alone: Use = field(default_factory=Use)
