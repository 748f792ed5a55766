"""The memory that a client has offered: checked with a canary first, and offered again in each new session."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from transferd.client.canary import laid
from transferd.client.repeating import Repeating
from transferd.client.session import UNSAYABLE
from transferd.errors import ProtocolError
from transferd.tiers.offered import INODE, inode_of
from transferd.wire import protocol as wire
from transferd.wire.canary import CHECKED, KEY

log = logging.getLogger(__name__)


class HandleLike(Protocol):
    """A device tier's handle (tiers/base.py), or anything of that shape."""

    @property
    def kind(self) -> str: ...
    @property
    def data(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class _KeptOffer:
    """An offer for a rank, and the boot and cache epoch under which the daemon took it, or was last asked to.

    inode: of the shared memory to which it led when it was made; None for other memory. A name or a descriptor's number
    may lead to other memory later.
    """

    rank: int
    kind: str
    data: dict[str, Any]
    boot_id: str
    epoch: int
    inode: tuple[int, int] | None = None

    @property
    def outdated(self) -> bool:
        return self.inode is not None and self.inode != inode_of(self.data)

    def said(self) -> wire.Offer:
        data = self.data if self.inode is None else self.data | {INODE: list(self.inode)}
        try:
            return wire.offer(self.rank, self.kind, data, self.epoch)
        except UNSAYABLE as error:
            raise ProtocolError(f"cannot encode the handle: {error}", code="bad_value") from error

    def ended_before(self, now: wire.Welcome) -> bool:
        """Whether the cache was cleared since, which ends the offers of earlier epochs: that memory may be gone.

        Epochs of one boot can be compared. A registration begins one, and the same engine's offers continue in it; each
        clear begins one. In another boot, a clear after the engine's registration was one that we did not hear of.
        """
        if self.boot_id == now.boot_id:
            return now.registered <= self.epoch < now.epoch
        return 0 < now.registered < now.epoch


class Offers:
    """A client's offers by rank. ask: sends a request and returns its value, or raises TransferError."""

    def __init__(self, ask: Callable[[wire.Control, float], Awaitable[Any]], timeout: float) -> None:
        self._ask = ask
        self._timeout = timeout
        self._made: dict[int, _KeptOffer] = {}
        self._repeating: dict[int, Repeating] = {}

    def __len__(self) -> int:
        return len(self._made)

    async def make(
        self,
        rank: int,
        handle: HandleLike | Mapping[str, Any],
        session: wire.Welcome,
        caches: Mapping[str, Sequence[Any]] | None,
        block: int | None,
    ) -> None:
        """See Client.offer. session: the newest Welcome."""
        kind, data = (handle["kind"], handle["data"]) if isinstance(handle, Mapping) else (handle.kind, handle.data)
        inode = inode_of(data) if kind == "shm" else None
        offer = _KeptOffer(rank, kind, data, session.boot_id, session.epoch, inode)
        known = self._made.get(rank) == offer  # then its blocks may be in use, so no canary
        if not known:
            self._made.pop(rank, None)  # an earlier one must not be repeated meanwhile
        if caches is None or known or not await self._taken(offer, caches, block):
            await self._ask(offer.said(), self._timeout)
        self._made[rank] = offer
        self._repeating[rank] = Repeating((session.boot_id, session.session, session.epoch))

    async def _taken(self, offer: _KeptOffer, caches: Mapping[str, Sequence[Any]], block: int | None) -> bool:
        """Let the daemon check a canary. True: it is an old daemon that ignores canaries and has taken the offer."""
        with laid(caches, block) as canary:
            answer = await self._ask(replace(offer, data=offer.data | {KEY: canary}).said(), self._timeout)
        return bool(answer != CHECKED)

    def keep(self, epoch: int) -> None:
        """Drop the offers of other epochs: this client has cleared or restored the cache."""
        self._made = {rank: offer for rank, offer in self._made.items() if offer.epoch == epoch}

    def again(self, session: wire.Welcome, now: float) -> list[wire.Control]:
        """The offers to repeat after this Welcome, which names an engine. now: monotonic seconds.

        An offer whose name or descriptor leads to other memory now is dropped: the engine offers that itself.
        """
        life = session.boot_id, session.session, session.epoch
        requests: list[wire.Control] = []
        for rank, offer in list(self._made.items()):
            if offer.ended_before(session):
                del self._made[rank]
            elif offer.outdated:
                log.warning("the memory offered for rank %d is gone, or was made anew; offer it again", rank)
                del self._made[rank]
            elif self._repeating[rank].due(life, now, known=rank not in session.missing):
                self._made[rank] = replace(offer, boot_id=session.boot_id, epoch=session.epoch)
                requests.append(self._made[rank].said())
        return requests

    def clear(self) -> None:
        self._made.clear()
