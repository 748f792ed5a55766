"""Follows a publisher of KV events without trusting stale announcements. Pure logic, no socket.

Batches carry sequence numbers that count up, from 0 (vLLM) or any number on. Three things can go wrong, each with one
remedy:

    a gap                             batches were missed: request a replay from the first missed one
    a smaller number                  another publisher at the same address: start over
    the connection breaks             announcements may be stale: drop them, and start over when it is back

To start over, the follower requests a snapshot of all announcements, and the batches after it (snapshot.py). Publishers
other than transferd have none: they answer with the end alone, and the follower requests a replay from 0 on.

During a replay, the follower sets live batches aside. When the replay ends, it applies those that the replay did not
contain. If a replay begins later than requested, the batches before it are lost for good: the follower drops all
announcements of the node, and starts over; without snapshots, it goes on with the replay's batches. If batches go out
of the publisher's buffer before its snapshot has arrived, it is followed as if it had no snapshots, until the next gap.

The follower does not trust its input. It counts and skips unreadable batches, and if a node announces more than
`max_blocks`, it drops the node's announcements.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from transferd.observability.report import FollowedReport
from transferd.storage.attention_store.open_index import TokenIndex
from transferd.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

MAX_ASIDE_BYTES = 16 * 1024**2  # of live batches kept during a replay; beyond it the replay starts again
END = -1
SNAPSHOT = -2
SNAPSHOTS_IN_A_ROW = 3  # requested before the follower goes on without one
SEQUENCE_BYTES = 8

UNREADABLE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError, MemoryError)


class _Event(msgspec.Struct, gc=False):
    """An event from any publisher; decoding skips the fields that we do not use. Hashes are integers or bytes."""

    type: str
    block_hashes: list[int | bytes] = []
    medium: str | None = None


class _ReceivedBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Event]
    dp_rank: int | None = None  # of the engine that the batch is about


_decoder = msgspec.msgpack.Decoder(_ReceivedBatch)


class Follower:
    """Follows one node's events into an index.

    ask: requests a replay from a sequence number on, or SNAPSHOT. Pass each answer with its number to `replayed`. None
        if the publisher has no replay; then a missed batch stays missed.
    """

    def __init__(self, index: TokenIndex, node: str, max_blocks: int, ask: Callable[[int], None] | None) -> None:
        self.node = node
        self._index = index
        self._max_blocks = max_blocks
        self._ask = ask
        self._next = 0  # the first sequence number that has not been applied
        self._last_live = -1  # the newest live batch; a replay may be ahead of it
        self._asked: int | None = None  # the request that has not ended
        self._answered = False  # whether an answer to it has arrived
        self._earlier = 0  # requests given up whose answers may still arrive, before those of the last request
        self._has_snapshots = True  # until this publisher shows that it has none
        self._tries = 0  # snapshots requested since the last replay that ended
        self._aside: list[tuple[int, bytes]] = []
        self._aside_bytes = 0
        self.counts = FollowedReport()

    def connected(self) -> None:
        """A publisher has become reachable, for the first time or after `disconnected`; or another has begun anew."""
        self._has_snapshots, self._tries = True, 0
        self._start_over()

    def disconnected(self) -> None:
        """The publisher is gone or cannot be reached."""
        self._index.forget(self.node)
        self._give_up()
        self._next, self._last_live = 0, -1
        self._empty_aside()

    def unanswered(self) -> None:
        """The requested replay does not arrive: request it again."""
        asked, self._asked, self._earlier = self._asked, None, 0
        if asked is not None:
            self._request(asked)

    def live(self, sequence: int, payload: bytes) -> None:
        """Take a batch of the live stream."""
        back = sequence <= self._last_live
        self._last_live = sequence
        if back:
            self.connected()
        self._route(sequence, payload)

    def replayed(self, sequence: int, payload: bytes) -> None:
        """Take an answer to a request; END after the last one."""
        if self._earlier:
            self._earlier -= sequence == END
        elif self._asked is None:
            return  # to a request that was sent twice
        elif sequence == SNAPSHOT:
            self._snapshot(payload)
        elif sequence == END:
            self._ended()
        else:
            self._batch(sequence, payload)

    # --- answers ------------------------------------------------------------------------------------

    def _snapshot(self, payload: bytes) -> None:
        """Take an answer of a snapshot: the number of the first batch after it, or a batch of announced blocks."""
        if self._answered:
            self._take(payload)
        elif len(payload) != SEQUENCE_BYTES:
            self.counts.unreadable += 1
        else:
            self._answered = True
            self._index.forget(self.node)
            self._next = int.from_bytes(payload, "big")
            self.counts.snapshots += 1

    def _batch(self, sequence: int, payload: bytes) -> None:
        if self._asked == SNAPSHOT and not self._answered:  # a publisher that reads the request as a small number
            self._asked, self._has_snapshots = 0, False
        self._answered = True
        if sequence > self._next:  # the batches between are gone for good
            self._lose()
            if self._has_snapshots and self._tries < SNAPSHOTS_IN_A_ROW:
                self._request(SNAPSHOT)
                return
        if sequence >= self._next:
            self._apply(sequence, payload)

    def _ended(self) -> None:
        asked, self._asked = self._asked, None
        if asked == SNAPSHOT and not self._answered:
            self._has_snapshots = False
            self._request(0)
            return
        self._tries = 0
        for number, content in self._empty_aside():
            self._route(number, content)

    # --- inside -------------------------------------------------------------------------------------

    def _route(self, sequence: int, payload: bytes) -> None:
        if self._asked is not None:
            self._put_aside(sequence, payload)
        elif sequence == self._next:
            self._apply(sequence, payload)
        elif sequence > self._next:
            self._missed(sequence, payload)

    def _missed(self, sequence: int, payload: bytes) -> None:
        if self._ask is None:
            self._lose()
            self._apply(sequence, payload)
        else:
            # The greeting of a subscription may come before `connected`: then nothing is known, and nothing is lost.
            self._request(self._next if self._next or not self._has_snapshots else SNAPSHOT)
            self._put_aside(sequence, payload)

    def _put_aside(self, sequence: int, payload: bytes) -> None:
        self._aside.append((sequence, payload))
        self._aside_bytes += len(payload)
        if self._aside_bytes > MAX_ASIDE_BYTES:  # the replay does not arrive, or is too slow
            self._lose()
            self._start_over()

    def _empty_aside(self) -> list[tuple[int, bytes]]:
        aside, self._aside, self._aside_bytes = self._aside, [], 0
        return aside

    def _start_over(self) -> None:
        self._index.forget(self.node)
        self._next = 0
        self._empty_aside()
        self._request(SNAPSHOT if self._has_snapshots else 0)

    def _request(self, wanted: int) -> None:
        if self._ask is not None:
            self._give_up()
            self._asked, self._answered = wanted, False
            if wanted == SNAPSHOT:
                self._tries += 1
            else:
                self.counts.replays += 1
            self._ask(wanted)

    def _give_up(self) -> None:
        """Ignore the answers to the last request."""
        self._earlier += self._asked is not None
        self._asked = None

    def _lose(self) -> None:
        """Drop all announcements: batches are lost for good, and they may have retracted blocks."""
        self.counts.lost += 1
        self._index.forget(self.node)

    def _apply(self, sequence: int, payload: bytes) -> None:
        self._next = sequence + 1
        self.counts.batches += 1
        self._take(payload)

    def _take(self, payload: bytes) -> None:
        try:
            batch = _decoder.decode(payload)
        except UNREADABLE:
            self.counts.unreadable += 1
            return
        for event in batch.events:
            known = _understood(event)
            if known is not None:
                self._index.apply(self.node, known, batch.dp_rank or 0)
        if self._index.blocks_of(self.node) > self._max_blocks:
            self._lose()


def _understood(event: _Event) -> BlockStored | BlockRemoved | AllBlocksCleared | None:
    hashes = [_as_int(hash_) for hash_ in event.block_hashes]
    medium = event.medium or "GPU"  # vLLM omits it if there is only one
    if event.type == "BlockStored":
        return BlockStored(hashes, None, [], 0, None, medium, None)
    if event.type == "BlockRemoved":
        return BlockRemoved(hashes, medium)
    return AllBlocksCleared() if event.type == "AllBlocksCleared" else None


def _as_int(hash_: int | bytes) -> int:
    """A hash as routers read it: the last eight bytes, or the integer modulo 2^64."""
    return int.from_bytes(hash_[-8:], "big") if isinstance(hash_, bytes) else hash_ % 2**64
