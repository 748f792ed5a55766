"""Daemons on a real Mooncake pool whose master, peers and memory really go away.

Whatever dies, three things hold: every task is answered by its deadline with a typed error, what an answer
claims is there to the last byte, and the daemon goes on working once the pool does.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.freezing import freeze, thaw
from transferd import Client, ReadStorageTask, Status, TaskResult, WriteStorageTask
from transferd.cli.pool.local import Lender, Master, wait_until
from transferd.cli.pool.master import free_port, master_executable
from transferd.cli.replay.kvdata import POISON, KvData
from transferd.client.launch import DaemonProcess, start
from transferd.runtime.compat import timeout, wait_for

pytestmark = [
    pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed"),
    pytest.mark.one_loop,
]
MIB = 1024**2
TIMEOUT_S = 4.0  # of the tasks here
BUSY_S = 10.0  # on top of the daemon's slack of 1 s, for a machine that has other things to do
BLOCKS = 16  # of a task
TROUBLE = {"storage_unavailable", "storage_error", "storage_full", "expired"}


def tree(master: str, *, ranks: int = 2, segment: int = 0, **mooncake: Any) -> dict[str, Any]:
    """Blocks of 256 KiB a rank, 3 of them in a chunk: a task is on its way for many calls."""
    cache = {"ranks": ranks, "layers": 4, "kv_heads": 4, "head_dim": 64, "block_size": 64, "device_blocks": 48}
    pool = {"master_server_addr": master, "global_segment_size": segment, "local_buffer_size": 0}
    return {
        "cache": cache | {"host_blocks": 0},
        "host": {"staging": "4MiB"},
        "storage": {"backend": "mooncake", "mooncake": pool | {"timeout": 1.0, "probe_interval": 0.1} | mooncake},
    }


class Node:
    """A daemon in its own process, an engine's client of it, and what its blocks must contain."""

    def __init__(self, process: DaemonProcess, client: Client, data: KvData) -> None:
        self.process, self.client, self.data = process, client, data
        self._tasks = 0

    async def push(
        self, kind: type[WriteStorageTask | ReadStorageTask], contents: Sequence[int], blocks: Sequence[int]
    ) -> asyncio.Future[TaskResult]:
        self._tasks += 1
        keys = [f"content-{content}" for content in contents]
        return await self.client.push(
            kind(task_id=f"t{self._tasks}", keys=keys, gpu_block_ids=list(blocks), timeout=TIMEOUT_S)
        )

    async def write(self, contents: Sequence[int], blocks: Sequence[int]) -> TaskResult:
        for content, block in zip(contents, blocks, strict=True):
            self.data.fill(block, content)
        return await answered(await self.push(WriteStorageTask, contents, blocks))

    async def read(self, contents: Sequence[int], blocks: Sequence[int]) -> TaskResult:
        self.data.poison(blocks)
        result = await answered(await self.push(ReadStorageTask, contents, blocks))
        self.check(result, contents, blocks)
        return result

    def check(self, result: TaskResult, contents: Sequence[int], blocks: Sequence[int]) -> None:
        """A read's claim is a prefix, and every byte of it is right."""
        assert result.block_ids == list(blocks[: len(result.block_ids)])
        for content, block in zip(contents, result.block_ids, strict=False):
            assert self.data.verify(block, content) is None

    async def stores(self, contents: Sequence[int]) -> None:
        """Write these from the blocks of their numbers: on a busy machine a call of the pool may take over 1 s."""
        async with timeout(60):
            while (await self.write(contents, contents)).status is not Status.OK:  # noqa: ASYNC110 - as below
                await asyncio.sleep(0.1)

    async def works(self, contents: Sequence[int]) -> None:
        """Once the pool does, it does: these can be written and read back. Their blocks: 0 … and 16 …"""
        sources, targets = range(len(contents)), range(BLOCKS, BLOCKS + len(contents))
        async with timeout(60):
            while (await self.write(contents, sources)).status is not Status.OK:  # noqa: ASYNC110 - memory is lent anew
                await asyncio.sleep(0.1)
            assert (await self.read(contents, targets)).status is Status.OK

    async def storage(self) -> dict[str, Any]:
        report: dict[str, Any] = (await self.client.stats())["storage"]
        return report

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for something in its report."""
        async with timeout(60):
            while not condition(await self.client.stats()):  # noqa: ASYNC110 - a report is asked for
                await asyncio.sleep(0.01)

    def log_lines(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.process.log.splitlines()]
        return [line for line in lines if line["event"] == event]


async def answered(pushed: asyncio.Future[TaskResult]) -> TaskResult:
    """The result, which must come by the task's deadline and name what went wrong."""
    result = await wait_for(pushed, 60)
    assert result.duration <= TIMEOUT_S + 1.0 + BUSY_S
    assert result.status in (Status.OK, Status.PARTIAL, Status.MISS, Status.FAILED, Status.EXPIRED)
    assert result.error is None or result.error.code in TROUBLE
    assert result.status not in (Status.FAILED, Status.EXPIRED) or result.error is not None
    return result


@asynccontextmanager
async def node(
    settings: dict[str, Any], directory: Path, name: str = "node", *, kill: bool = False
) -> AsyncIterator[Node]:
    """Started, attached, and at the end stopped with exit code 0 and not a line in its log that is not its own.

    kill: or killed.
    """
    process = await asyncio.to_thread(start, settings, directory, name=name)
    try:
        async with Client(process.endpoint) as client:
            caches = [await client.attach(rank=rank) for rank in range(settings["cache"]["ranks"])]
            running = Node(process, client, KvData(caches))
            yield running
            del caches
            running.data = None  # type: ignore[assignment]
        if kill:
            return
        assert await asyncio.to_thread(process.stop) == 0
        assert running.log_lines("stopped"), "every line is JSON"
    finally:
        if process.process.poll() is None:
            process.kill()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    with Master(tmp_path / "master.log") as running:
        yield running


@pytest.fixture
def lender(master: Master, tmp_path: Path) -> Iterator[Lender]:
    """A peer that holds the pool's memory: frozen, it keeps every transfer under way."""
    with Lender(master, 64 * MIB, tmp_path / "lender.log") as running:
        yield running


@contextmanager
def lending(settings: dict[str, Any], directory: Path, master: Master) -> Iterator[subprocess.Popen[bytes]]:
    """`transferd pool lend` with these settings."""
    sets = [f"--set=storage.mooncake.{name}={value}" for name, value in settings["storage"]["mooncake"].items()]
    before = len(master.segments())
    with (directory / "lend.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "transferd", "pool", "lend", *sets], stdout=log, stderr=log)
    try:
        assert wait_until(lambda: len(master.segments()) > before or process.poll() is not None)
        yield process
    finally:
        process.kill()
        process.wait()


async def in_transfer(running: Node, lender: Lender, kind: Any, contents: range) -> list[asyncio.Future[TaskResult]]:
    """Three tasks whose transfers have begun and cannot end."""
    freeze(lender.pid)
    blocks = [range(i * BLOCKS, (i + 1) * BLOCKS) for i in range(3)]
    parts = [contents[i * BLOCKS : (i + 1) * BLOCKS] for i in range(3)]
    pushed = [await running.push(kind, part, ids) for part, ids in zip(parts, blocks, strict=True)]
    await running.until(lambda stats: stats["staging"]["used"] > 0 and stats["storage"]["calls_under_way"] > 0)
    return pushed


async def test_without_a_master_a_start_waits_red_says_so_once_and_gives_up(tmp_path: Path) -> None:
    http, address = free_port(), f"127.0.0.1:{free_port()}"
    settings = tree(address, connect_timeout=4.0) | {"metrics": {"listen": f"127.0.0.1:{http}"}}
    process = start(settings, tmp_path, wait=False)
    try:
        red = asyncio.get_running_loop().run_in_executor(
            None, wait_until, lambda: readiness(http) == 503 or process.process.poll() is not None
        )
        assert await red
        assert process.process.poll() is None
        assert await asyncio.to_thread(process.process.wait, 60) == 1
    finally:
        process.kill()
    lines = [json.loads(line) for line in process.log.splitlines()]
    (waiting,) = [line for line in lines if line["event"] == "waiting for the Mooncake pool"]
    assert (waiting["master"], waiting["problem"]) == (address, "Connection refused")
    assert lines[-1]["event"] == "cannot start"
    assert lines[-1]["reason"] == "storage_unavailable"
    assert f"could not join the Mooncake pool at {address} within 4 s" in lines[-1]["problem"]


def readiness(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


async def test_a_master_that_comes_late_makes_a_waiting_start_ready(tmp_path: Path) -> None:
    late = Master(tmp_path / "master.log")
    settings = tree(late.address, segment=32 * MIB, connect_timeout=60.0)
    process = start(settings, tmp_path, wait=False)
    try:
        assert await asyncio.to_thread(wait_until, lambda: "waiting for the Mooncake pool" in process.log)
        with late:
            async with Client(process.endpoint, connect_timeout=60.0) as client:
                assert (await client.stats())["ready"]
            assert await asyncio.to_thread(process.stop) == 0
    finally:
        process.kill()


@pytest.mark.parametrize("kind", [WriteStorageTask, ReadStorageTask])
async def test_a_master_killed_in_the_middle_of_tasks_leaves_each_an_answer_and_a_new_one_is_used(
    master: Master, lender: Lender, tmp_path: Path, kind: Any
) -> None:
    async with node(tree(master.address), tmp_path) as running:
        contents = range(3 * BLOCKS)
        if kind is ReadStorageTask:
            await running.stores(contents)
            running.data.poison(contents)
        else:
            for content in contents:
                running.data.fill(content, content)
        pushed = await in_transfer(running, lender, kind, contents)
        master.stop()
        thaw(lender.pid)
        results = [await answered(future) for future in pushed]
        if kind is ReadStorageTask:
            for i, result in enumerate(results):
                running.check(result, contents[i * BLOCKS :], contents[i * BLOCKS : (i + 1) * BLOCKS])
        assert "storage_unavailable" in {result.error.code for result in results if result.error}
        for _ in range(20):
            refused = await running.read([0], [0])
            assert (refused.status, refused.error and refused.error.code) == (Status.FAILED, "storage_unavailable")
        assert (await running.storage())["breaker"] in ("open", "half_open")
        master.start()
        await running.until(lambda stats: stats["storage"]["breaker"] == "closed")
        assert (await running.read([0], [0])).status is Status.MISS, "a new master knows nothing"
        await running.works(range(100, 100 + BLOCKS))
        assert len(running.log_lines("storage does not answer: failing fast until it does")) >= 1
        assert len(running.log_lines("storage answers again")) >= 1


async def test_a_frozen_master_costs_tasks_their_deadline_at_most_and_nothing_is_lost(
    master: Master, lender: Lender, tmp_path: Path
) -> None:
    async with node(tree(master.address), tmp_path) as running:
        contents = range(BLOCKS)
        await running.stores(contents)
        freeze(master.pid)
        running.data.poison(range(BLOCKS, 3 * BLOCKS))
        pushed = [
            await running.push(ReadStorageTask, contents, range(BLOCKS, 2 * BLOCKS)),
            await running.push(WriteStorageTask, range(50, 50 + BLOCKS), range(2 * BLOCKS, 3 * BLOCKS)),
        ]
        for result in [await answered(future) for future in pushed]:
            assert result.block_ids == []
            assert result.error is not None
        assert (await running.client.stats())["ready"], "the daemon is up, and says so"
        thaw(master.pid)
        await running.until(lambda stats: stats["storage"]["breaker"] == "closed")
        assert (await running.read(contents, range(BLOCKS, 2 * BLOCKS))).status is Status.OK


async def test_a_peer_killed_in_the_middle_of_reads_takes_its_blocks_along_and_no_others(
    master: Master, tmp_path: Path
) -> None:
    """A prefill daemon lends the memory and dies; the decode daemon reads from it at that moment."""
    async with node(tree(master.address), tmp_path, "decode") as decode:
        prefill = await asyncio.to_thread(start, tree(master.address, segment=64 * MIB), tmp_path, name="prefill")
        try:
            async with Client(prefill.endpoint) as client:
                stored = Node(prefill, client, KvData([await client.attach(rank=rank) for rank in range(2)]))
                contents = range(BLOCKS)
                await stored.stores(contents)
                assert (await decode.read(contents, contents)).status is Status.OK
                decode.data.poison(contents)
                freeze(prefill.pid)
                pushed = await decode.push(ReadStorageTask, contents, contents)
                await decode.until(lambda stats: stats["storage"]["calls_under_way"] > 0 < stats["staging"]["used"])
                prefill.kill()
            result = await answered(pushed)
            decode.check(result, contents, contents)
            assert result.status in (Status.FAILED, Status.PARTIAL, Status.EXPIRED)
        finally:
            prefill.kill()
        again = await decode.read(contents, contents)
        assert again.block_ids == []
        with Lender(master, 64 * MIB, tmp_path / "lender.log"):
            await decode.works(range(100, 100 + BLOCKS))


async def test_the_first_read_of_a_silent_node_is_answered_long_before_its_timeout(
    master: Master, tmp_path: Path
) -> None:
    """The node that started first has the record of the layout, so the library knows its data port already."""
    async with node(tree(master.address, segment=64 * MIB), tmp_path, "first") as first:
        contents = range(BLOCKS)
        await first.stores(contents)
        async with node(tree(master.address), tmp_path, "second") as second:
            pid = first.process.process.pid
            freeze(pid)
            try:
                task = ReadStorageTask(
                    task_id="silent",
                    keys=[f"content-{content}" for content in contents],
                    gpu_block_ids=list(contents),
                    timeout=20.0,
                )
                second.data.poison(contents)
                result = await second.client.submit(task)
                assert (result.status, result.error and result.error.code) == (Status.FAILED, "storage_unavailable")
                assert "does not answer" in str(result.error)
                assert poisoned(second, contents)
            finally:
                thaw(pid)
            await second.until(lambda stats: not stats["storage"]["peers_down"])
            assert (await second.read(contents, contents)).status is Status.OK


async def test_a_full_pool_stores_what_fits_and_says_what_did_not(master: Master, tmp_path: Path) -> None:
    async with node(tree(master.address, segment=16 * MIB, hard_pin=True), tmp_path) as running:
        contents = range(40)  # 20 MiB
        result = await running.write(contents, contents)
        assert (result.status, result.error and result.error.code) == (Status.PARTIAL, "storage_full")
        assert 0 < len(result.block_ids) < 32
        for content in result.block_ids:
            assert (await running.read([content], [47])).status is Status.OK
        storage = await running.storage()
        assert storage["errors"] > 0
        assert storage["breaker"] == "closed", "a full pool answers"


async def test_a_block_larger_than_any_segment_is_storage_full_and_nothing_else(master: Master, tmp_path: Path) -> None:
    settings = tree(master.address, ranks=1, segment=16 * MIB) | {"host": {"staging": "64MiB"}}
    settings["cache"] |= {"layers": 1, "kv_heads": 64, "head_dim": 256, "block_size": 320, "device_blocks": 2}  # 20 MiB
    async with node(settings, tmp_path) as running:
        result = await running.write([0], [0])
        assert (result.status, result.error and result.error.code) == (Status.FAILED, "storage_full")
        assert (await running.read([0], [1])).status is Status.MISS
        assert (await running.storage())["breaker"] == "closed"


async def test_another_tensor_parallel_size_is_a_miss_that_both_sides_report(master: Master, tmp_path: Path) -> None:
    event = "another layout of this model is in the pool: its blocks are misses here"
    async with (
        node(tree(master.address, ranks=2, segment=64 * MIB), tmp_path, "prefill") as prefill,
        node(tree(master.address, ranks=1), tmp_path, "decode") as decode,
    ):
        contents = range(BLOCKS)
        await prefill.stores(contents)
        decode.data.poison(contents)
        pushed = await decode.push(ReadStorageTask, contents, contents)
        result = await answered(pushed)
        assert (result.status, result.block_ids, result.error) == (Status.MISS, [], None)
        assert poisoned(decode, contents), "not a byte"
        await decode.until(lambda stats: stats["storage"]["other_layout"] == 1)
        (line,) = decode.log_lines(event)
        fingerprints = [(await side.client.stats())["layout"]["fingerprint"] for side in (decode, prefill)]
        assert [line["ours"].split()[0], line["theirs"].split()[0]] == fingerprints
        async with timeout(60):
            while not prefill.log_lines(event):  # it looks when it misses something, a second after it last did
                assert (await prefill.read([99], [0])).status is Status.MISS
                await asyncio.sleep(0.1)


def poisoned(running: Node, blocks: Sequence[int]) -> bool:
    return all((part.raw[list(blocks)] == POISON).all() for part in running.data._parts)


async def test_what_a_node_has_stored_outlives_its_daemon_where_another_process_lends(
    master: Master, tmp_path: Path
) -> None:
    pages, ours = f"127.0.0.1:{master.metrics_port}", range(BLOCKS)
    settings = tree(master.address, segment=64 * MIB, lender=f"127.0.0.1:{free_port()}", master_pages=pages)
    with lending(settings, tmp_path, master) as process:
        async with node(settings, tmp_path, "killed", kill=True) as running:
            await running.works(ours)
        async with node(settings, tmp_path) as running:
            assert (await running.read(ours, ours)).block_ids == list(ours)
            left = await running.client.drain_pool()
            assert (left.left, left.why) == (2 * BLOCKS + 1, "no other node takes copies now"), "and a layout's record"
            with Lender(master, 64 * MIB, tmp_path / "other.log"):
                assert (await running.client.drain_pool()).objects == left.left
                process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(process.wait, 30) == 0
                assert (await running.read(ours, ours)).block_ids == list(ours)
