"""Everything that is announced, for a follower that missed batches which are not kept any more.

A subscriber that joins late finds in replays no announcement from before the oldest batch that is kept. A snapshot has
all announced blocks as of one sequence number: with the batches from that number on, the subscriber has exactly the
daemon's announcements. It is sent in two forms:

* to who requests a snapshot: hashes only, which is all that an index of hashes needs;
* to who requests a replay from a batch on that is not kept any more, as routers of vLLM's events do: as ordinary
  batches, with parents and token ids, numbered so that they end just before the snapshot's number. The first ones
  clear the index. A router drops a block whose parent it does not know, so parents come before their children.

A snapshot copies no blocks: it has references to those that the announcements keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from transferd.daemon.kv_events.announcements import Block, stored_events
from transferd.wire.kv_events import AllBlocksCleared, BlockStored, encode_batch

BLOCKS_PER_BATCH = 1024
A_STEP = 8192  # blocks that are put in order at a time


class Announced(NamedTuple):
    """The blocks that one engine has announced for one medium."""

    dp_rank: int
    medium: str
    blocks: Sequence[Block]
    block_size: int


# Publishes what is pending, and then returns all announcements of one engine.
Announcements = Callable[[], Iterable[Announced]]


class Snapshot:
    """All announcements as of `sequence`, the number of the first batch that it does not cover."""

    def __init__(self, sequence: int, announced: Iterable[Announced], ts: float) -> None:
        """ts: when it was taken, in seconds since the epoch."""
        self.sequence = sequence
        self._ts = ts
        self._parts = list(announced)
        self._engines = list(dict.fromkeys(part.dp_rank for part in self._parts))
        # How many ordinary batches it takes.
        self.count = len(self._engines) + sum(-(-len(part.blocks) // BLOCKS_PER_BATCH) for part in self._parts)

    def hashes(self) -> Iterator[bytes]:
        """Encode one batch of hashes after the other. The blocks of an event are not a chain."""
        for dp_rank, medium, blocks, _ in self._parts:
            for first in range(0, len(blocks), BLOCKS_PER_BATCH):
                some = [block.hash for block in blocks[first : first + BLOCKS_PER_BATCH]]
                yield encode_batch(self._ts, [BlockStored(some, None, [], 0, None, medium, None)], dp_rank)

    def batches(self) -> Iterator[bytes | None]:
        """`count` ordinary batches. None: the next one is not ready yet, so that no step takes long."""
        made = 0
        for engine in self._engines:
            made += 1
            yield encode_batch(self._ts, [AllBlocksCleared()], engine)
        for part in self._parts:
            for blocks in _in_order(part.blocks):
                made += bool(blocks)
                events = stored_events(part.medium, blocks, part.block_size)
                yield encode_batch(self._ts, events, part.dp_rank) if blocks else None
        for _ in range(self.count - made):  # two blocks had one hash
            yield encode_batch(self._ts, [], 0)


def _in_order(blocks: Sequence[Block]) -> Iterator[list[Block]]:
    """All blocks, parents before children, BLOCKS_PER_BATCH at a time; empty lists meanwhile."""
    waiting: dict[int, Block] = {}
    for first in range(0, len(blocks), A_STEP):
        waiting.update((block.hash, block) for block in blocks[first : first + A_STEP])
        yield []
    batch: list[Block] = []
    for number, block in enumerate(blocks, 1):
        line: list[Block] = []
        above: Block | None = block
        while above is not None and waiting.pop(above.hash, None) is not None:
            line.append(above)
            above = None if above.parent is None else waiting.get(above.parent)
            if len(line) % A_STEP == 0:  # a chain may have all blocks
                yield []
        if number % A_STEP == 0:  # those that were in others' lines
            yield []
        for one in reversed(line):
            batch.append(one)
            if len(batch) == BLOCKS_PER_BATCH:
                yield batch
                batch = []
    if batch:
        yield batch
