"""One store's state, what an index does for other levels, and its statistics."""

from __future__ import annotations

import gc
import weakref
from collections import Counter

from tests.support.simulation.loop import SimLoop, simulate
from transferd.errors import StorageError
from transferd.storage.base import Index, Item
from transferd.storage.batch import PATIENCE_S, Damaged, StoreBatch, bare, summary_of
from transferd.storage.lru import LruIndex, Use


def test_a_store_waits_for_writes_that_make_room_and_once_not_for_longer_than_patience_lasts() -> None:
    async def story(loop: SimLoop) -> None:
        batch = StoreBatch([], None, [])
        one, other = loop.create_future(), loop.create_future()
        batch.waits = {one, other}
        began = loop.time()
        loop.call_later(PATIENCE_S - 1, one.set_result, None)
        await batch.wait()
        assert (round(loop.time() - began, 3), batch.patient) == (PATIENCE_S - 1, True)
        batch.waits = {other}
        await batch.wait()
        assert (round(loop.time() - began, 3), batch.patient) == (2 * PATIENCE_S - 1, False), "it took too long"
        loop.call_later(5 * PATIENCE_S, other.set_result, None)
        await batch.wait()
        assert round(loop.time() - began, 3) == 7 * PATIENCE_S - 1, "what it waits for now is no room"

    simulate(story, 1)


class Store(Index):
    """An index alone, with some objects of ten bytes."""

    def __init__(self, capacity: int, *names: str) -> None:
        self._index = LruIndex(capacity)
        self.indexes = (self._index,)
        for name in names:
            assert self._index.reserve(name, 10, Use()) is not None
            self._index.commit(name)

    def evicted(self, nbytes: int = 10) -> list[str]:
        return [victim.name for victim in self._index.evict(nbytes)]


def test_a_touch_by_another_level_needs_a_use_and_moves_the_object_last() -> None:
    store = Store(1000, "a", "b", "c")
    assert [name for name, _ in store.hottest_first()] == ["c", "b", "a"]
    store.touch([Item("b", 10), Item("unknown", 10, Use())])
    assert [name for name, _ in store.hottest_first()] == ["c", "b", "a"]
    store.touch([Item("a", 10, Use())])
    assert list(store.hottest_first()) == [("a", 10), ("c", 10), ("b", 10)]
    assert [store.evicted() for _ in range(3)] == [["b"], ["c"], ["a"]]


def test_a_held_object_is_evicted_only_after_its_release_and_by_that_use() -> None:
    store = Store(1000, "a", "b", "c")
    assert (store.hold("a"), store.hold("unknown")) == (10, None)
    assert store.evicted() == ["b"]
    store.release("a", Use())
    store.release("unknown", Use())
    assert [store.evicted() for _ in range(3)] == [["c"], ["a"], []]


def test_an_error_that_is_kept_keeps_no_memory_of_the_call_that_raised_it() -> None:
    class Slot(bytearray):
        """Something that can be watched."""

    def failing(slot: Slot) -> None:
        try:
            raise OSError("worn out")
        except OSError as error:
            raise StorageError("cannot write") from error

    slot = Slot(10)
    watched = weakref.ref(slot)
    try:
        failing(slot)
    except StorageError as error:
        kept = bare(error)
    del slot
    gc.collect()
    assert watched() is None
    assert (str(kept), kept.__traceback__, kept.__cause__, kept.__context__) == ("cannot write", None, None, None)


def test_why_an_object_is_damaged_or_still_there_is_kept() -> None:
    error = StorageError("cannot read")
    assert (Damaged().error, Damaged(error).error) == (None, error)


def test_statistics_are_what_is_stored_and_each_eviction_has_one_cause() -> None:
    store = Store(1000, "a", "b")
    assert store._index.reserve("c", 7, Use()) is not None
    counts = Counter(
        {"hits": 1, "misses": 2, "corrupt": 3, "wrong_length": 4, "gone": 5, "errors": 6, "stored": 7, "evictions": 20}
    )
    counts |= Counter({"evicted_medium_full": 3, "evicted_shrink": 4, "evicted_reserve": 5})
    summary = summary_of(store._index, counts)
    assert summary.pop("evicted_for") == {"capacity": 8, "medium_full": 3, "shrink": 4, "reserve": 5}
    assert summary == {
        "objects": 2,
        "bytes": 20,
        "in_flight_bytes": 7,
        **{name: counts[name] for name in ("hits", "misses", "corrupt", "wrong_length", "gone", "errors", "stored")},
        "evictions": 20,
    }
    counts["evictions"] = 2  # some could not be removed
    assert summary_of(store._index, counts)["evicted_for"]["capacity"] == 0
