"""A rank: each task kind has something that runs it. What the handlers do is in the tests of their modules."""

from __future__ import annotations

import pytest

from tests.support.simulation.carrier import Fabric
from tests.workers.rig import Rig
from transferd.storage.peer.transport import PeerTransport
from transferd.tasks import Lane

DIRECT = {Lane.SEND, Lane.RECEIVE}  # handled where there is a transport to peers


@pytest.mark.parametrize("direct", [False, True])
async def test_each_lane_has_a_handler(direct: bool) -> None:
    transport = PeerTransport(Fabric().carrier("here"), "127.0.0.1:0", ranks=1) if direct else None
    assert set(Rig(transport=transport).worker._handlers) == (set(Lane) if direct else set(Lane) - DIRECT)
