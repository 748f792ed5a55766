"""The index against a model that is a plain list: what is held, what goes, and that the bound holds."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from transferd.storage import queues
from transferd.storage.lru import Adopted, LruIndex, NoRoom, Use, Victim

names = st.sampled_from([f"n{i}" for i in range(10)])
sizes = st.integers(0, 40)
depths = st.integers(0, 5)
USES = [Use() for _ in range(4)]  # tasks that come back; every other use is new
uses = st.sampled_from(USES)
RESTORED = Use()


class IndexMachine(RuleBasedStateMachine):
    """The model sorts everything anew each time.

    present: name -> (size, use, depth, number); the number counts placements, so of equals the last goes first.
    order: the uses that have something present, the next to go first.
    ends: of each use, the least depth that was evicted or found no room.
    of_nobody: names of restored objects; theirs is a queue apart.
    groups: of each use its queues in the order of their coming, each as whether it is that one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.present: dict[str, tuple[int, Use, int, int]] = {}
        self.reserved: dict[str, tuple[int, Use, int]] = {}
        self.ends: dict[Use, float] = {}
        self.order: list[Use] = []
        self.of_nobody: set[str] = set()
        self.groups: dict[Use, list[bool]] = {}
        self.removed: list[Victim] = []  # evicted, so may turn out to be stuck
        self.left: list[str] = []
        self.number = 0
        for use in USES:
            use.ends = {}

    @initialize(capacity=st.integers(0, 150))
    def start(self, capacity: int) -> None:
        self.index = LruIndex(capacity)
        self.index.watchers.append(queues.departures(self.left.append))

    @property
    def used(self) -> int:
        return sum(size for size, _, _ in self.reserved.values()) + self.bytes

    @property
    def bytes(self) -> int:
        return sum(size for size, _, _, _ in self.present.values())

    def next_to_go(self) -> list[str]:
        def rank(name: str) -> tuple[int, int, int, int]:
            _, use, depth, number = self.present[name]
            return self.order.index(use), -depth, self.groups[use].index(name in self.of_nobody), -number

        return sorted(self.present, key=rank)

    def may_go(self, use: Use, depth: int) -> list[str]:
        """Before `use`, or its own and deeper."""
        if use not in self.order:
            return self.next_to_go()
        place = self.order.index(use)
        return [
            name
            for name in self.next_to_go()
            if (at := self.order.index(self.present[name][1])) < place
            or (at == place and self.present[name][2] > depth)
        ]

    def place(self, name: str, size: int, use: Use, depth: int) -> None:
        if use not in self.order:
            self.order.append(use)
        self.number += 1
        self.present[name] = size, use, depth, self.number
        if (queue := name in self.of_nobody) not in self.groups.setdefault(use, []):
            self.groups[use].append(queue)

    def remove(self, name: str) -> None:
        del self.present[name]
        self.of_nobody.discard(name)
        self.tidy()

    def tidy(self) -> None:
        """A use that has nothing left begins anew."""
        here = {use for _, use, _, _ in self.present.values()}
        self.order = [use for use in self.order if use in here]
        live = {(use, name in self.of_nobody) for name, (_, use, _, _) in self.present.items()}
        self.groups = {use: [queue for queue in its if (use, queue) in live] for use, its in self.groups.items()}

    def first_of(self, candidates: Iterable[str], needed: int) -> list[str]:
        first = []
        for name in candidates:
            if needed <= 0:
                break
            first.append(name)
            needed -= self.present[name][0]
        return first

    def expect_gone(self, victims: object, candidates: Iterable[str], needed: int) -> None:
        """Exactly as many of the first candidates as it takes."""
        expected = [Victim(name, self.present[name][0]) for name in self.first_of(candidates, needed)]
        assert victims == expected
        assert self.left == [victim.name for victim in expected]
        self.left.clear()
        for victim in expected:
            _, use, depth, _ = self.present[victim.name]
            self.end(use, depth)
            self.remove(victim.name)
        self.removed += expected

    def end(self, use: Use, depth: int) -> None:
        self.ends[use] = min(self.ends.get(use, math.inf), depth)

    def deeper_is_coming(self, use: Use, depth: int) -> bool:
        return any(other is use and deeper > depth for _, other, deeper in self.reserved.values())

    def absent(self, name: str) -> bool:
        return name not in self.reserved and name not in self.present

    @rule(name=names, size=sizes, use=uses, depth=depths, patient=st.booleans())
    def reserve(self, name: str, size: int, use: Use, depth: int, patient: bool = True) -> None:
        if not self.absent(name) or size > self.index.capacity:
            return
        if depth >= self.ends.get(use, math.inf):
            assert self.index.reserve(name, size, use, depth, patient=patient) is NoRoom.FULL
            return
        needed = self.used + size - self.index.capacity
        candidates = self.may_go(use, depth)
        room = sum(self.present[candidate][0] for candidate in candidates)
        victims = self.index.reserve(name, size, use, depth, patient=patient)
        if room < needed:
            if use not in self.order or self.deeper_is_coming(use, depth):
                assert victims is NoRoom.LATER
                assert self.reserved, "somebody to wait for"
            else:
                assert victims is NoRoom.FULL
                self.end(use, depth)
            return
        if patient and victims is NoRoom.LATER:
            last = self.first_of(candidates, needed)[-1]
            assert self.present[last][1] is use
            assert self.deeper_is_coming(use, self.present[last][2])
            return
        own = {name: depth for name, (_, other, depth, _) in self.present.items() if other is use}
        before = len(self.removed)
        self.reserved[name] = size, use, depth
        self.expect_gone(victims, candidates, needed)
        if patient:
            gone = [own[victim.name] for victim in self.removed[before:] if victim.name in own]
            assert not any(self.deeper_is_coming(use, deeper) for deeper in gone), "those go first"
        assert self.index.used <= self.index.capacity

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.reserved)))
        size, use, depth = self.reserved.pop(name)
        self.came(name, size, use, depth)

    def came(self, name: str, size: int, use: Use, depth: int) -> None:
        victims = self.index.commit(name)
        self.place(name, size, use, depth)
        if depth >= self.ends.get(use, math.inf):
            self.expect_gone(victims, [name], max(1, size))
        else:
            self.expect_gone(victims, self.next_to_go(), self.used - self.index.capacity)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.reserved)))
        self.index.release(name)
        self.reserved.pop(name)
        self.tidy()

    @rule(chain=st.lists(names, max_size=6, unique=True), use=st.none() | uses)
    def touch_a_chain(self, chain: list[str], use: Use | None) -> None:
        self.index.find(chain, use or Use())
        self.touched(chain, use, range(len(chain)))

    @rule(name=names, use=uses, depth=depths)
    def touch_at_a_depth(self, name: str, use: Use, depth: int) -> None:
        if (entry := self.index.get(name)) is not None:
            self.index.touch_one(entry, use, depth)
        self.touched([name], use, [depth])

    def touched(self, chain: list[str], use: Use | None, depths: Iterable[int]) -> None:
        use = Use() if use is None else use
        for name, depth in zip(chain, depths, strict=True):
            if name not in self.present:
                continue
            size, last, before, number = self.present[name]
            if last is use:  # again by the same use: nearest the root counts, the place is kept
                self.present[name] = size, use, min(before, depth), number
            else:
                self.place(name, size, use, depth)
        self.tidy()

    @rule(name=names)
    def forget(self, name: str) -> None:
        there = name in self.present
        assert self.index.forget(name) == there
        if there:
            self.remove(name)
            assert self.left == [name]
        self.left.clear()

    @rule(name=names, size=sizes, use=uses)
    def forget_only_the_same_entry(self, name: str, size: int, use: Use) -> None:
        entry = self.index.get(name)
        if entry is None or size > self.index.capacity or self.reserved:
            return
        self.forget(name)
        self.reserve(name, size, use, 0)
        if name in self.reserved:
            self.index.commit(name)
            self.place(name, size, self.reserved.pop(name)[1], 0)
            assert not self.index.forget(name, entry), "it left and came back: another entry"

    @rule(nbytes=st.integers(0, 100))
    def evict(self, nbytes: int) -> None:
        self.expect_gone(self.index.evict(nbytes), self.next_to_go(), nbytes)

    @rule(nbytes=st.integers(0, 100), use=uses, depth=depths)
    def evict_for_a_write(self, nbytes: int, use: Use, depth: int) -> None:
        candidates = self.may_go(use, depth)
        self.expect_gone(self.index.evict(nbytes, use, depth), candidates, nbytes)

    @rule(capacity=st.integers(0, 150))
    def set_capacity(self, capacity: int) -> None:
        self.expect_gone(self.index.set_bounds(capacity), self.next_to_go(), self.used - capacity)

    @rule(capacity=st.integers(0, 150), at_most=st.integers(0, 4))
    def set_capacity_in_steps(self, capacity: int, at_most: int) -> None:
        """Each step evicts no more than it may, and leaves a bound at which no write has to evict the rest."""
        while True:
            going, used = self.next_to_go()[:at_most], self.used
            gone = self.index.set_bounds(capacity, at_most=at_most)
            self.expect_gone(gone, going, used - capacity)
            if len(gone) < at_most or not at_most:
                break
            assert self.index.capacity in (capacity, self.used)
        if at_most:
            assert self.index.capacity == capacity

    @rule(name=names, size=st.integers(1, 40), use=uses, depth=depths)
    def store(self, name: str, size: int, use: Use, depth: int) -> None:
        """Both steps at once, so that there is more to order."""
        self.reserve(name, size, use, depth)
        if name in self.reserved and self.reserved[name][1] is use:
            size, use, depth = self.reserved.pop(name)
            self.came(name, size, use, depth)

    @precondition(lambda self: self.removed)
    @rule()
    def restore(self) -> None:
        victim = self.removed.pop()
        if self.absent(victim.name):
            self.index.restore(victim)
            if RESTORED not in self.order:
                self.order.insert(0, RESTORED)
            self.of_nobody.add(victim.name)
            self.place(victim.name, victim.nbytes, RESTORED, 0)

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "index"):
            return
        assert self.index.used == self.used
        assert self.index.bytes == self.bytes
        assert len(self.index) == len(self.present)
        assert {entry.name: entry.nbytes for entry in self.index.hottest_first()} == {
            name: size for name, (size, _, _, _) in self.present.items()
        }
        assert [entry.name for entry in self.index.hottest_first()][::-1] == self.next_to_go()
        numbers = [group.number for groups in self.index.chains.of.values() for group in groups]
        assert numbers == sorted(numbers), "the order of uses"
        for group in (group for groups in self.index.chains.of.values() for group in groups):
            assert group.live == sum(entry.group is group for entry in set(group.entries))
            assert len(group.entries) <= queues.SLACK + 2 * group.live + 1


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_an_object_without_bytes_is_evicted_like_any_other() -> None:
    """While it was written, the last other object of its owner left."""
    index, use = LruIndex(100), Use()
    stored(index, Use(), 0)
    assert index.reserve("empty", 0, use) == []
    assert len(index.evict(1)) == 1
    index.commit("empty")
    assert order(index) == ["empty"]
    assert index.evict(1) == [Victim("empty", 0)]


def test_of_equals_with_two_owners_the_first_to_go_is_the_coldest() -> None:
    index, use = LruIndex(100), Use()
    stored(index, Use(), 0)
    [victim] = index.evict(1)
    assert index.reserve("own", 10, use) == []
    index.commit("own")
    index.restore(victim)
    index.find([victim.name], use)
    assert index.coldest(2) == order(index)[::-1]


def adopt(index: LruIndex, *objects: tuple[str, int]) -> None:
    """Objects of one use, the next to evict first."""
    index.adopt([Adopted(1, len(objects) - i, name, size) for i, (name, size) in enumerate(objects)])


def order(index: LruIndex) -> list[str]:
    return [entry.name for entry in index.hottest_first()]


def test_adopted_objects_keep_their_order_and_what_is_too_much_goes() -> None:
    index = LruIndex(100)
    index.adopt([Adopted(3, 1, "tail", 40), Adopted(3, 0, "root", 50), Adopted(7, 4, "later", 30)])
    assert index.set_bounds(100) == [Victim("tail", 40)]
    assert order(index) == ["later", "root"]
    index.find(["root"], Use())
    assert order(index) == ["root", "later"]


def test_a_chain_that_was_found_at_start_shrinks_from_its_tail_whatever_was_found_first() -> None:
    index = LruIndex(10**6)
    index.adopt([Adopted(5, depth, f"{depth}", 10) for depth in (2, 0, 3, 1)])
    assert [victim.name for victim in index.set_bounds(10)] == ["3", "2", "1"]


def test_new_uses_come_after_all_that_a_life_before_has_numbered() -> None:
    index = LruIndex(100)
    noted: list[tuple[str, int, int]] = []
    index.noted = lambda *record: noted.append(record)
    index.adopt([Adopted(3, 1, "a", 40)])
    index.begin_at(9)
    index.find(["a"], Use())
    assert (noted, index.first_use) == ([("a", 10, 0)], 10)


def test_the_noted_records_lead_to_the_same_order() -> None:
    """Whatever comes and goes: the last record of each present object sorts them as the index does."""
    rng = random.Random(7)
    index = LruIndex(400)
    noted: dict[str, tuple[int, int]] = {}
    index.noted = lambda name, use, depth: noted.__setitem__(name, (use, depth))
    uses, seen = [Use() for _ in range(6)], 0
    for _ in range(3000):
        name, use, depth = f"n{rng.randrange(80)}", rng.choice(uses), rng.randrange(6)
        if rng.random() < 0.5:
            uses[rng.randrange(6)] = Use()
        if (entry := index.get(name)) is not None:
            index.touch_one(entry, use, depth)
        elif name in index._reserved:
            index.commit(name) if rng.random() < 0.8 else index.release(name)
        else:
            index.reserve(name, 10, use, depth)
        there = order(index)
        assert min((noted[name][0] for name in there), default=index.first_use) >= index.first_use
        by_record = [noted[name] for name in reversed(there)]
        assert [use for use, _ in by_record] == sorted(use for use, _ in by_record)
        for group in {use for use, _ in by_record}:
            depths = [depth for one, depth in by_record if one == group]
            assert depths == sorted(depths, reverse=True)
        seen += len(there)
    assert seen > 10_000


def test_sizes_count_in_units_and_the_number_of_objects_is_bounded() -> None:
    index = LruIndex(100, unit=40)
    stored(index, Use(), 0)
    stored(index, Use(), 0)
    assert (index.bytes, index.used) == (80, 80)
    gone = order(index)[::-1]
    assert index.reserve("x", 41, Use()) == [Victim(entry, 10) for entry in gone], "80 bytes"
    index.release("x")
    assert index.used == 0
    index.set_bounds(10**6, 3)
    for _ in range(5):
        stored(index, Use(), 0)
    assert (len(index), len(index.set_bounds(10**6, 1)), len(index)) == (3, 2, 1)
    index.set_bounds(10**6, 0)
    assert index.reserve("y", 1, Use()) is NoRoom.FULL, "nothing is written that could make room"


def stored(index: LruIndex, use: Use, *depths: int) -> None:
    """An object of ten bytes at each depth, called after it and the order of the use."""
    for depth in depths:
        name = f"{depth}@{id(use)}"
        assert isinstance(index.reserve(name, 10, use, depth), list)
        index.commit(name)


def test_a_write_takes_no_room_from_later_uses_nor_from_its_own_root() -> None:
    index, first, second = LruIndex(60), Use(), Use()
    stored(index, first, 0, 1, 4)
    stored(index, second, 0, 1, 4)
    assert index.reserve("x", 10, first, 4) is NoRoom.FULL, "nothing goes for its equal"
    assert index.reserve("x", 10, first, 3) == [Victim(f"4@{id(first)}", 10)]
    index.release("x")
    assert index.reserve("x", 20, first, 2) is NoRoom.FULL, "there is room for ten"
    assert index.reserve("x", 10, first, 2) is NoRoom.FULL, "its chain has ended"
    assert index.reserve("y", 30, second, 5) == [Victim(f"1@{id(first)}", 10), Victim(f"0@{id(first)}", 10)]


def test_a_write_waits_for_deeper_ones_of_its_own_use_and_for_no_others() -> None:
    index, use = LruIndex(30), Use()
    stored(index, use, 0)
    for depth in (2, 3):
        assert index.reserve(f"r{depth}", 10, use, depth) == []
    assert index.reserve("x", 10, use, 2) is NoRoom.LATER
    assert index.commit("r3") == []
    assert index.reserve("x", 10, use, 2) == [Victim("r3", 10)]
    assert use.ends_at(0) == 3


def test_a_block_stays_while_a_deeper_one_is_still_being_written() -> None:
    index, use = LruIndex(30), Use()
    stored(index, use, 0, 2)
    assert index.reserve("r3", 10, use, 3) == []
    assert index.reserve("x", 10, use, 1) is NoRoom.LATER, "not the block at depth 2"
    assert index.reserve("x", 10, use, 1, patient=False) == [Victim(f"2@{id(use)}", 10)]
    assert index.commit("r3") == [Victim("r3", 10)], "nothing uses it without what was before it"
    assert "r3" not in index
    assert index.reserve("y", 10, use, 2) is NoRoom.FULL, "nor this"


def test_an_object_that_one_use_names_twice_counts_where_it_is_nearest_the_root() -> None:
    index, use = LruIndex(100), Use()
    stored(index, Use(), 7, 8)
    names = [entry.name for entry in index.hottest_first()]
    first, second = index.hottest_first()
    for entry, depth in ((first, 2), (second, 3), (second, 1), (first, 5)):
        index.touch_one(entry, use, depth)
    assert [entry.name for entry in index.hottest_first()] == [names[1], names[0]]
    index.touch_one(second, use, 4)
    assert [entry.name for entry in index.hottest_first()] == [names[1], names[0]], "deeper does not count"


def test_a_restored_object_is_the_next_to_evict() -> None:
    index = LruIndex(100)
    adopt(index, ("a", 40))
    index.find(["a"], Use())
    index.restore(Victim("b", 10))
    assert order(index) == ["a", "b"]


def test_touching_the_same_objects_for_ever_keeps_no_more_than_they_need() -> None:
    index = LruIndex(10**6)
    adopt(index, *((f"n{i}", 1) for i in range(1000)))
    first, second = Use(), Use()
    for i in range(50_000):
        index.find([f"n{i % 1000}"], (first, second)[i % 3 == 0])
    index.find(["n0"], Use())
    assert len(index.chains.of) <= 4
    groups = [group for groups in index.chains.of.values() for group in groups]
    assert sum(len(group.entries) for group in groups) <= 2 * 1000 + 4 * (queues.SLACK + 1)


def test_the_repr_shows_objects_bytes_and_reservations() -> None:
    index = LruIndex(100)
    adopt(index, ("a", 40))
    index.reserve("b", 10, Use())
    assert repr(index) == "LruIndex(1 objects, 50 of 100 bytes, 1 reserved)"


# --- what all ranks of a task leave behind ------------------------------------------------------------


@dataclass
class Rank:
    """One rank's share of a write: the depths that are not decided yet, and those that are being written."""

    use: Use
    name: str
    todo: list[int]
    ahead: int  # writes that it may have under way
    flying: set[int] = field(default_factory=set)

    def called(self, depth: int) -> str:
        return f"{depth}@{self.name}"


class Ranks:
    """Ranks of some tasks that write chains into one index, at a pace that a seed decides. One object is ten bytes."""

    def __init__(self, seed: int, objects: int, ranks: list[Rank]) -> None:
        self.random = random.Random(seed)
        self.index = LruIndex(10 * objects)
        self.ranks = ranks

    def run(self) -> None:
        while moves := [move for move in self._moves() if move is not None]:
            self.random.choice(moves)()

    def _moves(self) -> Iterable[Callable[[], object] | None]:
        waiting = [rank for rank in self.ranks if rank.todo]
        for rank in self.ranks:
            for depth in rank.flying:
                yield functools.partial(self._lands, rank, depth)
        decided = [functools.partial(self._decides, rank) for rank in waiting if len(rank.flying) < rank.ahead]
        yield from decided
        if waiting and not any(rank.flying for rank in self.ranks):
            # Nothing is under way that could wake those who wait.
            assert any(decide() for decide in decided), "everybody waits, for nobody"

    def _decides(self, rank: Rank) -> bool:
        """True: it was told to write, or that there is no room."""
        for depth in rank.todo[: rank.ahead]:
            answer = self.index.reserve(rank.called(depth), 10, rank.use, depth)
            if answer is NoRoom.LATER:
                assert any(other.flying for other in self.ranks), "somebody to wait for"
                continue
            rank.todo.remove(depth)
            if answer is not NoRoom.FULL:
                rank.flying.add(depth)
            return True
        return False

    def _lands(self, rank: Rank, depth: int) -> None:
        rank.flying.remove(depth)
        self.index.commit(rank.called(depth))

    def held(self, use: Use, depths: int) -> list[int]:
        """At each depth, how many ranks of the use have their object."""
        ranks = [rank for rank in self.ranks if rank.use is use]
        return [sum(rank.called(depth) in self.index for rank in ranks) for depth in range(depths)]


@pytest.mark.parametrize("seeds", [range(300)])
def test_ranks_at_any_pace_leave_as_much_of_the_root_as_the_store_can_hold(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        count, depths, objects = draw.randint(1, 4), draw.randint(1, 12), draw.randint(1, 30)
        use = Use()
        ranks = [Rank(use, str(i), list(range(depths)), draw.randint(1, 6)) for i in range(count)]
        story = Ranks(seed, objects, ranks)
        story.run()
        held = story.held(use, depths)
        root = min(depths, objects // count)
        assert held[:root] == [count] * root, f"seed {seed}: {held}, not as much as fits on every rank"
        assert not any(held[root + 1 :]), f"seed {seed}: {held}, something behind a block that a rank lacks"


@pytest.mark.parametrize("seeds", [range(300)])
def test_two_tasks_in_a_store_too_small_for_them_leave_no_gap_in_either(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        count, depths, objects = draw.randint(1, 3), draw.randint(1, 10), draw.randint(1, 30)
        uses = [Use(), Use()]
        ranks = [
            Rank(use, f"{number}.{i}", list(range(depths)), draw.randint(1, 6))
            for number, use in enumerate(uses)
            for i in range(count)
        ]
        story = Ranks(seed, objects, ranks)
        story.run()
        for use in uses:
            held = story.held(use, depths)
            root = next((depth for depth in range(depths) if held[depth] < count), depths)
            assert not any(held[root + 1 :]), f"seed {seed}: {held}, something behind a block that a rank lacks"
