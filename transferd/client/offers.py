"""The memory that a client has offered: checked with a canary first, and offered again in each new session."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from transferd.client.canary import laid
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
class _SentOffer:
    """An offer for a rank, and the cache epoch that it belongs to.

    inode: of the shared memory to which it led when it was made; None for other memory. A name or a descriptor's number
    may lead to other memory later.
    """

    rank: int
    kind: str
    data: dict[str, Any]
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


class Offers:
    """A client's offers by rank. ask: sends a request and returns its value, or raises TransferError."""

    def __init__(self, ask: Callable[[wire.Control, float], Awaitable[Any]], timeout: float) -> None:
        self._ask = ask
        self._timeout = timeout
        self._made: dict[int, _SentOffer] = {}

    def __len__(self) -> int:
        return len(self._made)

    async def make(
        self,
        rank: int,
        handle: HandleLike | Mapping[str, Any],
        epoch: int,
        caches: Mapping[str, Sequence[Any]] | None,
        block: int | None,
    ) -> None:
        """See Client.offer."""
        kind, data = (handle["kind"], handle["data"]) if isinstance(handle, Mapping) else (handle.kind, handle.data)
        offer = _SentOffer(rank, kind, data, epoch, inode_of(data) if kind == "shm" else None)
        known = self._made.get(rank) == offer  # then its blocks may be in use, so no canary
        if caches is None or known or not await self._taken(offer, caches, block):
            await self._ask(offer.said(), self._timeout)
        self._made[rank] = offer

    async def _taken(self, offer: _SentOffer, caches: Mapping[str, Sequence[Any]], block: int | None) -> bool:
        """Let the daemon check a canary. True: it is an old daemon that ignores canaries and has taken the offer."""
        with laid(caches, block) as canary:
            answer = await self._ask(replace(offer, data=offer.data | {KEY: canary}).said(), self._timeout)
        return bool(answer != CHECKED)

    def keep(self, epoch: int) -> None:
        """Drop the offers of other epochs: the cache was cleared or restored."""
        self._made = {rank: offer for rank, offer in self._made.items() if offer.epoch == epoch}

    def again(self, current: int, epoch: int) -> list[wire.Control]:
        """Return the offers of epoch `current`, renumbered to the new session's epoch. Drops all others.

        An offer whose name or descriptor leads to other memory now is dropped, too: the engine offers that itself.
        """
        self.keep(current)
        for rank in [rank for rank, offer in self._made.items() if offer.outdated]:
            log.warning("the memory offered for rank %d is gone, or was made anew; offer it again", rank)
            del self._made[rank]
        self._made = {rank: replace(offer, epoch=epoch) for rank, offer in self._made.items()}
        return [offer.said() for offer in self._made.values()]

    def clear(self) -> None:
        self._made.clear()
