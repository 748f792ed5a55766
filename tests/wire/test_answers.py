"""What orders have reached: answers add up, and read like data and like numbers."""

from __future__ import annotations

import pytest

from transferd.wire.answers import Pinned, Purged


def test_what_purges_removed_adds_up_and_reads_like_data() -> None:
    both = Purged(1, 10, ["/mnt/b"], ["/mnt/a"]) + Purged(2, 20, ["/mnt/b", "object"])
    assert (both["objects"], both["bytes"]) == (3, 30)
    assert (both["not_reached"], both.kept_by, both.complete) == (["/mnt/b", "object"], ["/mnt/a"], False)
    assert Purged(1, 10).complete
    with pytest.raises(KeyError):
        both["blocks"]


def test_what_is_pinned_is_a_number() -> None:
    pinned = Pinned(5, 3, 2)
    assert (pinned, pinned.durable, pinned.reachable) == (5, 3, 2)
    assert repr(pinned) == "Pinned(5, durable=3, reachable=2)"
