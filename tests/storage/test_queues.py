"""Groups of objects in the order of eviction. test_lru.py has the index over them, test_queues_shares.py the owners."""

from __future__ import annotations

import math

from transferd.storage.queues import (
    FOUND_AT,
    PINNED,
    EngineOwner,
    Entry,
    Queue,
    Use,
    UseGroup,
    order_of,
    spared,
)


def test_a_group_is_root_first_and_drops_what_has_moved_on() -> None:
    queue = Queue(EngineOwner("a"))
    group, other = UseGroup(Use(), 2, queue.own), UseGroup(Use(), 3, queue.own)
    entries = [Entry(f"n{depth}", 10) for depth in range(4)]
    for depth in (2, 0, 3, 1):
        group.add(entries[depth], depth)
    assert [entry.name for entry in group.root_first()] == ["n0", "n1", "n2", "n3"]
    other.add(entries[3], 0)
    assert [entry.name for entry in group.root_first()] == ["n0", "n1", "n2"]
    group.raise_to(entries[2], 0)
    assert entries[2].depth == 0


def chain(queue: Queue, number: int, space: str, length: int) -> UseGroup:
    use = Use()
    group = queue.own.groups[use] = UseGroup(use, number, queue.own)
    for depth in range(length):
        group.add(Entry(f"{space}/{number}-{depth}/0", 10), depth)
    return group


def going_of(queue: Queue, spare: float) -> list[Entry]:
    uses, objects_of = spared({queue: spare}, int)
    return [entry for groups in uses for group in groups for entry in objects_of(group)]


def test_a_queue_goes_by_use_and_then_from_the_leaf() -> None:
    queue = Queue(EngineOwner("a"))
    chain(queue, 1, "m/f/g", 2)
    second = chain(queue, 2, "m/f/g", 2)
    second.add(Entry("m/f/g/last/0", 10), 5)
    going = going_of(queue, math.inf)
    assert [entry.name.split("/")[3] for entry in going] == ["1-1", "1-0", "last", "2-1", "2-0"]
    assert going_of(queue, 49) == going[:4], "it can spare no more"
    assert sorted(going, key=order_of) == going
    queue.own.aside.add(going[2], 5)
    assert going_of(queue, math.inf) == [*going[:2], *going[3:]]


def test_a_chain_is_continued_only_if_it_is_clear_which() -> None:
    queue = Queue(EngineOwner("a"))
    one = chain(queue, 1, "m/f/g", 2)
    chain(queue, 2, "m/f/other", 2)
    chain(queue, 3, "m/f/g", 3)
    assert queue.continued_by("m/f/g/next/0", 2, ()) is one
    assert queue.continued_by("m/f/g/next/0", 2, {one.use}) is None, "it is still being written"
    assert queue.continued_by("m/f/g/next/0", 4, ()) is None, "none ends there"
    chain(queue, 4, "m/f/g", 2)
    assert queue.continued_by("m/f/g/next/0", 2, ()) is None, "two end there"


def test_an_entry_has_its_owner_and_whether_it_was_used() -> None:
    queue = Queue(EngineOwner("a"))
    entry = Entry("n", 10)
    assert (entry.owner, entry.pinned, entry.touched) == (None, False, False)
    UseGroup(Use(), 1, queue.own, FOUND_AT).add(entry, 0)
    assert (entry.owner, entry.pinned, entry.touched) == (EngineOwner("a"), False, False)
    queue.own.aside.add(entry, 0)
    entry.kept = PINNED
    assert (entry.owner, entry.pinned, entry.touched) == (EngineOwner("a"), True, True)
