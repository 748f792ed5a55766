"""Calls of several engines for one object at the same time become one, and each has its own honest answer and bytes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import pytest

from tests.storage.harness import Harness, Memory
from tests.support.blobs import get
from tests.support.simulation.storage import SimStorage
from tests.support.simulation.threads import SimThreads
from transferd.errors import StorageUnavailable
from transferd.runtime.aio import Background
from transferd.runtime.compat import timeout
from transferd.runtime.threads import Direction
from transferd.storage.base import EXISTS, FOUND, LEFT, MISSING, STORED, Blob, Found, Item, Outcome, Outcomes
from transferd.storage.joined import JoinedStorage, joined
from transferd.tiers.base import INLINE_BYTES

T = TypeVar("T")
LARGE = bytes(range(256)) * (INLINE_BYTES // 256 + 1)  # copied in a thread
UNTOUCHED = b"\xaa"


@pytest.fixture
def threads() -> SimThreads:
    return SimThreads()


@pytest.fixture
async def engines(behind: SimStorage, threads: SimThreads) -> AsyncIterator[Harness]:
    behind.slots_at_once = None  # as a pool
    storage, memory = joined(behind, threads), Memory(16 * 1024**2)
    storage.register(memory)
    yield Harness(storage, memory)
    assert isinstance(storage, JoinedStorage)
    assert (len(storage._loads), len(storage._stores)) == (0, 0), "an object is under way for ever"
    storage.unregister(memory)
    await storage.close()


def start(awaitable: Awaitable[T]) -> asyncio.Future[T]:
    return asyncio.ensure_future(awaitable)


async def turns(number: int = 10) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("content", [b"small", LARGE], ids=["small", "large"])
async def test_gets_at_once_are_one_get_and_each_has_the_bytes(
    behind: SimStorage, engines: Harness, content: bytes
) -> None:
    await engines.put(("a", content))
    got = await asyncio.gather(*(engines.get(("a", len(content))) for _ in range(3)))
    assert got == [[(FOUND, content)]] * 3
    assert behind.counts["hits"] == 1
    assert engines.storage.statistics()["shared_loads"] == 2
    await engines.get(("a", len(content)))  # nothing is kept: whoever asks later asks storage
    assert behind.counts["hits"] == 2


async def test_a_leader_returns_when_its_bytes_have_been_copied(
    behind: SimStorage, engines: Harness, threads: SimThreads
) -> None:
    """Its buffer may be used for other bytes as soon as it returns."""
    await engines.put(("a", LARGE))
    threads.gates[Direction.IN].hold()
    leads, follows = Blob("a", engines.buffer(len(LARGE))), Blob("a", engines.buffer(len(LARGE)))
    leading, following = start(get(engines.storage, [leads])), start(get(engines.storage, [follows]))
    await turns()
    assert bytes(leads.data) == LARGE
    assert not leading.done()
    assert not following.done()
    threads.gates[Direction.IN].release()
    assert await leading == [FOUND]
    leads.data[:] = bytes(len(LARGE))
    assert await following == [FOUND]
    assert bytes(follows.data) == LARGE


@pytest.mark.parametrize("gives_up", [0, 1], ids=["the leader", "a follower"])
async def test_a_cancelled_caller_takes_nothing_from_the_others(
    behind: SimStorage, engines: Harness, gives_up: int
) -> None:
    await engines.put(("a", b"content"))
    behind.gate.hold()
    blobs = [Blob("a", engines.buffer(7)) for _ in range(3)]
    calls = [start(get(engines.storage, [blob])) for blob in blobs]
    await turns()
    calls[gives_up].cancel()
    await turns()
    assert not calls[gives_up].done(), "bytes may still come to its buffer"
    behind.gate.release()
    await asyncio.wait(calls)
    assert calls.pop(gives_up).cancelled()
    blobs.pop(gives_up)
    assert [call.result() for call in calls] == [[FOUND]] * 2
    assert [bytes(blob.data) for blob in blobs] == [b"content"] * 2
    assert behind.counts["hits"] == 1, "a call that nobody waits for goes on, and serves those that follow it"


async def test_a_backends_own_time_limit_ends_its_call_and_not_the_caller(
    behind: SimStorage, engines: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first part ran in the caller's task, which the limit then cancelled instead of the call."""

    async def load(*_: object) -> list[Outcome]:
        with contextlib.suppress(TimeoutError):
            async with timeout(0.01):
                await asyncio.sleep(60)
        return [MISSING]

    monkeypatch.setattr(engines.storage._loads, "_call", load)  # type: ignore[attr-defined]

    async def caller() -> list[Outcome]:
        return await Background().begin(engines.storage.load([Item("a", 7)], None, [engines.buffer(7)]))

    assert await start(caller()) == [MISSING]


async def test_a_get_that_fails_fails_for_all_and_a_missing_object_is_missing_for_all(
    behind: SimStorage, engines: Harness
) -> None:
    await engines.put(("a", b"content"), ("b", b"content"))
    behind.dice.script("object get", "error", "missing", None)
    wanted = (("a", 7), ("b", 7), ("c", 7))
    for answers in await asyncio.gather(engines.get(*wanted), engines.get(*wanted)):
        assert [outcome.found for outcome, _ in answers] == [Found.FAILED, Found.MISSING, Found.MISSING]
        assert "could not be read" in str(answers[0][0].error)
    assert [outcome.found for outcome, _ in await engines.get(*wanted)] == [Found.FOUND, Found.FOUND, Found.MISSING]


async def test_a_call_that_fails_as_a_whole_fails_what_joined_it_and_no_more(
    behind: SimStorage, engines: Harness
) -> None:
    await engines.put(("a", b"content"), ("b", b"content"))
    behind.dice.script("get", "unavailable", None)
    leading, following = start(engines.get(("a", 7))), start(engines.get(("b", 7), ("a", 7)))
    with pytest.raises(StorageUnavailable):
        await leading
    (b, a) = await following
    assert b == (FOUND, b"content")
    assert a[0].error is not None
    assert a[0].error.reason == StorageUnavailable.code
    assert a[1] == UNTOUCHED * 7


async def test_calls_that_lead_and_follow_each_other_end(behind: SimStorage, engines: Harness) -> None:
    await engines.put(*((name, name.encode() * 4) for name in "abcd"))
    behind.gate.hold()
    first = start(engines.get(("a", 4), ("b", 4)))
    await turns()
    crossing = [start(engines.get(*((name, 4) for name in names))) for names in ("bca", "dcb", "acdda")]
    await turns()
    behind.gate.release()
    for names, call in zip(("ab", "bca", "dcb", "acdda"), [first, *crossing], strict=True):
        assert await call == [(FOUND, name.encode() * 4) for name in names]
    assert behind.counts["hits"] == 4


async def test_objects_of_another_length_are_not_the_same(behind: SimStorage, engines: Harness) -> None:
    await engines.put(("a", b"content"))
    behind.gate.hold()
    calls = [start(engines.get(("a", nbytes))) for nbytes in (7, 6)]
    await turns()
    behind.gate.release()
    assert await calls[0] == [(FOUND, b"content")]
    assert (await calls[1])[0][0] == MISSING


async def test_puts_at_once_are_one_put(behind: SimStorage, engines: Harness) -> None:
    behind.gate.hold()
    calls = [start(engines.put(("a", b"content"))), start(engines.put(("b", b"b"), ("a", b"content")))]
    await turns()
    behind.gate.release()
    assert await asyncio.gather(*calls) == [[STORED], [STORED, EXISTS]]
    assert behind.objects == {"a": b"content", "b": b"b"}
    assert engines.storage.statistics()["shared_stores"] == 1


async def test_a_failed_put_counts_as_stored_for_no_rider(behind: SimStorage, engines: Harness) -> None:
    behind.dice.script("object put", "full")
    for answers in await asyncio.gather(engines.put(("a", b"content")), engines.put(("a", b"content"))):
        assert [(one.found, one.error.reason) for one in answers if one.error] == [(Found.FAILED, "storage_full")]
    assert await engines.put(("a", b"content")) == [STORED]


async def test_a_follower_whose_copy_cannot_run_loads_the_object_itself(
    behind: SimStorage, engines: Harness, threads: SimThreads
) -> None:
    await engines.put(("a", LARGE))
    threads.close()
    leading, following = await asyncio.gather(*(engines.get(("a", len(LARGE))) for _ in range(2)))
    assert leading == following == [(FOUND, LARGE)]
    assert engines.storage.statistics()["hits"] == 2


class Drained:
    """Takes objects, or leaves them."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.wanted = wanted
        self.taken: list[tuple[int, bytes]] = []

    def __call__(self, i: int, data: memoryview, /) -> bool:
        self.taken.append((i, bytes(data)))
        return self.wanted


@pytest.fixture
def files(behind: SimStorage, threads: SimThreads) -> JoinedStorage:
    """Single flight in front of a storage whose threads drain."""
    made = joined(behind, threads)
    assert isinstance(made, JoinedStorage)
    return made


async def test_drains_and_slots_that_want_one_object_share_one_load(behind: SimStorage, files: JoinedStorage) -> None:
    behind.objects |= {"a": b"a" * 200, "b": b"b" * 200}
    behind.register(memory := Memory(4096))
    drains, slot = [Drained(), Drained()], memory.view[:200]
    behind.gate.hold()
    leading = start(files.load([Item("a", 200)], drains[0], [memory.view[400:600]]))
    await turns()
    following = [
        start(files.load([Item("b", 200), Item("a", 200)], drains[1], [memory.view[800:1000]])),
        start(files.load([Item("a", 200)], None, [slot])),
    ]
    await turns()
    behind.gate.release()
    assert await leading == [FOUND]
    assert [await one for one in following] == [[FOUND, FOUND], [FOUND]]
    assert drains[0].taken == [(0, b"a" * 200)]
    assert sorted(drains[1].taken) == [(0, b"b" * 200), (1, b"a" * 200)]
    assert bytes(slot) == b"a" * 200
    assert behind.counts["hits"] == 2


async def test_a_call_that_follows_and_leads_says_when_its_own_slots_return(
    behind: SimStorage, files: JoinedStorage
) -> None:
    behind.objects |= {"a": b"a" * 200, "b": b"b" * 200}
    behind.register(memory := Memory(4096))
    behind.gate.hold()
    leading = start(files.load([Item("a", 200)], None, [memory.view[:200]]))
    await turns()
    good, running = behind.load, asyncio.get_running_loop().create_future()

    async def load(*call: Any) -> list[Outcome]:
        return Outcomes.after(await good(*call), [running])

    files._loads._call = load
    both = [Item("a", 200), Item("b", 200)]
    following = start(files.load(both, None, [memory.view[400:600], memory.view[600:800]]))
    await turns()
    behind.gate.release()
    outcomes = await following
    assert (await leading, list(outcomes)) == ([FOUND], [FOUND, FOUND])
    assert isinstance(outcomes, Outcomes)
    running.set_result(None)
    await outcomes.returned


@pytest.mark.parametrize("leads", ["a task that has ended", "a task that cannot take it"])
async def test_a_follower_gets_an_object_that_the_leader_left(
    behind: SimStorage, files: JoinedStorage, leads: str
) -> None:
    behind.objects["a"] = b"a" * 200
    behind.register(memory := Memory(4096))
    first, second = Drained(), Drained()
    behind.gate.hold()
    leading = start(files.load([Item("a", 200)], first, [memory.view[:200]]))
    await turns()
    following = start(files.load([Item("a", 200)], second, [memory.view[400:600]]))
    await turns()
    first.wanted = False
    if leads == "a task that has ended":
        second.wanted = False
    behind.gate.release()
    assert await leading == [LEFT]
    second.wanted = True
    assert await following == [FOUND]
    assert second.taken[-1] == (0, b"a" * 200)


def test_only_what_costs_more_than_a_copy_in_memory_is_joined() -> None:
    plain = SimStorage()
    plain.slots_at_once = 0
    assert joined(plain, SimThreads()) is plain
    assert isinstance(joined(SimStorage(), SimThreads()), JoinedStorage)
