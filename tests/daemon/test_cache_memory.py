"""The cache's memory as engines see it: made by one side, cleared, restored, offered, and gone with its owner.

The daemon runs in this process, so that its memory can be looked at; clients come over a real socket, and
engines that die are processes of their own.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.integration.caches import attach
from tests.integration.own_memory import OwnMemory, code, from_me, read, write
from tests.support.waits import until
from transferd import (
    Client,
    Status,
    SwapInTask,
    SwapOutTask,
    SyncClient,
    TransferError,
)
from transferd.blocks.layout import build_layout
from transferd.client.launch import start as launch
from transferd.config import Config, from_tree, to_tree
from transferd.daemon.daemon import Daemon
from transferd.errors import ConnectTimeout, EngineGone, RequestError, TierError
from transferd.runtime.compat import wait_for
from transferd.tiers import segment
from transferd.tiers.base import DeviceHandle
from transferd.tiers.offered import DIRECTORY
from transferd.tiers.segment import PREFIX

Caches = dict[str, list[np.ndarray[Any, Any]]]
CACHE = {"ranks": 2, "layers": 2, "kv_heads": 2, "head_dim": 4, "block_size": 4, "device_blocks": 8, "host_blocks": 8}


def config(tmp_path: Path, client_timeout: float = 2.5, **cache: Any) -> Config:
    return from_tree(
        {
            "server": {"endpoint": f"ipc://{tmp_path}/t.sock", "client_timeout": client_timeout},
            "cache": CACHE | cache,
            "host": {"staging": "64KiB"},
            "storage": {"backend": "memory", "generation": "G1"},
            "metrics": {"listen": ""},
        }
    )


Start = Callable[..., Awaitable[Daemon]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """Starts daemons on one socket; each is stopped at the end, or before by `stop`."""
    running: list[Daemon] = []

    async def started(**cache: Any) -> Daemon:
        daemon = Daemon(config(tmp_path, **cache))
        running.append(daemon)
        await daemon.open()
        return daemon

    yield started
    for daemon in running:
        await daemon.stop(lambda: 5.0)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/t.sock"


def paint(caches: Caches, value: int) -> None:
    for arrays in caches.values():
        for array in arrays:
            array.view(np.uint8)[...] = value


def colours(caches: Caches) -> set[int]:
    return {int(c) for arrays in caches.values() for array in arrays for c in np.unique(array.view(np.uint8))}


class Engine(OwnMemory):
    """An engine in this process, of this file's layout."""

    def __init__(self, ranks: int = 2, **cache: Any) -> None:
        super().__init__(build_layout(from_tree({"cache": CACHE | cache}).geometry), ranks)

    def caches(self, rank: int) -> Caches:
        from transferd.tiers.segment import attach_arrays

        return attach_arrays(self.handle(rank).data)

    async def offer(self, client: Client, *ranks: int) -> None:
        for rank in ranks or range(len(self._tiers)):
            await client.offer(rank, self.handle(rank))


# --- clear and restore ----------------------------------------------------------------------------


async def test_clearing_frees_the_memory_and_restoring_makes_it_anew_and_empty(start: Start, endpoint: str) -> None:
    daemon = await start()
    async with Client(endpoint) as client:
        names = [daemon.default.cache.handle(b"test", rank).data["name"] for rank in range(2)]
        for rank in range(2):
            paint(await client.attach(rank), 0x77)
        assert (await client.submit(SwapOutTask(task_id="o", gpu_block_ids=[1], cpu_block_ids=[2]))).status == Status.OK
        await client.clear_cache()
        assert not any((DIRECTORY / name).exists() for name in names), "device memory is given back"
        report = await client.stats()
        assert report["host"]["bytes"] == 0
        assert (report["ready"], report["cache"]["cleared"], report["cache"]["missing"]) == (False, True, [0, 1])
        assert daemon.not_ready == "the cache was cleared; call restore_cache to re-create it"
        await client.restore_cache("G2")
        assert client.generation == "G2"
        await client.wait_ready(30)
        caches = [await client.attach(rank) for rank in range(2)]
        assert [colours(cache) for cache in caches] == [{0}, {0}], "new memory is zeroed"
        back = await client.submit(SwapInTask(task_id="i", gpu_block_ids=[4], cpu_block_ids=[2]))
        assert (back.status, code(back)) == (Status.REJECTED, "empty_block"), "nothing of the old host block is left"
        report = await client.stats()
        assert report["host"]["bytes"] > 0
        assert (report["ready"], report["generation"], report["cache"]["missing"]) == (True, "G2", [])


async def test_a_clear_that_keeps_host_memory_leaves_it_in_place_and_empty(start: Start, endpoint: str) -> None:
    daemon = await start()

    def pools() -> list[int]:
        hosts = [worker.context.host for worker in daemon.default.workers]
        return [host.memory.address for host in hosts if host is not None and host.memory.allocated]

    async with Client(endpoint) as client:
        before = pools()
        for step in range(2):
            caches = await attach(client)
            paint(caches[0], 0x77)
            out = SwapOutTask(task_id=f"o{step}", gpu_block_ids=[1], cpu_block_ids=[2])
            assert (await client.submit(out)).status == Status.OK
            await client.clear_cache(keep_host=True)
            assert pools() == before, "neither freed nor pinned anew"
            await client.restore_cache(f"step {step}")
            await client.reattach()
            back = await client.submit(SwapInTask(task_id=f"i{step}", gpu_block_ids=[4], cpu_block_ids=[2]))
            assert (back.status, code(back)) == (Status.REJECTED, "empty_block")
        await client.clear_cache(keep_host=True)
        await client.clear_cache()
        assert pools() == [], "a clear that keeps nothing frees it after all"
        await client.restore_cache("last")
        assert len(pools()) == 2


async def test_an_engine_that_slept_finds_what_it_stored_under_the_same_weights(start: Start, endpoint: str) -> None:
    await start()
    async with Client(endpoint) as client:
        caches = await attach(client)
        for cache in caches:
            paint(cache, 7)
        assert (await client.submit(write("w", ["k1"], [0]))).status == Status.OK
        await client.clear_cache()
        with pytest.raises(RequestError, match="'G1' ended"):
            await client.restore_cache("G1")
        await client.restore_cache("G1", same_weights=True)
        await client.wait_ready(30)
        caches = await attach(client)
        assert (await client.submit(read("r", ["k1"], [3]))).block_ids == [3]
        for cache in caches:
            assert {
                int(c) for layers in cache.values() for array in layers for c in array[3].view(np.uint8).ravel()
            } == {7}
        await client.clear_cache()
        with pytest.raises(RequestError, match="'G1' ended"):
            await client.restore_cache("G1")  # it is closed again


async def test_blocks_of_the_generation_that_was_cleared_can_never_be_read(start: Start, endpoint: str) -> None:
    await start()
    async with Client(endpoint) as client:
        await attach(client)
        assert (await client.submit(write("w", ["k1", "k2"], [0, 1]))).status == Status.OK
        assert await client.match(["k1", "k2"]) == 2
        await client.clear_cache()
        assert await client.match(["k1", "k2"]) == 0, "nothing can be loaded into a cache that is not there"
        with pytest.raises(RequestError, match="'G1' ended") as caught:
            await client.restore_cache("G1")
        assert caught.value.reason == "closed_generation"
        await client.restore_cache("G2")
        await client.reattach()
        assert await client.match(["k1"]) == 0
        assert (await client.submit(read("r", ["k1"], [3]))).status == Status.MISS
        with pytest.raises(RequestError, match="'G1' ended"):
            await client.set_generation("G1")
        await client.set_generation("G3")
        await client.set_generation("G2")  # only a clear closes a generation


async def test_only_a_changed_generation_is_reported(start: Start, endpoint: str) -> None:
    daemon = await start()
    cache, said = daemon.default.cache, list[str]()
    feed: Any = SimpleNamespace(
        generation_changed=lambda now: said.append(f"generation {now}"),
        memory_gone=lambda *, stored: said.append(f"memory gone, {stored}"),
    )
    cache.feed, cache.renamed = feed, lambda before: said.append(f"after {before}")
    cache.epoch_began = lambda: said.append("epoch")
    async with Client(endpoint) as client:
        await client.set_generation("G1")
        await client.set_generation("G2")
        await client.clear_cache()
    assert said == ["generation G2", "after G1", "memory gone, True", "epoch"]


async def test_while_the_cache_is_cleared_tasks_are_rejected_and_resume_does_not_help(
    start: Start, endpoint: str
) -> None:
    await start()
    async with Client(endpoint) as client:
        await client.clear_cache()
        await client.resume()
        for task in (write("w", ["k"], [0]), SwapOutTask(task_id="o", gpu_block_ids=[0], cpu_block_ids=[0])):
            result = await client.submit(task)
            assert (result.status, code(result)) == (Status.REJECTED, "cleared")
        with pytest.raises(TransferError, match="rank 0 has no memory") as caught:
            await client.attach(0)
        assert caught.value.reason == "not_ready"
        await client.drain()
        await client.restore_cache("G2")
        assert code(await client.submit(write("w", ["k"], [0]))) == "draining", "a drain lasts until resume"
        await client.resume()
        await attach(client)
        assert (await client.submit(write("w", ["k"], [0]))).status == Status.OK


async def test_results_of_before_are_not_repeated_on_other_memory(start: Start, endpoint: str) -> None:
    await start()
    async with Client(endpoint) as client:
        await attach(client)
        task = SwapOutTask(task_id="o", gpu_block_ids=[1], cpu_block_ids=[2])
        assert (await client.submit(task)).status == Status.OK
        assert (await client.submit(task)).status == Status.OK, "known, and repeated"
        await client.clear_cache()
        await client.restore_cache("G2")
        result = await client.submit(task)
        assert (result.status, code(result)) == (Status.REJECTED, "cache_gone")


async def test_arrays_that_are_still_mapped_after_a_clear_show_old_bytes_and_reach_nobody(
    start: Start, endpoint: str
) -> None:
    await start()
    async with Client(endpoint) as client:
        await attach(client)
        old = await client.attach(0)
        paint(old, 0x33)
        await client.clear_cache()
        assert colours(old) == {0x33}, "safe to look at"
        await client.restore_cache("G2")
        paint(old, 0x44)
        assert code(await client.submit(write("w", ["k"], [0]))) == "not_attached"
        await client.attach(1)
        assert colours(await client.attach(0)) == {0}
        assert (await client.submit(write("w", ["k"], [0]))).status == Status.OK
        await client.submit(read("r", ["k"], [5]))
        assert colours(old) == {0x44}, "and no task reaches them"


async def test_a_clear_waits_for_what_was_admitted_and_refuses_what_comes_later(start: Start, endpoint: str) -> None:
    daemon = await start()
    async with Client(endpoint) as client:
        await attach(client)
        await client.pause()
        waiting = await client.push(write("early", ["k"], [0]))
        clearing = asyncio.ensure_future(client.clear_cache())
        await until(lambda: daemon.default.cache.cleared, "the clear has begun")
        assert code(await client.submit(write("late", ["k"], [0]))) == "cleared"
        assert not clearing.done()
        assert not waiting.done()
        await client.resume()
        assert (await waiting).status == Status.OK
        await clearing
        assert (await client.stats())["cache"]["cleared"]


async def test_clearing_twice_is_once_and_restoring_twice_is_refused(start: Start, endpoint: str) -> None:
    daemon = await start()
    async with Client(endpoint) as client:
        with pytest.raises(RequestError, match="was not cleared") as caught:
            await client.restore_cache("G2")
        assert caught.value.reason == "not_cleared"
        await asyncio.gather(client.clear_cache(), client.clear_cache())
        assert daemon.default.cache.epoch == 2
        for bad in ("x" * 300, "a\nb"):
            with pytest.raises(RequestError, match="printable"):
                await client.restore_cache(bad)
        await client.restore_cache("G2")
        with pytest.raises(RequestError, match="was not cleared"):
            await client.restore_cache("G3")


async def test_a_restore_without_room_leaves_the_cache_cleared_and_may_be_tried_again(
    start: Start, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await start()
    tier = daemon.default.coordinator.workers[1].context.device

    async def full() -> None:
        raise TierError("no room on device 1")

    async with Client(endpoint) as client:
        await client.clear_cache()
        before = set(segment._made_here)
        with monkeypatch.context() as patch:
            patch.setattr(tier, "open", full)
            with pytest.raises(TierError, match="no room on device 1"):
                await client.restore_cache("G2")
        assert set(segment._made_here) == before, "rank 0's memory was given back"
        assert code(await client.submit(write("w", ["k"], [0]))) == "cleared"
        await client.restore_cache("G2")
        await attach(client)
        assert (await client.submit(write("w", ["k"], [0]))).status == Status.OK


async def test_a_clear_goes_on_after_its_client_has_left(start: Start, endpoint: str) -> None:
    daemon = await start()
    async with Client(endpoint) as other:
        await attach(other)
        await other.pause()
        waiting = await other.push(write("early", ["k"], [0]))
        async with Client(endpoint) as client:
            asking = asyncio.ensure_future(client.clear_cache())
            await until(lambda: daemon.default.cache.cleared, "the clear has begun")
        with pytest.raises(TransferError):
            await asking
        await other.resume()
        assert (await waiting).status == Status.OK
        await until(lambda: daemon.default.cache.epoch == 2, "the clear goes on without its client")
        await other.restore_cache("G2")


def test_the_blocking_client_can_clear_and_restore_the_cache(tmp_path: Path, endpoint: str) -> None:
    async def serve(started: asyncio.Event, done: asyncio.Event) -> None:
        daemon = Daemon(config(tmp_path))
        await daemon.open()
        started.set()
        await done.wait()
        await daemon.stop(lambda: 5.0)

    def use() -> None:
        with SyncClient(endpoint) as client:
            client.attach(0)
            client.detach(0)
            client.clear_cache()
            with SyncClient(endpoint, await_ready=False) as other:
                with pytest.raises(ConnectTimeout, match="the cache was cleared"):
                    other.wait_ready(0.01)
                other.restore_cache("G2")
                other.wait_ready(30)
            with pytest.raises(RequestError, match="the daemon creates"):
                client.offer(0, DeviceHandle("shm", {}))

    async def main() -> None:
        started, done = asyncio.Event(), asyncio.Event()
        serving = asyncio.ensure_future(serve(started, done))
        await wait_for(started.wait(), 60)
        try:
            await wait_for(asyncio.to_thread(use), 30)
        finally:
            done.set()
            await serving

    asyncio.run(main())


# --- memory that clients must let go of first -----------------------------------------------------


async def test_memory_that_does_not_outlive_its_creator_is_not_cleared_under_those_who_mapped_it(
    start: Start, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = await start()
    monkeypatch.setattr(type(daemon.default.coordinator.workers[0].context.device), "outlives_close", False)
    async with Client(endpoint) as client:
        caches = await client.attach(1)
        await client.attach(0)
        paint(caches, 0x12)
        async with Client(endpoint) as other:
            await other.attach(1)
            with pytest.raises(RequestError, match="rank 0 is mapped by 1 clients; detach first"):
                await client.clear_cache()
            assert (await client.submit(write("w", ["k"], [0]))).status == Status.OK, "nothing has changed"
            await client.detach(0)
            with pytest.raises(RequestError, match="rank 1 is mapped by 2 clients; detach first") as caught:
                await client.clear_cache()
            assert caught.value.reason == "still_mapped"
            assert colours(await client.attach(1)) == {0x12}
        await until(lambda: daemon.default.cache.statistics().mapped == [0, 1], "a client that has gone maps nothing")
        await client.detach(1)
        await client.clear_cache()
        await client.restore_cache("G2")


# --- the engine creates ---------------------------------------------------------------------------


async def test_the_daemon_is_ready_when_every_rank_was_offered_and_moves_the_engine_s_blocks(
    start: Start, endpoint: str
) -> None:
    daemon = await start(ownership="attach")
    assert daemon.not_ready == "no engine has offered the memory of ranks 0, 1"
    async with Engine() as engine, Client(endpoint, await_ready=False) as client:
        assert not client.connected
        with pytest.raises(ConnectTimeout, match=r"within 0.01 s: no engine has offered.*without memory: rank 0, 1"):
            await client.wait_ready(0.01)
        assert code(await client.submit(write("w", ["k"], [0]))) == "starting"
        await client.offer(0, engine.handle(0))
        await client.ping()
        with pytest.raises(ConnectTimeout, match=r"without memory: rank 1\b"):
            await client.wait_ready(0.01)
        await client.offer(1, {"kind": "shm", "data": engine.handle(1).data})
        await client.wait_ready(30)
        assert daemon.not_ready == ""
        caches = [engine.caches(rank) for rank in range(2)]
        for rank, colour in ((0, 0x21), (1, 0x43)):
            paint(caches[rank], colour)
        assert (await client.submit(write("w", ["k"], [6]))).status == Status.OK
        for cache in caches:
            paint(cache, 0)
        assert (await client.submit(read("r", ["k"], [2]))).status == Status.OK
        for cache, colour in zip(caches, (0x21, 0x43), strict=True):
            assert colours({"x": [array[2] for arrays in cache.values() for array in arrays]}) == {colour}
            assert colours({"x": [array[3:] for arrays in cache.values() for array in arrays]}) == {0}
        report = (await client.stats())["cache"]
        assert (report["creator"], report["owners"]) == ("engine", [os.getpid()] * 2)
        paint(await client.attach(0), 0x55)
        assert colours(caches[0]) == {0x55}, "who attaches gets the engine's memory"


async def test_a_rank_has_one_creator_and_a_second_is_refused(start: Start, endpoint: str) -> None:
    daemon = await start(ownership="attach")
    async with Engine() as engine, Engine() as second, Client(endpoint, await_ready=False) as client:
        await engine.offer(client)
        with pytest.raises(RequestError, match=f"rank 0 has its memory from process {os.getpid()} already") as caught:
            await client.offer(0, second.handle(0))
        assert caught.value.reason == "already_attached"
        with pytest.raises(RequestError, match="already"):
            await client.offer(1, engine.handle(0))
        await client.offer(0, engine.handle(0))  # the same one again is no second one
        assert daemon.not_ready == ""


async def test_memory_of_one_rank_is_not_taken_for_another(start: Start, endpoint: str) -> None:
    daemon = await start(ownership="attach")
    async with Engine() as engine, Client(endpoint, await_ready=False) as client:
        await client.offer(0, engine.handle(0))
        alias = DIRECTORY / f"{engine.handle(0).data['name']}.alias"
        os.link(DIRECTORY / engine.handle(0).data["name"], alias)
        try:
            for name in (engine.handle(0).data["name"], alias.name):
                with pytest.raises(RequestError, match="rank 1 overlaps that of rank 0") as caught:
                    await client.offer(1, DeviceHandle("shm", engine.handle(0).data | {"name": name}))
                assert caught.value.reason == "already_attached"
                assert daemon.default.cache.missing == [1]
                assert not daemon.default.coordinator.workers[1].context.device.statistics()["open"], "nothing is kept"
        finally:
            alias.unlink()
        await client.offer(1, engine.handle(1))
        await client.wait_ready(30)


async def test_where_the_daemon_creates_an_offer_is_refused(start: Start, endpoint: str) -> None:
    await start()
    async with Engine() as engine, Client(endpoint) as client:
        with pytest.raises(RequestError, match="the daemon creates the cache here") as caught:
            await engine.offer(client, 0)
        assert caught.value.reason == "not_attachable"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arrays": []}, "layout_mismatch"),
        ({"nbytes": 512}, "layout_mismatch"),
        ({"name": f"{PREFIX}nobody"}, "tier_error"),
        ({"owner": None}, "bad_value"),
        ({"owner": {"boot": "x", "namespace": 0, "pid": 1, "started": 0}}, "engine_gone"),
        ({"arrays": "x" * 1_100_000}, "too_large"),
        ({"name": object()}, "bad_value"),
        ({"name": "a\0b"}, "bad_value"),
        ({"name": ".."}, "bad_value"),
        ({"nbytes": 2**63 - 1}, "memory_unusable"),
        ({"owner": {"boot": "\0", "namespace": 0, "pid": 1, "started": 0}}, "engine_gone"),
    ],
    ids=[
        "no arrays",
        "too small",
        "no segment",
        "no owner",
        "another machine",
        "too large",
        "no msgpack",
        "NUL",
        "dots",
        "no memory has that",
        "NUL in the owner",
    ],
)
async def test_a_handle_that_cannot_be_used_is_a_typed_refusal_and_nothing_is_kept(
    start: Start, endpoint: str, change: dict[str, Any], reason: str
) -> None:
    daemon = await start(ownership="attach")
    async with Engine() as engine, Client(endpoint, await_ready=False) as client:
        await engine.offer(client, 1)
        handle = engine.handle(0)
        with pytest.raises(TransferError) as caught:
            await client.offer(0, DeviceHandle(handle.kind, handle.data | change))
        assert caught.value.reason == reason
        assert "\n" not in str(caught.value)
        assert daemon.default.cache.missing == [0]
        await engine.offer(client, 0)
        await client.wait_ready(30)


@pytest.mark.parametrize("rank", [-1, 2])
async def test_a_rank_that_is_not_there_is_refused(start: Start, endpoint: str, rank: int) -> None:
    await start(ownership="attach")
    async with Engine() as engine, Client(endpoint, await_ready=False) as client:
        with pytest.raises(RequestError, match="rank must be 0 to 1"):
            await client.offer(rank, engine.handle(0))
        with pytest.raises(RequestError, match="rank must be 0 to 1"):
            await client.detach(rank)


ENGINE = """
import asyncio, sys
from transferd import Client
from transferd.config import from_tree
from transferd.client.launch import start as launch
from transferd.blocks.layout import build_layout
from transferd.runtime.threads import ThreadPools
from transferd.tiers.shm import ShmDeviceTier

async def main(endpoint, cache, ranks):
    threads = ThreadPools(1)
    async with Client(endpoint, await_ready=False) as client:
        for rank in ranks:
            tier = ShmDeviceTier(build_layout(from_tree({"cache": cache}).cache), rank, 0, threads)
            await tier.open()
            await client.offer(rank, tier.handle())
        print("offered", flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(sys.argv[1], eval(sys.argv[2]), eval(sys.argv[3])))
"""


async def engine_process(endpoint: str, *ranks: int) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ENGINE, endpoint, repr(CACHE), repr(ranks), stdin=pipe, stdout=pipe
    )
    assert process.stdout is not None
    assert await wait_for(process.stdout.readline(), 60) == b"offered\n"
    return process


@pytest.mark.parametrize("told_by", ["the kernel", "its silence"])
async def test_an_engine_that_is_killed_takes_its_memory_and_the_next_one_may_offer(
    start: Start, endpoint: str, told_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if told_by == "the kernel":
        daemon = await start(ownership="attach", client_timeout=1000.0)
    else:

        def refused(_: int) -> int:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "pidfd_open", refused)
        daemon = await start(ownership="attach", client_timeout=6.0)  # a living one may stand still for seconds
    async with Engine() as engine, Client(endpoint, await_ready=False) as client:
        await engine.offer(client, 0)
        first = await engine_process(endpoint, 1)
        await client.wait_ready(30)
        await client.submit(write("w", ["k"], [0]))
        await client.pause()
        waiting = await client.push(write("queued", ["q"], [0]))
        handle = daemon.default.cache.handle(b"test", 1)
        first.send_signal(signal.SIGKILL)
        await wait_for(first.communicate(), 20)  # with input it would write to a pipe that the dead has closed
        result = await wait_for(waiting, 60)
        assert (result.status, code(result)) == (Status.FAILED, "engine_gone")
        await until(lambda: daemon.default.cache.missing == [1], "the memory is unmapped")
        assert daemon.server.statistics().clients_lost == 1
        assert daemon.not_ready == "no engine has offered the memory of rank 1"
        result = await client.submit(write("w2", ["k"], [0]))
        assert (result.status, code(result)) == (Status.REJECTED, "engine_gone")
        with pytest.raises(EngineGone, match=f"the process that made the handle, {first.pid}, has ended"):
            await client.offer(1, handle)
        (DIRECTORY / handle.data["name"]).unlink(missing_ok=True)  # as the start of any daemon does
        second = await engine_process(endpoint, 1)
        await client.wait_ready(30)
        await client.resume()
        assert (await client.submit(write("w3", ["k"], [0]))).status == Status.OK
        assert second.stdin is not None
        second.stdin.close()
        await wait_for(second.communicate(), 20)
        await until(lambda: daemon.default.cache.missing == [1], "one that says Bye is gone at once", within=10)


async def test_an_engine_that_reconnects_keeps_its_memory_mapped(start: Start, endpoint: str) -> None:
    daemon = await start(ownership="attach")
    cache = daemon.default.cache
    async with Engine() as engine:
        async with Client(endpoint, await_ready=False) as client:
            await engine.offer(client)
            second = b"another connection"
            for rank in range(2):
                await cache.offer(second, rank, from_me(engine.handle(rank)), cache.epoch)
        # The first connection is really gone: a client that is there offers again what it sees missing.
        await until(lambda: not daemon.server.clients, "the first connection is given up")
        async with cache._change:  # whatever that has begun is done
            pass
        assert cache.missing == []
        assert daemon.not_ready == ""
        cache.client_gone(second)
        await until(lambda: cache.missing == [0, 1], "the offer went with its last connection")


async def test_what_was_offered_before_a_refused_offer_is_offered_to_the_next_daemon(
    start: Start, endpoint: str
) -> None:
    first = await start(ownership="attach")
    async with Engine() as engine, Engine() as other, Client(endpoint, await_ready=False) as client:
        await engine.offer(client)
        with pytest.raises(RequestError, match="rank 0 has its memory from process"):
            await client.offer(0, other.handle(0))
        await first.stop(lambda: 5.0)
        second = await start(ownership="attach")
        await until(lambda: not second.default.cache.missing, "both ranks have their memory again")


async def test_an_engine_offers_again_by_itself_to_a_daemon_that_was_restarted(start: Start, endpoint: str) -> None:
    first = await start(ownership="attach")
    async with Engine() as engine, Client(endpoint, await_ready=False) as client:
        await engine.offer(client)
        await client.wait_ready(30)
        boot = client.boot_id
        await first.stop(lambda: 5.0)
        second = await start(ownership="attach")
        await until(lambda: client.boot_id != boot and client.connected, "offered, and ready")
        assert second.default.cache.missing == []
        assert (await client.submit(write("w", ["k"], [0]))).status == Status.OK


async def test_a_daemon_that_is_killed_leaves_the_engine_its_memory_and_gets_it_again(tmp_path: Path) -> None:
    tree = {"cache": CACHE | {"ownership": "attach"}, "storage": {"backend": "memory"}}
    process = launch(tree, tmp_path, wait=False)
    async with Engine() as engine, Client(process.endpoint, connect_timeout=60, await_ready=False) as client:
        await engine.offer(client)
        await client.wait_ready(30)
        boot = client.boot_id
        paint(engine.caches(0), 0x42)
        assert (await client.submit(SwapOutTask(task_id="o", gpu_block_ids=[0], cpu_block_ids=[0]))).status == "ok"
        process.kill()
        assert colours(engine.caches(0)) == {0x42}
        process = launch(tree, tmp_path, wait=False)
        await until(lambda: client.boot_id != boot and client.connected, "offered again, and ready", within=60)
        assert colours(engine.caches(0)) == {0x42}, "nothing of a living engine is cleaned up"
        assert (await client.submit(SwapOutTask(task_id="o", gpu_block_ids=[0], cpu_block_ids=[0]))).status == "ok"
        assert await asyncio.to_thread(process.stop) == 0
        # An engine that is quick has offered its memory again before the daemon says whether it waits for it.
        waited = "no engine has offered the memory of ranks 0, 1" in process.log
        assert ('"event": "listening"' if waited else '"event": "ready"') in process.log


async def test_after_a_clear_the_engine_offers_anew_and_an_old_offer_is_refused(start: Start, endpoint: str) -> None:
    daemon = await start(ownership="attach")
    async with Engine() as engine, Engine() as renewed, Client(endpoint, await_ready=False) as client:
        await engine.offer(client)
        await client.clear_cache()
        for tier in daemon.default.coordinator.workers:
            assert not tier.context.device.statistics()["open"], "unmapped"
        await client.restore_cache("G2")
        assert daemon.not_ready == "no engine has offered the memory of ranks 0, 1"
        with pytest.raises(RequestError, match="before the cache was cleared") as caught:
            await daemon.default.cache.offer(b"late", 0, from_me(engine.handle(0)), 1)
        assert caught.value.reason == "stale_offer"
        client._renewed()  # its connection breaks: what the clear has ended is not offered again
        assert not client._offers._made
        await renewed.offer(client)
        await client.wait_ready(30)
        assert (await client.submit(write("w", ["k"], [0]))).status == Status.OK


@pytest.mark.parametrize("when", ["before the mapping begins", "during it"])
async def test_a_client_that_leaves_while_its_memory_is_being_mapped_leaves_nothing_mapped(
    start: Start, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    daemon = await start(ownership="attach")
    tier = daemon.default.coordinator.workers[0].context.device
    attach, begun, gate = tier.attach, asyncio.Event(), asyncio.Event()

    async def slow(handle: DeviceHandle) -> None:
        begun.set()
        await gate.wait()
        await attach(handle)

    monkeypatch.setattr(tier, "attach", slow)
    async with Engine() as engine:
        offering = asyncio.ensure_future(
            daemon.default.cache.offer(b"engine", 0, from_me(engine.handle(0)), daemon.default.cache.epoch)
        )
        if when == "during it":
            await begun.wait()
        else:
            await until(lambda: daemon.default.cache._changes, "the offer has come", look=0)
            assert not begun.is_set()
        daemon.default.cache.client_gone(b"engine")
        offering.cancel()
        await asyncio.gather(offering, return_exceptions=True)
        gate.set()
        await until(lambda: not daemon.default.cache._changes, "it ends")
        assert daemon.default.cache.missing == [0, 1]
        assert not tier.statistics()["open"]


@pytest.mark.parametrize("slow", ["the other rank's memory is being mapped", "token storage becomes ready"])
async def test_memory_of_an_engine_that_has_gone_is_never_ready_again_while_it_waits_to_be_unmapped(
    start: Start, endpoint: str, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """Its rank's memory is that of a dead process, which no task may use."""
    daemon = await start(ownership="attach")
    cache, tier = daemon.default.cache, daemon.default.workers[1].context.device
    attach, begun, gate, announced = tier.attach, asyncio.Event(), asyncio.Event(), list[list[int | None]]()

    async def wait() -> None:
        begun.set()
        await gate.wait()

    async def attached(handle: DeviceHandle) -> None:
        await wait()
        await attach(handle)

    if slow == "token storage becomes ready":
        monkeypatch.setattr(cache, "tokens", SimpleNamespace(ready=wait))
    else:
        monkeypatch.setattr(tier, "attach", attached)
    announce = daemon.default.coordinator.announce_ready

    def told() -> None:
        announced.append(cache.owners)
        announce()

    monkeypatch.setattr(daemon.default.coordinator, "announce_ready", told)
    async with Engine() as engine, Client(endpoint, await_ready=False) as client:
        dead = await engine_process(endpoint, 0)
        offering = asyncio.ensure_future(engine.offer(client, 1))
        await begun.wait()
        dead.send_signal(signal.SIGKILL)
        await wait_for(dead.communicate(), 20)
        await until(lambda: daemon.server.statistics().clients_lost == 1, "the daemon has seen it")
        gate.set()
        await offering
        await until(lambda: cache.missing == [0], "its memory is unmapped")
        assert announced == []
        result = await client.submit(write("w", ["k"], [0]))
        assert (result.status, code(result)) == (Status.REJECTED, "engine_gone")
        await engine.offer(client, 0)
        await client.wait_ready(30)
        assert announced == [[os.getpid()] * 2]
        assert (await client.submit(write("w2", ["k"], [0]))).status == Status.OK


async def test_a_stop_unmaps_and_leaves_the_engine_its_memory(start: Start, endpoint: str) -> None:
    daemon = await start(ownership="attach")
    async with Engine() as engine, Client(endpoint, await_ready=False) as client:
        await engine.offer(client)
        await daemon.stop(lambda: 5.0)
        gc.collect()
        for rank in range(2):
            paint(engine.caches(rank), 1)
            assert (DIRECTORY / engine.handle(rank).data["name"]).exists()


async def test_restoring_without_a_name_takes_what_the_version_file_says_now(tmp_path: Path) -> None:
    """FastDeploy's version.yaml: read at start and on restore."""
    file = tmp_path / "version.yaml"
    file.write_text("version: RL-STEP01-a-b")
    tree = to_tree(config(tmp_path))
    tree["storage"] |= {"generation": "", "version_file": str(file)}
    daemon = Daemon(from_tree(tree))
    await daemon.open()
    try:
        async with Client(f"ipc://{tmp_path}/t.sock") as client:
            assert client.generation == "RL-STEP01"
            await client.clear_cache()
            with pytest.raises(RequestError, match="'RL-STEP01' ended"):
                await client.restore_cache()
            file.write_text("no version here")
            with pytest.raises(TransferError, match=r"storage\.version_file"):
                await client.restore_cache()
            file.write_text("version: RL-STEP02-c-d")
            await client.restore_cache()
            assert client.generation == daemon.default.coordinator.generation == "RL-STEP02"
            await client.wait_ready(30)
    finally:
        await daemon.stop(lambda: 5.0)


async def test_restoring_without_a_name_or_a_file_takes_the_generation_set_meanwhile(
    start: Start, endpoint: str
) -> None:
    await start()
    async with Client(endpoint) as client:
        await client.clear_cache()
        with pytest.raises(RequestError, match="'G1' ended"):
            await client.restore_cache()
        await client.set_generation("G2")
        await client.restore_cache()
        assert client.generation == "G2"
