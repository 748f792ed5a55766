"""What `transferd purge` says of disks that it has not reached, and of levels that others use too."""

from __future__ import annotations

import pytest

from transferd.cli.keeping import _not_reached
from transferd.wire.answers import Purged

SHARED = "; the level object keeps its objects, because others use it"
REMEDY = " (--shared removes them for all)"


@pytest.mark.parametrize(
    ("purged", "by_age", "said"),
    [
        (Purged(1, 10, [], ["/mnt/a"]), False, ""),
        (
            Purged(1, 10, ["/mnt/b"], ["/mnt/a"]),
            False,
            "; /mnt/b was away: its objects go when it returns (the order is on /mnt/a)",
        ),
        (
            Purged(1, 10, ["/mnt/b"], []),
            False,
            "; /mnt/b was away: its objects go when it returns; if the daemon restarts before, purge again",
        ),
        (
            Purged(1, 10, ["/mnt/b", "/mnt/c"], ["/mnt/a"]),
            False,
            "; /mnt/b, /mnt/c were away: their objects go when they return (the order is on /mnt/a)",
        ),
        (
            Purged(shared=["object"]),
            False,
            f"{SHARED}: this daemon uses them no more until it stores them again, or restarts{REMEDY}",
        ),
        (Purged(shared=["object"]), True, f"{SHARED}{REMEDY}"),
        (
            Purged(1, 10, ["/mnt/b"], ["/mnt/a"], ["object"]),
            True,
            f"; /mnt/b was away: its objects go when it returns (the order is on /mnt/a){SHARED}{REMEDY}",
        ),
    ],
)
def test_a_purge_says_what_is_left_and_when_it_goes(purged: Purged, by_age: bool, said: str) -> None:
    assert _not_reached(purged, by_age=by_age) == said
    assert purged.complete == (said == "")
