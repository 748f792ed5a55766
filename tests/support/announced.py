"""Announcements of blocks of which only the hashes are known."""

from __future__ import annotations

from collections.abc import Iterable

from transferd.daemon.kv_events.announcements import Block
from transferd.daemon.kv_events.snapshot import Announced


def announced_hashes(dp_rank: int, medium: str, hashes: Iterable[int]) -> Announced:
    return Announced(dp_rank, medium, [Block(hash_, None, False, None) for hash_ in hashes], 0)
