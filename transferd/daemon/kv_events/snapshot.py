"""A snapshot of everything that is announced, for a follower that missed batches which are not kept any more.

A subscriber that joins late finds in replays no announcement from before the oldest batch that is kept. A snapshot
holds the hashes of all announced blocks as of one sequence number: with the batches from that number on, the
subscriber has exactly the daemon's announcements.

Hashes only: parents and token ids are not kept once they are published.
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from transferd.wire.kv_events import BlockStored, encode_batch

HASHES_PER_BATCH = 1024


class Announced(NamedTuple):
    """The blocks that one engine has announced for one medium."""

    dp_rank: int
    medium: str
    hashes: Iterable[int]


# Publishes what is pending, and then returns all announcements of one engine.
Announcements = Callable[[], Iterable[Announced]]


class Snapshot:
    """All announcements as of `sequence`, the number of the first batch that it does not cover. 8 bytes a block."""

    def __init__(self, sequence: int, announced: Iterable[Announced], ts: float) -> None:
        """ts: when it was taken, in seconds since the epoch."""
        self.sequence = sequence
        self._ts = ts
        self._parts = [(part.dp_rank, part.medium, array.array("Q", part.hashes)) for part in announced]

    def batches(self) -> Iterator[bytes]:
        """Encode one batch after the other. The blocks of an event are not a chain."""
        for dp_rank, medium, hashes in self._parts:
            for first in range(0, len(hashes), HASHES_PER_BATCH):
                some = hashes[first : first + HASHES_PER_BATCH].tolist()
                yield encode_batch(self._ts, [BlockStored(some, None, [], 0, None, medium, None)], dp_rank)
