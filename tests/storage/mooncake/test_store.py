"""The backend's own rules, over a simulated pool that answers what the real one was seen to answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.storage.harness import MEMORY_BYTES, Harness, Memory, Open, pool_storage
from tests.support.blobs import get, put
from tests.support.simulation.pool import SIM_MASTER, SimPool
from transferd.config import MooncakeStorageSection
from transferd.errors import InvariantError, StillRunning, StorageError, StorageFull, StorageUnavailable
from transferd.runtime.clock import Clock
from transferd.runtime.compat import timeout
from transferd.storage import suspects
from transferd.storage.base import FOUND, MISSING, STORED, Blob, Found, Outcome, Outcomes
from transferd.storage.mooncake import MooncakeStorage, client, error_codes
from transferd.storage.mooncake import native_calls as merger
from transferd.storage.mooncake import store as store_module
from transferd.storage.mooncake.join import DIAL_INTERVAL_S
from transferd.storage.mooncake.native_calls import CallKind
from transferd.storage.mooncake.peers import ASK_AGAIN_S, PROBE_S

Start = Callable[..., Any]


def config(**section: Any) -> MooncakeStorageSection:
    usual: dict[str, Any] = {"master_server_addr": SIM_MASTER, "timeout": 5.0, "probe_interval": 0.01}
    return MooncakeStorageSection(**usual | section)


@pytest.fixture
def pool() -> SimPool:
    return SimPool()


@pytest.fixture
def start(open_storage: Open, pool: SimPool) -> Start:
    async def start_(clock: Clock | None = None, **section: object) -> Harness:
        storage = pool_storage(config(**section), clock=clock or Clock(), set_up=pool.set_up)
        harness: Harness = await open_storage(storage)
        pool.calls.clear()
        return harness

    return start_


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "CONTEST_PAUSES_S", (0.001,) * 3)
    monkeypatch.setattr(store_module, "ROOM_PAUSES_S", (0.001,) * 3)


class Held:
    """Holds up the pool's calls of these operations, as a master or a peer does that hangs."""

    def __init__(self, pool: SimPool, *operations: str) -> None:
        self._operations = operations
        self.entered, self.release = threading.Event(), threading.Event()
        pool.before = self

    def __call__(self, operation: str, _keys: Sequence[str]) -> None:
        if operation in self._operations:
            self.entered.set()
            assert self.release.wait(30)


def reason(outcome: Outcome) -> str:
    assert outcome.found is Found.FAILED
    assert outcome.error is not None
    return outcome.error.reason


def be_impatient(harness: Harness, timeout: float = 0.05) -> None:
    """Calls that begin from now on may take so long: what came before was not meant to be a matter of time."""
    storage = harness.storage
    assert isinstance(storage, MooncakeStorage)
    storage._section = msgspec.structs.replace(storage._section, timeout=timeout)
    assert storage._calls is not None
    storage._calls._wait = timeout


async def until(storage: MooncakeStorage, state: str) -> None:
    async with timeout(30):
        while storage.statistics()["breaker"] != state:  # noqa: ASYNC110 - a breaker tells nobody
            await asyncio.sleep(0.001)


# --- memory ---------------------------------------------------------------------------------------


async def test_memory_that_the_transport_refuses_is_an_error(pool: SimPool) -> None:
    storage, memory = pool_storage(config(), set_up=pool.set_up), Memory(4096)
    await storage.open()
    pool.registering = error_codes.INVALID_PARAMS
    with pytest.raises(StorageError, match=r"refused to register 4096 bytes.*INVALID_PARAMS"):
        storage.register(memory)
    storage.unregister(memory)
    await storage.close()
    memory.close()


async def test_a_start_fails_where_nothing_can_be_registered(pool: SimPool) -> None:
    pool.registering = error_codes.INVALID_PARAMS
    storage = pool_storage(config(), set_up=pool.set_up)
    with pytest.raises(StorageError, match="refused to register"):
        await storage.open()
    await storage.close()


@pytest.mark.parametrize("operation", ["put", "get"])
async def test_a_buffer_outside_registered_memory_never_reaches_the_library(
    start: Start, pool: SimPool, operation: str
) -> None:
    harness = await start()
    call = harness.storage.put if operation == "put" else harness.storage.get
    with pytest.raises(InvariantError, match="not in memory registered with Mooncake"):
        await call([Blob("name", memoryview(bytearray(10)))])
    assert not pool.calls


async def test_a_buffer_may_lie_in_any_registered_memory_up_to_its_last_byte(start: Start) -> None:
    harness = await start()
    edge = harness.memory.view[MEMORY_BYTES - 10 :]
    assert await put(harness.storage, [Blob("name", edge)]) == [STORED]
    edge.release()


# --- put ------------------------------------------------------------------------------------------


async def test_a_put_is_looked_up_before_it_counts(start: Start, pool: SimPool) -> None:
    harness = await start()
    assert await harness.put(("a", b"x"), ("b", b"y")) == [STORED, STORED]
    assert pool.calls == [("put", ["a", "b"]), ("holders", ["a", "b"])]


async def test_a_key_that_another_client_is_writing_counts_once_that_has_ended(start: Start, pool: SimPool) -> None:
    harness = await start()
    pool.begun.add("a")

    def finish(operation: str, keys: Sequence[str]) -> None:
        if operation == "exists" and keys == ["a"]:  # the second question, about what was not there at the first
            pool.finish("a", b"theirs")

    pool.before = finish
    assert await harness.put(("a", b"theirs"), ("b", b"y")) == [STORED, STORED]
    assert harness.storage.statistics()["contested"] == 1
    assert harness.storage.statistics()["taken_over"] == 0


async def test_a_write_that_never_ended_is_taken_over(start: Start, pool: SimPool) -> None:
    harness = await start()
    pool.begun.add("a")
    assert await harness.put(("a", b"ours"), ("b", b"y")) == [STORED, STORED]
    assert await harness.get(("a", 4)) == [(FOUND, b"ours")]
    assert [call for call in pool.calls if call[0] == "replace"] == [("replace", ["a"])]
    assert harness.storage.statistics()["taken_over"] == 1


async def test_a_failed_takeover_is_an_error_of_its_object_alone(start: Start, pool: SimPool) -> None:
    harness = await start()
    pool.begun.add("a")
    pool.answer("replace", error_codes.INVALID_WRITE)
    first, second = await harness.put(("a", b"x"), ("b", b"y"))
    assert (reason(first), second) == ("storage_error", STORED)
    assert "another client" in str(first.error)
    assert harness.storage.statistics()["errors"] == 1


@pytest.mark.parametrize("code", sorted(error_codes.OVERTAKEN))
async def test_a_put_that_another_one_overtook_counts_if_the_object_is_there(
    start: Start, pool: SimPool, code: int
) -> None:
    harness = await start()
    pool.answer("put", code)
    pool.objects["a"] = b"x"
    assert await harness.put(("a", b"x")) == [STORED]


async def test_a_put_fails_object_by_object(start: Start, pool: SimPool) -> None:
    pool.largest = 100
    harness = await start()
    big, small = await harness.put(("big", bytes(101)), ("small", bytes(100)))
    assert (reason(big), small) == ("storage_full", STORED)
    assert isinstance(big.error, StorageFull)
    assert "101 bytes" in str(big.error)


async def test_a_full_pool_is_asked_again_until_its_eviction_has_made_room(start: Start, pool: SimPool) -> None:
    harness = await start()
    pool.answer("put", error_codes.NO_AVAILABLE_HANDLE, times=2)
    assert await harness.put(("a", b"x"), ("b", b"y")) == [STORED, STORED]
    assert harness.storage.statistics()["waited_for_room"] == 4, "two objects, twice"


async def test_a_pool_full_of_pinned_objects_is_full(start: Start, pool: SimPool) -> None:
    harness = await start(hard_pin=True)
    pool.capacity = sum(map(len, pool.objects.values())) + 10
    assert await harness.put(("a", bytes(6))) == [STORED]
    assert reason((await harness.put(("b", bytes(6))))[0]) == "storage_full"
    assert await harness.storage.exists(["a", "b"]) == [True, False]


async def test_an_object_that_a_full_pool_loses_at_once_has_no_other_writer(start: Start, pool: SimPool) -> None:
    harness = await start()
    pool.begun.add("a")  # so that the put is answered with 0, and the object is not found
    pool.answer("replace", error_codes.NO_AVAILABLE_HANDLE)
    (outcome,) = await harness.put(("a", b"x"))
    assert reason(outcome) == "storage_full"
    pool.answer("replace", error_codes.OK)
    (outcome,) = await harness.put(("a", b"x"))
    assert "another client is writing a and has not finished" in str(outcome.error)


async def test_a_put_without_an_answered_look_up_is_unavailable(start: Start, pool: SimPool) -> None:
    harness = await start()
    pool.begun.add("a")  # so that the put is answered with 0, and the object is not found
    pool.answer("exists", error_codes.RPC_FAIL, times=1000)
    (outcome,) = await harness.put(("a", b"x"))
    assert reason(outcome) == "storage_unavailable"
    pool._scripted.clear()
    await until(harness.storage, "closed")


# --- get ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(error_codes.NOT_THERE))
async def test_each_code_for_an_absent_object_is_missing(start: Start, pool: SimPool, code: int) -> None:
    harness = await start()
    pool.answer("get", code)
    [(outcome, _)] = await harness.get(("a", 10))
    assert outcome == MISSING
    assert harness.storage.statistics()["errors"] == 0


async def test_an_unknown_code_is_an_error_of_its_object_with_its_number(start: Start, pool: SimPool) -> None:
    harness = await start()
    pool.answer("get", -4711)
    [(outcome, _)] = await harness.get(("a", 10))
    assert reason(outcome) == "storage_error"
    assert "code -4711" in str(outcome.error)
    assert harness.storage.statistics()["breaker"] == "closed"


async def test_an_object_of_another_length_is_missing_until_it_is_stored_again(start: Start, pool: SimPool) -> None:
    harness = await start()
    pool.objects |= {"short": bytes(9), "long": bytes(11), "right": bytes(10)}
    answers = await harness.get(("short", 10), ("long", 10), ("right", 10), ("absent", 10))
    assert [outcome for outcome, _ in answers] == [MISSING, MISSING, FOUND, MISSING]
    assert {"short", "long", "right"} <= pool.objects.keys(), "others may expect that length"
    assert harness.storage.statistics()["wrong_length"] == 2
    assert await harness.storage.exists(["short", "long", "right"]) == [False, False, True]
    assert await harness.put(("short", b"x" * 10), ("new", b"y" * 10)) == [STORED, STORED]
    assert await harness.get(("short", 10), ("new", 10)) == [(FOUND, b"x" * 10), (FOUND, b"y" * 10)]
    assert pool.objects["short"] == b"x" * 10


async def test_a_name_twice_in_a_batch_crosses_once_and_fills_both_buffers(start: Start, pool: SimPool) -> None:
    harness = await start()
    assert await harness.put(("a", b"one"), ("b", b"two"), ("a", b"one")) == [STORED] * 3
    assert await harness.get(("a", 3), ("b", 3), ("a", 3)) == [(FOUND, b"one"), (FOUND, b"two"), (FOUND, b"one")]
    assert [keys for operation, keys in pool.calls if operation in ("put", "get")] == [["a", "b"], ["a", "b"]]
    assert harness.storage.statistics()["hits"] == 3


async def test_a_negative_answer_to_exists_is_an_error_and_not_a_hit(start: Start, pool: SimPool) -> None:
    harness = await start()
    pool.answer("exists", -1)
    with pytest.raises(StorageError, match="INTERNAL_ERROR"):
        await harness.storage.exists(["a", "b"])
    assert harness.storage.statistics()["errors"] == 1


async def test_a_damaged_object_is_read_once_more_then_avoided_and_then_overwritten(
    start: Start, pool: SimPool
) -> None:
    harness = await start()
    await harness.put(("a", b"one"))
    await harness.storage.quarantine("a")
    assert await harness.get(("a", 3)) == [(FOUND, b"one")], "perhaps only the way here was bad"
    await harness.storage.quarantine("a")
    assert [outcome for outcome, _ in await harness.get(("a", 3))] == [MISSING]
    assert await harness.storage.exists(["a"]) == [False]
    assert pool.objects["a"] == b"one", "others can read it"
    assert harness.storage.statistics()["link_faults"] == 0
    assert await harness.put(("a", b"two"), ("b", b"new")) == [STORED] * 2
    assert await harness.get(("a", 3), ("b", 3)) == [(FOUND, b"two"), (FOUND, b"new")]


async def test_a_link_that_spoils_much_is_said_and_nothing_is_loaded_over_it(
    start: Start, pool: SimPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suspects, "SILENCE_S", 0.0)
    harness = await start()
    names = [f"{i}" for i in range(suspects.FAULTS)]
    await harness.put(*((name, b"one") for name in names))
    assert harness.storage.statistics()["bad_link"] == ""
    for name in names:
        await harness.storage.quarantine(name)
        assert await harness.get((name, 3)) == [(FOUND, b"one")], "it came whole the second time"
    assert "this node's link" in harness.storage.statistics()["bad_link"]
    asked = len(pool.calls)
    with pytest.raises(StorageUnavailable, match="nothing is loaded from the pool for a while"):
        await harness.get(("0", 3))
    assert len(pool.calls) == asked, "the pool is left alone"
    assert await harness.put(("new", b"two")) == [STORED]


# --- the breaker ----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(error_codes.NO_ANSWER))
async def test_a_code_for_no_master_opens_the_breaker_and_a_probe_closes_it(
    start: Start, pool: SimPool, code: int
) -> None:
    harness = await start(probe_interval=0.01)
    pool.answer("exists", code, times=10_000)
    with capture_logs() as logs:
        with pytest.raises(StorageUnavailable, match="does not answer"):
            await harness.storage.exists(["a"])
        for call in (harness.put(("a", b"x")), harness.get(("a", 1)), harness.storage.exists(["a"])):
            with pytest.raises(StorageUnavailable, match="until a background probe succeeds"):
                await call
        assert not any(operation in ("put", "get") for operation, _ in pool.calls), "nothing was called"
        pool._scripted.clear()
        await until(harness.storage, "closed")
    assert await harness.put(("a", b"x")) == [STORED]
    assert [line["event"] for line in logs] == [
        "storage does not answer: failing fast until it does",
        "storage answers again",
    ]
    statistics = harness.storage.statistics()
    assert (statistics["errors"], statistics["breaker_opened"], statistics["breaker_reason"]) == (4, 1, "")


async def test_a_load_that_hangs_is_answered_when_the_breaker_opens_and_keeps_its_buffers_until_it_ends(
    start: Start, pool: SimPool
) -> None:
    harness = await start(probe_interval=30.0)
    be_impatient(harness)
    held = Held(pool, "get", "exists")  # the master, which is asked while the load hangs
    pool.objects["a"] = b"x"
    buffer = harness.buffer(1, b"?")
    outcomes = await get(harness.storage, [Blob("a", buffer)])
    assert [reason(outcome) for outcome in outcomes] == ["storage_unavailable"]
    assert str(outcomes[0].error).startswith("mooncake does not answer (a call has been running for more than 0.05 s)")
    with pytest.raises(StorageUnavailable, match=r"a call has been running for more than 0.05 s"):
        await harness.storage.exists(["a"])
    assert isinstance(outcomes, Outcomes)
    assert not outcomes.returned.done()
    held.release.set()
    await outcomes.returned
    assert bytes(buffer) == b"x", "the call went on to its end"


async def test_a_store_that_hangs_is_answered_too_and_counts_as_failed_whatever_becomes_of_it(
    start: Start, pool: SimPool
) -> None:
    harness = await start(probe_interval=30.0)
    be_impatient(harness)
    held = Held(pool, "put", "exists")
    outcomes = await harness.storage.put([Blob("a", harness.buffer(1, b"x")), Blob("b", harness.buffer(1, b"y"))])
    assert [reason(outcome) for outcome in outcomes] == ["storage_unavailable"] * 2
    assert isinstance(outcomes, Outcomes)
    assert not outcomes.returned.done(), "the library may still read the buffers"
    held.release.set()
    await outcomes.returned
    assert pool.objects["a"] == b"x", "it was stored all the same"


async def test_a_look_up_that_hangs_is_answered_when_the_breaker_opens(start: Start, pool: SimPool) -> None:
    harness = await start(probe_interval=30.0)
    be_impatient(harness)
    held = Held(pool, "exists")
    with pytest.raises(StorageUnavailable, match=r"a call has been running for more than 0.05 s"):
        await harness.storage.exists(["a"])
    held.release.set()


async def test_a_load_that_still_moves_bytes_when_the_breaker_opens_is_waited_for(start: Start, pool: SimPool) -> None:
    harness = await start(probe_interval=30.0)
    held = Held(pool, "get")
    pool.objects["a"] = b"x"
    loading = asyncio.ensure_future(harness.get(("a", 1)))
    assert await asyncio.to_thread(held.entered.wait, 30)
    harness.storage._breaker.failed("gone")
    assert not loading.done()
    held.release.set()
    assert await loading == [(FOUND, b"x")]


async def test_a_load_that_hangs_opens_no_breaker_while_the_master_answers(start: Start, pool: SimPool) -> None:
    harness = await start(probe_interval=30.0)
    be_impatient(harness)
    held = Held(pool, "get")
    pool.objects["a"] = b"x"
    hanging = asyncio.ensure_future(harness.get(("a", 1)))
    while not harness.storage.statistics()["calls_under_way"]:  # noqa: ASYNC110 - a few turns of the loop
        await asyncio.sleep(0)
    be_impatient(harness, timeout=60.0)  # what asks the master may take as long as this machine needs
    async with timeout(20):
        while ("exists", ["transferd/probe"]) not in pool.calls:  # noqa: ASYNC110 - the pool tells nobody
            await asyncio.sleep(0.01)
    assert await harness.storage.exists(["a"]) == [True]
    assert harness.storage.statistics()["breaker"] == "closed"
    held.release.set()
    assert await hanging == [(FOUND, b"x")]


async def test_a_cancelled_call_keeps_its_buffers_until_it_has_ended(start: Start, pool: SimPool) -> None:
    harness = await start()
    held = Held(pool, "get")
    pool.objects["a"] = b"fresh"
    buffer = harness.buffer(5, b"stale")
    getting = asyncio.ensure_future(get(harness.storage, [Blob("a", buffer)]))
    assert await asyncio.to_thread(held.entered.wait, 30)
    getting.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not getting.done(), "the library still has the buffer"
    held.release.set()
    with pytest.raises(asyncio.CancelledError):
        await getting
    assert bytes(buffer) == b"fresh"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waits for the one before it gives up doing so soon."""
    monkeypatch.setattr(merger, "PATIENCE_S", 0.001)


@pytest.mark.usefixtures("impatient")
async def test_calls_that_all_hang_leave_the_next_one_an_error_within_the_timeout(start: Start, pool: SimPool) -> None:
    harness = await start(timeout=60.0)
    held, hanging = await all_threads_hang(harness, pool)
    be_impatient(harness)
    late = [asyncio.ensure_future(harness.get(("same", 1))) for _ in range(3)]
    for error in await asyncio.gather(*late, return_exceptions=True):
        assert isinstance(error, StorageUnavailable)
        assert "none ended within 0.05 s" in str(error)
    held.release.set()
    await asyncio.gather(*hanging)


async def all_threads_hang(harness: Harness, pool: SimPool) -> tuple[Held, list[asyncio.Task[Any]]]:
    held = Held(pool, "get")
    # One key: calls for it are never merged.
    hanging = [asyncio.ensure_future(harness.get(("same", 1))) for _ in range(CallKind.LOAD.threads)]
    async with timeout(30):
        while sum(operation == "get" for operation, _ in pool.calls) < len(hanging):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)
    return held, hanging


async def test_gets_that_come_during_a_call_are_merged_into_the_next(start: Start, pool: SimPool) -> None:
    harness = await start()
    pool.objects |= {f"k{i}": bytes([i]) * 10 for i in range(6)}
    held = Held(pool, "get")
    gets = [asyncio.ensure_future(harness.get((f"k{i}", 10))) for i in range(6)]
    assert await asyncio.to_thread(held.entered.wait, 30)
    held.release.set()
    assert await asyncio.gather(*gets) == [[(FOUND, bytes([i]) * 10)] for i in range(6)]
    assert [keys for operation, keys in pool.calls if operation == "get"] == [["k0"], ["k1", "k2", "k3", "k4", "k5"]]
    assert harness.storage.statistics()["batches_merged"] == 4


@pytest.mark.usefixtures("impatient")
async def test_with_the_breaker_open_nobody_waits_for_a_thread(start: Start, pool: SimPool) -> None:
    harness = await start(timeout=60.0, probe_interval=30.0)
    held, hanging = await all_threads_hang(harness, pool)
    harness.storage._breaker.failed("gone")
    with pytest.raises(StorageUnavailable, match=r"gone.*until a background probe succeeds"):
        await harness.get(("late", 1))
    held.release.set()
    await asyncio.gather(*hanging)


@pytest.mark.usefixtures("impatient")
async def test_a_call_that_waited_for_a_thread_while_the_breaker_opened_is_not_made(
    start: Start, pool: SimPool
) -> None:
    harness = await start(timeout=60.0, probe_interval=30.0)
    held, hanging = await all_threads_hang(harness, pool)
    waiting = asyncio.ensure_future(harness.get(("late", 1)))
    while not harness.storage._stuck:  # noqa: ASYNC110 - until it waits for a thread, and for no call before it
        await asyncio.sleep(0)
    harness.storage._breaker.failed("gone meanwhile")
    held.release.set()
    ((outcome, _),) = await waiting
    assert "gone meanwhile" in str(outcome.error)
    await asyncio.gather(*hanging)
    assert ("get", ["late"]) not in pool.calls


# --- memory after a transfer that never ended -----------------------------------------------------


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long buffers were held back, without waiting for it."""
    beside = {store_module.HEARTBEAT_S, DIAL_INTERVAL_S, PROBE_S, ASK_AGAIN_S}  # other things wait, too
    held: list[float] = []
    really = asyncio.sleep

    async def sleep(seconds: float) -> None:
        if seconds in beside:
            await really(seconds)
        else:
            held.append(seconds)

    monkeypatch.setattr(client, "stall_limit", lambda: 3.0)
    monkeypatch.setattr(client, "connect_limit", lambda: 127.0)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    return held


@pytest.mark.parametrize("which", ["monotonic", "wall"])
async def test_a_transfer_that_ran_into_the_librarys_limit_keeps_its_buffers(
    start: Start, pool: SimPool, hold: list[float], which: str
) -> None:
    now = {"monotonic": 0.0, "wall": 0.0}
    clock = replace(Clock(), monotonic=lambda: now["monotonic"], wall=lambda: now["wall"])
    harness = await start(clock=clock)

    def a_minute_passes(operation: str, _keys: Sequence[str]) -> None:
        now[which] += 61.0 * (operation == "get")

    pool.before = a_minute_passes
    pool.answer("get", error_codes.TRANSFER_FAIL)
    with capture_logs() as logs:
        answers = await harness.get(*((f"k{i}", 1) for i in range(30)))
    assert {reason(outcome) for outcome, _ in answers} == {"storage_error"}
    assert hold == [4 * 127.0 + 8 * 3.0], "four connections may yet be tried, and 30 transfers run, four at a time"
    assert harness.storage.statistics()["held"] == 30
    assert [line["event"] for line in logs] == ["a Mooncake transfer did not end: holding its buffers"]


@pytest.mark.parametrize("code", sorted(error_codes.SETTLED))
async def test_a_failure_that_leaves_no_transfer_behind_gives_the_buffers_back(
    start: Start, pool: SimPool, hold: list[float], code: int
) -> None:
    now = [0.0]
    harness = await start(clock=replace(Clock(), monotonic=lambda: now[0]))
    pool.before = lambda operation, _keys: now.__setitem__(0, now[0] + 61.0 * (operation == "get"))
    pool.answer("get", code)
    await asyncio.gather(harness.get(("a", 1)), return_exceptions=True)
    assert 60.0 not in hold
    assert harness.storage.statistics()["held"] == 0


async def test_a_transfer_that_failed_in_time_gives_its_buffers_back(
    start: Start, pool: SimPool, hold: list[float]
) -> None:
    harness = await start()
    pool.answer("get", error_codes.TRANSFER_FAIL)
    [(outcome, _)] = await harness.get(("a", 1))
    assert reason(outcome) == "storage_error"
    assert not hold


# --- close ----------------------------------------------------------------------------------------


async def test_a_close_names_the_call_that_does_not_end_and_leaves_its_client_open(
    pool: SimPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CLOSE_TIMEOUT_S", 0.01)
    storage, memory = pool_storage(config(), set_up=pool.set_up), Memory(4096)
    await storage.open()
    client = storage._client
    held = Held(pool, "exists")
    hanging = asyncio.ensure_future(storage.exists(["a"]))
    assert await asyncio.to_thread(held.entered.wait, 30)
    with pytest.raises(StillRunning, match=r"transferd-mooncake-\d+: load call, \d"):
        await storage.close()
    assert not client.closed  # type: ignore[union-attr]
    held.release.set()
    assert await hanging == [False]
    memory.close()


async def test_after_the_close_nothing_is_open(pool: SimPool) -> None:
    storage = pool_storage(config(), set_up=pool.set_up)
    await storage.open()
    client = storage._client
    await storage.close()
    assert client.closed  # type: ignore[union-attr]
    assert client.registered == {}  # type: ignore[union-attr]
    with pytest.raises(StorageError, match="not open"):
        await storage.exists(["a"])
