"""Memories that engines map have a bound, and no user takes all of them."""

from __future__ import annotations

import resource

import pytest

from transferd.daemon import memories
from transferd.daemon.memories import FEWEST, MAPS_EACH, check_memories, memories_of, most_memories
from transferd.errors import TransferError
from transferd.tiers.base import DeviceHandle


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(memories, "most_memories", lambda: 1000)
    return 1000


def test_descriptors_and_maps_both_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "most_maps", lambda: 65530)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4096, 4096))
    assert most_memories() == 1024, "of descriptors"
    monkeypatch.setattr(memories, "most_maps", lambda: 600)
    assert most_memories() == 600 // 2 // MAPS_EACH
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert most_memories() == 600 // 2 // MAPS_EACH


def test_one_user_has_half_of_them_at_most(most: int) -> None:
    mapped = [(5001, 300), (5001, 190)]
    check_memories(10, "b", 5001, mapped)
    with pytest.raises(TransferError, match="engine 'b' offers 11 more memories, and those of one user") as refused:
        check_memories(11, "b", 5001, mapped)
    assert refused.value.reason == "no_room"
    check_memories(64, "other", 5002, mapped)


def test_all_together_have_a_bound(most: int) -> None:
    mapped = [(uid, 240) for uid in range(4)]
    check_memories(40, "a", 9, mapped)
    with pytest.raises(TransferError, match="all engines may have 1000 mapped"):
        check_memories(41, "a", 9, mapped)


def test_a_low_limit_leaves_an_engine_with_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories, "most_memories", lambda: FEWEST)
    check_memories(FEWEST, "only", None, [])
    with pytest.raises(TransferError):
        check_memories(FEWEST + 1, "only", None, [])


def test_what_a_handle_names() -> None:
    assert memories_of(DeviceHandle("shm", {"name": "a"})) == 1
    assert memories_of(DeviceHandle("shm", {"name": "a", "more": [{"name": "b"}, {"name": "c"}]})) == 3
    assert memories_of(DeviceHandle("shm", {"name": "a", "more": "no list"})) == 1
    assert memories_of(DeviceHandle("cuda", {})) == 0
