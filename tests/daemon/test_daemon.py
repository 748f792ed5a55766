"""The daemon as an engine sees it: a process of its own, real sockets, real files, every byte compared."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.caches import Caches, attach, attached, fill, snapshot, wipe
from tests.support.blobs import overwrite
from tests.support.waits import until
from transferd import (
    Client,
    ReadStorageTask,
    Status,
    SwapInTask,
    SwapOutTask,
    TaskResult,
    WriteStorageTask,
)
from transferd.blocks.formats import key_digest
from transferd.client.launch import DaemonProcess, running, start
from transferd.runtime.compat import wait_for

pytestmark = pytest.mark.one_loop  # the daemon is in a process of its own; test_wire.py has both loops

Tree = dict[str, dict[str, Any]]


def config(ranks: int = 2, **cache: Any) -> Tree:
    return {
        "cache": {"ranks": ranks, "layers": 3, "kv_heads": 2, "head_dim": 16, "block_size": 8, "device_blocks": 32}
        | {"host_blocks": 32}
        | cache,
        "host": {"staging": "256KiB"},
        "storage": {"backend": "file"},
    }


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with running(config(), tmp_path) as process:
        yield process


@pytest.fixture
async def client(daemon: DaemonProcess) -> AsyncIterator[Client]:
    async with Client(daemon.endpoint) as connected:
        await attach(connected)
        yield connected


def write(task_id: str, blocks: list[int], prefix: str = "key", **more: Any) -> WriteStorageTask:
    keys = [f"{prefix}-{i}" for i in range(len(blocks))]
    return WriteStorageTask(task_id=task_id, keys=keys, gpu_block_ids=blocks, **more)


def read(task_id: str, blocks: list[int], prefix: str = "key", **more: Any) -> ReadStorageTask:
    keys = [f"{prefix}-{i}" for i in range(len(blocks))]
    return ReadStorageTask(task_id=task_id, keys=keys, gpu_block_ids=blocks, **more)


async def test_written_blocks_are_read_back_into_other_blocks_byte_for_byte(client: Client) -> None:
    caches = await attach(client)
    source, target = [3, 9, 1, 20, 7], [30, 2, 11, 25, 4]
    fill(caches, source, seed=1)
    before = snapshot(caches, source)
    written = await client.submit(write("w", source))
    assert (written.status, written.block_ids) == (Status.OK, source)
    assert [r.rank for r in written.ranks] == [0, 1]
    assert await client.match([f"key-{i}" for i in range(7)]) == 5
    result = await client.submit(read("r", target))
    assert (result.status, result.block_ids) == (Status.OK, target)
    assert snapshot(caches, target) == before
    assert result.bytes == written.bytes > 0


async def test_a_sparse_read_loads_what_is_there_and_exists_says_the_same(client: Client, tmp_path: Path) -> None:
    caches = await attach(client)
    fill(caches, list(range(32)), seed=6)
    await client.submit(write("w", [0, 1, 2, 3]))
    damaged = [path for path in tmp_path.rglob("*") if path.is_file() and key_digest("key-2") in str(path)]
    for path in damaged:
        overwrite(path, bytes(path.stat().st_size))
    assert damaged
    keys = ["key-0", "missing", "key-1", "key-2", "never stored", "key-3"]
    assert await client.exists(keys) == [True, False, True, True, False, True]
    assert await client.exists([]) == []
    untouched = [n for n in range(32) if n not in (10, 12, 15)]
    stored, others = snapshot(caches, [0, 1, 3]), snapshot(caches, untouched)
    task = ReadStorageTask(task_id="r", keys=keys, gpu_block_ids=[10, 11, 12, 13, 14, 15], prefix=False)
    result = await client.submit(task)
    assert (result.status, result.block_ids, result.error) == (Status.PARTIAL, [10, 12, 15], None)
    assert [r.blocks for r in result.ranks] == [3, 3]
    assert snapshot(caches, [10, 12, 15]) == stored
    assert snapshot(caches, untouched) == others
    assert await client.exists(keys) == [True, False, True, False, False, True], "the damaged one was set aside"
    again = await client.submit(ReadStorageTask(task_id="r2", keys=keys, gpu_block_ids=[10, 11, 12, 13, 14, 15]))
    assert (again.status, again.block_ids) == (Status.PARTIAL, [10])
    story = await client.explain("r")
    told = [event for rank in story["lives"][0]["ranks"] for event in rank["events"] if event["what"] == "found"]
    assert [event["blocks"] for event in told] == [4, 4]


async def test_a_read_returns_the_prefix_that_storage_has_and_touches_nothing_else(client: Client) -> None:
    caches = await attach(client)
    fill(caches, list(range(32)), seed=2)
    await client.submit(write("w", [0, 1, 2]))
    untouched = snapshot(caches, [13, 14])
    result = await client.submit(read("r", [10, 11, 12, 13, 14]))
    assert (result.status, result.block_ids, result.error) == (Status.PARTIAL, [10, 11, 12], None)
    assert snapshot(caches, [10, 11, 12]) == snapshot(caches, [0, 1, 2])
    assert snapshot(caches, [13, 14]) == untouched
    assert (await client.submit(read("none", [5], prefix="other"))).status is Status.MISS


async def test_a_key_already_stored_counts_as_written_and_moves_no_bytes(client: Client) -> None:
    await client.submit(write("first", [1, 2]))
    again = await client.submit(write("second", [3, 4, 5]))
    assert (again.status, again.block_ids) == (Status.OK, [3, 4, 5])
    first_two = (await client.submit(write("third", [6, 7]))).bytes
    assert first_two == 0


async def test_swapped_blocks_come_back_as_they_went(client: Client) -> None:
    caches = await attach(client)
    fill(caches, [4, 5, 6], seed=3)
    before = snapshot(caches, [4, 5, 6])
    out = await client.submit(SwapOutTask(task_id="o", gpu_block_ids=[4, 5, 6], cpu_block_ids=[31, 0, 15]))
    wipe(caches, [4, 5, 6])
    back = await client.submit(SwapInTask(task_id="i", gpu_block_ids=[20, 21, 22], cpu_block_ids=[31, 0, 15]))
    assert (out.status, back.status) == (Status.OK, Status.OK)
    assert snapshot(caches, [20, 21, 22]) == before


async def test_tasks_pushed_without_waiting_run_in_order_on_the_blocks_they_share(client: Client) -> None:
    caches = await attach(client)
    fill(caches, list(range(8)), seed=4)
    before = snapshot(caches, list(range(8)))
    blocks, host = list(range(8)), list(range(8))
    pushed = [
        await client.push(write("w", blocks)),
        await client.push(SwapOutTask(task_id="o", gpu_block_ids=blocks, cpu_block_ids=host)),
        await client.push(read("r", blocks[::-1])),  # waits for both, then turns the blocks around
        await client.push(SwapInTask(task_id="i", gpu_block_ids=list(range(8, 16)), cpu_block_ids=host)),
    ]
    results = await asyncio.gather(*pushed)
    assert [r.status for r in results] == [Status.OK] * 4
    assert snapshot(caches, list(range(8, 16))) == before
    assert snapshot(caches, blocks[::-1]) == before


async def test_many_readers_of_one_hot_prefix_all_get_it_and_none_needs_staging(client: Client) -> None:
    caches = await attach(client)
    fill(caches, [0, 1], seed=5)
    before = snapshot(caches, [0, 1])
    await client.submit(write("w", [0, 1]))
    targets = [[2 * i + 2, 2 * i + 3] for i in range(15)]
    await client.pause()
    pushed = [await client.push(read(f"r{i}", target)) for i, target in enumerate(targets)]
    await client.resume()
    assert {(await future).status for future in pushed} == {Status.OK}
    for target in targets:
        assert snapshot(caches, target) == before
    stats = await client.stats()
    assert stats["storage"]["hits"] == 2 * 2 * 15, "each copies from the page cache (docs/files.md)"
    assert stats["storage"]["misses"] == 0


async def test_a_damaged_object_is_a_miss_and_is_counted(client: Client, daemon: DaemonProcess) -> None:
    caches = await attach(client)
    fill(caches, [0, 1, 2], seed=6)
    await client.submit(write("w", [0, 1, 2]))
    objects = [p for p in (daemon.config_file.parent / "blocks").rglob("*") if p.is_file() and p.stat().st_size > 1000]
    assert len(objects) == 6
    for path in objects:
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 1
        overwrite(path, data)
    result = await client.submit(read("r", [10, 11, 12]))
    assert (result.status, result.block_ids) == (Status.MISS, [])
    assert (await client.stats())["storage"]["corrupt"] >= 2
    rewritten = await client.submit(write("again", [0, 1, 2]))
    assert rewritten.status is Status.OK
    assert (await client.submit(read("r2", [20, 21, 22]))).status is Status.OK
    assert snapshot(caches, [20, 21, 22]) == snapshot(caches, [0, 1, 2])


async def test_a_new_generation_puts_older_blocks_out_of_reach(client: Client) -> None:
    await client.submit(write("w", [0]))
    await client.set_generation("RL-STEP04")
    assert await client.match(["key-0"]) == 0
    missed = await client.submit(read("r", [1]))
    assert (missed.status, missed.generation) == (Status.MISS, "RL-STEP04")
    await client.set_generation("")
    assert await client.match(["key-0"]) == 1


async def test_pause_holds_tasks_and_resume_lets_them_go(client: Client) -> None:
    await client.pause()
    held = await client.push(write("w", [0]))
    stats = await client.stats()
    assert (stats["queued"], stats["paused"]) == (1, True)
    await client.resume()
    assert (await held).status is Status.OK


async def test_cancel_of_a_held_task_and_its_deadline(client: Client) -> None:
    await client.pause()
    cancelled = await client.push(write("c", [0]))
    expired = await client.push(write("e", [1], prefix="e", timeout=0.2))
    await client.cancel("c")
    assert (await cancelled).status is Status.CANCELLED
    assert (await expired).status is Status.EXPIRED
    await client.resume()


async def test_drain_finishes_what_was_admitted_and_rejects_the_rest(client: Client) -> None:
    pushed = [await client.push(write(f"w{i}", [i], prefix=f"p{i}")) for i in range(8)]
    await client.drain()
    assert all(future.done() and future.result().status is Status.OK for future in pushed)
    late = await client.submit(write("late", [9], prefix="late"))
    assert (late.status, late.error and late.error.code) == (Status.REJECTED, "draining")
    await client.resume()
    assert (await client.submit(write("later", [9], prefix="late"))).status is Status.OK


@pytest.mark.parametrize(
    "task",
    [
        WriteStorageTask(task_id="t", keys=["a"], gpu_block_ids=[1, 2]),
        WriteStorageTask(task_id="t", keys=["a"], gpu_block_ids=[-1]),
        WriteStorageTask(task_id="t", keys=["a"], gpu_block_ids=[32]),
        ReadStorageTask(task_id="t", keys=["a", "b"], gpu_block_ids=[1, 1]),
        SwapInTask(task_id="t", gpu_block_ids=[0], cpu_block_ids=[99]),
        SwapOutTask(task_id="t", gpu_block_ids=[0, 1], cpu_block_ids=[1]),
    ],
)
async def test_bad_tasks_are_rejected_before_anything_is_touched(client: Client, task: Any) -> None:
    future = await client.push(task)
    assert future.done(), "a rejected push is answered at once"
    result: TaskResult = future.result()
    assert result.status is Status.REJECTED
    assert result.error is not None
    stats = await client.stats()
    assert stats["rejects"][result.error.code] == 1
    assert stats["staging"]["used"] == 0


@pytest.mark.parametrize("attention", ["mla", "dsa"])
async def test_other_attentions_with_mtp_layers_survive_the_whole_way(tmp_path: Path, attention: str) -> None:
    tree = config(
        ranks=1,
        attention=attention,
        kv_lora_rank=128,
        qk_rope_head_dim=16,
        index_head_dim=128,
        mtp_layers=1,
        mtp_blocks=40,
    )
    tree["host"]["staging"] = "1MiB"
    if attention == "dsa":
        tree["cache"]["dtype"] = "uint8"
    with running(tree, tmp_path) as process:
        async with Client(process.endpoint) as client:
            await whole_way(client, ranks=1)


async def test_block_wise_fp8_with_its_scales_survives_the_whole_way(tmp_path: Path) -> None:
    with running(config(dtype="block_wise_fp8", scale_dtype="float32", kv_heads=3, block_size=7), tmp_path) as process:
        async with Client(process.endpoint) as client:
            await whole_way(client, ranks=2)


async def whole_way(client: Client, ranks: int) -> None:
    caches = await attach(client, ranks)
    fill(caches, [0, 31], seed=7)
    before = snapshot(caches, [0, 31])
    await client.submit(write("w", [0, 31]))
    await client.submit(SwapOutTask(task_id="o", gpu_block_ids=[0, 31], cpu_block_ids=[2, 3]))
    await client.submit(read("r", [5, 6]))
    await client.submit(SwapInTask(task_id="i", gpu_block_ids=[9, 8], cpu_block_ids=[2, 3]))
    assert snapshot(caches, [5, 6]) == before
    assert snapshot(caches, [9, 8]) == before


async def test_sigterm_drains_answers_everything_and_exits_0(tmp_path: Path) -> None:
    process = start(config(), tmp_path)
    async with attached(process.endpoint) as client:
        await client.pause()
        queued = [await client.push(write(f"w{i}", [i], prefix=f"p{i}")) for i in range(5)]
        process.signal(signal.SIGTERM)
        results = await asyncio.gather(*queued)
        assert {(r.status, r.error.code) for r in results if r.error} == {(Status.FAILED, "shutdown")}
    assert process.stop() == 0
    assert not list(Path("/dev/shm").glob(f"transferd.{process.pid}.*"))


async def test_a_restarted_daemon_finds_what_the_killed_one_had_stored(tmp_path: Path) -> None:
    first = start(config(), tmp_path)
    async with Client(first.endpoint) as client:
        caches = await attach(client)
        fill(caches, [0, 1, 2], seed=8)
        before = snapshot(caches, [0, 1, 2])
        await client.submit(write("w", [0, 1, 2]))
        boot_id = client.boot_id
        first.kill()
    with running(config(), tmp_path) as second:
        async with Client(second.endpoint) as client:
            assert client.boot_id != boot_id
            caches = await attach(client)
            assert (await client.submit(read("r", [4, 5, 6]))).status is Status.OK
            assert snapshot(caches, [4, 5, 6]) == before


async def test_pending_futures_of_a_killed_daemon_end_as_daemon_lost(tmp_path: Path) -> None:
    process = start(config(), tmp_path)
    async with attached(process.endpoint) as client:
        await client.pause()
        pending = await client.push(write("w", [0]))
        process.kill()
        result = await wait_for(pending, 60)
        assert (result.status, result.error and result.error.code) == (Status.FAILED, "daemon_lost")


@pytest.mark.one_loop
async def test_kill_9_at_any_moment_of_writes_leaves_every_block_right_or_missing(tmp_path: Path) -> None:
    """The engine keeps writing; the daemon is killed after the first, third, … of sixteen answers and started again."""
    expected: dict[str, list[bytes]] = {}
    written: dict[str, list[bytes]] = {}
    for round_, answered in enumerate(range(1, 17, 2)):
        with running(config(), tmp_path) as process:
            async with Client(process.endpoint) as client:
                caches = await attach(client)
                await verify_or_missing(client, caches, written)  # of the last round; all of them at the end
                fill(caches, list(range(16)), seed=1000 + round_)
                pushed = []
                written = {f"r{round_}-b{block}": snapshot(caches, [block]) for block in range(16)}
                for block, key in enumerate(written):
                    pushed.append(await client.push(WriteStorageTask(task_id=key, keys=[key], gpu_block_ids=[block])))
                await asyncio.gather(*pushed[:answered])
                process.kill()
        expected |= written
    with running(config(), tmp_path) as process:
        async with Client(process.endpoint) as client:
            found = await verify_or_missing(client, await attach(client), expected)
            assert found >= sum(range(1, 17, 2)), "what was answered before the kill is there"
    assert not list((tmp_path / "blocks").rglob("*.tmp")), "no temporary file is left behind"


async def verify_or_missing(client: Client, caches: Caches, expected: dict[str, list[bytes]]) -> int:
    found = 0
    for key, content in expected.items():
        wipe(caches, [31])
        result = await client.submit(ReadStorageTask(task_id=f"verify-{key}", keys=[key], gpu_block_ids=[31]))
        assert result.status in (Status.OK, Status.MISS), result
        if result.status is Status.OK:
            assert snapshot(caches, [31]) == content, key
            found += 1
    return found


async def test_sighup_changes_level_and_capacity_without_a_restart(tmp_path: Path) -> None:
    tree = config()
    with running(tree, tmp_path) as process:
        async with attached(process.endpoint) as client:
            await client.submit(write("w", list(range(16))))
            objects = (await client.stats())["storage"]["objects"]
            assert objects == 32
            text = process.config_file.read_text()
            process.config_file.write_text(text.replace("[storage.file]", '[storage.file]\ncapacity = "40KiB"'))
            process.signal(signal.SIGHUP)
            await until(lambda: "reloaded" in process.log, within=30)
            await client.submit(write("w2", [20], prefix="after"))
            assert (await client.stats())["storage"]["bytes"] <= 40 * 1024
            process.config_file.write_text("nonsense = 1")
            process.signal(signal.SIGHUP)
            await until(lambda: "reload refused" in process.log, within=30)
            assert (await client.submit(read("r", [21], prefix="after"))).status is Status.OK
