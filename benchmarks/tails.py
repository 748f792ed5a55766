"""What a quiet client waits for beside a flood: p50 and p99 of a read of 2 MiB, a swap and a look-up.

    python -m benchmarks.tails [--rounds 5] [--count 2000] [--format json] [--save]

Four clients in another process write blocks of 2 MiB as fast as they can; each has LANES tasks of FLOOD_BLOCKS blocks
under way. The quiet client has one call under way. It is measured alone, beside a flood of another daemon, which is
what a flood costs whoever uses this machine, and beside a flood of its own daemon. These take turns in one run, on a
store of files and on one of memory. The bar of issue "Fast on slow memory, too" is 5 x alone for each p99.
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
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.engines import RESULTS, Flood, engine, flood_when_told
from transferd import Client, ReadStorageTask, Status, SwapOutTask, WriteStorageTask
from transferd.cli.bench.harness import Row, machine, print_report, report, row
from transferd.client.launch import DaemonProcess, running

BLOCKS = 64
LAYOUT = {"layers": 16, "kv_heads": 4, "head_dim": 128, "block_size": 64, "device_blocks": BLOCKS}
BLOCK_MIB = 2
CLIENTS, LANES, FLOOD_BLOCKS = 4, 4, 4
TIMES = 5.0  # p99 beside a flood, in p99 alone, at most
STORES: dict[str, dict[str, Any]] = {
    "file": {"backend": "file", "file": {"capacity": "4GiB"}},
    "memory": {"backend": "memory", "memory": {"capacity": "2GiB"}},
}
numbers = itertools.count()


def own(endpoint: str, name: str) -> contextlib.AbstractAsyncContextManager[tuple[Client, list[Any]]]:
    return engine(endpoint, name, LAYOUT, model=name, host_blocks=BLOCKS)


async def flood(endpoint: str) -> None:
    """The process that floods."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [(await stack.enter_async_context(own(endpoint, f"floods{number}")))[0] for number in range(CLIENTS)]
        await flood_when_told(clients, LANES, FLOOD_BLOCKS, BLOCKS, mib=BLOCK_MIB)


async def read(client: Client) -> None:
    number = next(numbers)
    task = ReadStorageTask(task_id=f"r{number}", keys=["quiet"], gpu_block_ids=[number % BLOCKS])
    assert (result := await client.submit(task)).status is Status.OK, result


async def swap(client: Client) -> None:
    number = next(numbers)
    task = SwapOutTask(task_id=f"s{number}", gpu_block_ids=[number % BLOCKS], cpu_block_ids=[number % BLOCKS])
    assert (result := await client.submit(task)).status is Status.OK, result


async def look_up(client: Client) -> None:
    assert await client.exists(["quiet"]) == [True]


CALLS: dict[str, Callable[[Client], Awaitable[None]]] = {
    "read of 2 MiB": read,
    "swap of 2 MiB": swap,
    "exists": look_up,
}


async def timed(call: Callable[[Client], Awaitable[None]], client: Client, count: int) -> list[float]:
    """Milliseconds of each call."""
    took = []
    for _ in range(count):
        before = time.perf_counter()
        await call(client)
        took.append((time.perf_counter() - before) * 1e3)
    return took


async def measure(store: str, endpoint: str, other: str, rounds: int, count: int) -> list[Row]:
    """other: the endpoint of another daemon. count: calls of each kind in each place, in all."""
    floods = {"of another daemon": other, "of its daemon": endpoint}
    took: dict[str, dict[str, list[list[float]]]] = {place: {name: [] for name in CALLS} for place in ("", *floods)}
    rates: dict[str, list[float]] = {place: [] for place in floods}
    flooding = {place: await Flood.start(where, ("-m", "benchmarks.tails")) for place, where in floods.items()}
    async with own(endpoint, "quiet") as (client, _):
        task = WriteStorageTask(task_id="w", keys=["quiet"], gpu_block_ids=[0])
        assert (stored := await client.submit(task)).status is Status.OK, stored
        await client.pin(["quiet"], 3600.0)
        for call in CALLS.values():
            await timed(call, client, 50)
        for _ in range(rounds):
            for place in took:
                if place:
                    await flooding[place].go()
                    await asyncio.sleep(1.0)
                for name, call in CALLS.items():
                    took[place][name].append(await timed(call, client, count // rounds))
                if place:
                    rates[place].append(await flooding[place].stop())
    for running_flood in flooding.values():
        await running_flood.end()
    rows = []
    for name in CALLS:
        for part, title in ((98, "p99"), (49, "p50")):
            of = {place: [statistics.quantiles(one, n=100)[part] for one in took[place][name]] for place in took}
            rows.append(row(f"{store}: {name}, {title} alone", of[""], "ms", 1.0, "ms"))
            for place in floods:
                times = [one / statistics.median(of[""]) for one in of[place]]
                what = f"{store}: {name}, {title} beside a flood {place}"
                rows.append(row(what, times, "x", TIMES, "x alone at most"))
    for place, each in rates.items():
        rows.append(row(f"{store}: the flood {place}", each, "MiB/s", statistics.median(each), "MiB/s"))
    return rows


async def main(rounds: int, count: int) -> list[Row]:
    rows = []
    for store, section in STORES.items():
        with contextlib.ExitStack() as stack:
            daemons = [stack.enter_context(daemon(store, section)) for _ in range(2)]
            rows += await measure(store, daemons[0].endpoint, daemons[1].endpoint, rounds, count)
    return rows


@contextlib.contextmanager
def daemon(store: str, section: dict[str, Any]) -> Iterator[DaemonProcess]:
    """A daemon with a store of its own."""
    with tempfile.TemporaryDirectory(prefix="transferd-tails-") as directory:
        storage = dict(section)
        if store == "file":
            storage["file"] = storage["file"] | {"path": f"{directory}/store"}
        tree = {"storage": storage, "engines": {"devices": ["shm"]}, "host": {"staging": "128MiB"}}
        with running(tree, Path(directory)) as one:
            yield one


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=2000, help="calls of each kind, alone and beside each flood")
    parser.add_argument("--format", choices=("text", "json"), default="text")
    parser.add_argument("--save", action="store_true", help="write results/tails.json")
    parser.add_argument("--flood", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.flood:
        asyncio.run(flood(options.flood))
        sys.exit(0)
    where = machine()
    tree = report("tails", where, asyncio.run(main(options.rounds, options.count)))
    if options.save:
        (RESULTS / "tails.json").write_text(json.dumps(tree, indent=1) + "\n")
    print_report(tree, options.format)
