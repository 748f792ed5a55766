"""The halves of one rank's transfer. The sender's waits until the receiver posts memory, then writes into it."""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from transferd.errors import PeerLost, PeerRefused, TransferError
from transferd.runtime.aio import resolve
from transferd.storage.base import FOUND, STORED, Blob, Found, Outcome
from transferd.storage.peer.carrier import Carrier, PeerWrite
from transferd.storage.peer.connection import PeerConnection
from transferd.storage.peer.messages import (
    Begin,
    Done,
    Landed,
    PeerMessage,
    Post,
    PostedSlot,
    Refusal,
    Want,
    Withdraw,
    Withdrawn,
    theirs,
)
from transferd.tasks import ErrorInfo


@dataclass(eq=False)
class _Half:
    """What both halves have. attempt: the receiver's number for it, once that is known."""

    transfer: str
    rank: int
    attempt: int
    _names: list[str]
    peer: PeerConnection | None = field(init=False, default=None)
    ended: bool = field(init=False, default=False)  # the task is over; writes may still run
    _error: TransferError | None = field(init=False, default=None)
    _news: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    @property
    def share(self) -> tuple[str, int, int]:
        """The first three fields of this share's messages."""
        return self.transfer, self.rank, self.attempt

    def fail(self, error: TransferError) -> None:
        """Fail, unless it has failed before: here, or because another rank of the transfer has."""
        if self._error is None:
            self._error = error
        self._news.set()

    def _send(self, message: PeerMessage) -> None:
        if self.peer is not None:
            self.peer.send(message)


@dataclass(eq=False)
class Outbound(_Half):
    """Used by one sending rank and fed by the PeerTransport, all on one loop.

    Ends after `end`, once no write runs.
    """

    _carrier: Carrier
    _forget: Callable[[Outbound], None]
    _engine: str = field(init=False, default="")
    _slots: dict[str, PostedSlot] = field(init=False, default_factory=dict)  # posted and not yet written to
    _fresh: deque[str] = field(init=False, default_factory=deque)  # posted and not yet returned by `posted`
    _writes: int = field(init=False, default=0)  # running
    _done: bool = field(init=False, default=False)
    _ending: PeerMessage | None = field(init=False, default=None)  # sent to the receiver once no write runs

    def __post_init__(self) -> None:
        self._unposted = set(self._names)

    @property
    def open(self) -> bool:
        """Whether this share still waits for a receiver."""
        return self.peer is None and self._error is None and not self.ended

    # --- for the Sender -----------------------------------------------------------------------------

    async def posted(self, limit: int) -> list[str]:
        """Up to `limit` objects for which memory was posted since the last call; [] after the last object.

        Waits without a time limit (the task has a deadline). Raises TransferError if the transfer failed.
        """
        await self._until(lambda: bool(self._fresh) or not self._unposted)
        return [self._fresh.popleft() for _ in range(min(limit, len(self._fresh)))]

    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        """Write sealed objects into the memory posted for them. Like Storage.put; do not cancel it."""
        if self._error is not None or self.peer is None:
            return [Outcome(Found.FAILED, self._error or PeerLost("the receiver has gone"))] * len(blobs)
        names = [blob.name for blob in blobs]
        slots = [self._slots.pop(name) for name in names]
        if any(slot.nbytes != blob.data.nbytes for slot, blob in zip(slots, blobs, strict=True)):
            self._mistaken("the receiver posted memory of the wrong size for an object")
            return [Outcome(Found.FAILED, self._error)] * len(blobs)
        writes = [
            PeerWrite(_address(b.data), slot.address, b.data.nbytes) for b, slot in zip(blobs, slots, strict=True)
        ]
        self._writes += 1
        try:
            await self._carrier.write(self._engine, writes)
        except TransferError as error:
            self._send(Landed(*self.share, names, ErrorInfo(error.reason, str(error))))
            return [Outcome(Found.FAILED, error)] * len(blobs)
        else:
            self._send(Landed(*self.share, names))
            return [STORED] * len(blobs)
        finally:
            self._writes -= 1
            self._settle()

    async def taken(self) -> None:
        """Wait until the receiver has every object on its device. Raises TransferError if that fails."""
        await self._until(lambda: self._done)

    def end(self, error: ErrorInfo | None) -> None:
        """End the share. Refuses a receiver that still waits, with this error. Idempotent."""
        if self.ended:
            return
        if not self._done:
            why = error or ErrorInfo("cancelled", "the sender's task has ended")
            self.fail(PeerRefused(why.message, code=error.code if error else None))
            if self.peer is not None and self._ending is None:
                self._ending = Refusal(*self.share, why)
        self.ended = True
        self._news.set()
        self._settle()

    # --- for the exchange ---------------------------------------------------------------------------

    def wanted(self, want: Want, peer: PeerConnection) -> None:
        """Take up a receiver's request for the objects."""
        self.peer, self.attempt, self._engine = peer, want.attempt, want.engine
        if want.names == self._names:
            self._send(Begin(*self.share))
            return
        error = mismatch(want.names, self._names)
        self._send(Refusal(*self.share, error))
        self.peer = None
        self.fail(PeerRefused(error.message, code=error.code))

    def hear(self, message: Post | Done | Withdraw) -> None:
        """Take up a message of the receiver that is met."""
        if isinstance(message, Post):
            self.posts(message)
        elif isinstance(message, Done):
            self.done()
        else:
            self.withdrawn(theirs(message.error))

    def posts(self, post: Post) -> None:
        """Take up memory that the receiver has posted for some of the objects."""
        for slot in post.slots:
            if slot.name not in self._unposted:
                self._mistaken(f"the receiver posted memory for {slot.name[:200]}, which is unknown or already posted")
                return
            self._unposted.discard(slot.name)
            self._slots[slot.name] = slot
            self._fresh.append(slot.name)
        self._news.set()

    def done(self) -> None:
        if self._unposted or self._slots or self._writes:
            self._mistaken("the receiver reported that it has every object before every object was written")
            return
        self._done = True
        self._news.set()

    def _mistaken(self, what: str) -> None:
        """End this transfer because the receiver violated the protocol. Others on its connection continue."""
        self.fail(PeerRefused(what, code="malformed"))
        self._ending = self._ending or Refusal(*self.share, ErrorInfo("malformed", what))
        self._settle()

    def withdrawn(self, error: ErrorInfo) -> None:
        """The receiver cancelled. It gets its answer once no write runs."""
        self._ending = Withdrawn(*self.share)
        self.fail(PeerRefused(f"the receiver cancelled the transfer: {error.message}", code=error.code))
        self._settle()

    def lost(self, why: str) -> None:
        """The connection to the receiver is lost."""
        self.peer = None
        if not self._done:
            self.fail(PeerLost(f"lost the receiving daemon: {why}"))

    # --- inside -------------------------------------------------------------------------------------

    def _settle(self) -> None:
        if self._writes:
            return
        if self._ending is not None:
            self._send(self._ending)
            self._ending = self.peer = None
        if self.ended:
            self._forget(self)

    async def _until(self, so: Callable[[], bool]) -> None:
        """Wait until this is so, or the share has ended. Raises TransferError if the transfer failed."""
        while not so() and self._error is None and not self.ended:
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error


def mismatch(wanted: Sequence[str], own: Sequence[str]) -> ErrorInfo:
    """Why two lists of object names differ, judged by the parts of the names (formats.py)."""
    theirs, mine = (list(names[0].split("/")) if names else [] for names in (wanted, own))
    for part, (a, b) in zip(("model", "layout", "generation"), zip(theirs, mine, strict=False), strict=False):
        if a != b:
            return ErrorInfo(f"{part}_mismatch", f"the receiver's {part} is {a}, the sender's {b}")
    what = f"the receiver expects {len(wanted)} blocks and the sender has {len(own)}, for different tokens"
    return ErrorInfo("blocks_mismatch", what)


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


# How long to hold posted memory after a failed write or a lost connection. By then bytes on the wire have arrived,
# and the write of a sender that lost only its connection has ended, or stalled for longer than the carrier allows.
HOLD_S = 4.0


@dataclass(eq=False)
class Inbound(_Half):
    """Used by one receiving rank and fed by the PeerTransport, all on one loop.

    Ends after `end`, once no memory is posted.
    """

    _engine: str
    sender: str
    _join: Callable[[str], Awaitable[PeerConnection]]
    _forget: Callable[[Inbound], None]
    _suspect: bool = field(init=False, default=False)  # a write failed, and some of its bytes may still arrive
    _held: int = field(init=False, default=0)  # groups of buffers held for that reason
    _posted: dict[str, asyncio.Future[Outcome]] = field(init=False, default_factory=dict)

    # --- for the Receiver ---------------------------------------------------------------------------

    async def begun(self) -> None:
        """Wait until the sender works on the same objects. Raises TransferError if it will not.

        Waits without a time limit (the task has a deadline).
        """
        if self.ended:
            raise PeerLost("the task ended before the transfer began")
        peer = await self._join(self.sender)
        if self._error is None and not self.ended:
            self.peer = peer
            self._send(Want(*self.share, self._names, self._engine))
            await self._news.wait()
        if self._error is not None:
            raise self._error

    async def get(self, blobs: Sequence[Blob]) -> list[Outcome]:
        """Post the buffers and wait until the sender is done with them. Like Storage.get; do not cancel it."""
        if self._error is not None or self.peer is None:
            return [Outcome(Found.FAILED, self._error or PeerLost("the sender has gone"))] * len(blobs)
        loop = asyncio.get_running_loop()
        waiting = [loop.create_future() for _ in blobs]
        self._posted |= zip((blob.name for blob in blobs), waiting, strict=True)
        slots = [PostedSlot(blob.name, _address(blob.data), blob.data.nbytes) for blob in blobs]
        self._send(Post(*self.share, slots))
        return list(await asyncio.gather(*waiting))

    def end(self, error: ErrorInfo | None) -> None:
        """End the share. error: None if every object was intact; otherwise the sender is asked to stop. Idempotent."""
        if self.ended:
            return
        self.ended = True
        if self.peer is not None and self._error is None:
            if error is None:
                self._send(Done(*self.share))
            else:
                self.cancel(error)
                return  # until the sender has confirmed that it writes no more
        self._settle()

    def cancel(self, error: ErrorInfo) -> None:
        """Ask the sender to stop. It answers once it writes no more."""
        if self._error is None:
            self._send(Withdraw(*self.share, error))
            self.fail(PeerRefused(error.message, code=error.code))

    # --- for the exchange ---------------------------------------------------------------------------

    def begins(self) -> None:
        self._news.set()

    def landed(self, landed: Landed) -> None:
        """The sender is done with these buffers, whether or not its write succeeded."""
        waiting = [self._posted.pop(name) for name in landed.names if name in self._posted]
        if landed.error is None:
            self._release(waiting, FOUND)
        else:
            self._suspect = True
            error = theirs(landed.error, PeerLost.code)
            self._hold(waiting, Outcome(Found.FAILED, PeerLost(error.message, code=error.code)))

    def _hold(self, waiting: Sequence[asyncio.Future[Outcome]], outcome: Outcome) -> None:
        self._held += 1
        asyncio.get_running_loop().call_later(HOLD_S, self._release, waiting, outcome, 1)

    def _release(self, waiting: Sequence[asyncio.Future[Outcome]], outcome: Outcome, held: int = 0) -> None:
        """held: how many groups these are that were held."""
        self._held -= held
        for future in waiting:
            resolve(future, outcome)
        self._settle()

    def refused(self, error: ErrorInfo) -> None:
        """The sender refused, and writes no more."""
        self.fail(PeerRefused(f"the sender refused: {error.message}", code=error.code))
        self.let_go()

    def lost(self, why: str) -> None:
        """The connection to the sender is lost. Bytes on the wire may still arrive, for up to HOLD_S."""
        self.peer = None
        self.fail(PeerLost(f"lost the sending daemon: {why}"))
        self._suspect = True
        self.let_go()

    def let_go(self) -> None:
        """The sender starts no more writes. Hold the buffers for HOLD_S if a write failed, or may still run."""
        self.peer = None
        posted, self._posted = list(self._posted.values()), {}
        outcome = Outcome(Found.FAILED, self._error)
        if posted and self._suspect:
            self._hold(posted, outcome)
        else:
            self._release(posted, outcome)

    # --- inside -------------------------------------------------------------------------------------

    def _settle(self) -> None:
        if self.ended and not self._posted and not self._held:
            self._forget(self)
