"""The state of one put or get of an indexed store (indexed.py): what is decided, written or read, what waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transferd.errors import StorageError
from transferd.storage.base import Blob, Outcome
from transferd.storage.lru import Entry, Use, Victim


class Damaged(Exception):
    """Raised by `_read`: what is stored under the name cannot be the object, or cannot be read any more.

    error: what the caller hears; None when it is simply a miss.
    """

    def __init__(self, error: StorageError | None = None) -> None:
        super().__init__(error)
        self.error = error


@dataclass(slots=True)
class Write:
    """One object that is being written. `position` is its index in the caller's batch."""

    position: int
    blob: Blob
    use: Use
    victims: list[Victim]  # removed before the write to make room; a victim stays here if its removal failed
    error: StorageError | None = None


class Read(NamedTuple):
    """One object that was present when it was asked for. `position` is its place in the caller's batch."""

    position: int
    blob: Blob
    entry: Entry


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


def name_of(item: object) -> str:
    """The object that an effect is given, whatever it is wrapped in."""
    return item.blob.name if isinstance(item, Write | Read) else str(item)
