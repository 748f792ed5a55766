"""The index against a model that is a plain list: what is held, what goes, and that the bound holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from transferd.storage.lru import LruIndex, Victim

names = st.sampled_from([f"n{i}" for i in range(10)])
sizes = st.integers(0, 40)


class IndexMachine(RuleBasedStateMachine):
    """`present` is a list of (name, size), the next to go first; `reserved` a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.present: list[tuple[str, int]] = []
        self.reserved: dict[str, int] = {}
        self.removed: list[Victim] = []  # evicted, so may turn out to be stuck

    @initialize(capacity=st.integers(0, 150))
    def start(self, capacity: int) -> None:
        self.index = LruIndex(capacity)

    @property
    def used(self) -> int:
        return sum(self.reserved.values()) + sum(size for _, size in self.present)

    def expect_gone(self, victims: list[Victim], *, bound: int) -> None:
        """Exactly as many of the coldest as it takes to come down to `bound`."""
        expected = []
        while self.used > bound and self.present:
            expected.append(Victim(*self.present.pop(0)))
        assert victims == expected
        self.removed += expected

    def absent(self, name: str) -> bool:
        return name not in self.reserved and name not in dict(self.present)

    @rule(name=names, size=sizes)
    def reserve(self, name: str, size: int) -> None:
        if not self.absent(name) or size > self.index.capacity:
            return
        victims = self.index.reserve(name, size)
        if sum(self.reserved.values()) + size > self.index.capacity:
            assert victims is None
            return
        assert victims is not None
        self.expect_gone(victims, bound=self.index.capacity - size)
        self.reserved[name] = size
        assert self.index.used <= self.index.capacity

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.reserved)))
        victims = self.index.commit(name)
        self.present.append((name, self.reserved.pop(name)))
        self.expect_gone(victims, bound=self.index.capacity)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.reserved)))
        self.index.release(name)
        del self.reserved[name]

    @rule(chain=st.lists(names, max_size=6, unique=True))
    def touch(self, chain: list[str]) -> None:
        self.index.touch(chain)
        sizes = dict(self.present)
        used = [(name, sizes[name]) for name in reversed(chain) if name in sizes]
        self.present = [item for item in self.present if item not in used] + used

    @rule(name=names)
    def forget(self, name: str) -> None:
        assert self.index.forget(name) == (name in dict(self.present))
        self.present = [item for item in self.present if item[0] != name]

    @rule(name=names, size=sizes)
    def forget_only_the_same_entry(self, name: str, size: int) -> None:
        entry = self.index.get(name)
        if entry is None or size > self.index.capacity or self.reserved:
            return
        self.index.forget(name)
        self.present = [item for item in self.present if item[0] != name]
        self.reserve(name, size)
        self.index.commit(name)
        self.present.append((name, self.reserved.pop(name)))
        assert not self.index.forget(name, entry), "it left and came back: another entry"

    @rule(nbytes=st.integers(0, 100))
    def evict(self, nbytes: int) -> None:
        self.expect_gone(self.index.evict(nbytes), bound=self.used - nbytes)

    @rule(capacity=st.integers(0, 150))
    def set_capacity(self, capacity: int) -> None:
        self.expect_gone(self.index.set_capacity(capacity), bound=capacity)

    @precondition(lambda self: self.removed)
    @rule()
    def restore(self) -> None:
        victim = self.removed.pop()
        if self.absent(victim.name):
            self.index.restore(*victim)
            self.present.insert(0, (victim.name, victim.nbytes))

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "index"):
            return
        assert self.index.used == self.used
        assert self.index.bytes == sum(size for _, size in self.present)
        assert len(self.index) == len(self.present)
        coldest_first = [(name, entry.nbytes) for name, entry in self.index.hottest_first()][::-1]
        assert coldest_first == self.present


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_adopted_objects_keep_their_order_and_what_is_too_much_goes() -> None:
    index = LruIndex(100)
    assert index.adopt([("a", 40), ("b", 50), ("c", 30)]) == [("a", 40)]
    assert [name for name, _ in index.hottest_first()] == ["c", "b"]
    assert [entry.touched for _, entry in index.hottest_first()] == [False, False]
    index.touch(["b"])
    assert [(name, entry.touched) for name, entry in index.hottest_first()] == [("b", True), ("c", False)]


def test_the_repr_tells_the_books() -> None:
    index = LruIndex(100)
    index.adopt([("a", 40)])
    index.reserve("b", 10)
    assert repr(index) == "LruIndex(1 objects, 50 of 100 bytes, 1 reserved)"
