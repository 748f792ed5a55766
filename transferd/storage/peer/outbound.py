"""The sender's half of one transfer of one rank: waits for the receiver's memory, writes into it."""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque
from collections.abc import Callable, Sequence

from transferd.errors import PeerLost, PeerRefused, TransferError
from transferd.storage.base import STORED, Blob, Found, Outcome
from transferd.storage.peer.carrier import Carrier, Move
from transferd.storage.peer.connection import Connection
from transferd.storage.peer.messages import Begin, Landed, Message, Post, Refused, Slot, Want, Withdrawn
from transferd.tasks import ErrorInfo


class Outbound:
    """Used by one Sender and fed by the exchange, all on one loop. Ends when told to, and no write is under way."""

    def __init__(
        self, transfer: str, rank: int, names: Sequence[str], carrier: Carrier, forget: Callable[[Outbound], None]
    ) -> None:
        self.transfer = transfer
        self.rank = rank
        self.attempt = 0  # of the receiver it has met
        self.peer: Connection | None = None
        self._names = list(names)
        self._carrier = carrier
        self._forget = forget
        self._engine = ""
        self._slots: dict[str, Slot] = {}  # posted and not yet written to
        self._fresh: deque[str] = deque()  # posted and not yet asked for
        self._unposted = set(names)
        self._writes = 0  # under way
        self._error: TransferError | None = None
        self._done = False
        self._ending: Message | None = None  # what the receiver is told once no write is under way
        self._ended = False
        self._news = asyncio.Event()

    @property
    def share(self) -> tuple[str, int, int]:
        """What it is about, on the wire."""
        return self.transfer, self.rank, self.attempt

    @property
    def open(self) -> bool:
        """It waits for a receiver."""
        return self.peer is None and self._error is None and not self._ended

    @property
    def ended(self) -> bool:
        """Its task is over; it is here until its writes are."""
        return self._ended

    # --- for the Sender -----------------------------------------------------------------------------

    async def posted(self, limit: int) -> list[str]:
        """Up to `limit` objects that memory has been posted for since the last call; [] when it was all of them.

        Waits without a limit of its own (the task has a deadline). Raises TransferError when the transfer failed.
        """
        while not self._fresh and self._unposted and self._error is None and not self._ended:
            await self._hear()
        if self._error is not None:
            raise self._error
        return [self._fresh.popleft() for _ in range(min(limit, len(self._fresh)))]

    async def put(self, blobs: Sequence[Blob]) -> list[Outcome]:
        """Write sealed objects into the memory posted for them; as Storage.put, and not to be cancelled."""
        if self._error is not None or self.peer is None:
            return [Outcome(Found.FAILED, self._error or PeerLost("no receiver"))] * len(blobs)
        names = [blob.name for blob in blobs]
        slots = [self._slots.pop(name) for name in names]
        if any(slot.nbytes != blob.data.nbytes for slot, blob in zip(slots, blobs, strict=True)):
            self._mistaken("the receiver posted memory of another size than its objects have")
            return [Outcome(Found.FAILED, self._error)] * len(blobs)
        moves = [Move(_address(b.data), slot.address, b.data.nbytes) for b, slot in zip(blobs, slots, strict=True)]
        self._writes += 1
        try:
            await self._carrier.write(self._engine, moves)
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
        """Wait until the receiver has every object on its device. Raises TransferError when that will not be."""
        while not self._done and self._error is None and not self._ended:
            await self._hear()
        if self._error is not None:
            raise self._error

    def end(self, error: ErrorInfo | None) -> None:
        """The task is over. A receiver that is still waiting is refused with this error. Idempotent."""
        if self._ended:
            return
        if not self._done:
            self._fail(PeerRefused(error.message if error else "given up", code=error.code if error else None))
            if self.peer is not None and self._ending is None:
                told = error or ErrorInfo("cancelled", "the sender's task has ended")
                self._ending = Refused(*self.share, told)
        self._ended = True
        self._news.set()
        self._settle()

    # --- for the exchange ---------------------------------------------------------------------------

    def wanted(self, want: Want, peer: Connection) -> None:
        """A receiver is there."""
        self.peer, self.attempt, self._engine = peer, want.attempt, want.engine
        if want.names == self._names:
            self._tell(Begin(*self.share))
            return
        error = mismatch(want.names, self._names)
        self._tell(Refused(*self.share, error))
        self.peer = None
        self._fail(PeerRefused(error.message, code=error.code))

    def posts(self, post: Post) -> None:
        """Memory for some of the objects."""
        for slot in post.slots:
            if slot.name not in self._unposted:
                self._mistaken(f"memory was posted for {slot.name[:200]}, which is not expected (any more)")
                return
            self._unposted.discard(slot.name)
            self._slots[slot.name] = slot
            self._fresh.append(slot.name)
        self._news.set()

    def done(self) -> None:
        if self._unposted or self._slots or self._writes:
            self._mistaken("the receiver says that it has everything, and not everything was written")
            return
        self._done = True
        self._news.set()

    def _mistaken(self, what: str) -> None:
        """The receiver does not keep to the protocol: this transfer is over, others on its connection go on."""
        self._fail(PeerRefused(what, code="malformed"))
        self._ending = self._ending or Refused(*self.share, ErrorInfo("malformed", what))
        self._settle()

    def withdrawn(self, error: ErrorInfo) -> None:
        """The receiver gives up; it is answered when no write is under way."""
        self._ending = Withdrawn(*self.share)
        self._fail(PeerRefused(f"the receiver gave up: {error.message}", code=error.code))
        self._settle()

    def lost(self, why: str) -> None:
        """The receiver has gone."""
        self.peer = None
        if not self._done:
            self._fail(PeerLost(f"the receiving daemon has gone: {why}"))

    def fail(self, error: TransferError) -> None:
        """Another rank of the transfer cannot go on, so neither can this one."""
        self._fail(error)

    # --- inside -------------------------------------------------------------------------------------

    def _tell(self, message: Message) -> None:
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
    """Why two lists of object names are not the same, from the parts that names are made of (keys.py)."""
    theirs, mine = (list(names[0].split("/")) if names else [] for names in (wanted, own))
    for part, (a, b) in zip(("model", "layout", "generation"), zip(theirs, mine, strict=False), strict=False):
        if a != b:
            return ErrorInfo(f"{part}_mismatch", f"the receiver's {part} is {a}, the sender's {b}")
    what = f"the receiver expects {len(wanted)} blocks, the sender has {len(own)}; they are not of the same tokens"
    return ErrorInfo("blocks_mismatch", what)


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
