"""Making and freeing one engine's memory takes minutes on a server. The other engines go on meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.daemon.test_engines import LAYOUT, Memory, client, configured, described, running, serving
from tests.support.waits import until
from transferd import Client, Status
from transferd.daemon import process
from transferd.daemon.daemon import Daemon
from transferd.errors import TierError, TransferError
from transferd.runtime.compat import timeout
from transferd.tasks import SwapInTask, SwapOutTask
from transferd.tiers import populate, segment
from transferd.tiers.pinned import HostRegion
from transferd.tiers.segment import SharedSegment
from transferd.tiers.shm import ShmDeviceTier

# 1 MiB a block: smaller ones are copied on the loop, and need no thread.
LARGE: dict[str, Any] = {"layers": 4, "kv_heads": 8, "head_dim": 128, "block_size": 64}
HOST = {"staging": "8MiB"}


class Held:
    """Calls of one function that do not return until `go`, whoever makes them from now on.

    inside: their first arguments, in the order of the calls. errors: what calls raise then, by their place there.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
        self.inside: list[Any] = []
        self.errors: dict[int, Exception] = {}
        self._go = threading.Event()
        self._real = getattr(owner, name)

        def held(*arguments: Any) -> Any:
            position = len(self.inside)
            self.inside.append(arguments[0])
            assert self._go.wait(60)
            if position in self.errors:
                raise self.errors[position]
            return self._real(*arguments)

        monkeypatch.setattr(owner, name, held)

    def go(self) -> None:
        self._go.set()


@contextlib.asynccontextmanager
async def held(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> AsyncIterator[Held]:
    with monkeypatch.context() as patch:
        calls = Held(patch, owner, name)
        try:
            yield calls
        finally:
            calls.go()


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/t.sock"


async def swapped(one: Client, memory: Memory, value: int) -> None:
    """Block 1 leaves the device and comes back as block 2."""
    memory.paint(1, value)
    for task in (
        SwapOutTask(task_id=f"o{value}", gpu_block_ids=[1], cpu_block_ids=[0], timeout=20.0),
        SwapInTask(task_id=f"i{value}", gpu_block_ids=[2], cpu_block_ids=[0], timeout=20.0),
    ):
        result = await one.submit(task)
        assert result.status is Status.OK, result
    assert memory.holds(2, value)


async def while_held(
    calls: Held, work: Coroutine[Any, Any, object], count: int, what: str, meanwhile: Awaitable[None]
) -> None:
    """Begin `work`, which leads to so many of these calls, and let it end only after `meanwhile`."""
    working = asyncio.ensure_future(work)
    await until(lambda: len(calls.inside) == count, what)
    await meanwhile
    assert not working.done()
    calls.go()
    await working


@pytest.mark.parametrize("ranks", [2, 4])
async def test_an_engine_loads_while_the_memory_of_another_is_made_and_freed(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    async with (
        running(endpoint, host=HOST),
        serving(endpoint, "a", layout=LARGE) as (a, memory),
        client(endpoint, "b") as b,
    ):
        await swapped(a, memory, 0x10)
        async with held(monkeypatch, HostRegion, "allocate") as allocations:
            await while_held(
                allocations,
                b.register(described(ranks, layout=LARGE)),
                ranks,
                "all ranks' memory is made at once",
                swapped(a, memory, 0x20),
            )
        async with held(monkeypatch, HostRegion, "close") as closes:
            await while_held(
                closes, b.unregister(), ranks, "all ranks' memory is freed at once", swapped(a, memory, 0x30)
            )


# --- the engine of [cache] ------------------------------------------------------------------------

RANKS = 3
CACHE = LAYOUT | {"ranks": RANKS, "host_blocks": 4}


async def test_a_clear_and_a_restore_handle_all_ranks_at_once_and_a_failed_restore_frees_them_all(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(endpoint, cache=CACHE) as daemon, Client(endpoint) as own:
        contexts = [worker.context for worker in daemon.default.workers]

        def present() -> list[tuple[bool, bool]]:
            """Of each rank: whether it has host blocks, and device blocks."""
            return [
                (context.host is not None and context.host.memory.allocated, context.device.statistics()["open"])
                for context in contexts
            ]

        async with held(monkeypatch, HostRegion, "close") as closes:
            clearing = asyncio.ensure_future(own.clear_cache())
            await until(lambda: len(closes.inside) == RANKS, "all ranks are cleared at once")
            closes.go()
            await clearing
        async with held(monkeypatch, HostRegion, "allocate") as allocations:
            allocations.errors[1] = TierError("no room for one rank")
            restoring = asyncio.ensure_future(own.restore_cache("G2"))
            await until(lambda: len(allocations.inside) == RANKS, "all ranks are restored at once")
            assert daemon.default.cache.cleared
            allocations.go()
            with pytest.raises(TierError, match="no room for one rank"):
                await restoring
        assert daemon.default.cache.cleared
        assert present() == [(False, False)] * RANKS
        await own.restore_cache("G2")
        assert not daemon.default.cache.cleared
        assert present() == [(True, True)] * RANKS


async def test_the_device_memory_of_all_ranks_is_made_at_once(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, together, real = 0, asyncio.Event(), ShmDeviceTier.open

    async def opened(tier: ShmDeviceTier) -> None:
        nonlocal arrived
        arrived += 1
        if arrived % RANKS == 0:
            together.set()
        async with timeout(20):
            await together.wait()
        await real(tier)

    monkeypatch.setattr(ShmDeviceTier, "open", opened)
    async with running(endpoint, cache=CACHE), Client(endpoint) as own:
        await own.clear_cache()
        together.clear()
        await own.restore_cache("G2")
        assert (await own.stats())["ready"]
        assert arrived == 2 * RANKS


async def test_shared_memory_is_made_and_freed_beside_engines(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of [cache], which the daemon makes, and the daemon's mapping of an engine's, which may be the last."""
    async with (
        running(endpoint, cache=CACHE, host=HOST),
        Client(endpoint) as own,
        serving(endpoint, "a", layout=LARGE) as (a, memory),
    ):
        async with held(monkeypatch, SharedSegment, "close") as closes:
            await while_held(
                closes, own.clear_cache(), RANKS, "all ranks' memory is freed at once", swapped(a, memory, 0x10)
            )
        async with held(monkeypatch, segment, "_allocate") as allocations:
            await while_held(
                allocations,
                own.restore_cache("G2"),
                RANKS,
                "all ranks' memory is made at once",
                swapped(a, memory, 0x20),
            )
        async with serving(endpoint, "b") as (b, _), held(monkeypatch, SharedSegment, "close") as closes:
            await while_held(closes, b.unregister(), 1, "the mapping of its memory ends", swapped(a, memory, 0x30))


async def test_memory_that_cannot_be_freed_is_named_and_the_stop_ends(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(configured(endpoint, cache=CACHE))
    await daemon.open()
    async with held(monkeypatch, HostRegion, "close") as closes:
        # A rank that hangs keeps no other from being freed: the time is over once all have begun.
        hanging = await daemon.stop(lambda: 0.1 if len(closes.inside) == RANKS else 3.0)
        assert len(closes.inside) == RANKS
        closes.go()
    for rank in range(RANKS):
        assert f"rank {rank}" in hanging
        [told] = [line for line in hanging if f": freeing host memory of rank {rank}, " in line]
        assert told.startswith("transferd-setup-")


async def test_a_signal_ends_the_making_of_memory_for_an_engine_that_registers(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(populate, "PIECE", 4096)
    begun, go, touched = threading.Event(), threading.Event(), list[int]()

    def touch(address: int, _nbytes: int) -> None:
        touched.append(address)
        begun.set()
        assert go.wait(60)

    monkeypatch.setattr(populate, "_touch", touch)
    daemon = Daemon(configured(endpoint, host=HOST))
    await daemon.open()
    async with client(endpoint, "b") as b:
        registering = asyncio.ensure_future(b.register(described()))
        await until(begun.is_set, "memory is being made")
        stopping = asyncio.ensure_future(process._stopped(daemon, SimpleNamespace(budget=lambda: 20.0)))  # type: ignore[arg-type]
        try:
            await until(lambda: populate.PROGRESS.cancelled, "the stop has begun")
        finally:
            go.set()
        assert await stopping == []
        with pytest.raises(TransferError):
            await registering
    assert len(touched) <= populate.THREADS, "each thread ends with the piece that it has in hand"
    assert not populate.PROGRESS.cancelled
