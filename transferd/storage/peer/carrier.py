"""What moves the bytes of a direct transfer: writes into the registered memory of another process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from transferd.tiers.base import HostMemory


class Move(NamedTuple):
    """One range: from an address here to an address in the peer's registered memory."""

    source: int
    target: int
    nbytes: int


class Carrier(Protocol):
    """The contract of a carrier.

    `write` returns when the last byte is in the peer's memory, and raises when that did not happen. After either,
    local memory is free again and no byte leaves it for this call. After a failure, bytes that had left may still
    arrive: a peer that was stopped finds them when it goes on (seen with TCP), so it holds such memory back a while.
    It refuses what lies outside memory that the peer has registered. Every wait in it is bounded.
    """

    @property
    def address(self) -> str:
        """What a peer needs in order to write here. Valid after `open`."""
        ...

    async def open(self) -> None:
        """Raises ConfigError, TransferError."""
        ...

    def register(self, memory: HostMemory) -> None:
        """Let peers write to this memory, until `unregister`. Raises TransferError."""
        ...

    def unregister(self, memory: HostMemory) -> None: ...

    async def write(self, peer: str, moves: Sequence[Move]) -> None:
        """Raises PeerLost. Must not be cancelled."""
        ...

    async def close(self) -> None:
        """After every call has returned. Idempotent."""
        ...
