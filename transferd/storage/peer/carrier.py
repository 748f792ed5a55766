"""Carriers move the bytes of a transfer between peers: they write into the registered memory of another process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from transferd.tiers.base import HostMemory


class PeerWrite(NamedTuple):
    """One range: from an address here to an address in the peer's registered memory."""

    source: int
    target: int
    nbytes: int


class Carrier(Protocol):
    """The contract of a carrier.

    `write` returns once the last byte is in the peer's memory, and raises if that fails. In both cases local memory
    is free again, and no more bytes leave it for this call. After a failure, bytes on the wire may still arrive: a
    stopped process receives them when it continues (seen with TCP). So the receiver holds such memory for a while.
    A write outside the peer's registered memory is refused. Every wait in a carrier is bounded.
    """

    @property
    def address(self) -> str:
        """The address that a peer needs to write here. Valid after `open`."""

    async def open(self) -> None:
        """Start the carrier. Raises ConfigError, TransferError."""

    def register(self, memory: HostMemory) -> None:
        """Let peers write to this memory, until `unregister`. Raises TransferError."""

    def unregister(self, memory: HostMemory) -> None: ...

    async def write(self, peer: str, writes: Sequence[PeerWrite]) -> None:
        """Write all ranges. Raises PeerLost. Do not cancel it."""

    async def close(self) -> None:
        """Stop the carrier. Call it after every other call has returned. Idempotent."""
