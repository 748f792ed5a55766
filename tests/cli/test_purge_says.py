"""What `transferd purge` says about objects that stay."""

from __future__ import annotations

import pytest

from transferd.cli.keeping import _not_reached
from transferd.wire.answers import Purged

AWAY = "; /b was away: its objects go when it returns"
SHARED = "; the level object keeps its objects, because others use it"


@pytest.mark.parametrize(
    ("purged", "by_age", "says"),
    [
        (Purged(3, 30), False, ""),
        (Purged(3, 30, ["/b"], ["/a"]), False, f"{AWAY} (the order is on /a)"),
        (Purged(3, 30, ["/b"]), False, f"{AWAY}; if the daemon restarts before, purge again"),
        (
            Purged(shared=["object"]),
            False,
            f"{SHARED}: this daemon uses them no more until it stores them again, or restarts",
        ),
        (Purged(shared=["object"]), True, SHARED),
        (Purged(1, 9, ["/b"], ["/a"], ["object"]), True, f"{AWAY} (the order is on /a){SHARED}"),
    ],
)
def test_a_purge_says_what_stays_and_for_how_long(purged: Purged, by_age: bool, says: str) -> None:
    assert _not_reached(purged, by_age=by_age) == says
    assert purged.complete == (says == "")
