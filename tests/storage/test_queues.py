"""Groups of objects in the order of eviction; test_lru.py has the index over them, and test_shares.py its owners."""

from __future__ import annotations

from transferd.storage.queues import FOUND_AT, Entry, Queue, Use, UseGroup
from transferd.storage.shares import Account, EngineOwner


def test_a_group_is_root_first_and_drops_what_has_moved_on() -> None:
    queue = Queue(Account(EngineOwner("a")))
    group, other = UseGroup(Use(), 2, queue), UseGroup(Use(), 3, queue)
    entries = [Entry(f"n{depth}", 10) for depth in range(4)]
    for depth in (2, 0, 3, 1):
        group.add(entries[depth], depth)
    assert [entry.name for entry in group.root_first()] == ["n0", "n1", "n2", "n3"]
    other.add(entries[3], 0)
    assert [entry.name for entry in group.root_first()] == ["n0", "n1", "n2"]
    group.raise_to(entries[2], 0)
    assert entries[2].depth == 0


def test_an_entry_says_whose_it_is_and_whether_it_was_used() -> None:
    account = Account(EngineOwner("a"))
    queue = Queue(account)
    entry = Entry("n", 10)
    assert (entry.account, entry.pinned, entry.touched) == (None, False, False)
    UseGroup(Use(), 1, queue, FOUND_AT).add(entry, 0)
    assert (entry.account, entry.pinned, entry.touched) == (account, False, False)
    queue.pinned.add(entry, 0)
    assert (entry.account, entry.pinned, entry.touched) == (account, True, True)
