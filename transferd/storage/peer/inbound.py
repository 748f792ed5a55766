"""The receiver's half of one rank's transfer: posts memory, and knows when the sender is done with it."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable, Sequence

from transferd.errors import PeerLost, PeerRefused, TransferError
from transferd.storage.base import FOUND, Blob, Found, Outcome
from transferd.storage.peer.connection import PeerConnection
from transferd.storage.peer.messages import Done, Landed, Post, PostedSlot, Want, Withdraw, theirs
from transferd.tasks import ErrorInfo

# How long to hold posted memory after a failed write or a lost connection. By then bytes on the wire have arrived,
# and the write of a sender that lost only its connection has ended, or stalled for longer than the carrier allows.
HOLD_S = 4.0


class Inbound:
    """Used by one receiving rank and fed by the PeerTransport, all on one loop.

    Ends after `end`, once no memory is posted.
    """

    def __init__(
        self,
        transfer: str,
        rank: int,
        attempt: int,
        names: Sequence[str],
        engine: str,
        join: Callable[[Inbound], Awaitable[PeerConnection]],
        forget: Callable[[Inbound], None],
    ) -> None:
        self.transfer = transfer
        self.rank = rank
        self.attempt = attempt
        self._names = list(names)
        self._engine = engine
        self._join = join
        self._forget = forget
        self.peer: PeerConnection | None = None  # the sender's, from Want to the end
        self._error: TransferError | None = None
        self._ended = False
        self._suspect = False  # a write failed, and some of its bytes may still arrive
        self._held = 0  # groups of buffers held for that reason
        self._began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._posted: dict[str, asyncio.Future[Outcome]] = {}

    @property
    def share(self) -> tuple[str, int, int]:
        """The first three fields of this share's messages."""
        return self.transfer, self.rank, self.attempt

    # --- for the Receiver ---------------------------------------------------------------------------

    async def begun(self) -> None:
        """Wait until the sender works on the same objects. Raises TransferError if it will not.

        Waits without a time limit (the task has a deadline).
        """
        if self._ended:
            raise PeerLost("the task ended before the transfer began")
        peer = await self._join(self)
        if self._error is None and not self._ended:
            self.peer = peer
            peer.send(Want(*self.share, self._names, self._engine))
            await self._began
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
        self.peer.send(Post(*self.share, slots))
        return list(await asyncio.gather(*waiting))

    def end(self, error: ErrorInfo | None) -> None:
        """End the share. error: None if every object was intact; otherwise the sender is told to stop. Idempotent."""
        if self._ended:
            return
        self._ended = True
        if self.peer is not None and self._error is None:
            if error is None:
                self.peer.send(Done(*self.share))
            else:
                self.cancel(error)
                return  # until the sender has confirmed that it writes no more
        self._settle()

    def cancel(self, error: ErrorInfo) -> None:
        """Ask the sender to stop. It answers once it writes no more."""
        if self._error is None:
            if self.peer is not None:
                self.peer.send(Withdraw(*self.share, error))
            self._fail(PeerRefused(error.message, code=error.code))

    # --- for the exchange ---------------------------------------------------------------------------

    def begins(self) -> None:
        if not self._began.done():
            self._began.set_result(None)

    def landed(self, landed: Landed) -> None:
        """The sender is done with these buffers, whether or not its write succeeded."""
        waiting = [self._posted.pop(name) for name in landed.names if name in self._posted]
        error = landed.error
        if error is None:
            _tell(waiting, FOUND)
        else:
            self._suspect = True
            error = theirs(error, PeerLost.code)
            outcome = Outcome(Found.FAILED, PeerLost(error.message, code=error.code))
            self._held += 1
            asyncio.get_running_loop().call_later(HOLD_S, self._release, waiting, outcome)
        self._settle()

    def _release(self, waiting: Sequence[asyncio.Future[Outcome]], outcome: Outcome) -> None:
        self._held -= 1
        _tell(waiting, outcome)
        self._settle()

    def refused(self, error: ErrorInfo) -> None:
        """The sender refused, and writes no more."""
        self._fail(PeerRefused(f"the sender refused: {error.message}", code=error.code))
        self._let_go()

    def withdrawn(self) -> None:
        """The sender has confirmed the cancellation, and writes no more."""
        self._let_go()

    def lost(self, why: str) -> None:
        """The connection to the sender is lost. Bytes on the wire may still arrive, for up to HOLD_S."""
        self.peer = None
        self._fail(PeerLost(f"lost the sending daemon: {why}"))
        self._suspect = True
        self._let_go()

    # --- inside -------------------------------------------------------------------------------------

    def _fail(self, error: TransferError) -> None:
        if self._error is None:
            self._error = error
        self.begins()

    def _let_go(self) -> None:
        """The sender starts no more writes. Hold the buffers for HOLD_S if a write failed, or may still run."""
        self.peer = None
        posted, self._posted = list(self._posted.values()), {}
        outcome = Outcome(Found.FAILED, self._error)
        self._held += 1
        if posted and self._suspect:
            asyncio.get_running_loop().call_later(HOLD_S, self._release, posted, outcome)
        else:
            self._release(posted, outcome)

    def _settle(self) -> None:
        if self._ended and not self._posted and not self._held:
            self._forget(self)


def _tell(waiting: Sequence[asyncio.Future[Outcome]], outcome: Outcome) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(outcome)


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
