"""A sender and a receiver, joined by real connections."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.storage.peer.nodes import SLOT, Node
from tests.support.simulation.carrier import Fabric
from transferd.runtime.compat import timeout
from transferd.storage.peer import outbound as inbound_module
from transferd.storage.peer.transport import PeerTransport
from transferd.tiers.pinned import HostRegion


@pytest.fixture(autouse=True)
def short_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbound_module, "HOLD_S", 0.05)


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[Node, Node]]:
    """(sender, receiver)"""
    fabric = Fabric()
    made = []
    for name in ("sender", "receiver"):
        carrier = fabric.carrier(name)
        node = Node(PeerTransport(carrier, "127.0.0.1:0", ranks=2), carrier, HostRegion(64 * SLOT))
        await node.transport.open()
        carrier.register(node.memory)
        made.append(node)
    async with timeout(30):
        yield made[0], made[1]
    for node in made:
        await node.transport.close()
