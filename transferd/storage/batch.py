"""The state of one put into an indexed store (indexed.py): what is decided, what is written, what waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from transferd.errors import StorageError
from transferd.storage.base import Blob, Outcome
from transferd.storage.lru import Use, Victim


@dataclass(slots=True)
class Write:
    """One object that is being written. `position` is its index in the caller's batch."""

    position: int
    blob: Blob
    use: Use
    victims: list[Victim]  # removed before the write to make room; a victim stays here if its removal failed
    error: StorageError | None = None


@dataclass(slots=True)
class PutBatch:
    """The blobs of one put.

    todo: positions that are not decided yet. outcomes: by position, for those that are. waits: what the rest waits for.
    written: completes when the last wave that was decided has been written. alone: the use of blobs that name none.
    """

    blobs: Sequence[Blob]
    todo: Sequence[int]
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    waits: set[asyncio.Future[None]] = field(default_factory=set)
    written: asyncio.Future[None] | None = None
    alone: Use = field(default_factory=Use)
