"""Peers by name: sending to one, and transports whose peers are names alone."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from transferd.errors import TierError
from transferd.wire.credentials import Credentials
from transferd.wire.passing import Descriptors
from transferd.wire.transport import ServerPeer, ServerTransport


def send(transport: ServerTransport, peer: bytes, payload: bytes) -> bool:
    """Send to the peer of this name. Returns False if it is not connected, or does not read."""
    connection = transport.peer(peer)
    return connection is not None and connection.send(payload)


class NamedPeers(ServerTransport):
    """A ServerTransport where every name is a connected peer; what is sent to any of them goes to `send`."""

    endpoints = ("memory",)

    @abstractmethod
    def send(self, peer: bytes, payload: bytes) -> bool:
        """As ServerPeer.send, for the peer of this name."""

    def observes(self, peer: bytes) -> bool:
        return False

    def credentials(self, peer: bytes) -> Credentials | None:
        return None

    def peer(self, name: bytes) -> ServerPeer:
        return _Named(self, name)

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Named:
    transport: NamedPeers
    name: bytes
    where: str = ""

    @property
    def observer(self) -> bool:
        return self.transport.observes(self.name)

    @property
    def credentials(self) -> Credentials | None:
        return self.transport.credentials(self.name)

    def send(self, payload: bytes, /) -> bool:
        return self.transport.send(self.name, payload)

    async def passed(self, token: bytes) -> Descriptors:
        raise TierError("nothing is passed to a peer that is a name alone")
