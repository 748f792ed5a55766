"""A rank: each task kind has something that runs it. What the handlers do is in the tests of their modules."""

from __future__ import annotations

from tests.workers.rig import Rig
from transferd.tasks import Lane

DIRECT = {Lane.SEND, Lane.RECEIVE}  # handled where there is a transport to peers: tests/workers/test_direct.py


def test_each_lane_has_a_handler() -> None:
    assert set(Rig().worker._handlers) == set(Lane) - DIRECT
