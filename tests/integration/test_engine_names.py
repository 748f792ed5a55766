"""Who did it: what a daemon with two engines logs and publishes names the engine, also for equal task ids."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest
import structlog

from tests.daemon.test_engines import LAYOUT, Memory, client, described, running, serving
from tests.integration.own_memory import write
from tests.integration.subscriber import WAIT_MS, AllBlocksCleared, BlockRemoved, Subscriber
from transferd import Client, Status, SwapInTask, SwapOutTask
from transferd.errors import RequestError, TransferError
from transferd.runtime.compat import timeout
from transferd.tiers.base import DeviceHandle
from transferd.wire.kv_events import block_hash


async def test_log_lines_about_an_engine_name_it(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/t.sock"
    cache = LAYOUT | {"ranks": 1, "host_blocks": 0}
    with structlog.testing.capture_logs() as lines:
        async with running(endpoint, cache=cache), Client(endpoint) as own, serving(endpoint, "a") as (a, _):
            await own.attach(0)
            empty = await a.submit(SwapInTask(task_id="empty", gpu_block_ids=[0], cpu_block_ids=[0]))
            assert empty.status is Status.REJECTED
            for one in (own, a):
                await one.pause()
                late = msgspec.structs.replace(write("late", ["k"], [0]), timeout=0.01)
                assert (await one.submit(late)).status is Status.EXPIRED
                await one.resume()
                await one.clear_cache()
                await one.restore_cache("again")
    named = [(line["event"], line.get("engine")) for line in lines]
    for event in ("task ended with an error", "cache cleared", "cache restored"):
        assert [engine for what, engine in named if what == event] == ["default", "a"], (event, named)
    assert ("memory attached", "a") in named
    assert ("task refused", "a") in named
    assert [line for line in lines if "task_id" in line and "engine" not in line] == []


async def test_a_refused_engine_leaves_a_line_with_its_name_and_the_reason(tmp_path: Path) -> None:
    """Once for each refusal that the engine cannot mend by waiting: the operator sees the daemon's log first."""
    endpoint = f"ipc://{tmp_path}/t.sock"
    with structlog.testing.capture_logs() as lines:
        limit = {"max_engines": 1}
        async with running(endpoint, engines=limit), Memory(1, **LAYOUT) as memory, client(endpoint, "a") as a:
            await a.register(described())
            handle = memory.handle(0)
            missing = DeviceHandle(handle.kind, handle.data | {"name": "transferd.nobody"})
            with pytest.raises(TransferError, match="nobody"):
                await a.offer(0, missing)
            for name, reason in (("b", "too_many_engines"), ("a", "engine_exists")):
                async with client(endpoint, name) as other:
                    with pytest.raises(RequestError) as refused:
                        await other.register(described())
                    assert refused.value.reason == reason
    told = [line for line in lines if line["event"] in ("offer refused", "registration refused")]
    assert [(line["event"], line["engine"], line["code"]) for line in told] == [
        ("offer refused", "a", "tier_error"),
        ("registration refused", "b", "too_many_engines"),
    ], "engine_exists is retried by the adapters"
    assert "transferd.nobody" in told[0]["problem"]
    assert {line["peer"] for line in told} == {f"uid {os.geteuid()}, pid {os.getpid()}"}


async def test_a_router_tells_the_events_of_two_engines_apart(tmp_path: Path) -> None:
    places = {"endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    endpoint = f"ipc://{tmp_path}/t.sock"
    subscriber = Subscriber(places["endpoint"], places["replay_endpoint"])
    try:
        async with running(endpoint, events=places), serving(endpoint, "b", dp_rank=5) as (b, _):
            async with serving(endpoint, "a", dp_rank=3) as (a, _):
                assert (await a.submit(write("same", ["x", "both"], [0, 1]))).status is Status.OK
                assert (await b.submit(write("same", ["y", "both"], [0, 1]))).status is Status.OK
                assert (await b.submit(SwapOutTask(task_id="o", gpu_block_ids=[0], cpu_block_ids=[2]))).status == "ok"
                stored = {3: {"STORAGE": {"x", "both"}}, 5: {"STORAGE": {"y", "both"}, "CPU": {"y"}}}
                await told(subscriber, b, stored)
            await told(subscriber, b, stored | {3: {}})
    finally:
        subscriber.close()


async def told(subscriber: Subscriber, client: Client, expected: dict[int, dict[str, set[str]]]) -> None:
    """Ask for what was missed until a router that keeps an index for each dp_rank knows exactly this."""
    wanted = {
        rank: {medium: set(map(block_hash, keys)) for medium, keys in of.items()} for rank, of in expected.items()
    }
    known: dict[int | None, dict[str | None, set[int | bytes]]] = {}
    async with timeout(WAIT_MS / 1000):
        while known != wanted:
            await client.stats()  # a turn of the daemon's loop
            await asyncio.to_thread(subscriber.catch_up)
            known = by_engine(subscriber)


def by_engine(subscriber: Subscriber) -> dict[int | None, dict[str | None, set[int | bytes]]]:
    known: dict[int | None, dict[str | None, set[int | bytes]]] = {}
    for batch in subscriber.batches:
        if not batch.events:  # what a new subscription gets at once is of no engine
            continue
        index = known.setdefault(batch.data_parallel_rank, {})
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                index.clear()
            elif isinstance(event, BlockRemoved):
                index[event.medium] -= set(event.block_hashes)
            else:
                index.setdefault(event.medium, set()).update(event.block_hashes)
    return known
