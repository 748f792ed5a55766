"""Deciding and doing: order of effects on one name, room, failures, cancellation. Effects are scripted here."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from tests.storage.harness import Harness, Open
from tests.support.blobs import get, put
from transferd.errors import Closed, StorageError, StorageFull
from transferd.runtime.aio import uncancelled
from transferd.runtime.compat import wait_for
from transferd.runtime.threads import ThreadPools
from transferd.storage import batch
from transferd.storage.base import EXISTS, FOUND, LEFT, MISSING, STORED, Blob, Found, Item, Take
from transferd.storage.batch import Answer, Damaged, Write
from transferd.storage.indexed import IndexedStorage
from transferd.storage.lru import Use

T = TypeVar("T")
BOUND_S = 20.0  # for waits that should end at once


class ScriptedStorage(IndexedStorage):
    """A dict, whose effects can be held and can be told to fail; it notes every effect in order.

    held: effects ("write a", "remove a", …) that wait in their thread until let go. failures: what
    an effect raises, once. Asserts what indexed.py promises: one effect on a name at a time.
    """

    backend = "scripted"

    def __init__(self, capacity: int, *, medium: int = 10**9) -> None:
        super().__init__(capacity, ThreadPools(4), shares=2)
        self.objects: dict[str, bytes] = {}
        self.medium = medium  # bytes the medium really holds
        self.effects: list[str] = []
        self.failures: dict[str, StorageError | Damaged] = {}
        self._held: dict[str, threading.Event] = {}
        self._begun: dict[str, asyncio.Event] = {}
        self._changing: set[str] = set()
        self._mutex = threading.Lock()

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()

    def hold(self, effect: str, why: int = 0) -> None:
        self._held[effect] = threading.Event()
        self._begun[effect] = asyncio.Event()

    async def begun(self, effect: str) -> None:
        await wait_for(self._begun[effect].wait(), BOUND_S)

    def let_go(self, effect: str) -> None:
        self._held.pop(effect).set()

    def _effect(self, verb: str, name: str, change: Callable[[], bool | None]) -> bool | None:
        effect = f"{verb} {name}"
        with self._mutex:
            self.effects.append(effect)
            if verb != "read":
                assert name not in self._changing, f"two effects on {name} at once"
                self._changing.add(name)
        try:
            if effect in self._held:
                held = self._held[effect]
                self._loop.call_soon_threadsafe(self._begun[effect].set)
                assert held.wait(BOUND_S)
            failure = self.failures.pop(effect, None)
            if failure is not None:
                raise failure
            return change()
        finally:
            if verb != "read":
                self._changing.discard(name)

    def _write(self, write: Write, data: memoryview) -> None:
        name = write.item.name

        def change() -> None:
            with self._mutex:
                if sum(map(len, self.objects.values())) + len(data) > self.medium:
                    raise StorageFull("the medium is full")
                self.objects[name] = bytes(data)

        if self._freed(write):
            self._effect("write", name, change)

    def _read(self, item: Item, slot: memoryview, take: Take | None) -> Answer:
        def change() -> bool:
            stored = self.objects.get(item.name)
            if stored is None:
                return False
            slot[:] = stored
            return True

        return bool(self._effect("read", item.name, change)) and (take is None or take(slot) or LEFT)

    def _remove(self, name: str) -> None:
        self._effect("remove", name, lambda: self._pop(name))

    def _set_aside(self, name: str) -> None:
        self._effect("aside", name, lambda: self._pop(name))

    def _pop(self, name: str) -> None:
        self.objects.pop(name, None)


OpenScripted = Callable[..., Awaitable[tuple[ScriptedStorage, Harness]]]


@pytest.fixture
def open_scripted(open_storage: Open) -> OpenScripted:
    async def open_(capacity: int, **more: int) -> tuple[ScriptedStorage, Harness]:
        storage = ScriptedStorage(capacity, **more)
        return storage, await open_storage(storage)

    return open_


def start(awaitable: Awaitable[T]) -> asyncio.Future[T]:
    return asyncio.ensure_future(awaitable)


async def passes(count: int = 20) -> None:
    """Let everything on the loop that can run, run."""
    for _ in range(count):
        await asyncio.sleep(0)


TEN = b"0123456789"


async def test_victims_are_removed_before_the_write_they_make_room_for(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(20)
    await store.put(("a/0", TEN))
    await store.put(("b/0", TEN))
    storage.effects.clear()
    await store.put(("c/0", TEN * 2))
    assert sorted(storage.effects[:2]) == ["remove a/0", "remove b/0"]
    assert storage.effects[2:] == ["write c/0"]


async def test_a_put_waits_for_the_removal_of_its_name(open_scripted: OpenScripted) -> None:
    """Otherwise the late removal would take the new object with it."""
    storage, store = await open_scripted(20)
    await store.put(("a/0", TEN))
    await store.put(("b/0", TEN))
    storage.hold("remove a/0")
    evicting = start(store.put(("c/0", TEN)))
    await storage.begun("remove a/0")
    again = start(store.put(("a/0", TEN)))
    await passes()
    assert storage.effects.count("write a/0") == 1, "the second write has not begun"
    storage.let_go("remove a/0")
    assert await evicting == [STORED]
    assert await again == [STORED]
    assert await store.get(("a/0", 10)) == [(FOUND, TEN)]


async def test_a_put_waits_for_the_quarantine_of_its_name(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(100)
    await store.put(("a/0", TEN))
    storage.hold("aside a/0")
    setting_aside = start(storage.quarantine("a/0"))
    assert storage.find(["a/0"], None) == [False], "unreachable at once: a client that hears of it may ask for it"
    assert storage.statistics()["corrupt"] == 1
    await storage.begun("aside a/0")
    assert await storage.exists(["a/0"]) == [False]
    again = start(store.put(("a/0", TEN)))
    await passes()
    assert not again.done()
    storage.let_go("aside a/0")
    await setting_aside
    assert await again == [STORED]
    assert storage.objects == {"a/0": TEN}


async def test_puts_of_one_name_at_once_write_it_once(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(100)
    storage.hold("write a/0")
    first = start(store.put(("a/0", TEN)))
    await storage.begun("write a/0")
    others = [start(store.put(("a/0", TEN))) for _ in range(3)]
    await passes()
    assert await storage.exists(["a/0"]) == [False], "not there before it is whole"
    storage.let_go("write a/0")
    assert await first == [STORED]
    assert [await other for other in others] == [[EXISTS]] * 3
    assert storage.effects == ["write a/0"]


async def test_when_the_first_of_two_puts_fails_the_second_tries_itself(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(100)
    storage.failures["write a/0"] = StorageError("broken")
    storage.hold("write a/0")
    first = start(store.put(("a/0", TEN)))
    await storage.begun("write a/0")
    second = start(store.put(("a/0", TEN)))
    await passes()
    storage.let_go("write a/0")
    [outcome] = await first
    assert outcome.found is Found.FAILED
    assert await second == [STORED]


async def test_a_write_that_finds_all_room_reserved_waits_for_a_write_to_end(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(20)
    storage.hold("write a/0")
    first = start(store.put(("a/0", TEN * 2)))
    await storage.begun("write a/0")
    second = start(store.put(("b/0", TEN)))
    await passes()
    assert storage.effects == ["write a/0"]
    assert storage.statistics()["in_flight_bytes"] == 20
    storage.let_go("write a/0")
    assert await first == [STORED]
    assert await second == [STORED]
    assert storage.objects == {"b/0": TEN}


def chain(use: Use, *depths: int) -> list[Blob]:
    return [Blob(f"{depth}/0", memoryview(TEN), use, depth) for depth in depths]


async def test_a_block_of_a_chain_stays_until_the_deeper_one_is_written_that_should_go(
    open_scripted: OpenScripted,
) -> None:
    storage, _ = await open_scripted(30)
    use = Use()
    assert await put(storage, chain(use, 0, 2)) == [STORED] * 2
    storage.hold("write 3/0")
    ahead = start(put(storage, chain(use, 3)))
    await storage.begun("write 3/0")
    behind = start(put(storage, chain(use, 1)))
    await passes()
    assert storage.effects[2:] == ["write 3/0"]
    storage.let_go("write 3/0")
    assert await ahead == [STORED]
    assert await behind == [STORED]
    assert sorted(storage.objects) == ["0/0", "1/0", "2/0"]
    [outcome] = await put(storage, chain(use, 3))
    assert isinstance(outcome.error, StorageFull)


async def test_a_deeper_write_that_hangs_is_not_waited_for_and_leaves_nothing_behind_its_chain(
    open_scripted: OpenScripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "PATIENCE_S", 0.01)
    storage, _ = await open_scripted(30)
    use = Use()
    assert await put(storage, chain(use, 0, 2)) == [STORED] * 2
    storage.hold("write 3/0")
    hangs = start(put(storage, chain(use, 3)))
    await storage.begun("write 3/0")
    assert await wait_for(put(storage, chain(use, 1)), BOUND_S) == [STORED]
    storage.let_go("write 3/0")
    [outcome] = await hangs
    assert isinstance(outcome.error, StorageFull)
    await storage.close()
    assert sorted(storage.objects) == ["0/0", "1/0"]
    statistics = storage.statistics()
    assert (statistics["bytes"], statistics["in_flight_bytes"]) == (20, 0)
    assert statistics["evicted_for"]["shrink"] == 0


async def test_a_capacity_below_an_object_that_is_being_written_removes_it_when_it_has_come(
    open_scripted: OpenScripted,
) -> None:
    storage, store = await open_scripted(30)
    storage.hold("write a/0")
    writing = start(store.put(("a/0", TEN)))
    await storage.begun("write a/0")
    storage.set_capacity(5)
    storage.let_go("write a/0")
    [outcome] = await writing
    assert isinstance(outcome.error, StorageFull)
    await storage.close()
    assert not storage.objects
    assert storage.statistics()["evicted_for"]["shrink"] == 1


async def test_a_full_medium_evicts_the_objects_own_size_and_tries_once_more(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(1000, medium=30)
    for name in ("a/0", "b/0", "c/0"):
        await store.put((name, TEN))
    assert await store.put(("d/0", TEN)) == [STORED]
    assert sorted(storage.objects) == ["b/0", "c/0", "d/0"]
    assert await store.put(("e/0", TEN * 2)) == [STORED]
    assert sorted(storage.objects) == ["d/0", "e/0"]
    statistics = storage.statistics()
    assert (statistics["objects"], statistics["bytes"], statistics["evictions"], statistics["errors"]) == (2, 30, 3, 0)
    assert statistics["evicted_for"] == {"capacity": 0, "medium_full": 3, "shrink": 0, "reserve": 0}


async def test_a_medium_that_stays_full_fails_the_object_and_leaves_the_books_right(
    open_scripted: OpenScripted,
) -> None:
    storage, store = await open_scripted(1000, medium=30)
    await store.put(("a/0", TEN))
    [outcome] = await store.put(("b/0", TEN * 4))
    assert outcome.found is Found.FAILED
    assert isinstance(outcome.error, StorageFull)
    assert storage.effects.count("write b/0") == 2, "once more, and only once"
    assert await store.put(("c/0", TEN * 3)) == [STORED]


async def test_a_full_medium_with_nothing_to_evict_fails_at_once(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(1000, medium=5)
    [outcome] = await store.put(("a/0", TEN))
    assert isinstance(outcome.error, StorageFull)
    assert storage.effects == ["write a/0"]


async def test_one_failed_object_leaves_its_neighbours_alone(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(1000)
    storage.failures["write b/0"] = StorageError("broken", code="storage_io")
    outcomes = await store.put(("a/0", TEN), ("b/0", TEN), ("c/0", TEN))
    assert [outcome.found for outcome in outcomes] == [Found.STORED, Found.FAILED, Found.STORED]
    assert outcomes[1].error is not None
    assert outcomes[1].error.reason == "storage_io"
    assert await storage.exists(["a/0", "b/0", "c/0"]) == [True, False, True]


async def test_a_victim_of_a_lower_capacity_that_cannot_be_removed_returns(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(20)
    await store.put(("a/0", TEN), ("b/0", TEN))
    storage.failures["remove b/0"] = StorageError("stuck", code="storage_read_only")
    storage.hold("remove b/0")
    storage.set_capacity(10)
    await storage.begun("remove b/0")
    assert await storage.exists(["b/0"]) == [False]
    storage.let_go("remove b/0")
    await wait_for(storage._effects.end(), BOUND_S)
    assert await storage.exists(["b/0"]) == [True]
    await storage.quarantine("b/0")  # within bounds again, for the end of the test


async def test_a_capacity_lowered_during_a_write_holds_when_it_has_ended(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(30)
    await store.put(("a/0", TEN))
    storage.hold("write b/0")
    writing = start(store.put(("b/0", TEN * 2)))
    await storage.begun("write b/0")
    storage.set_capacity(20)
    storage.let_go("write b/0")
    assert await writing == [STORED]
    assert await storage.exists(["a/0", "b/0"]) == [False, True]


async def test_an_object_that_vanished_is_missing_and_leaves_the_index(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(100)
    await store.put(("a/0", TEN))
    storage.objects.clear()
    assert await storage.exists(["a/0"]) == [True]
    [(outcome, _)] = await store.get(("a/0", 10))
    assert outcome == MISSING
    assert await storage.exists(["a/0"]) == [False]
    assert storage.statistics()["bytes"] == 0


async def test_a_get_that_lost_a_race_does_not_drop_the_newer_object(open_scripted: OpenScripted) -> None:
    """The read finds nothing, but by then the name was evicted and stored anew."""
    storage, store = await open_scripted(10)
    await store.put(("a/0", TEN))
    storage.hold("read a/0")
    reading = start(store.get(("a/0", 10)))
    await storage.begun("read a/0")
    storage.objects.pop("a/0")
    storage.set_capacity(0)
    storage.set_capacity(10)
    assert await store.put(("a/0", TEN)) == [STORED]
    gone = storage.objects.pop("a/0")
    storage.let_go("read a/0")
    await reading
    storage.objects["a/0"] = gone
    assert await storage.exists(["a/0"]) == [True]


async def test_an_unreadable_object_fails_and_is_set_aside(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(100)
    await store.put(("a/0", TEN), ("b/0", TEN))
    storage.failures["read a/0"] = Damaged(StorageError("bad sector", code="storage_io"))
    (bad, _), (good, _) = await store.get(("a/0", 10), ("b/0", 10))
    assert bad.error is not None
    assert bad.error.reason == "storage_io"
    assert good == FOUND
    assert await storage.exists(["a/0", "b/0"]) == [False, True]
    assert storage.statistics()["corrupt"] == 1
    assert await store.put(("a/0", TEN)) == [STORED], "and heals"


async def test_a_failed_read_that_may_pass_keeps_the_object(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(100)
    await store.put(("a/0", TEN))
    storage.failures["read a/0"] = StorageError("too many open files")
    [(outcome, _)] = await store.get(("a/0", 10))
    assert outcome.found is Found.FAILED
    assert await store.get(("a/0", 10)) == [(FOUND, TEN)]


async def test_an_object_of_another_length_is_set_aside_without_being_read(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(100)
    await store.put(("a/0", TEN))
    [(outcome, _)] = await store.get(("a/0", 9))
    assert outcome == MISSING
    assert storage.effects == ["write a/0", "aside a/0"]
    assert storage.statistics()["wrong_length"] == 1


@pytest.mark.parametrize("operation", ["write", "read"])
async def test_a_cancelled_call_ends_when_its_io_has_ended_however_often_it_is_cancelled(
    open_scripted: OpenScripted, operation: str
) -> None:
    storage, store = await open_scripted(100)
    if operation == "read":
        await store.put(("a/0", TEN))
    buffer = store.buffer(10, TEN)
    storage.hold(f"{operation} a/0")
    call = put if operation == "write" else get
    task = asyncio.ensure_future(call(storage, [Blob("a/0", buffer)]))
    await storage.begun(f"{operation} a/0")
    for _ in range(3):
        task.cancel()
        await passes()
        assert not task.done(), "a thread still works on the buffer"
    storage.let_go(f"{operation} a/0")
    await asyncio.wait([task], timeout=BOUND_S)
    assert task.cancelled()
    assert await store.get(("a/0", 10)) == [(FOUND, TEN)], "what was begun was finished, and is in the books"


async def test_a_bug_in_an_effect_surfaces_and_leaves_no_reservation(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(100)
    storage.failures["write a/0"] = ZeroDivisionError()  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        await store.put(("a/0", TEN), ("b/0", TEN))
    assert storage.statistics()["in_flight_bytes"] == 0
    assert await store.put(("a/0", TEN)) == [STORED]


async def test_after_close_every_call_says_closed(open_scripted: OpenScripted) -> None:
    storage, _ = await open_scripted(100)
    await storage.close()
    for call in (storage.exists([]), put(storage, []), get(storage, [])):
        with pytest.raises(Closed, match="scripted storage is closed"):
            await call
    with pytest.raises(Closed, match="scripted storage is closed"):
        await storage.quarantine("a/0")


async def test_close_waits_for_removals_under_way(open_scripted: OpenScripted) -> None:
    storage, store = await open_scripted(100)
    await store.put(("a/0", TEN))
    storage.hold("remove a/0")
    storage.set_capacity(0)
    await storage.begun("remove a/0")
    closing = start(storage.close())
    await passes()
    assert not closing.done()
    storage.let_go("remove a/0")
    await wait_for(closing, BOUND_S)
    assert storage.objects == {}


# --- uncancelled ----------------------------------------------------------------------------------


async def test_uncancelled_work_returns_and_raises_as_itself() -> None:
    async def work(error: Exception | None) -> int:
        await asyncio.sleep(0)
        if error is not None:
            raise error
        return 7

    assert await uncancelled(work(None)) == 7
    with pytest.raises(KeyError):
        await uncancelled(work(KeyError()))


async def test_uncancelled_work_that_fails_after_the_cancellation_is_not_reported_as_lost() -> None:
    """The caller hears of its cancellation; the error is seen here, so the loop logs nothing about it."""
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    gate = asyncio.Event()

    async def work() -> None:
        await gate.wait()
        raise KeyError

    task = asyncio.ensure_future(uncancelled(work()))
    await passes(3)
    task.cancel()
    await passes(3)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    await passes()
    assert reported == []
