"""Which object goes where and in which order, and what comes of a pass, over pages and a library of the test's own."""

from __future__ import annotations

import asyncio
import itertools
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from tests.support.waits import until
from transferd.config import MooncakeStorageSection
from transferd.errors import RequestError, StorageUnavailable
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage.mooncake import copies as module
from transferd.storage.mooncake import error_codes
from transferd.storage.mooncake.client import CopyTask
from transferd.storage.mooncake.copies import Copies, FreeMemory, LastAsked
from transferd.storage.mooncake.master_pages import LentMemory, PoolObject
from transferd.storage.mooncake.peers import Peers
from transferd.tasks import CopiesMade

T = TypeVar("T")
ROOM = 1_000_000


def node(number: int, *, capacity: int = ROOM, used: int = 0, takes: bool = True) -> LentMemory:
    return LentMemory(f"segment-{number}", f"10.0.0.{number}:1", capacity, used, takes)


class Pool:
    """Three nodes, of which this is the first. failing: segments to which every copy fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, objects: dict[str, Sequence[int]], **section: Any) -> None:
        self.nodes = [node(number) for number in (1, 2, 3)]
        self.objects = {key: {f"10.0.0.{number}:1" for number in held} for key, held in objects.items()}
        self.failing: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self.own = frozenset({"10.0.0.1:1"})
        self.before: Callable[[], None] = lambda: None
        monkeypatch.setattr(module, "LOOK_S", 0.001)
        monkeypatch.setattr(module, "read_segments", lambda _: list(self.nodes))
        monkeypatch.setattr(module, "read_named", lambda _, keys: iter([self._of(keys)]))
        monkeypatch.setattr(module, "read_all", self._all)
        self.settings = settings = MooncakeStorageSection(master_server_addr="10.0.0.9:1", **section)
        peers = Peers(SYSTEM_CLOCK, self._look)
        self.peers = peers
        self.copies = Copies(settings, self.in_thread, peers, SYSTEM_CLOCK, Counter())

    def _of(self, keys: Sequence[str]) -> list[PoolObject]:
        return [PoolObject(key, 1000, tuple(sorted(self.objects[key]))) for key in keys if self.objects.get(key)]

    def _all(self, _: str, share: tuple[int, int]) -> Iterator[list[PoolObject]]:
        number, shares = share
        yield self._of([key for key in self.objects if zlib.crc32(key.encode()) % shares == number])

    async def _look(self, work: Callable[[], T]) -> T:
        return work()

    async def in_thread(self, work: Callable[[Any], T]) -> T:
        await asyncio.sleep(0)
        self.before()
        return work(self)

    def copy(self, copies: Sequence[tuple[str, str]]) -> list[CopyTask | int]:
        self.asked += copies
        return [(0, len(self.asked) - len(copies) + i) for i in range(len(copies))]

    def copied(self, tasks: Sequence[CopyTask]) -> list[bool | None]:
        made: list[bool | None] = []
        for _, number in tasks:
            key, segment = self.asked[number]
            made.append(segment not in self.failing)
            if made[-1]:
                self.objects[key].add(next(one.node for one in self.nodes if one.name == segment))
        return made


def keys_of(pool: Pool) -> list[str]:
    return [key for key, _ in pool.asked]


async def test_a_drain_copies_what_only_this_node_has(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, {"ours": [1], "both": [1, 2], "theirs": [3], "ours too": [1]})
    assert await pool.copies.drain() == CopiesMade(2, 2000)
    assert sorted(keys_of(pool)) == ["ours", "ours too"]
    assert pool.copies.statistics() == {"copying_bytes": 0, "copies_made": 2}
    assert await pool.copies.drain() == CopiesMade(), "and nothing twice"


async def test_the_last_used_chain_is_copied_first_and_stays_together(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, {f"{chain}{depth}": [1] for chain in "abc" for depth in range(4)})
    for chain in "bac":
        pool.copies.recent.used([f"{chain}{depth}" for depth in range(4)])
    await pool.copies.drain()
    assert keys_of(pool) == [f"{chain}{depth}" for chain in "cab" for depth in range(4)]
    assert [len({segment for key, segment in pool.asked if key[0] == chain}) for chain in "abc"] == [1, 1, 1]
    assert len({segment for _, segment in pool.asked}) == 2, "the chains are shared out"


def test_the_order_of_use_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECENT", 3)
    order = LastAsked()
    order.used(["a", "b"])
    order.used(["c", "d"])
    objects = [PoolObject(key, 1, ()) for key in "abcd"]
    assert [one.key for one in order.first(objects)] == ["c", "d", "a", "b"]
    assert [order.chain(key) for key in "abcd"] == [1, 1, 2, 2]
    order.used(["d"])
    assert [one.key for one in order.first(objects)] == ["d", "c", "a", "b"]
    assert [order.chain(key) for key in "abcd"] == [1, 1, 2, 3]
    order.used(["e", "f", "g"])
    assert [order.chain(key) for key in "abcde"] == [0, 0, 0, 3, 4], "two generations"
    for number in range(20):
        order.used([f"h{number}"])
    assert sum(order.chain(f"h{number}") > 0 for number in range(20)) in range(3, 7)


def test_memory_counts_as_full_below_the_mark_at_which_the_master_evicts() -> None:
    free = FreeMemory([node(1, used=800_000), node(2, takes=False), node(3)], without=["10.0.0.3:1"])
    taken = [free.take(20_000, ()) for _ in range(3)]
    assert [one and one.name for one in taken] == ["segment-1", "segment-1", None], "0.85 of it, in rounded objects"


async def test_a_copy_that_fails_is_tried_on_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, {"k": [1]})
    pool.nodes[2] = node(3, used=100)
    pool.failing = {"segment-2"}
    pool.peers.down["10.0.0.2:1"] = ""
    assert await pool.copies.drain() == CopiesMade(1, 1000)
    assert pool.asked == [("k", "segment-3")], "a node that is down gets none"
    del pool.peers.down["10.0.0.2:1"]
    pool.objects["k"] = {"10.0.0.1:1"}
    made = await pool.copies.drain()
    assert (made.left, made.left_bytes) == (1, 1000)
    assert made.why == "the copy to segment-2 failed"


async def test_no_room_and_refusals_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, {"a": [1], "b": [1]})
    pool.nodes = [node(1), node(2, used=ROOM)]
    assert await pool.copies.drain() == CopiesMade(0, 0, 2, 2000, "the other nodes have no room")
    for pool.nodes in ([node(1)], [node(1), node(2, takes=False)]):
        assert await pool.copies.drain() == CopiesMade(0, 0, 2, 2000, "no other node takes copies now")
    pool.nodes = [node(1), node(2)]
    pool.peers.down["10.0.0.2:1"] = ""
    assert (await pool.copies.drain()).why == "no other node takes copies now"
    pool.peers.down.clear()
    monkeypatch.setattr(pool, "copy", lambda pairs: [error_codes.OBJECT_NOT_FOUND] * len(pairs))
    assert (await pool.copies.drain()).why == "OBJECT_NOT_FOUND, -704"


async def test_a_drain_ends_with_its_time_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, {f"k{number}": [1] for number in range(100)})
    now = [0.0]

    def copied(tasks: Sequence[CopyTask]) -> list[bool | None]:
        now[0] += 0.01
        return [None] * len(tasks)

    monkeypatch.setattr(pool, "copied", copied)
    monkeypatch.setattr(pool.copies, "_now", lambda: now[0])  # the drain's time passes with its looks alone
    monkeypatch.setattr(module, "BEGUN", 10_000)
    monkeypatch.setattr(module, "END_S", 0.01)
    made = await pool.copies.drain(within_s=0.05)
    assert made == CopiesMade(0, 0, 100, 100_000, "the time was up")
    assert 0 < len(pool.asked) <= module.UNDER_WAY * 3, "no more are under way than a node begins in two seconds"


async def test_the_last_drain_ends_what_runs_and_nothing_begins_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, {"k": [1]}, replica_num=2)
    endless = asyncio.get_running_loop().create_future()
    real, pool.copied = pool.copied, lambda tasks: [None] * len(tasks)  # type: ignore[method-assign]

    def asked() -> None:
        if pool.asked and not endless.done():
            endless.set_result(None)

    pool.before = asked
    mending = asyncio.ensure_future(pool.copies.mend())
    await endless
    pool.copied = real  # type: ignore[method-assign]
    assert (await pool.copies.leave(10)).left == 0
    await mending
    with pytest.raises(StorageUnavailable, match="stopping"):
        await pool.copies.mend()
    await pool.copies.close()


async def test_a_drain_during_the_last_one_is_refused_and_does_not_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, {"k": [1]})
    looks: list[object] = []
    real = pool.copied

    def copied(tasks: Sequence[CopyTask]) -> list[bool | None]:
        looks.append(tasks)
        return [None] * len(tasks)

    monkeypatch.setattr(pool, "copied", copied)
    leaving = asyncio.ensure_future(pool.copies.leave(1000))
    await until(lambda: looks)
    drain = asyncio.ensure_future(pool.copies.drain())
    looks.clear()
    await until(lambda: len(looks) > 1 or leaving.done())
    monkeypatch.setattr(pool, "copied", real)
    assert (await leaving).left == 0
    with pytest.raises(StorageUnavailable, match="stopping"):
        await drain


async def test_a_look_that_a_drain_ends_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, {"both": [1, 2], "ours": [1]}, replica_num=2)
    monkeypatch.setattr(module, "read_all", lambda *_: iter([pool._of(["both"]), pool._of(["ours"])]))

    drains: list[asyncio.Future[CopiesMade]] = []

    def begin_a_drain() -> None:
        if not drains:
            drains.append(asyncio.ensure_future(pool.copies.drain()))

    pool.before = begin_a_drain
    for look in (pool.copies.alone, pool.copies.mend, pool.copies.drain):
        with pytest.raises(StorageUnavailable, match="the look at the pool was ended"):
            await look()
        assert await drains[0] == CopiesMade(1, 1000)
        pool.objects["ours"] = {"10.0.0.1:1"}
        drains.clear()
    pool.before = lambda: None
    assert await pool.copies.alone() == {"ours": 1000}


async def test_a_mend_makes_as_many_copies_as_are_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    record = "transferd/layouts/demo/0"  # a node that starts alone stores it
    pool = Pool(monkeypatch, {"one": [2], "two": [2, 3], "three": [1, 2, 3], record: [1]}, replica_num=3)
    assert await pool.copies.mend() == CopiesMade(2, 2000)
    assert {key: len(held) for key, held in pool.objects.items()} == {"one": 3, "two": 3, "three": 3, record: 1}


async def test_each_node_looks_at_its_share_and_rests_a_hundred_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    objects: dict[str, Sequence[int]] = {"whole": [1, 2]}
    objects.update((f"lacks {number}", [number % 3 + 1]) for number in range(30))
    pool = Pool(monkeypatch, objects, replica_num=2, mend_interval=0.001)
    rests, sleep, cores = [], asyncio.sleep, itertools.count(0.0, 0.5)

    async def rest(seconds: float) -> None:
        rests.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", rest)
    monkeypatch.setattr(time, "thread_time", lambda: next(cores))
    counted = []
    for number in (1, 2, 3):
        pool.own = frozenset({f"10.0.0.{number}:1"})
        watching = Copies(pool.settings, pool.in_thread, pool.peers, SYSTEM_CLOCK, Counter())
        watching.start()
        await until(lambda: "copies_missing" in watching.statistics() and max(rests) >= 100)  # noqa: B023
        counted.append(watching.statistics()["copies_missing"])
        if number == 3:
            for held in pool.objects.values():
                held |= {"10.0.0.1:1", "10.0.0.2:1"}
            await until(lambda: watching.statistics()["copies_missing"] == 0)  # noqa: B023
        await watching.close()
        assert max(rests) == 100 * 2 * 0.5, "two readings of half a second"
        rests.clear()
    assert sum(counted) == 30
    assert min(counted) > 0


async def test_an_impossible_mend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(monkeypatch, {"k": [1]})
    with pytest.raises(RequestError, match="replica_num = 1"):
        await pool.copies.mend()


async def test_near_its_end_a_drain_asks_for_no_more_than_a_node_still_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a node has yet to begin as its client closes ends the process in the library."""
    pool = Pool(monkeypatch, {f"k{number}": [1] for number in range(200)})
    looks: list[Sequence[CopyTask]] = []

    def copied(tasks: Sequence[CopyTask]) -> list[bool | None]:
        looks.append(tasks)
        return [None] * len(tasks)

    monkeypatch.setattr(pool, "copied", copied)
    monkeypatch.setattr(module, "END_S", 0.0)
    monkeypatch.setattr(module, "BEGUN", 2 * module.EACH / 1000)
    leaving = asyncio.ensure_future(pool.copies.leave(within_s=1000))
    await until(lambda: len(looks) > 5)
    assert len(pool.asked) == module.EACH, "of 96 that may be under way"
    await pool.copies.close()
    assert (await leaving).why == "the time was up"
