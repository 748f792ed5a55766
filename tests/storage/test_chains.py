"""Which use continues which chain: the one that the task names, or the only one that can be meant."""

from __future__ import annotations

import random

import pytest

from transferd.storage.lru import LruIndex, Use
from transferd.storage.queues import UNSAVED


def order(index: LruIndex) -> list[str]:
    """All names, root first and the last used first."""
    return [entry.name for entry in index.hottest_first()]


def called(chain: str, depth: int, rank: int = 0) -> str:
    return f"m/f/g/{chain}{depth}/{rank}"


def named(chain: str, start: int, count: int) -> Use:
    """The use of a task that says which block comes before its own."""
    use = Use(start=start, stop=start + count)
    use.parent, use.last = f"{chain}{start - 1}" if start else "", f"{chain}{start + count - 1}"
    return use


def store(index: LruIndex, chain: str, start: int, count: int = 1, ranks: int = 1) -> Use:
    use = named(chain, start, count)
    for depth in range(start, start + count):
        for rank in range(ranks):
            if isinstance(index.reserve(called(chain, depth, rank), 1, use, depth), list):
                index.commit(called(chain, depth, rank))
    return use


def usable(index: LruIndex, chain: str, ranks: int = 1) -> int:
    """How many blocks from the root on are there on all ranks."""
    depth = 0
    while all(called(chain, depth, rank) in index for rank in range(ranks)):
        depth += 1
    return depth


# --- named ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chains", [2, 8, 48])
def test_conversations_of_one_length_keep_their_roots(chains: int, ranks: int) -> None:
    """Guessed, none of them could be told from the others: 33 blocks were left of two, and none of them usable."""
    length, held = 16, 11
    index = LruIndex(chains * held * ranks)
    for depth in range(length):
        for chain in range(chains):
            store(index, f"c{chain}.", depth, 1, ranks)
    left = [usable(index, f"c{chain}.", ranks) for chain in range(chains)]
    assert sum(left) * ranks == len(index) == chains * held * ranks, "each block that is left can be used"


def test_what_is_used_last_stays_whole() -> None:
    index = LruIndex(8)
    for depth in range(4):
        store(index, "a", depth)
        store(index, "b", depth)
    store(index, "a", 4)
    assert (usable(index, "a"), usable(index, "b")) == (5, 3), "the older one shrinks from its leaf"


def test_a_parent_that_is_not_stored_costs_nothing() -> None:
    index = LruIndex(8)
    store(index, "a", 5, 2)
    assert order(index) == [called("a", 5), called("a", 6)]
    store(index, "b", 0, 2)
    assert order(index)[0] == called("b", 0)


def test_two_chains_with_one_root_part_and_the_later_one_has_the_root() -> None:
    index = LruIndex(100)
    store(index, "s", 0, 4)
    first = named("s", 4, 2)
    for depth in (4, 5):
        index.reserve(called("a", depth), 1, first, depth)
        index.commit(called("a", depth))
    second = named("s", 4, 2)
    for depth in (4, 5):
        index.reserve(called("b", depth), 1, second, depth)
        index.commit(called("b", depth))
    shared = [called("s", depth) for depth in range(4)]
    assert order(index) == [*shared, called("b", 4), called("b", 5), called("a", 4), called("a", 5)]
    third = Use(start=6, stop=7)
    third.parent = "a5"
    index.reserve(called("a", 6), 1, third, 6)
    index.commit(called("a", 6))
    assert order(index)[:3] == [called("a", 4), called("a", 5), called("a", 6)]
    assert len(index.chains.of) == 2


def test_a_task_that_begins_a_sequence_continues_nothing_however_it_is_numbered() -> None:
    index = LruIndex(100)
    store(index, "a", 0, 4)
    store(index, "b", 0, 4)
    assert len(index.chains.of) == 2


def test_what_a_chain_still_writes_when_it_is_continued_belongs_to_its_successor() -> None:
    index = LruIndex(6)
    before = named("a", 0, 3)
    for depth in range(2):
        index.reserve(called("a", depth), 1, before, depth)
        index.commit(called("a", depth))
    index.reserve(called("a", 2), 1, before, 2)  # it is being written
    after = named("a", 3, 1)
    index.reserve(called("a", 3), 1, after, 3)
    index.commit(called("a", 3))
    store(index, "b", 0)
    index.commit(called("a", 2))
    assert {index.get(called("a", depth)).group.use for depth in range(4)} == {after}  # type: ignore[union-attr]
    assert order(index) == [called("b", 0), *(called("a", depth) for depth in range(4))]
    assert index.first_use == index.get(called("a", 0)).group.number  # type: ignore[union-attr]


def test_a_load_of_the_next_blocks_uses_what_leads_to_them() -> None:
    index = LruIndex(8)
    for depth in range(4):
        store(index, "a", depth)
        store(index, "b", depth)
    load = Use(start=2)
    load.parent = "a1"
    index.find([called("a", 2), called("a", 3)], load)
    store(index, "c", 0, 4)
    assert (usable(index, "a"), usable(index, "b")) == (4, 0)


def test_blocks_that_are_held_for_the_levels_below_join_their_chain_when_they_are_released() -> None:
    index = LruIndex(100)
    index.holds = True
    uses = [store(index, chain, depth) for depth in range(3) for chain in "ab"]
    for use, (depth, chain) in zip(uses, [(depth, chain) for depth in range(3) for chain in "ab"], strict=True):
        index.unpin(index.get(called(chain, depth)), use, UNSAVED)  # type: ignore[arg-type]
    assert order(index) == [called(chain, depth) for chain in "ba" for depth in range(3)]


def test_a_chain_over_several_indexes_goes_on_in_each() -> None:
    """As the disks of one store: a block's parent may lie on another disk, or its chain skip one."""
    draw = random.Random(3)
    indexes = [LruIndex(20), LruIndex(20), LruIndex(20)]
    for index in indexes:
        index.chains.together = [one.chains for one in indexes]
    for depth in range(14):
        for chain in "abcdef":
            use, name = named(chain, depth, 1), called(chain, depth)
            index = draw.choice(indexes)
            if isinstance(index.reserve(name, 1, use, depth), list):
                index.commit(name)
    numbers = [
        {index.get(called(chain, depth)).group.number for depth in range(14) if called(chain, depth) in index}  # type: ignore[union-attr]
        for index in indexes
        for chain in "abcdef"
    ]
    assert max(map(len, numbers)) == 1, "one group for a chain on each disk"


@pytest.mark.parametrize("seed", range(40))
def test_any_parents_on_any_disks_leave_the_books_right(seed: int) -> None:
    """Nonsense too: circles, parents of other lengths, uses that begin on one disk and go on on another."""
    draw = random.Random(seed)
    indexes = [LruIndex(30) for _ in range(draw.randint(1, 3))]
    for index in indexes:
        index.chains.together = [one.chains for one in indexes]
    uses = []
    for _ in range(20):
        use = Use(start=draw.randint(0, 4))
        use.stop, use.parent, use.last = use.start + 3, f"x{draw.randint(0, 20)}", f"x{draw.randint(0, 20)}"
        uses.append(use)
    flying: list[tuple[LruIndex, str]] = []
    for _ in range(400):
        index, use, name = draw.choice(indexes), draw.choice(uses), called("x", draw.randint(0, 20))
        what = draw.random()
        if flying and what < 0.4:
            index, name = flying.pop(draw.randrange(len(flying)))
            (index.commit if draw.random() < 0.8 else index.release)(name)
        elif name in index:
            index.find([name], use)
        elif (index, name) not in flying and isinstance(index.reserve(name, 1, use, use.start), list):
            flying.append((index, name))
    for index, name in flying:
        index.release(name)
    for index in indexes:
        groups = [group for groups in index.chains.of.values() for group in groups]
        assert all(group.live == sum(entry.group is group for entry in set(group.entries)) > 0 for group in groups)
        assert sum(group.live for group in groups) == len(index) == len(order(index))
        assert [use for use, its in index.chains.of.items() if any(group.use is not use for group in its)] == []
        assert not index.chains.waiting


@pytest.mark.parametrize("seed", range(40))
def test_at_any_pace_of_ranks_and_tasks_a_chain_is_one_group(seed: int) -> None:
    """Tasks of one chain overlap: a task begins while ranks still write blocks of the one before."""
    draw = random.Random(seed)
    ranks, chains, steps = draw.randint(1, 3), draw.randint(1, 5), draw.randint(2, 8)
    index = LruIndex(10**6)
    todo = {
        (chain, rank): [(step, named(f"c{chain}.", step, 1)) for step in range(steps)]
        for chain in range(chains)
        for rank in range(ranks)
    }
    uses = {(chain, step): named(f"c{chain}.", step, 1) for chain in range(chains) for step in range(steps)}
    flying: list[str] = []
    while any(todo.values()) or flying:
        ready = [key for key, left in todo.items() if left]
        if ready and draw.random() < 0.6:
            chain, rank = draw.choice(ready)
            step, _ = todo[chain, rank].pop(0)
            name = called(f"c{chain}.", step, rank)
            assert isinstance(index.reserve(name, 1, uses[chain, step], step), list)
            flying.append(name)
        elif flying:
            index.commit(flying.pop(draw.randrange(len(flying))))
    for chain in range(chains):
        entries = [index.get(called(f"c{chain}.", step, rank)) for step in range(steps) for rank in range(ranks)]
        assert len({entry and entry.group for entry in entries}) == 1
    assert not index.chains.waiting


def test_a_retired_chain_goes_first_until_it_is_used() -> None:
    index = LruIndex(8)
    renumbered: list[tuple[int, int]] = []
    index.chains.renumbered = lambda old, new: renumbered.append((old, new))
    for chain in "abc":
        store(index, chain, 0, 2)
    for _ in index.chains.retire(lambda name: "/b" in name or "/c" in name):
        pass
    assert (order(index)[:2], renumbered) == ([called("a", 0), called("a", 1)], [(3, 0), (2, 0)])
    assert index.first_use == 1
    index.find([called("c", 0), called("c", 1)], Use())
    store(index, "d", 0, 4)
    assert [usable(index, chain) for chain in "abcd"] == [2, 0, 2, 4]


# --- guessed ----------------------------------------------------------------------------------------


def grow(index: LruIndex, chain: str, start: int) -> bool:
    """A task that names only the next block of a chain. Returns whether it found room."""
    return grow_by(index, chain, start, 1) == 1


def grow_by(index: LruIndex, chain: str, start: int, count: int) -> int:
    """A task that names only the next blocks of a chain. Returns how many found room."""
    use, room = Use(start=start, stop=start + count), 0
    for depth in range(start, use.stop):
        name = f"m/f/g/{chain}{depth}/0"
        if isinstance(index.reserve(name, 10, use, depth), list):
            index.commit(name)
            room += 1
    return room


def test_a_chain_that_grows_a_block_a_task_keeps_its_root_and_stays_young() -> None:
    index = LruIndex(100)
    renumbered: list[tuple[int, int]] = []
    index.chains.renumbered = lambda old, new: renumbered.append((old, new))
    assert [grow(index, "a", i) for i in range(16)] == [True] * 10 + [False] * 6
    assert order(index) == [f"m/f/g/a{i}/0" for i in range(10)]
    assert len(renumbered) == 15
    assert grow(index, "b", 0), "another chain eats it from its tail"
    assert "m/f/g/a9/0" not in index
    assert grow(index, "b", 1)
    assert [name for name in order(index) if "/b" in name] == ["m/f/g/b0/0", "m/f/g/b1/0"], "one group"


def test_a_chain_that_grows_several_blocks_a_task_keeps_its_root() -> None:
    index = LruIndex(100)
    assert [grow_by(index, "a", start, 4) for start in range(0, 24, 4)] == [4, 4, 2, 0, 0, 0]
    assert order(index) == [f"m/f/g/a{i}/0" for i in range(10)]


def test_chains_that_could_be_meant_both_are_not_mixed_up() -> None:
    index = LruIndex(1000)
    for chain in "ab":
        grow(index, chain, 0)
    grow(index, "a", 1)
    assert len(index.chains.of) == 3, "both end there"
    other = Use(start=2)
    index.reserve("m/f/other/a2/0", 10, other, 2)
    index.commit("m/f/other/a2/0")
    assert len(index.chains.of) == 4, "another generation"
    grow(index, "a", 2)
    assert len(index.chains.of) == 4


def test_a_use_that_has_written_continues_no_other_chain_though_what_it_wrote_is_held() -> None:
    """What other levels of storage lack is held, and in no group; then the use looked as if it had written nothing."""
    index = LruIndex(4)
    for name, stop in (("a", 2), ("b", 2)):
        index.reserve(name, 1, use := Use(start=1, stop=stop), 1)
        index.commit(name)
    use = Use(start=2, stop=4)
    index.holds = True
    index.reserve("c", 1, use, 2)
    index.commit("c")
    assert index.forget("a"), "now one chain alone ends where the use began"
    index.reserve("d", 1, use, 3)
    index.commit("d")
    assert index.get("b").group.use is not use  # type: ignore[union-attr]
