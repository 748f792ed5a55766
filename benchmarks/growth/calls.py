"""What each call costs a daemon that has much: objects stored, engines registered, tasks queued.

A daemon in a process of its own has so many of one thing; each call is then made again and again, one at a time. Its
cost is CPU time, because a busy machine does not change that: of the event loop's thread, and of all threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.growth.served import TINY, ok, swap
from transferd.cli.bench.control import cpu_seconds
from transferd.cli.pool.master import free_port
from transferd.client.client import Client
from transferd.client.engines import Engine
from transferd.client.launch import DaemonProcess, running
from transferd.observability.report_memory import EVERY_S
from transferd.tasks import ReadStorageTask, Task, WriteStorageTask

A_TASK = 1024  # keys of a task that fills the store
LOOKED_UP = 65_536  # keys of the large look-up
ASKED = 9  # times that each call is made
ASKED_NEW = 3
ENGINES_AT_ONCE = 50  # that register at the same time

REPORTS = ("stats", "scrape")

numbers = itertools.count()
Ask = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of CPU of one call: of the event loop, and of all threads of the daemon."""

    loop_us: float
    all_us: float


@dataclass(slots=True)
class Crowd:
    """A daemon, and the client that makes the calls.

    each_us: CPU of all threads, and each_bytes: resident memory, for each of the things that it was filled with.
    """

    daemon: DaemonProcess
    client: Client
    port: int
    keys: list[str]  # stored; the first ones
    each_us: float = 0.0
    each_bytes: float = 0.0
    longest_ms: float = 0.0

    async def filled(self, count: int, fill: Awaitable[object]) -> None:
        before, cpu = _resident(self.daemon.pid), cpu_seconds(self.daemon.pid)
        await fill
        self.each_us = (cpu_seconds(self.daemon.pid) - cpu) / count * 1e6
        self.each_bytes = (_resident(self.daemon.pid) - before) / count

    async def cost(self, ask: Ask, *, new: bool = False) -> Cost:
        """The least of some calls, after one that does not count: the others had heartbeats of clients between them.

        new: each gets a report that is made for it.
        """
        asked = ASKED_NEW if new else ASKED
        pid = self.daemon.pid
        each = []
        for _ in range(asked + 1):
            if new:
                await asyncio.sleep(EVERY_S + 0.05)
            loop, every = loop_seconds(pid), cpu_seconds(pid)
            await ask()
            each.append(Cost((loop_seconds(pid) - loop) * 1e6, (cpu_seconds(pid) - every) * 1e6))
        kept = each[1:]
        return Cost(min(one.loop_us for one in kept), min(one.all_us for one in kept))


def loop_seconds(pid: int) -> float:
    """CPU time of a daemon's event loop, which its first thread runs."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * 4096


@contextlib.asynccontextmanager
async def crowd(engines: int = 1, queued: int = 1024) -> AsyncIterator[Crowd]:
    """A daemon that takes so much."""
    port = free_port()
    tree: dict[str, Any] = {
        "cache": TINY | {"ranks": 1, "device_blocks": A_TASK + 8, "host_blocks": 64},
        "storage": {"backend": "memory", "memory": {"capacity": "4GiB"}},
        "server": {"max_queued_tasks": max(4096, 8 * queued), "max_queued_bytes": "8GiB"},
        "host": {"staging": "64KiB"},
        "engines": {"max_engines": max(64, engines + 8), "devices": ["shm"], "host_memory": "8GiB"},
        "metrics": {"listen": f"127.0.0.1:{port}"},
    }
    with tempfile.TemporaryDirectory(prefix="transferd-bench-") as directory, running(tree, Path(directory)) as daemon:
        async with Client(daemon.endpoint) as client:
            await client.attach(0)
            yield Crowd(daemon, client, port, [f"key {n}" for n in range(LOOKED_UP)])


# --- what there is much of ------------------------------------------------------------------------------------------


async def store(here: Crowd, count: int) -> None:
    """Store so many objects, the keys that are looked up first."""
    for start in range(0, count, A_TASK):
        names = [f"key {n}" for n in range(start, min(count, start + A_TASK))]
        blocks = list(range(len(names)))
        await ok(here.client, WriteStorageTask(task_id=f"w{next(numbers)}", keys=names, gpu_block_ids=blocks))


async def register(here: Crowd, name: str) -> Client:
    """A new engine of one rank, whose memory the daemon makes."""
    client = Client(here.daemon.endpoint, engine=name, await_ready=False)
    client.on_new_boot = lambda: None
    await client.connect()
    layout = TINY | {"device_blocks": 8, "ownership": "create"}
    await client.register(Engine(ranks=1, model=name, layout=layout, host_blocks=8))
    await client.wait_ready(120)
    return client


def _patient(block: int) -> Task:
    """A swap that may be queued for as long as all calls take."""
    return replace(swap([block], [block]), timeout=3600.0)


async def queue(here: Crowd, count: int) -> list[asyncio.Future[Any]]:
    """Queue so many swaps behind a pause."""
    waiting: list[asyncio.Future[Any]] = []
    waiting.extend(asyncio.ensure_future(here.client.submit(_patient(n % 64))) for n in range(count))
    while (await here.client.stats())["queued"] < count:  # noqa: ASYNC110 - the daemon is another process
        await asyncio.sleep(0.05)
    return waiting


# --- the calls ------------------------------------------------------------------------------------------------------


async def scrape(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = await reader.read()
    writer.close()
    if not answer.startswith(b"HTTP/1.1 200 "):
        raise RuntimeError(f"a scrape was answered {answer[:100]!r}")


async def _moves(here: Crowd, task: Callable[[], Any]) -> None:
    await ok(here.client, task())


def calls(here: Crowd, *, paused: bool) -> dict[str, Ask]:
    """Every call that is measured, by name. paused: tasks only queue."""
    client = here.client

    async def come_and_go() -> None:
        other = await register(here, f"new{next(numbers)}")
        await other.unregister()
        await other.close()

    async def submit_and_cancel() -> None:
        pushed = asyncio.ensure_future(client.submit(_patient(1)))
        await client.ping()
        pushed.cancel()
        await asyncio.wait([pushed])
        await client.ping()

    async def connect() -> None:
        async with Client(here.daemon.endpoint):
            pass

    asked: dict[str, Ask] = {
        f"look-up of {LOOKED_UP:,} keys": lambda: client.exists(here.keys, timeout=60),
        "look-up of 64 keys": lambda: client.exists(here.keys[:64]),
        "hello": client.ping,
        "connect": connect,
        "stats": client.stats,
        "scrape": lambda: scrape(here.port),
        "register, unregister": come_and_go,
        "submit, cancel": submit_and_cancel,
        "pin": lambda: client.pin(here.keys[:1], ttl=600.0),
        "unpin": lambda: client.unpin(here.keys[:1]),
        "purge": lambda: client.purge(keys=[f"w{next(numbers)}"]),
        "tasks": client.tasks,
    }
    if not paused:
        fresh = (f"w{n}" for n in numbers)
        asked |= {
            "swap": lambda: ok(client, swap([1], [1])),
            "write": lambda: ok(
                client, WriteStorageTask(task_id=f"t{next(numbers)}", keys=[next(fresh)], gpu_block_ids=[1])
            ),
            "read": lambda: ok(
                client, ReadStorageTask(task_id=f"t{next(numbers)}", keys=here.keys[:1], gpu_block_ids=[2])
            ),
        }
    return asked


async def costs(here: Crowd, *, paused: bool = False) -> dict[str, Cost]:
    found = {name: await here.cost(ask, new=name in REPORTS) for name, ask in calls(here, paused=paused).items()}
    here.longest_ms = (await here.client.stats())["loop_longest_s"] * 1e3
    return found


async def with_objects(count: int) -> tuple[Crowd, dict[str, Cost]]:
    async with crowd() as here:
        await here.filled(count, store(here, count))
        return here, await costs(here)


async def with_engines(count: int) -> tuple[Crowd, dict[str, Cost]]:
    async with crowd(engines=count) as here, contextlib.AsyncExitStack() as stack:
        await store(here, 64)
        clients: list[Client] = []

        async def fill() -> None:
            for start in range(0, count, ENGINES_AT_ONCE):
                some = range(start, min(count, start + ENGINES_AT_ONCE))
                clients.extend(await asyncio.gather(*(register(here, f"e{n}") for n in some)))

        await here.filled(count, fill())
        for client in clients:
            stack.push_async_callback(client.close)
        return here, await costs(here)


async def with_queued(count: int) -> tuple[Crowd, dict[str, Cost]]:
    async with crowd(queued=count) as here:
        await store(here, 64)
        await here.client.pause()
        waiting: list[asyncio.Future[Any]] = []

        async def fill() -> None:
            waiting.extend(await queue(here, count))

        await here.filled(count, fill())
        found = await costs(here, paused=True)
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        return here, found


THINGS: dict[str, Callable[[int], Coroutine[Any, Any, tuple[Crowd, dict[str, Cost]]]]] = {
    "objects": with_objects,
    "engines": with_engines,
    "queued tasks": with_queued,
}
SIZES = {"objects": (1_000, 100_000, 1_000_000), "engines": (1, 100, 1_000), "queued tasks": (100, 10_000, 100_000)}

# --- the table and the gate -----------------------------------------------------------------------------------------

WITH_ALL = {"engines": REPORTS}  # a report has a row for each engine, so these may grow with them
MOST, NOISE_US = 3.0, 500.0  # times, and microseconds besides: caches of the CPU, not steps of ours
LONGEST_MS = 50.0


def measure(sizes: Mapping[str, Sequence[int]] = SIZES) -> dict[str, Any]:
    """All calls at all sizes, in JSON types: for each thing its sizes, and a column of figures for each of them."""
    found: dict[str, Any] = {}
    for thing, counts in sizes.items():
        columns = []
        for count in counts:
            here, each = asyncio.run(THINGS[thing](count))
            calls_us = {name: [cost.loop_us, cost.all_us] for name, cost in each.items()}
            figures = {"each_us": here.each_us, "each_bytes": here.each_bytes, "longest_ms": here.longest_ms}
            columns.append(figures | {"calls": calls_us})
        found[thing] = {"sizes": list(counts), "columns": columns}
    return found


def grown(found: Mapping[str, Any]) -> list[str]:
    """What costs more than MOST times as much at a larger size, or holds the loop for longer than LONGEST_MS."""
    problems = []
    for thing, one in found.items():
        first = one["columns"][0]["calls"]
        for size, column in zip(one["sizes"], one["columns"], strict=True):
            if column["longest_ms"] > LONGEST_MS:
                problems.append(f"{size:,} {thing}: a step of the loop took {column['longest_ms']:.0f} ms of CPU")
            for name, (loop_us, _) in column["calls"].items():
                few_us = first[name][0]
                if name not in WITH_ALL.get(thing, ()) and loop_us > MOST * few_us + NOISE_US:
                    problems.append(f"{size:,} {thing}: {name} costs {loop_us:,.0f} us, and {few_us:,.0f} with few")
    return problems
