"""What `transferd purge` says of disks that it has not reached."""

from __future__ import annotations

import pytest

from transferd.cli.keeping import _not_reached
from transferd.wire.answers import Purged


@pytest.mark.parametrize(
    ("purged", "said"),
    [
        (Purged(1, 10, [], ["/mnt/a"]), ""),
        (
            Purged(1, 10, ["/mnt/b"], ["/mnt/a"]),
            "; /mnt/b was away: its objects go when it returns (the order is on /mnt/a)",
        ),
        (
            Purged(1, 10, ["/mnt/b"], []),
            "; /mnt/b was away: its objects go when it returns; if the daemon restarts before, purge again",
        ),
        (
            Purged(1, 10, ["/mnt/b", "/mnt/c"], ["/mnt/a"]),
            "; /mnt/b, /mnt/c were away: their objects go when they return (the order is on /mnt/a)",
        ),
    ],
)
def test_a_purge_says_what_is_left_and_when_it_goes(purged: Purged, said: str) -> None:
    assert _not_reached(purged) == said
