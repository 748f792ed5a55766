"""Follows a publisher of KV events without trusting stale announcements. Pure logic, no socket.

Batches carry sequence numbers from 0. Three things can go wrong, each with one remedy:

    a gap                             batches were missed: request a replay from the first missed one
    a smaller number                  another daemon at the same address: start over
    the connection breaks             announcements may be stale: forget them, and start over when it is back

During a replay, the follower sets live batches aside. When the replay ends, it applies those that the replay did not
contain. If a replay begins later than requested, the batches before it are lost for good: the follower forgets all
announcements of the node, and only those of the replay count.

The follower does not trust its input. It counts and skips unreadable batches, and if a node announces more than
`max_blocks`, it forgets the node's announcements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from transferd.storage.attention_store.index import TokenIndex
from transferd.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

MAX_ASIDE_BYTES = 16 * 1024**2  # of live batches kept during a replay; beyond it the replay starts again
END = -1

UNREADABLE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError, MemoryError)


class _Event(msgspec.Struct, gc=False):
    """An event from any publisher; decoding skips the fields that we do not use. Hashes are integers or bytes."""

    type: str
    block_hashes: list[int | bytes] = []
    medium: str | None = None


class _ReceivedBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Event]


_decoder = msgspec.msgpack.Decoder(_ReceivedBatch)


class Follower:
    """Follows one node's events into an index.

    ask: requests a replay from a sequence number on. Pass its batches to `replayed`, and END after the last one. None:
        the publisher has no replay, so a missed batch stays missed.
    """

    def __init__(self, index: TokenIndex, node: str, max_blocks: int, ask: Callable[[int], None] | None) -> None:
        self.node = node
        self._index = index
        self._max_blocks = max_blocks
        self._ask = ask
        self._next = 0  # the first sequence number that has not been applied
        self._last_live = -1  # the newest live batch; a replay may be ahead of it
        self.asking = False  # a requested replay has not ended
        self._first_answer = False
        self._aside: list[tuple[int, bytes]] = []
        self._aside_bytes = 0
        self.batches = 0
        self.replays = 0
        self.lost = 0  # how often batches were lost for good
        self.unreadable = 0

    def connected(self) -> None:
        """The publisher has become reachable, for the first time or after `disconnected`."""
        self._start_over()

    def disconnected(self) -> None:
        """The publisher is gone or cannot be reached."""
        self._index.forget(self.node)
        self._next, self._last_live, self.asking = 0, -1, False
        self._empty_aside()

    def unanswered(self) -> None:
        """The requested replay does not arrive: request it again."""
        if self.asking:
            self._request()

    def live(self, sequence: int, payload: bytes) -> None:
        """Take a batch of the live stream."""
        back = sequence <= self._last_live
        self._last_live = sequence
        if back:  # the numbers began again at 0: another daemon
            self._start_over()
        self._route(sequence, payload)

    def replayed(self, sequence: int, payload: bytes) -> None:
        """Take a batch of the requested replay; END after the last one."""
        if not self.asking:
            return  # of a replay that we no longer wait for
        if sequence == END:
            self.asking = False
            for number, content in self._empty_aside():
                self._route(number, content)
            return
        if self._first_answer and sequence > self._next:
            self._lose()
        self._first_answer = False
        if sequence >= self._next:
            self._apply(sequence, payload)

    # --- inside -------------------------------------------------------------------------------------

    def _route(self, sequence: int, payload: bytes) -> None:
        if self.asking:
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
            self._request()
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
        self._request()

    def _request(self) -> None:
        if self._ask is not None:
            self.asking = self._first_answer = True
            self.replays += 1
            self._ask(self._next)

    def _lose(self) -> None:
        """Forget all announcements: batches are lost for good, and they may have retracted blocks."""
        self.lost += 1
        self._index.forget(self.node)

    def _apply(self, sequence: int, payload: bytes) -> None:
        self._next = sequence + 1
        self.batches += 1
        try:
            events = _decoder.decode(payload).events
        except UNREADABLE:
            self.unreadable += 1
            return
        for event in events:
            known = _understood(event)
            if known is not None:
                self._index.apply(self.node, known)
        if self._index.blocks_of(self.node) > self._max_blocks:
            self._lose()


def _understood(event: _Event) -> BlockStored | BlockRemoved | AllBlocksCleared | None:
    hashes = [_as_int(hash_) for hash_ in event.block_hashes]
    medium = event.medium or "GPU"  # vLLM omits it if there is only one
    known: dict[str, Callable[[], Any]] = {
        "BlockStored": lambda: BlockStored(hashes, None, [], 0, None, medium, None),
        "BlockRemoved": lambda: BlockRemoved(hashes, medium),
        "AllBlocksCleared": AllBlocksCleared,
    }
    make = known.get(event.type)
    return None if make is None else make()


def _as_int(hash_: int | bytes) -> int:
    """A hash as routers read it: the last eight bytes, or the integer modulo 2^64."""
    return int.from_bytes(hash_[-8:], "big") if isinstance(hash_, bytes) else hash_ % 2**64
