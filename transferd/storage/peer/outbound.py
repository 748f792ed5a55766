"""The sender's half of one rank's transfer: waits until the receiver posts memory, then writes into it."""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable, Sequence

from transferd.errors import PeerLost, PeerRefused, TransferError
from transferd.storage.base import STORED, Blob, Found, Outcome
from transferd.storage.peer.carrier import Carrier, PeerWrite
from transferd.storage.peer.connection import PeerConnection
from transferd.storage.peer.messages import Begin, Landed, PeerMessage, Post, PostedSlot, Refusal, Want, Withdrawn
from transferd.tasks import ErrorInfo


class Outbound:
    """Used by one sending rank and fed by the PeerTransport, all on one loop.

    Ends after `end`, once no write runs.
    """

    def __init__(
        self, transfer: str, rank: int, names: Sequence[str], carrier: Carrier, forget: Callable[[Outbound], None]
    ) -> None:
        self.transfer = transfer
        self.rank = rank
        self.attempt = 0  # the receiver's
        self.peer: PeerConnection | None = None
        self._names = list(names)
        self._carrier = carrier
        self._forget = forget
        self._engine = ""
        self._slots: dict[str, PostedSlot] = {}  # posted and not yet written to
        self._fresh: deque[str] = deque()  # posted and not yet returned by `posted`
        self._unposted = set(names)
        self._writes = 0  # running
        self._error: TransferError | None = None
        self._done = False
        self._ending: PeerMessage | None = None  # sent to the receiver once no write runs
        self._ended = False
        self._news = asyncio.Event()

    @property
    def share(self) -> tuple[str, int, int]:
        """The first three fields of this share's messages."""
        return self.transfer, self.rank, self.attempt

    @property
    def open(self) -> bool:
        """Whether this share still waits for a receiver."""
        return self.peer is None and self._error is None and not self._ended

    @property
    def ended(self) -> bool:
        """Whether the task is over. Writes may still run."""
        return self._ended

    # --- for the Sender -----------------------------------------------------------------------------

    async def posted(self, limit: int) -> list[str]:
        """Up to `limit` objects for which memory was posted since the last call; [] after the last object.

        Waits without a time limit (the task has a deadline). Raises TransferError if the transfer failed.
        """
        while not self._fresh and self._unposted and self._error is None and not self._ended:
            await self._hear()
        if self._error is not None:
            raise self._error
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
            self._tell(Landed(*self.share, names, ErrorInfo(error.reason, str(error))))
            return [Outcome(Found.FAILED, error)] * len(blobs)
        else:
            self._tell(Landed(*self.share, names))
            return [STORED] * len(blobs)
        finally:
            self._writes -= 1
            self._settle()

    async def taken(self) -> None:
        """Wait until the receiver has every object on its device. Raises TransferError if that fails."""
        while not self._done and self._error is None and not self._ended:
            await self._hear()
        if self._error is not None:
            raise self._error

    def end(self, error: ErrorInfo | None) -> None:
        """End the share. Refuses a receiver that still waits, with this error. Idempotent."""
        if self._ended:
            return
        if not self._done:
            why = error or ErrorInfo("cancelled", "the sender's task has ended")
            self._fail(PeerRefused(why.message, code=error.code if error else None))
            if self.peer is not None and self._ending is None:
                self._ending = Refusal(*self.share, why)
        self._ended = True
        self._news.set()
        self._settle()

    # --- for the exchange ---------------------------------------------------------------------------

    def wanted(self, want: Want, peer: PeerConnection) -> None:
        """A receiver has asked for the objects."""
        self.peer, self.attempt, self._engine = peer, want.attempt, want.engine
        if want.names == self._names:
            self._tell(Begin(*self.share))
            return
        error = mismatch(want.names, self._names)
        self._tell(Refusal(*self.share, error))
        self.peer = None
        self._fail(PeerRefused(error.message, code=error.code))

    def posts(self, post: Post) -> None:
        """The receiver has posted memory for some of the objects."""
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
        self._fail(PeerRefused(what, code="malformed"))
        self._ending = self._ending or Refusal(*self.share, ErrorInfo("malformed", what))
        self._settle()

    def withdrawn(self, error: ErrorInfo) -> None:
        """The receiver cancelled. It gets its answer once no write runs."""
        self._ending = Withdrawn(*self.share)
        self._fail(PeerRefused(f"the receiver cancelled the transfer: {error.message}", code=error.code))
        self._settle()

    def lost(self, why: str) -> None:
        """The connection to the receiver is lost."""
        self.peer = None
        if not self._done:
            self._fail(PeerLost(f"lost the receiving daemon: {why}"))

    def fail(self, error: TransferError) -> None:
        """Another rank of the transfer has failed, so this one fails, too."""
        self._fail(error)

    # --- inside -------------------------------------------------------------------------------------

    def _tell(self, message: PeerMessage) -> None:
        if self.peer is not None:
            self.peer.send(message)

    def _fail(self, error: TransferError) -> None:
        if self._error is None:
            self._error = error
        self._news.set()

    def _settle(self) -> None:
        if self._writes:
            return
        if self._ending is not None:
            self._tell(self._ending)
            self._ending = self.peer = None
        if self._ended:
            self._forget(self)

    async def _hear(self) -> None:
        self._news.clear()
        await self._news.wait()


def mismatch(wanted: Sequence[str], own: Sequence[str]) -> ErrorInfo:
    """Why two lists of object names differ, judged by the parts of the names (keys.py)."""
    theirs, mine = (list(names[0].split("/")) if names else [] for names in (wanted, own))
    for part, (a, b) in zip(("model", "layout", "generation"), zip(theirs, mine, strict=False), strict=False):
        if a != b:
            return ErrorInfo(f"{part}_mismatch", f"the receiver's {part} is {a}, the sender's {b}")
    what = f"the receiver expects {len(wanted)} blocks and the sender has {len(own)}, for different tokens"
    return ErrorInfo("blocks_mismatch", what)


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
