"""What do engines that share a daemon cost each other, and what do they gain?

    python benchmarks/engines.py [--parts neighbours shapes trace] [--rounds N] [--requests N] [--trace FILE]
                                 [--format json] [--save]

neighbours   a quiet engine's p99 beside one that floods: in the same daemon, and in another daemon on the same disk.
             The second is the floor: what a flood costs whoever uses the machine. docs/operations.md states FACTOR
shapes       8 engines of one rank in one daemon, one engine of 8 ranks, and 8 daemons; the same bytes; on a file store,
             and on a Mooncake pool (8 daemons need one; left out where it is not installed)
trace        conversations go around 8 engines in turn: hits with one storage for all, and with an eighth for each

Rounds alternate in one run, so that what else the machine does falls on all. --save writes results/engines.json. Exits
with 1 if a quiet engine suffers more than FACTOR.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from transferd import Client, Engine, ReadStorageTask, Status, WriteStorageTask
from transferd.cli.bench.harness import Row, machine, print_report, report, row
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable
from transferd.cli.replay.trace import read_trace
from transferd.client.launch import DaemonProcess, running
from transferd.runtime.compat import wait_for

RESULTS = Path(__file__).parent / "results"
TRACE = Path(__file__).parents[2] / "shared/traces/conversation_trace.jsonl"
PARTS = ("neighbours", "shapes", "trace")
FACTOR = 3.0  # a quiet engine's p99 beside a flood: in the same daemon, at most so often that in another daemon
BIG = {"layers": 8, "kv_heads": 4, "head_dim": 128, "block_size": 64, "device_blocks": 256}  # blocks of 1 MiB
MIDDLE = BIG | {"layers": 2, "device_blocks": 64}  # of 256 KiB
SMALL = {"layers": 1, "kv_heads": 1, "head_dim": 32, "block_size": 64, "device_blocks": 256}  # of 8 KiB
FLOODING, FLOOD_BLOCKS = 32, 16  # tasks under way, blocks of each
ENGINES = 8
TASKS, BLOCKS = 16, 8  # of each engine and round, of each task
TRACE_BYTES = 32 * 1024**2  # all storage in `trace`: less than what it would store
numbers = itertools.count()


@contextlib.asynccontextmanager
async def engine(
    endpoint: str, name: str, layout: dict[str, Any], *, ranks: int = 1, model: str = "m", host_blocks: int = 0
) -> AsyncIterator[tuple[Client, list[Any]]]:
    """A registered engine whose cache the daemon makes, and for each rank its arrays."""
    async with Client(endpoint, engine=name, await_ready=False) as client:
        layout = layout | {"ownership": "create"}
        await client.register(Engine(ranks=ranks, model=model, layout=layout, host_blocks=host_blocks))
        await client.wait_ready(60)
        yield client, [await client.attach(rank) for rank in range(ranks)]


# --- neighbours ---------------------------------------------------------------------------------------


async def flood(endpoint: str) -> None:
    """The process that floods."""
    async with engine(endpoint, "floods", BIG, model="floods") as (client, _):
        await flood_when_told([client], FLOODING, FLOOD_BLOCKS, BIG["device_blocks"], mib=1)


async def flood_when_told(clients: Sequence[Client], lanes: int, blocks: int, device_blocks: int, *, mib: int) -> None:
    """Flood between the words "go" and "stop" on stdin. A stop is answered with the MiB that were written per second.

    lanes: tasks of each client under way, with so many blocks of so many MiB each.
    """
    print("ready", flush=True)
    while (await asyncio.to_thread(sys.stdin.readline)).strip() == "go":
        stop = asyncio.Event()
        writers = [
            asyncio.ensure_future(_write_until(stop, client, lane, blocks, device_blocks))
            for client in clients
            for lane in range(lanes)
        ]
        print("going", flush=True)
        before = time.perf_counter()
        await asyncio.to_thread(sys.stdin.readline)
        stop.set()
        tasks = sum(await asyncio.gather(*writers))
        print(tasks * blocks * mib / (time.perf_counter() - before), flush=True)


async def _write_until(stop: asyncio.Event, client: Client, lane: int, count: int, device_blocks: int) -> int:
    """Write one task of `count` blocks after the other. How many they were."""
    tasks = 0
    while not stop.is_set():
        number = next(numbers)
        keys = [f"f{number}-{i}" for i in range(count)]
        blocks = [(lane * count + i) % device_blocks for i in range(count)]
        await client.insist(WriteStorageTask(task_id=f"f{number}", keys=keys, gpu_block_ids=blocks, timeout=60))
        tasks += 1
    return tasks


class Flood:
    """A child process that floods a daemon when it is told to."""

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self._child = child

    @classmethod
    async def start(cls, endpoint: str, program: Sequence[str] = (__file__,)) -> Flood:
        """program: of Python, which floods with `--flood ENDPOINT`."""
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            sys.executable, *program, "--flood", endpoint, stdin=pipe, stdout=pipe
        )
        flood = cls(child)
        await flood._told()
        return flood

    async def _told(self, word: str = "") -> str:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        if word:
            self._child.stdin.write(f"{word}\n".encode())
        return (await wait_for(self._child.stdout.readline(), 120)).decode().strip()

    async def go(self) -> None:
        await self._told("go")

    async def stop(self) -> float:
        """MiB per second that it wrote."""
        return float(await self._told("stop"))

    async def end(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        await wait_for(self._child.wait(), 60)


async def quiet(client: Client, tasks: int) -> list[float]:
    """Milliseconds of each write and each read of one block, one at a time."""
    took = []
    for _ in range(tasks):
        number = next(numbers)
        for task in (
            WriteStorageTask(task_id=f"w{number}", keys=[f"q{number}"], gpu_block_ids=[number % 256]),
            ReadStorageTask(task_id=f"r{number}", keys=[f"q{number}"], gpu_block_ids=[number % 256]),
        ):
            before = time.perf_counter()
            result = await client.submit(task)
            took.append((time.perf_counter() - before) * 1e3)
            assert result.status is Status.OK, result
    return took


async def neighbours(one: str, other: str, rounds: int, tasks: int = 100) -> list[Row]:
    """one, other: two daemons. The quiet engine is in the first."""
    percentile: dict[str, list[list[float]]] = {"alone": [], "same": [], "other": []}
    rates: dict[str, list[float]] = {"same": [], "other": []}
    floods = {"same": await Flood.start(one), "other": await Flood.start(other)}
    async with engine(one, "quiet", BIG, model="quiet") as (client, _):
        await quiet(client, 20)
        for _ in range(rounds):
            for case in percentile:
                if case in floods:
                    await floods[case].go()
                    await asyncio.sleep(1)
                took = await quiet(client, tasks)
                if case in floods:
                    rates[case].append(await floods[case].stop())
                percentile[case].append(statistics.quantiles(took, n=100))
    for each in floods.values():
        await each.end()

    def times(part: int, above: str, below: str) -> list[float]:
        return [a[part] / b[part] for a, b in zip(percentile[above], percentile[below], strict=True)]

    rows = [row("quiet engine alone, p99", [one[98] for one in percentile["alone"]], "ms", 1.0, "ms")]
    for part, name in ((98, "p99"), (49, "p50")):
        rows += [
            row(f"{name} beside a flood in another daemon", times(part, "other", "alone"), "x", 1.0, "x alone"),
            row(f"{name} beside a flood in the same daemon", times(part, "same", "alone"), "x", 1.0, "x alone"),
            row(f"{name} same daemon, of that in another", times(part, "same", "other"), "x", FACTOR, "x at most"),
        ]
    rows.append(
        row("the flood in the same daemon", rates["same"], "MiB/s", statistics.median(rates["other"]), "in another")
    )
    return rows


# --- shapes -------------------------------------------------------------------------------------------


async def pass_over(clients: Sequence[Client], kind: Callable[[int, int], Any]) -> float:
    """Seconds until every client's tasks are done, 4 at a time for each."""

    async def work(number: int, client: Client) -> None:
        gate = asyncio.Semaphore(4)

        async def one(task: int) -> None:
            async with gate:
                result = await client.insist(kind(number, task))
                assert result.status is Status.OK, result

        await asyncio.gather(*(one(task) for task in range(TASKS)))

    before = time.perf_counter()
    await asyncio.gather(*(work(number, client) for number, client in enumerate(clients)))
    return time.perf_counter() - before


async def shape(endpoints: Sequence[str], engines: int, ranks: int) -> tuple[float, float]:
    """MiB/s written and read by so many engines, spread over these daemons."""
    run = next(numbers)
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for number in range(engines):
            endpoint = endpoints[number % len(endpoints)]
            client, _ = await stack.enter_async_context(engine(endpoint, f"e{number}", MIDDLE, ranks=ranks))
            clients.append(client)

        def task(number: int, task: int) -> dict[str, Any]:
            keys = [f"{run}-{number}-{task}-{block}" for block in range(BLOCKS)]
            first = task % (MIDDLE["device_blocks"] // BLOCKS) * BLOCKS
            return {"keys": keys, "gpu_block_ids": list(range(first, first + BLOCKS)), "timeout": 60}

        def write(number: int, at: int) -> WriteStorageTask:
            return WriteStorageTask(task_id=f"{run}-w{number}-{at}", **task(number, at))

        def read(number: int, at: int) -> ReadStorageTask:
            """What the next engine has written, where there is one."""
            return ReadStorageTask(task_id=f"{run}-r{number}-{at}", **task((number + 1) % engines, at))

        mib = engines * ranks * TASKS * BLOCKS * 256 / 1024
        written = mib / await pass_over(clients, write)
        moved = (written, mib / await pass_over(clients, read))
        for client in clients:
            await client.unregister()
    return moved


async def shapes(on: str, one: str, eight: Sequence[str], rounds: int) -> list[Row]:
    """on: the backend's name. one: a daemon; eight: those that share a pool with it, if there are any."""
    cases = {"8 engines of 1 rank": ([one], ENGINES, 1), "1 engine of 8 ranks": ([one], 1, ENGINES)}
    if eight:
        cases["8 daemons"] = (list(eight), ENGINES, 1)
    moved: dict[str, list[tuple[float, float]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case, asked in cases.items():
            moved[case].append(await shape(*asked))
    rows = []
    for part, name in enumerate(("write", "read")):
        base = statistics.median(each[part] for each in moved["1 engine of 8 ranks"])
        rows += [
            row(f"{on}: {name}, {case}", [e[part] for e in each], "MiB/s", base, "1x8") for case, each in moved.items()
        ]
    return rows


# --- trace --------------------------------------------------------------------------------------------


async def conversation(endpoints: Sequence[str], requests: Sequence[Any]) -> tuple[float, float, int]:
    """Shares of all blocks that storage had, and that another engine had put there; and loads that were shared.

    Every block that is loaded is compared with what belongs to its key.
    """
    writer: dict[int, int] = {}
    counts = {"blocks": 0, "hits": 0, "others": 0}
    async with contextlib.AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(engine(endpoints[number % len(endpoints)], f"t{number}", SMALL))
            for number in range(ENGINES)
        ]

        async def serve(number: int) -> None:
            client, ((arrays, *_),) = engines[number][0], [list(rank.values()) for rank in engines[number][1]]
            keys_of_layer = arrays[0]  # the key plane of the only layer
            for at in range(number, len(requests), ENGINES):
                ids = requests[at].hash_ids[: SMALL["device_blocks"]]
                keys, blocks = [str(one) for one in ids], list(range(len(ids)))
                keys_of_layer[: len(ids)] = 0
                got = await client.insist(ReadStorageTask(task_id=f"r{at}", keys=keys, gpu_block_ids=blocks))
                assert got.status in (Status.OK, Status.PARTIAL, Status.MISS), got
                for block in got.block_ids:
                    assert _holds(keys_of_layer, block, ids[block]), f"wrong bytes of {ids[block]}"
                hits = len(got.block_ids)
                counts["blocks"] += len(ids)
                counts["hits"] += hits
                counts["others"] += sum(writer.get(one, number) != number for one in ids[:hits])
                if hits < len(ids):
                    for block in blocks[hits:]:
                        _fill(keys_of_layer, block, ids[block])
                    task = WriteStorageTask(task_id=f"w{at}", keys=keys[hits:], gpu_block_ids=blocks[hits:])
                    await client.insist(task)
                    writer.update(dict.fromkeys(ids[hits:], number))

        await asyncio.gather(*(serve(number) for number in range(ENGINES)))
        shared = (await engines[0][0].stats())["storage"]["shared_loads"]
    return counts["hits"] / counts["blocks"], counts["others"] / counts["blocks"], shared


def _fill(plane: Any, block: int, content: int) -> None:
    plane[block].reshape(-1).view(np.uint64)[:] = content


def _holds(plane: Any, block: int, content: int) -> bool:
    return bool((plane[block].reshape(-1).view(np.uint64) == content).all())


async def trace(one: str, each: Sequence[str], requests: Sequence[Any]) -> list[Row]:
    """one: a daemon with all the storage. each: a daemon for each engine, with its share of it."""
    hits, others, shared = await conversation([one], requests)
    apart, _, _ = await conversation(each, requests)
    return [
        row("trace: hits, one storage", [hits * 100], "%", apart * 100, "% with an eighth each"),
        row("trace: of these, written by another engine", [others * 100], "%", hits * 100, "% hits"),
        row("trace: loads that joined another engine's", [shared], "objects", 1.0, "object"),
    ]


# --- all of it ----------------------------------------------------------------------------------------


def file_store(capacity: str) -> dict[str, Any]:
    return {"storage": {"backend": "file", "file": {"capacity": capacity}}}


def pooled(master: Master, lent: int) -> dict[str, Any]:
    mooncake = {"master_server_addr": master.address, "global_segment_size": lent, "local_buffer_size": 0}
    return {"storage": {"backend": "mooncake", "mooncake": mooncake}}


def daemons(stack: contextlib.ExitStack, tree: dict[str, Any], count: int = 1) -> list[DaemonProcess]:
    started = []
    for _ in range(count):
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="transferd-engines-")))
        started.append(stack.enter_context(running(tree, directory)))
    return started


def measure(asked: argparse.Namespace, told: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    if "neighbours" in asked.parts:
        with contextlib.ExitStack() as stack:
            one, other = daemons(stack, file_store("2GiB"), 2)
            rows += asyncio.run(neighbours(one.endpoint, other.endpoint, asked.rounds))
    if "shapes" in asked.parts:
        with contextlib.ExitStack() as stack:
            (one,) = daemons(stack, file_store("4GiB"))
            rows += asyncio.run(shapes("file", one.endpoint, [], asked.rounds))
        if master_executable() is None:
            told("8 daemons with a pool between them: left out, Mooncake is not installed")
        else:
            rows += _on_a_pool(asked.rounds)
    if "trace" in asked.parts:
        if not asked.trace.exists():
            told(f"trace: left out, there is no {asked.trace}")
            return rows
        requests = read_trace(asked.trace, asked.requests)
        memory = {"storage": {"backend": "file", "file": {"capacity": TRACE_BYTES}}}
        eighth = {"storage": {"backend": "file", "file": {"capacity": TRACE_BYTES // ENGINES}}}
        with contextlib.ExitStack() as stack:
            (one,), each = daemons(stack, memory), daemons(stack, eighth, ENGINES)
            rows += asyncio.run(trace(one.endpoint, [daemon.endpoint for daemon in each], requests))
    return rows


def _on_a_pool(rounds: int) -> list[Row]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="transferd-engines-")))
        master = stack.enter_context(Master(directory / "master.log"))
        lent = 1024**3 // ENGINES
        (one,), eight = daemons(stack, pooled(master, lent)), daemons(stack, pooled(master, lent), ENGINES)
        return asyncio.run(shapes("pool", one.endpoint, [daemon.endpoint for daemon in eight], rounds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=400, help="of the trace")
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--save", action="store_true", help="write results/engines.json")
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.flood:
        asyncio.run(flood(asked.flood))
        return 0
    before = machine()
    rows = measure(asked, lambda what: print(what, file=sys.stderr, flush=True))
    tree = report("engines", before, rows)
    if asked.save:
        (RESULTS / "engines.json").write_text(json.dumps(tree, indent=2) + "\n")
    print_report(tree, asked.format)
    return 1 if any(one.limit_name == "x at most" and one.ratio > 1 for one in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
