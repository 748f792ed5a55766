"""Totals are totals: what stats, top, the page and explain show of 1, 4 and 16 engines is what /metrics counts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.daemon.test_engines import Memory, described
from tests.integration.own_memory import read, write
from tests.support.waits import stats_until, wait_until
from transferd import Client, Status
from transferd.cli.pool.master import free_port
from transferd.client.launch import DaemonProcess, running

RANKS = 2


def http(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
        return str(answer.read().decode())


def counted(page: str, name: str) -> dict[tuple[str, ...], float]:
    """The samples of one metric that are not 0, by the values of their labels."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    return {tuple(one.labels.values()): one.value for one in samples if one.name == name and one.value}


class World:
    """A daemon without [cache] and `number` engines; engine n has written n + 1 blocks and missed one."""

    def __init__(self, process: DaemonProcess, port: int, number: int) -> None:
        self.process, self.port = process, port
        self.names = [f"engine-{n}" for n in range(number)]
        self.clients: dict[str, Client] = {}

    async def work(self, stack: AsyncExitStack) -> None:
        for place, name in enumerate(self.names):
            memory = await stack.enter_async_context(Memory(RANKS))
            client = Client(self.process.endpoint, engine=name, await_ready=False)
            self.clients[name] = await stack.enter_async_context(client)
            await client.register(described(RANKS, model=f"m{place}"))
            for rank in range(RANKS):
                await client.offer(rank, memory.handle(rank))
            await client.wait_ready(60)
            for block in range(place + 1):
                result = await client.submit(write(f"w{block}", [f"{name} {block}"], [block % 8]))
                assert result.status is Status.OK, result
            result = await client.submit(read(f"only {name}", ["nobody wrote this"], [0]))
            assert result.status is Status.MISS, result


@pytest.fixture(params=[1, 4, 16], ids=lambda number: f"{number}-engines")
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    port = free_port()
    tree = {"storage": {"backend": "memory"}, "metrics": {"listen": f"127.0.0.1:{port}"}}
    with running(tree, tmp_path) as process:
        async with AsyncExitStack() as stack:
            world = World(process, port, request.param)
            await world.work(stack)
            yield world


async def command(world: World, *arguments: str) -> str:
    """What a command prints."""
    line = [sys.executable, "-m", "transferd", *arguments, "--endpoint", world.process.endpoint, "--timeout", "30"]
    # The event loop would start a process the usual way, which takes a second (tests/support/forks.py).
    made = await asyncio.to_thread(subprocess.run, line, stdout=subprocess.PIPE, text=True, check=True)
    return made.stdout


async def test_every_view_shows_the_sum_over_engines(world: World) -> None:
    number = len(world.names)
    wrote = number * (number + 1) // 2
    page = ""

    def is_new() -> bool:
        nonlocal page  # of a moment ago, if the last ones took long to make
        page = http(world.port, "/metrics")
        return (world.names[-1], "miss") in counted(page, "transferd_engine_tasks_total")

    await asyncio.to_thread(wait_until, is_new, "the last task is on the page")
    tasks = counted(page, "transferd_engine_tasks_total")
    assert tasks == {(name, "ok"): n + 1 for n, name in enumerate(world.names)} | {
        (name, "miss"): 1 for name in world.names
    }
    assert counted(page, "transferd_tasks_total") == {("ok",): wrote, ("miss",): number}
    moved = counted(page, "transferd_engine_bytes_total")
    durations = counted(page, "transferd_task_duration_seconds_count")
    assert durations == {(name, "write", "ok"): n + 1 for n, name in enumerate(world.names)} | {
        (name, "read", "miss"): 1 for name in world.names
    }

    report = json.loads(await command(world, "stats", "--format", "json"))
    live = json.loads(await asyncio.to_thread(http, world.port, "/live"))["report"]
    status = json.loads(await asyncio.to_thread(http, world.port, "/status"))
    for shown in (report, live, status):
        assert (shown["lanes"]["write"]["done"], shown["lanes"]["read"]["done"]) == (wrote, number)
        assert shown["totals"]["done"] == sum(tasks.values())
        assert shown["totals"]["bytes"] == shown["lanes"]["write"]["bytes"] == sum(moved.values())
        for name in world.names:
            mine = shown["engines"][name]
            assert mine["totals"]["done"] == sum(count for (whose, _), count in tasks.items() if whose == name)
            assert mine["totals"]["bytes"] == moved[(name,)]
        assert shown["totals"]["p99_s"] >= shown["totals"]["p50_s"] > 0
    top = json.loads(await command(world, "top", "--once", "--interval", "0.1", "--format", "json"))
    assert set(top["kinds"]) == {"write", "read", "swap_out", "swap_in"}
    lines = {line.split()[0]: line.split() for line in (await command(world, "stats")).splitlines() if line.strip()}
    assert (lines["write"][3], lines["read"][3]) == (str(wrote), str(number))
    for name in world.names[:2]:
        assert f"{name}: m" in " ".join(" ".join(words) for words in lines.values()) or number > 1


async def test_one_engine_is_shown_alone_and_a_task_is_found_wherever_it_ran(world: World) -> None:
    last = world.names[-1]
    text = await command(world, "stats", "--engine", last)
    (row,) = [line.split() for line in text.splitlines() if line.startswith("write")]
    assert row[3] == str(len(world.names))
    top = json.loads(await command(world, "top", "--once", "--interval", "0.1", "--engine", last, "--format", "json"))
    assert {one["engine"] for one in top["rows"]} == {last}

    story = await command(world, "explain", f"only {last}")
    assert f"of engine {last}" in story.splitlines()[1]
    shared = json.loads(await command(world, "explain", "w0", "--format", "json"))
    assert {shared["engine"], *shared["also"]} == set(world.names)
    asked = await world.clients[world.names[0]].explain("w0")
    assert asked["engine"] == world.names[0], "an engine that asks means its own task"


async def test_an_engine_that_leaves_takes_nothing_from_the_totals(world: World) -> None:
    before = await world.clients[world.names[0]].stats()
    await world.clients[world.names[-1]].unregister()
    async with Client(world.process.endpoint, await_ready=False) as looker:
        last = world.names[-1]  # a report of many engines is made once a second
        await stats_until(looker, lambda s: last not in s["engines"] and not s["engines_leaving"], within=60)
        after = await looker.stats()
    assert set(after["engines"]) == set(world.names[:-1])
    assert {key: after["totals"][key] for key in ("done", "failed", "bytes")} == {
        key: before["totals"][key] for key in ("done", "failed", "bytes")
    }
