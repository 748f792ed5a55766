"""Engines that register with a real daemon: they come, share what they stored, keep apart otherwise, and leave."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.own_memory import OwnMemory, code, read, write
from tests.support.waits import until
from transferd import (
    Client,
    Engine,
    Pages,
    RequestError,
    Status,
    SyncClient,
    shm_pages,
)
from transferd.blocks.copyplan import CopyPlan
from transferd.blocks.layout import build_layout
from transferd.client import heartbeat
from transferd.config import Config, from_tree
from transferd.daemon.clients import KnownClient
from transferd.daemon.daemon import SETUP_THREADS, Daemon
from transferd.daemon.engine import SET_UP_AT_ONCE, HostedEngine
from transferd.errors import ConnectRefused, ConnectTimeout, TierError, TransferError
from transferd.tasks import SwapInTask, SwapOutTask
from transferd.tiers.base import HostMemory
from transferd.tiers.offered import DIRECTORY
from transferd.tiers.segment import PREFIX, SharedSegment, attach_arrays
from transferd.tiers.shm import ShmDeviceTier
from transferd.wire import protocol as wire
from transferd.wire.transport import ZmqClientTransport
from transferd.workers.rank import RankWorker

TOKEN = "the token of engine e"
LAYOUT: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 4, "block_size": 4, "device_blocks": 8}


class Memory(OwnMemory):
    """An engine's own memory, of this file's layout."""

    def __init__(self, ranks: int = 1, **layout: Any) -> None:
        super().__init__(build_layout(from_tree({"cache": LAYOUT | {"ranks": ranks} | layout}).geometry), ranks)

    def arrays(self, rank: int = 0) -> list[np.ndarray[Any, Any]]:
        return [array for layers in attach_arrays(self.handle(rank).data).values() for array in layers]

    def paint(self, block: int, value: int) -> None:
        for rank in range(len(self._tiers)):
            for array in self.arrays(rank):
                array[block].view(np.uint8)[...] = value + rank

    def holds(self, block: int, value: int) -> bool:
        return all(
            bool((array[block].view(np.uint8) == value + rank).all())
            for rank in range(len(self._tiers))
            for array in self.arrays(rank)
        )


def described(ranks: int = 1, **more: Any) -> Engine:
    values: dict[str, Any] = {"model": "m", "generation": "g", "host_blocks": 4} | more
    layout = LAYOUT | values.pop("layout", {})
    return Engine(ranks=ranks, layout=layout, **values)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/t.sock"


@pytest.fixture
async def daemon(endpoint: str) -> AsyncIterator[Daemon]:
    """One without [cache]: it has storage, and waits."""
    async with running(endpoint) as daemon:
        yield daemon


def configured(endpoint: str, **sections: Any) -> Config:
    tree = {
        "server": {"endpoint": endpoint, "client_timeout": 2.5},
        "host": {"staging": "64KiB"},
        "storage": {"backend": "memory"},
        "metrics": {"listen": ""},
    }
    return from_tree(tree | sections)


@contextlib.asynccontextmanager
async def running(endpoint: str, **sections: Any) -> AsyncIterator[Daemon]:
    daemon = Daemon(configured(endpoint, **sections))
    await daemon.open()
    try:
        yield daemon
    finally:
        assert await daemon.stop(lambda: 5.0) == []


def client(endpoint: str, engine: str, token: str = "") -> Client:
    return Client(endpoint, engine=engine, await_ready=False, token=token)


@contextlib.asynccontextmanager
async def serving(endpoint: str, name: str, *, token: str = "", **more: Any) -> AsyncIterator[tuple[Client, Memory]]:
    """An engine of one process that is registered, and ready."""
    engine = described(**more)
    layout = {key: value for key, value in dict(engine.layout).items() if key in LAYOUT}  # type: ignore[arg-type]
    async with Memory(engine.ranks, **layout) as memory, client(endpoint, name, token) as one:
        await one.register(engine)
        for rank in range(engine.ranks):
            await one.offer(rank, memory.handle(rank))
        await one.wait_ready(30)
        yield one, memory


# --- coming ---------------------------------------------------------------------------------------


async def test_a_daemon_without_an_engine_is_up_and_says_what_it_waits_for(daemon: Daemon, endpoint: str) -> None:
    assert daemon.not_ready == ""
    async with client(endpoint, "") as one:
        report = await one.stats()
        assert (report["ready"], report["engines"], report["ranks"]) == (True, {}, [])
        result = await one.submit(write("w", ["k"], [0]))
        assert (result.status, code(result)) == (Status.REJECTED, "unknown_engine")
        with pytest.raises(RequestError, match="no engine of its own") as caught:
            await one.match(["k"])
        assert caught.value.reason == "unknown_engine"
        with pytest.raises(ConnectTimeout, match="no engine of its own"):
            await one.wait_ready(0.2)


async def test_an_engine_is_ready_when_all_its_ranks_have_offered_from_any_client(
    daemon: Daemon, endpoint: str
) -> None:
    async with Memory(2) as memory, client(endpoint, "e", TOKEN) as one, client(endpoint, "e", TOKEN) as other:
        with pytest.raises(RequestError) as caught:
            await other.offer(1, memory.handle(1))
        assert caught.value.reason == "unknown_engine", "it came before the engine"
        assert await one.register(described(2)) == TOKEN
        assert not (await one.stats())["engines"]["e"]["ready"]
        await other.offer(1, memory.handle(1))
        assert (await one.stats())["engines"]["e"]["missing"] == [0]
        await one.offer(0, memory.handle(0))
        await one.wait_ready(30)
        await other.wait_ready(30)
        [engine] = daemon.engines.all
        staging = [worker.context.staging.memory for worker in engine.workers]
        assert [(one.rank, one.lender) for one in staging] == [(0, (os.getpid(), 0)), (1, (os.getpid(), 1))]
        memory.paint(1, 0x40)
        written = await one.submit(write("w", ["k"], [1]))
        assert (written.status, len(written.ranks)) == (Status.OK, 2)
        assert (await other.submit(read("r", ["k"], [2]))).block_ids == [2]
        assert memory.holds(2, 0x40)
        mine = (await one.stats())["engines"]["e"]
        assert (mine["ready"], mine["ranks"], mine["clients"], mine["tasks"]["ok"]) == (True, 2, 2, 2)


async def test_two_living_engines_cannot_have_one_name(daemon: Daemon, endpoint: str) -> None:
    async with client(endpoint, "e") as one, client(endpoint, "e") as other:
        await one.register(described())
        await one.register(described())  # the same client, the same engine: it was there
        with pytest.raises(RequestError) as caught:
            await one.register(described(model="another"))
        assert caught.value.reason == "layout_mismatch"
        with pytest.raises(RequestError) as caught:
            await other.register(described())
        assert caught.value.reason == "engine_exists"


@pytest.mark.parametrize(
    ("name", "engine", "reason"),
    [
        ("e", described(model=""), "bad_value"),
        ("e", described(model="a\0b"), "bad_value"),
        ("e", described(generation="\n"), "bad_value"),
        ("e", described(generation="g" * 257), "bad_value"),
        ("e", described(layout={"device": "os:system"}), "bad_value"),
        ("e", described(layout={"layers": 0}), "bad_value"),
        ("e", described(layout={"layers": 4096, "kv_heads": 2**20, "head_dim": 2**20}), "bad_value"),
        ("e", described(layout={"no such key": 1}), "bad_value"),
        ("e", described(host_blocks=2**31 - 1), "no_room"),
        ("e", described(host_blocks=0, layout={"device_blocks": 2**31 - 1, "ownership": "attach"}), "no_room"),
        ("no spaces", described(), "bad_value"),
    ],
)
async def test_an_impossible_engine_is_refused(
    daemon: Daemon, endpoint: str, name: str, engine: Engine, reason: str
) -> None:
    async with client(endpoint, name) as one:
        with pytest.raises(TransferError) as caught:
            await one.register(engine)
        assert caught.value.reason == reason
        assert list(daemon.engines.all) == []


async def test_there_are_at_most_so_many_engines(endpoint: str) -> None:
    async with running(endpoint, engines={"max_engines": 2}), contextlib.AsyncExitStack() as stack:
        for name in ("a", "b"):
            await stack.enter_async_context(serving(endpoint, name))
        async with client(endpoint, "c") as third:
            with pytest.raises(RequestError) as caught:
                await third.register(described())
            assert caught.value.reason == "too_many_engines"


async def test_an_engine_whose_memory_takes_long_keeps_no_other_from_coming(
    daemon: Daemon, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks had taken every thread that makes memory."""
    go, allocate = threading.Event(), RankWorker._allocate

    def slow(worker: RankWorker) -> None:
        assert worker.context.engine != "large" or go.wait(60)
        allocate(worker)

    monkeypatch.setattr(RankWorker, "_allocate", slow)
    async with client(endpoint, "large") as large:
        coming = asyncio.ensure_future(large.register(described(ranks=SETUP_THREADS)))
        try:
            await until(lambda: len(daemon.threads.under_way()) >= SET_UP_AT_ONCE)
            async with serving(endpoint, "other") as (one, _):
                assert not coming.done()
                await one.unregister()
        finally:
            go.set()
        await coming


async def test_an_engine_that_registers_is_admitted_a_quarter_of_what_the_daemon_admits(endpoint: str) -> None:
    server = {"endpoint": endpoint, "max_queued_tasks": 40, "max_queued_bytes": "4MiB", "max_inflight_bytes": "1GiB"}
    async with running(endpoint, server=server) as daemon, serving(endpoint, "a"):
        [engine] = [engine for engine in daemon.engines if engine.name == "a"]
        least = engine.dispatcher.limits.server
        assert (least.max_queued_tasks, least.max_queued_bytes, least.max_inflight_bytes) == (10, 1 << 20, 1 << 28)


async def test_host_memory_is_one_budget_and_returns_with_the_engine_that_leaves(endpoint: str) -> None:
    async with running(endpoint, engines={"host_memory": "100KiB", "host_memory_each": "80KiB"}) as daemon:
        async with serving(endpoint, "a") as (first, _), client(endpoint, "b") as second:
            taken = daemon.stats()["host"]["budget"]["taken"]
            assert taken > 64 * 2**10  # staging, and host blocks
            with pytest.raises(TransferError, match=f"{100 * 2**10 - taken} are left") as caught:
                await second.register(described())
            assert caught.value.reason == "no_room"
            with pytest.raises(RequestError, match="one may have 81920"):
                await second.register(described(host_blocks=128))
            await first.unregister()
            await second.register(described())
            assert daemon.stats()["host"]["budget"]["taken"] == taken
            await second.unregister()
        assert daemon.stats()["host"]["budget"]["left"] == 100 * 2**10


# --- sharing, and keeping apart -------------------------------------------------------------------


async def test_engines_that_agree_read_each_others_blocks_and_others_never_do(daemon: Daemon, endpoint: str) -> None:
    async with (
        serving(endpoint, "a") as (a, mine),
        serving(endpoint, "b") as (b, same),
        serving(endpoint, "c", model="other") as (c, _),
        serving(endpoint, "d", generation="h") as (d, _),
        serving(endpoint, "e", layout={"layers": 3}) as (e, _),
        serving(endpoint, "f", group_ranks=2) as (f, _),
    ):
        mine.paint(3, 0x21)
        assert (await a.submit(write("t", ["k"], [3]))).status is Status.OK
        assert (await b.submit(read("t", ["k"], [5]))).block_ids == [5], "the same task_id, of another engine"
        assert same.holds(5, 0x21)
        for other in (c, d, e, f):
            assert (await other.submit(read("t", ["k"], [5]))).status is Status.MISS
            assert await other.exists(["k"]) == [False]
        assert await b.exists(["k", "l"]) == [True, False]


async def test_the_daemons_own_engine_and_one_that_registers_share_as_well(endpoint: str) -> None:
    cache = LAYOUT | {"ranks": 1, "host_blocks": 0}
    storage = {"backend": "memory", "model": "m", "generation": "g"}
    async with running(endpoint, cache=cache, storage=storage), Client(endpoint) as own:
        caches = [array for layers in (await own.attach(0)).values() for array in layers]
        async with serving(endpoint, "e") as (one, memory):
            memory.paint(1, 0x37)
            assert (await one.submit(write("w", ["k"], [1]))).status is Status.OK
            assert (await own.submit(read("r", ["k"], [2]))).block_ids == [2]
            assert all(bool((array[2].view(np.uint8) == 0x37).all()) for array in caches)
            with pytest.raises(RequestError) as caught:
                await own.unregister()
            assert caught.value.reason == "bad_request"
        assert (await own.submit(read("r2", ["k"], [3]))).block_ids == [3]


async def test_one_engines_pause_generation_and_clear_affect_no_other_engine(daemon: Daemon, endpoint: str) -> None:
    async with serving(endpoint, "a") as (a, mine), serving(endpoint, "b") as (b, _):
        await a.pause()
        waits = await a.push(write("w", ["k"], [0]))
        assert (await b.submit(write("w", ["k"], [0]))).status is Status.OK
        assert not waits.done()
        await a.resume()
        assert (await waits).status is Status.OK
        await a.set_generation("h")
        assert (a.generation, b.generation) == ("h", "g")
        assert await a.exists(["k"]) == [False]
        assert await b.exists(["k"]) == [True]
        mine.paint(1, 0x55)
        assert (await a.submit(SwapOutTask(task_id="o", gpu_block_ids=[1], cpu_block_ids=[2]))).status is Status.OK
        empty = await b.submit(SwapInTask(task_id="i", gpu_block_ids=[1], cpu_block_ids=[2]))
        assert code(empty) == "empty_block", "host blocks are its own"
        await a.clear_cache()
        assert (await b.submit(read("r", ["k"], [4]))).block_ids == [4]


async def test_only_the_user_who_registered_an_engine_speaks_for_it(
    daemon: Daemon, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(endpoint, "e") as (_, memory):
        registrant = daemon.engines.get("e")
        assert registrant is not None
        mine = daemon.clients.at(registrant)
        theirs = property(lambda one: (os.getuid(), os.getpid()) if one in mine else (12345, 1))
        monkeypatch.setattr(KnownClient, "who", theirs)
        async with client(endpoint, "e") as foreign:
            for ask in (foreign.match(["k"]), foreign.offer(0, memory.handle()), foreign.unregister(), foreign.pause()):
                with pytest.raises(RequestError) as caught:
                    await ask
                assert caught.value.reason == "not_yours"
            assert code(await foreign.submit(read("r", ["k"], [0]))) == "not_yours"
            with pytest.raises(RequestError) as caught:
                await foreign.register(described())
            assert caught.value.reason == "engine_exists"


# --- leaving --------------------------------------------------------------------------------------


async def test_an_engine_that_unregisters_leaves_nothing_and_its_name_is_free(daemon: Daemon, endpoint: str) -> None:
    async with serving(endpoint, "a") as (a, _), serving(endpoint, "b") as (b, memory):
        assert (await a.submit(write("first", ["k"], [0]))).status is Status.OK
        engine = daemon.engines.get("a")
        assert engine is not None
        await a.pause()
        queued = await a.push(write("w", ["k"], [0]))
        await a.unregister()
        assert engine.dispatcher.results.nbytes == 0, "what has left takes no memory until it is collected"
        assert (await queued).status is Status.FAILED
        assert code(await queued) == "engine_gone"
        assert "a" not in (await b.stats())["engines"]
        assert code(await a.submit(write("x", ["k"], [0]))) == "unknown_engine"
        memory.paint(0, 0x11)
        assert (await b.submit(write("w", ["k"], [0]))).status is Status.OK
        await a.register(described())
        assert (await b.stats())["engines"]["a"]["epoch"] > 1


@pytest.mark.parametrize("who", ["its own client", "one that only asks"])
async def test_the_prefetches_of_an_engine_that_leaves_end_and_keep_nothing(
    endpoint: str, tmp_path: Path, who: str
) -> None:
    """Nobody could cancel them any more: an engine of the same name is another one."""
    file = {"path": str(tmp_path / "blocks"), "capacity": "64MiB", "reserve": "0B"}
    levels = {"levels": ["memory", "file"], "memory": {"capacity": "16MiB"}, "file": file}
    async with running(endpoint, storage=levels), serving(endpoint, "a") as (a, _):
        assert (await a.submit(write("w", ["k"], [0]))).status is Status.OK
    async with running(endpoint, storage=levels) as daemon, contextlib.AsyncExitStack() as stack:
        async with serving(endpoint, "a") as (a, _):
            asking = await stack.enter_async_context(client(endpoint, "a", a.token))
            one = a if who == "its own client" else asking
            assert (await one.prefetch(["k"], "memory", timeout=3600)).count == 1
            assert (await a.stats())["storage"]["levels"][0]["kept_bytes"] > 0
            if one is a:
                await a.unregister()
        await until(lambda: not daemon.engines.all, "the engine has left")
        assert daemon.storage is not None
        assert daemon.storage.statistics()["levels"][0]["kept_bytes"] == 0
        assert daemon.engines.prefetches._running == {}


async def test_a_hello_sent_before_the_answer_to_a_second_registration_does_not_end_the_engine(
    daemon: Daemon, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = daemon.engines.hold
    async with serving(endpoint, "a") as (a, memory):
        await a.unregister()

        def registered(client: KnownClient) -> None:
            hold(client)
            a._conversation._greet()  # as its heartbeat does at some moment

        monkeypatch.setattr(daemon.engines, "hold", registered)
        await a.register(described())
        assert "a" in (await a.stats())["engines"]
        await a.offer(0, memory.handle(0))
        await a.wait_ready(30)
        assert (await a.submit(write("w", ["k"], [0]))).status is Status.OK


async def test_a_client_whose_registration_failed_has_no_part_in_the_engine_that_has_the_name(
    daemon: Daemon, endpoint: str
) -> None:
    async with serving(endpoint, "a"), client(endpoint, "a") as late:
        with pytest.raises(RequestError) as caught:
            await late.register(described(generation="another"))
        assert caught.value.reason == "engine_exists"
        late._conversation._greet()
        assert code(await late.submit(write("w", ["k"], [0]))) == "not_this_engine"
        assert not late.connected


async def test_an_engine_goes_with_its_last_client_and_comes_again_under_a_new_epoch(
    daemon: Daemon, endpoint: str
) -> None:
    async with client(endpoint, "e", TOKEN) as stays:
        async with serving(endpoint, "e", token=TOKEN) as (one, _):
            await until(lambda: stays.connected, "another client of the engine sees it")
            assert (await stays.submit(read("r", ["k"], [0]))).status is Status.MISS, "it takes part"
            before = daemon.engines.get("e")
            assert before is not None
        await until(lambda: before.cache.missing == [0], "the goodbye has come; other clients may overtake it")
        assert daemon.engines.get("e") is before, "a client of it lives"
        assert code(await stays.submit(write("w", ["k"], [0]))) == "engine_gone", "its memory went with its owner"
    await until(lambda: daemon.engines.all == [], "it has left")
    async with serving(endpoint, "e") as (one, _):
        after = daemon.engines.get("e")
        assert after is not None
        assert after.first_epoch > before.first_epoch
        assert (await one.submit(write("w", ["k"], [0]))).status is Status.OK
    report = daemon.stats()
    assert (report["tasks"]["ok"], report["tasks"]["miss"]) == (1, 1), "what an engine had counted does not go with it"
    if daemon.engines.all:
        await daemon.engines.settled()
    assert report["engines_leaving"] in (0, 1)


async def test_a_client_that_waits_for_the_name_does_not_keep_the_engine_that_died(
    daemon: Daemon, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of an engine that was killed and restarted at once."""
    async with Memory() as memory, client(endpoint, "e") as again:
        async with serving(endpoint, "e") as (killed, _):
            with pytest.raises(RequestError) as caught:
                await again.register(described())
            assert caught.value.reason == "engine_exists"
            monkeypatch.setattr(killed._conversation, "post", lambda _: None)  # no Bye
        await until(lambda: daemon.engines.get("e") is None, "the dead are given up")
        await again.register(described())
        await again.offer(0, memory.handle())
        await again.wait_ready(30)
        assert (await again.submit(write("w", ["k"], [0]))).status is Status.OK


async def test_sixteen_engines_on_one_daemon_share_and_leave_without_a_trace_in_the_others(
    daemon: Daemon, endpoint: str
) -> None:
    async with contextlib.AsyncExitStack() as stay:
        stays = [await stay.enter_async_context(serving(endpoint, f"stays-{n}", ranks=1)) for n in range(8)]
        async with contextlib.AsyncExitStack() as leave:
            leaves = [await leave.enter_async_context(serving(endpoint, f"leaves-{n}", ranks=1)) for n in range(8)]
            assert len((await stays[0][0].stats())["engines"]) == 16
            for number, (one, memory) in enumerate(stays + leaves):
                memory.paint(number % 8, 0x10 + number)
                assert (await one.submit(write("w", [f"k{number}"], [number % 8]))).status is Status.OK
            for number, (one, memory) in enumerate(stays + leaves):
                other = (number + 5) % 16
                assert (await one.submit(read("r", [f"k{other}"], [(number + 1) % 8]))).status is Status.OK
                assert memory.holds((number + 1) % 8, 0x10 + other)
            before = [[array.tobytes() for array in memory.arrays()] for _, memory in stays]
            await asyncio.gather(*(one.unregister() for one, _ in leaves[:4]))
        await until(lambda: len(list(daemon.engines)) == 8, "half of them have left")
        await daemon.engines.settled()
        assert [[array.tobytes() for array in memory.arrays()] for _, memory in stays] == before
        for number, (one, memory) in enumerate(stays):
            assert (await one.submit(read("last", [f"k{15 - number}"], [7]))).status is Status.OK
            assert memory.holds(7, 0x10 + 15 - number), "what an engine stored outlives it"


async def test_a_client_of_an_earlier_engine_is_refused_until_it_shows_the_new_token(
    daemon: Daemon, endpoint: str
) -> None:
    heard: list[wire.ReplyBody] = []
    daemon.server._liveness.timeout = 1000.0  # this client has no heartbeat
    transport = ZmqClientTransport(endpoint)
    transport.start(lambda payload: heard.append(wire.decode_reply(payload).body))

    async def ask(body: wire.Body) -> Any:
        count = len(heard)
        transport.send(wire.encode_request(1, body))
        await until(lambda: len(heard) > count, f"an answer to {body}")
        return heard[-1]

    try:
        async with serving(endpoint, "e") as (one, memory):
            nameless, token = await ask(wire.Hello("e")), one.token
            assert (nameless.ready, nameless.epoch, nameless.registration) == (False, 0, "")
            first = await ask(wire.Hello("e", token))
            assert (first.ready, first.registration) == (True, token)
            await one.unregister()
            await until(lambda: isinstance(heard[-1], wire.Refused), "it is told to say Hello")
            absent = await ask(wire.Hello("e", token))
            assert (absent.ready, absent.epoch, absent.registration) == (False, 0, "")
            assert (await ask(write("late", ["k"], [0]))).result.error.code == "unknown_engine"
        async with serving(endpoint, "e") as (one, memory):
            stale = await ask(wire.Hello("e", token))
            assert (stale.ready, stale.epoch, stale.registration) == (False, 0, "")
            assert one.token not in stale.why
            assert (await ask(write("later", ["k"], [0]))).result.error.code == "not_this_engine"
            refused = await ask(wire.offer(0, "shm", dict(memory.handle().data), first.epoch))
            assert refused.error.code == "not_this_engine"
            assert (await ask(wire.Hello("e", one.token))).ready
            assert (await ask(write("now", ["k"], [0]))).result.status is Status.OK
    finally:
        transport.close()


async def test_a_client_notices_that_its_engine_was_replaced_under_the_same_name(daemon: Daemon, endpoint: str) -> None:
    async with client(endpoint, "e", TOKEN) as other:
        async with serving(endpoint, "e", token=TOKEN) as (one, _):
            await until(lambda: other.connected, "it knows the engine")
            told: list[str] = []
            other.on_new_boot = lambda: told.append("gone")
            await one.unregister()
            await until(lambda: not other.connected, "it hears of it")
        async with serving(endpoint, "e") as (one, memory), client(endpoint, "e", one.token) as another:
            assert told == ["gone"]
            await another.wait_ready(30)
            memory.paint(0, 9)
            assert (await another.submit(write("now", ["k"], [0]))).status is Status.OK
            assert code(await other.submit(write("old", ["k"], [0]))) == "not_this_engine", "the token ended"


async def test_after_a_restart_of_the_daemon_engines_come_again_by_themselves(endpoint: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(contextlib.AsyncExitStack())
        await first.enter_async_context(running(endpoint))
        one, memory = await stack.enter_async_context(serving(endpoint, "e", ranks=2))
        other = await stack.enter_async_context(client(endpoint, "e", one.token))
        await other.wait_ready(30)
        await first.aclose()
        second = await stack.enter_async_context(running(endpoint))
        await until(lambda: one.boot_id == second.boot_id and one.connected and other.connected, "all is as before")
        memory.paint(2, 0x61)
        assert (await other.submit(write("w", ["k"], [2]))).status is Status.OK
        assert (await one.submit(read("r", ["k"], [3]))).block_ids == [3]
        assert memory.holds(3, 0x61)


async def test_a_client_whose_engine_was_given_up_knows_that_its_mappings_are_outdated(
    daemon: Daemon, endpoint: str
) -> None:
    """A suspended engine: it comes again under the same boot id, and what the daemon had beside its memory is new."""
    async with serving(endpoint, "e") as (one, _):
        await one.device_handle(0)
        before, boot_id = daemon.engines.get("e"), one.boot_id
        assert before is not None
        for known in daemon.clients.at(before):
            daemon.server._forget(known.peer)  # as after server.client_timeout
        await until(lambda: daemon.engines.get("e") not in (None, before) and one.connected, "it has come again")
        await until(lambda: one.outdated == [0], "and knows what it has lost")
        assert one.boot_id == boot_id
        await one.device_handle(0)
        assert one.outdated == []


def test_a_blocking_client_registers_offers_and_leaves(tmp_path: Path) -> None:
    from transferd.client.launch import start

    daemon = start({"storage": {"backend": "memory"}, "host": {"staging": "64KiB"}}, tmp_path, wait=False)
    try:

        async def memory() -> Memory:
            return await Memory().__aenter__()

        mine = asyncio.run(memory())
        with SyncClient(daemon.endpoint, engine="e", await_ready=False, connect_timeout=30) as one:
            one.register(described())
            one.offer(0, mine.handle())
            one.wait_ready(30)
            mine.paint(0, 3)
            assert one.submit(write("w", ["k"], [0])).status is Status.OK
            assert one.explain("w")["engine"] == "e"
            assert [row["engine"] for row in one.tasks(engine="e")] == ["e"]
            assert one.tasks(engine="another") == []
            assert [row["engine"] for row in one.clients(engine="e")] == ["e"]
            one.unregister()
            assert one.stats()["engines"] == {}
        asyncio.run(mine.__aexit__())
    finally:
        assert daemon.stop() == 0
    assert not list(DIRECTORY.glob(f"{PREFIX}{daemon.pid}.*"))


async def test_engines_with_pages_of_their_own_share_them_wherever_they_lie(daemon: Daemon, endpoint: str) -> None:
    """Two engines with the same identity; in one of them layers lie side by side, in the other one after the other."""
    layers, nbytes, blocks = 3, 256, 4
    layout = Pages(layers=layers, page_bytes=nbytes, blocks=blocks, identity="test/one")
    apart = [(layer * blocks * nbytes, nbytes) for layer in range(layers)]
    together = [(layer * nbytes, layers * nbytes) for layer in range(layers)]
    async with contextlib.AsyncExitStack() as stack:
        views: list[dict[str, list[np.ndarray[Any, Any]]]] = []
        clients: list[Client] = []
        for name, segments in (("a", apart), ("b", together)):
            memory = SharedSegment(f"{PREFIX}{os.getpid()}.{name}", layers * blocks * nbytes, create=True)
            stack.callback(memory.close)
            one = await stack.enter_async_context(client(endpoint, name))
            await one.register(Engine(ranks=1, model="m", layout=layout))
            await one.offer(0, shm_pages(memory.name, segments=segments))
            await one.wait_ready(30)
            view = np.ctypeslib.as_array((ctypes.c_uint8 * memory.nbytes).from_address(memory.address))
            views.append(layout.views(view, segments))
            clients.append(one)
        content = [np.random.default_rng(layer).integers(0, 256, nbytes, dtype=np.uint8) for layer in range(layers)]
        for layer in range(layers):
            views[0]["page"][layer][1] = content[layer]
        assert (await clients[0].submit(write("w", ["k"], [1]))).status is Status.OK
        assert (await clients[1].submit(read("r", ["k"], [3]))).block_ids == [3]
        for layer in range(layers):
            assert np.array_equal(views[1]["page"][layer][3], content[layer])
        assert await clients[1].exists(["k", "l"]) == [True, False]
        views.clear()


# --- given up too early ---------------------------------------------------------------------------


class SlowOpening:
    """Engines open their ranks when `goes_on` is set. begun: one has come so far. fails: it opens in vain."""

    def __init__(self, patch: pytest.MonkeyPatch, *, fails: bool = False) -> None:
        self.begun, self.goes_on, opened = asyncio.Event(), asyncio.Event(), HostedEngine.open

        async def slowly(engine: HostedEngine) -> None:
            self.begun.set()
            await self.goes_on.wait()
            await opened(engine)
            if fails:
                raise TierError("no room")

        patch.setattr(HostedEngine, "open", slowly)


def has_memory(engine: HostedEngine) -> bool:
    return any(region.allocated for worker in engine.workers for region in worker.context.regions.values())


@pytest.mark.parametrize(("fails", "reason"), [(False, "engine_gone"), (True, "tier_error")])
async def test_what_is_given_up_while_it_is_built_leaves_nothing_behind(
    daemon: Daemon, endpoint: str, monkeypatch: pytest.MonkeyPatch, fails: bool, reason: str
) -> None:
    async with client(endpoint, "e", TOKEN) as one, client(endpoint, "e", TOKEN) as other:
        with monkeypatch.context() as patch:
            opening = SlowOpening(patch, fails=fails)
            registering = asyncio.ensure_future(one.register(described()))
            await opening.begun.wait()
            [engine] = daemon.engines.all
            await other.ping()  # it shows its token
            leaving = asyncio.ensure_future(other.unregister())
            await until(lambda: daemon.engines.get("e") is None, "it is dismissed")
            opening.goes_on.set()
            with pytest.raises(TransferError) as given_up:
                await registering
            assert given_up.value.reason == reason
            await leaving
        assert not has_memory(engine)
        assert (daemon.engines.all, daemon.engines.total.engines) == ([], [])
        assert daemon.stats()["host"]["budget"]["taken"] == 0
        async with Memory() as memory:  # and the name is free
            await other.register(described())
            await other.offer(0, memory.handle())
            await other.wait_ready(30)
            assert (await other.submit(write("w", ["k"], [0]))).status is Status.OK


@pytest.mark.parametrize(("error", "reason"), [(MemoryError(), "out_of_memory"), (OSError("no room"), "internal")])
async def test_an_engine_that_opens_in_vain_leaves_whatever_the_error_is(
    daemon: Daemon, endpoint: str, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    async def fail(_: RankWorker) -> None:
        raise error

    async with client(endpoint, "e", TOKEN) as one, client(endpoint, "e", TOKEN) as other:
        with monkeypatch.context() as patch:
            patch.setattr(RankWorker, "open", fail)
            with pytest.raises(TransferError) as given_up:
                await one.register(described())
        assert given_up.value.reason == reason
        await daemon.engines.settled()
        assert (daemon.engines.all, daemon.engines.total.engines) == ([], [])
        assert daemon.stats()["host"]["budget"]["taken"] == 0
        async with Memory() as memory:  # and the name is free
            await other.register(described())
            await other.offer(0, memory.handle())
            await other.wait_ready(30)


async def test_a_stop_waits_for_what_was_given_up_while_it_is_built(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening = SlowOpening(monkeypatch)
    async with contextlib.AsyncExitStack() as stack:
        async with running(endpoint) as daemon:
            one = await stack.enter_async_context(client(endpoint, "e"))
            registering = asyncio.ensure_future(one.register(described()))
            await opening.begun.wait()
            [engine] = daemon.engines.all
            leaving, settled = asyncio.ensure_future(daemon.engines.unregister(engine)), daemon.engines.settled

            async def stopping() -> None:
                opening.goes_on.set()
                await settled()

            monkeypatch.setattr(daemon.engines, "settled", stopping)
            await until(lambda: daemon.engines.get("e") is None, "it is dismissed")
        await leaving
        assert not has_memory(engine)
        with pytest.raises(TransferError):
            await registering


@pytest.mark.parametrize(("comes_again", "why"), [(False, "unknown_engine"), (True, "engine_gone")])
async def test_a_task_that_a_leaving_engine_still_copies_is_refused_as_unsettled(
    daemon: Daemon, endpoint: str, monkeypatch: pytest.MonkeyPatch, comes_again: bool, why: str
) -> None:
    """Its client was silent for too long, and sends the task again."""
    begun, gate, copy_in = asyncio.Event(), asyncio.Event(), ShmDeviceTier.copy_in

    async def held(tier: ShmDeviceTier, plan: CopyPlan, host: HostMemory) -> None:
        begun.set()
        await gate.wait()
        await copy_in(tier, plan, host)

    monkeypatch.setattr(ShmDeviceTier, "addressable", False)
    monkeypatch.setattr(ShmDeviceTier, "copy_in", held)
    async with serving(endpoint, "e", token=TOKEN) as (one, memory), client(endpoint, "e", TOKEN) as other:
        memory.paint(1, 0x21)
        memory.paint(2, 0x42)
        assert (await one.submit(write("w", ["k"], [1]))).status is Status.OK
        pushed = await one.push(read("r", ["k"], [2]))
        await begun.wait()
        conversation = one._conversation
        conversation._beat_timer.cancel()  # it sends the task again when we say so, not before
        await until(lambda: not conversation._heart.hello_under_way, "its newest Hello is answered")
        engine = daemon.engines.get("e")
        assert engine is not None
        for known in daemon.clients.at(engine):
            daemon.server._forget(known.peer, "was silent for 7.4 s")
        if comes_again:
            await other.register(described())
        conversation._greet()  # as its heartbeat does
        refused = await pushed
        assert not refused.settled
        assert (refused.status, code(refused)) == (Status.REJECTED, why), refused
        assert memory.holds(2, 0x42)
        gate.set()
        assert await one.settled("r", 20)
        assert memory.holds(2, 0x21), "it was touched after the refusal"


# --- lives ----------------------------------------------------------------------------------------


async def test_a_token_that_was_shown_before_another_process_registered_the_engine_counts(
    daemon: Daemon, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first push, before its next Hello, was refused: it "shows no token". The rest of its Hello counts, too."""
    other_weights = Client(endpoint, engine="e", await_ready=False, token=TOKEN, generation="g2")
    async with contextlib.AsyncExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(heartbeat, "FIRST_HELLO_S", 3600.0)  # between this client's first Hello and its second
            patch.setattr(heartbeat, "SLOWEST_HELLO_S", 3600.0)
            early = await stack.enter_async_context(client(endpoint, "e", TOKEN))
            stranger = await stack.enter_async_context(client(endpoint, "e", "another token"))
            await stack.enter_async_context(other_weights)
            for one in (early, stranger, other_weights):
                assert code(await one.submit(write("w0", ["k"], [1]))) == "unknown_engine"
        await stack.enter_async_context(serving(endpoint, "e", token=TOKEN))
        assert (await early.submit(write("w", ["k"], [1]))).status is Status.OK
        assert code(await stranger.submit(write("x", ["k"], [1]))) == "not_this_engine"
        assert code(await other_weights.submit(write("y", ["k"], [1]))) == "generation_mismatch"
        other_weights._conversation._greet()
        assert code(await other_weights.submit(write("z", ["k"], [1]))) == "generation_mismatch"


async def test_processes_that_register_at_the_same_moment_share_one_registration(
    daemon: Daemon, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first one's host memory is pinned, and while its ranks open."""
    begun, goes_on = asyncio.Event(), asyncio.Event()
    made = daemon.engines._made

    async def slowly(*given: Any) -> HostedEngine:
        begun.set()
        await goes_on.wait()
        return await made(*given)

    monkeypatch.setattr(daemon.engines, "_made", slowly)
    async with contextlib.AsyncExitStack() as stack:
        each = [await stack.enter_async_context(client(endpoint, "e", TOKEN)) for _ in range(4)]
        asked = [asyncio.ensure_future(one.register(described())) for one in each]
        await begun.wait()
        stranger = await stack.enter_async_context(client(endpoint, "e", TOKEN[::-1]))
        with pytest.raises(RequestError, match="already registered") as refused:
            await stranger.register(described())
        assert refused.value.reason == "engine_exists"
        other = await stack.enter_async_context(client(endpoint, "e", TOKEN))
        with pytest.raises(RequestError, match="another geometry") as refused:
            await other.register(described(model="another"))
        assert refused.value.reason == "layout_mismatch"
        await each[0].close()  # who came first leaves
        goes_on.set()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(answers[0], TransferError)
        assert answers[1:] == [TOKEN] * 3
        [row] = (await each[1].stats())["engines"].values()
        assert row["epoch"] == 1, "it was built once"
        assert len({one._conversation.session.epoch for one in each[1:]}) == 1
    await until(lambda: daemon.engines.all == [], "it goes with its last client")


async def test_an_unregister_that_is_refused_changes_nothing(
    daemon: Daemon, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client had forgotten its registration, its token and its offers: it could not try again."""
    async with serving(endpoint, "e", token=TOKEN) as (a, _):
        with monkeypatch.context() as busy:
            busy.setattr("transferd.daemon.server.MAX_WAITING_PER_CLIENT", 0)
            with pytest.raises(TransferError, match="are waiting already") as refused:
                await a.unregister()
        assert refused.value.reason == "too_many_requests"
        with pytest.raises(RequestError, match="event loop"):
            await asyncio.to_thread(asyncio.run, a.unregister())
        assert a.token == TOKEN
        assert list(a._offers._made) == [0]
        for peer in list(daemon.clients):  # it is considered gone: it registers the engine again
            daemon.server._forget(peer)
        before = daemon.engines.get("e")
        await until(lambda: (now := daemon.engines.get("e")) not in (None, before) and now.why_not_ready == "")
        assert (await a.submit(write("w", ["k"], [0]))).status is Status.OK
        await a.unregister()
        assert daemon.engines.get("e") is None
        assert a.token == ""
        assert not a._offers._made


async def test_unregister_ends_the_token_for_all_processes_and_they_are_told(
    daemon: Daemon, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    async with serving(endpoint, "e", token=TOKEN) as (a, _), client(endpoint, "e", TOKEN) as b:
        await b.register(described())
        b.on_new_boot = lambda: told.append(b.boot_id)
        with caplog.at_level(logging.WARNING, "transferd.client.offers"):
            await a.unregister()
            await until(lambda: told, "b is told")
        assert "'e' was unregistered by a client of its own" in caplog.text
        for _ in range(3):  # as at each heartbeat
            await b.ping()
        assert daemon.engines.get("e") is None
        assert told == [b.boot_id], "once"
        result = await b.submit(write("w", ["k"], [0]))
        assert code(result) == "unknown_engine"
        assert result.error is not None
        assert "was unregistered" in result.error.message
        with pytest.raises(RequestError, match="register it with a new token") as refused:
            await b.register(described())
        assert refused.value.reason == "unregistered"
        await a.register(described())  # under a new token
        assert (await a.stats())["engines"]["e"]["epoch"] > 1
        with pytest.raises(ConnectRefused, match="is another one") as out:
            await b.wait_ready(20.0)
        assert out.value.reason == "not_this_engine"


async def test_the_next_life_says_how_the_last_one_ended(
    daemon: Daemon, endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(endpoint, "e") as (one, _):
        before = daemon.engines.get("e")
        assert before is not None
        with caplog.at_level(logging.WARNING, "transferd.client.offers"):
            for known in daemon.clients.at(before):
                daemon.server._forget(known.peer, "was silent for 7.4 s")
            await until(lambda: daemon.engines.get("e") not in (None, before) and one.connected, "it has come again")
            assert "the last one was silent for 7.4 s, so all of its blocks are empty" in caplog.text
            caplog.clear()
            async with client(endpoint, "e", one.token) as other:
                await other.clear_cache()
            await until(lambda: "the cache was cleared" in caplog.text, "another client's clear is told as one")
