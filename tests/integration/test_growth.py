"""What a call costs the event loop does not grow with what is stored, or with how many tasks are queued.

Counts lines of transferd that run on the loop, so that a busy machine changes nothing. `make growth-gate` measures CPU
time, beside 1,000,000 objects, 1,000 engines and 100,000 queued tasks.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import transferd
from tests.wire.test_acceptor import Peer
from transferd import ReadStorageTask, Status, SwapOutTask, SyncClient, WriteStorageTask
from transferd.config import from_tree
from transferd.daemon.daemon import Daemon
from transferd.runtime.compat import Self
from transferd.wire import protocol as wire
from transferd.wire.zmtp import properties

PACKAGE = str(Path(transferd.__file__).parent) + "/"
FEW, MANY = 64, 2048
MOST, BESIDES = 1.5, 600  # times what it takes with few; a heartbeat and a report are 280 lines that come by themselves
A_TASK = 256  # keys


class Lines:
    """How many lines of the package run on this thread, from entry to exit."""

    def __enter__(self) -> Self:
        self.count = 0
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, _event: str, _: Any) -> Callable[..., Any] | None:
        return self._ran if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _ran(self, _frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        self.count += event == "line"
        return self._ran


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[SyncClient]:
    """A daemon on this loop, and its client, which others threads use."""
    tree = {
        "server": {"endpoint": f"ipc://{directory}/s"},
        "cache": {"ranks": 1, "layers": 1, "kv_heads": 1, "head_dim": 16, "block_size": 4}
        | {"device_blocks": A_TASK, "host_blocks": A_TASK},
        "storage": {"backend": "memory"},
        "metrics": {"listen": ""},
    }
    daemon = Daemon(from_tree(tree))
    await daemon.open()
    client = SyncClient(str(tree["server"]["endpoint"]))  # type: ignore[index]
    try:
        await asyncio.to_thread(client.connect)
        await asyncio.to_thread(client.attach, rank=0)
        yield client
    finally:
        await asyncio.to_thread(client.close)
        await daemon.stop(lambda: 5.0)


def store(client: SyncClient, keys: list[str]) -> None:
    for start in range(0, len(keys), A_TASK):
        some = keys[start : start + A_TASK]
        task = WriteStorageTask(task_id=f"s{len(keys)} {start}", keys=some, gpu_block_ids=list(range(len(some))))
        assert client.submit(task).status is Status.OK


def push(peer: Peer, first: int, count: int) -> None:
    """Push swaps up to this number, and wait for no answer."""
    for number in range(first, count):
        block = number % A_TASK
        task = SwapOutTask(task_id=f"q{number}", gpu_block_ids=[block], cpu_block_ids=[block])
        peer.send(wire.encode_request(number + 1, task))


async def lines(ask: Callable[[int], object], first: int) -> int:
    """The fewest lines of three calls: the others also counted what came between."""
    counts = []
    for number in range(first, first + 4):  # the first one loads
        with Lines() as ran:
            await asyncio.to_thread(ask, number)
        counts.append(ran.count)
    return min(counts[1:])


def calls(client: SyncClient, *, queued: bool) -> dict[str, Callable[[int], object]]:
    def moved(task: Any) -> None:
        assert client.submit(task).status is Status.OK

    asked: dict[str, Callable[[int], object]] = {
        "look-up": lambda _: client.exists(["k0", "k1", "absent"]),
        "ping": lambda _: client.ping(),
        "stats": lambda _: client.stats(),
        "tasks": lambda _: client.tasks(limit=4),
        "clients": lambda _: client.clients(limit=4),
        "pin": lambda _: client.pin(["k0"], ttl=60.0),
        "unpin": lambda _: client.unpin(["k0"]),
        "purge": lambda n: client.purge(keys=[f"w{n - 1}"]),
    }
    if not queued:
        asked |= {
            "swap": lambda n: moved(SwapOutTask(task_id=f"o{n}", gpu_block_ids=[1], cpu_block_ids=[1])),
            "write": lambda n: moved(WriteStorageTask(task_id=f"w{n}", keys=[f"w{n}"], gpu_block_ids=[1])),
            "read": lambda n: moved(ReadStorageTask(task_id=f"r{n}", keys=["k0"], gpu_block_ids=[2])),
        }
    return asked


def grown(few: dict[str, int], many: dict[str, int]) -> list[str]:
    return [
        f"{name}: {few[name]} lines, {many[name]} with many" for name in few if many[name] > MOST * few[name] + BESIDES
    ]


async def test_no_call_costs_more_with_many_objects(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        found = []
        for count in (FEW, MANY):
            await asyncio.to_thread(store, client, [f"k{number}" for number in range(count)])
            found.append({name: await lines(ask, count) for name, ask in calls(client, queued=False).items()})
        assert grown(*found) == []


async def test_no_call_costs_more_with_many_queued_tasks_and_nor_does_a_client_that_comes_and_goes(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as client:
        await asyncio.to_thread(store, client, ["k0", "k1"])
        await asyncio.to_thread(client.pause)

        def visit(_: int) -> None:
            with SyncClient(client.endpoint):
                pass

        found, before, peer = [], 0, Peer(client.endpoint)
        peer.socket.setblocking(True)
        peer.send(wire.encode_request(0, wire.Hello()))
        for count in (FEW, MANY):
            await asyncio.to_thread(push, peer, before, count)
            before = count
            while (await asyncio.to_thread(client.stats))["queued"] < count:  # noqa: ASYNC110 - a thread pushes them
                await asyncio.sleep(0.01)
            asked = calls(client, queued=True) | {"visit": visit}
            found.append({name: await lines(ask, count) for name, ask in asked.items()})
        peer.socket.close()
        assert grown(*found) == []


def test_a_walk_over_all_would_be_seen() -> None:
    few, many = {"a": 100}, {"a": 100 + MANY}
    assert grown(few, many) == ["a: 100 lines, 2148 with many"]


def test_lines_of_a_loop_are_counted() -> None:
    with Lines() as ran:
        properties({b"%d" % number: b"" for number in range(MANY)})
    assert ran.count > MANY
