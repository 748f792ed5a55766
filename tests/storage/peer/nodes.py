"""Two daemons' transports for transfers between them, on real connections; a test decides when bytes move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.simulation.carrier import MemoryCarrier
from transferd.storage.base import Blob, Found, Outcome
from transferd.storage.peer.outbound import Inbound, Outbound
from transferd.storage.peer.transport import PeerTransport
from transferd.tasks import ErrorInfo
from transferd.tiers.pinned import HostRegion

SLOT = 4096
NAMES = [f"model/layout/gen/{i:040x}/0" for i in range(8)]
RANKS = "this daemon has 2 ranks"
WHY = ErrorInfo("expired", "the deadline was reached")


@dataclass
class Node:
    """One daemon's transport, its carrier, and the staging that it uses."""

    transport: PeerTransport
    carrier: MemoryCarrier
    memory: HostRegion

    def blobs(self, names: Sequence[str], first_slot: int = 0) -> list[Blob]:
        starts = [(first_slot + i) * SLOT for i in range(len(names))]
        return [Blob(n, self.memory.view[s : s + SLOT]) for n, s in zip(names, starts, strict=True)]

    def fill(self, names: Sequence[str]) -> list[Blob]:
        blobs = self.blobs(names)
        for blob in blobs:
            blob.data[:] = content(blob.name)
        return blobs


def content(name: str) -> bytes:
    return (name.encode() * (SLOT // len(name) + 1))[:SLOT]


async def joined(
    sender: Node, receiver: Node, names: list[str] = NAMES, transfer: str = "t", rank: int = 0
) -> tuple[Outbound, Inbound]:
    """A transfer that has begun."""
    outbound = sender.transport.outbound(transfer, rank, names)
    inbound = receiver.transport.inbound(transfer, rank, names, sender.transport.address)
    await inbound.begun()
    return outbound, inbound


async def asked(outbound: Outbound, count: int) -> list[str]:
    names: list[str] = []
    while len(names) < count:
        names += await outbound.posted(count)
    return names


def failed(outcomes: Sequence[Outcome], code: str) -> bool:
    return all(o.found is Found.FAILED and o.error is not None and o.error.reason == code for o in outcomes)
