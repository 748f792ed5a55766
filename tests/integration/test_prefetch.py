"""Prefetches and warm-ups of a daemon with levels: bytes, kills, cancels, a level that is full, slow or dead."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_levels import (
    BLOCKS,
    KEYS,
    RANKS,
    copied,
    daemon_of,
    filled,
    read,
    rows,
    same,
    tree,
    write,
)
from tests.support.s3_server import S3Server, serving
from tests.support.waits import wait_until
from transferd import Client, RequestError, Status, SyncClient, WriteStorageTask
from transferd.client.group import GroupClient
from transferd.client.launch import running

OBJECTS = RANKS * BLOCKS


def restarted(path: Path, config: dict[str, Any]) -> Any:
    """Store all blocks, kill the daemon, and start it again: only files are left. Returns (its context, the bytes)."""
    with daemon_of(config, path / "a") as (daemon, client):
        kept = filled(client)
        assert write(client).status is Status.OK
        copied(client)
        daemon.kill()
    return daemon_of(config, path / "b"), kept


def test_blocks_are_brought_up_kept_and_read_from_above(tmp_path: Path) -> None:
    context, kept = restarted(tmp_path, tree(tmp_path, level={"file": {"promote": 0}}))
    with context as (_, client):
        result = client.prefetch([*KEYS, "absent"], timeout=600, task_id="p")
        assert (result.status, result.count, result.block_ids) == (Status.PARTIAL, BLOCKS, list(range(BLOCKS)))
        assert [(rank.rank, rank.blocks) for rank in result.ranks] == [(rank, BLOCKS) for rank in range(RANKS)]
        above, below = rows(client)
        assert (above["objects"], above["prefetched"], above["promoted"]) == (OBJECTS, OBJECTS, 0)
        assert above["kept_bytes"] == above["bytes"] > 0
        assert result.bytes == above["bytes"]
        assert below["hits"] == 0, "it counts as no use"
        assert read(client, "r").status is Status.OK
        assert same(kept, client)
        above, below = rows(client)
        assert (above["hits"], above["kept_bytes"], below["hits"]) == (OBJECTS, 0, 0)
        again = client.prefetch(KEYS)
        assert (again.status, again.count, again.bytes) == (Status.OK, BLOCKS, 0)
        assert client.prefetch(["absent"]).status is Status.MISS
        assert client.prefetch(KEYS, "file").count == BLOCKS
        with pytest.raises(RequestError, match="it has memory, file") as refused:
            client.prefetch(KEYS, "attic")
        assert refused.value.reason == "unknown_level"


def test_it_ends_with_a_cancel_its_deadline_and_its_client(tmp_path: Path) -> None:
    context, _ = restarted(tmp_path, tree(tmp_path))
    with context as (daemon, client):
        assert client.prefetch(KEYS, timeout=600, task_id="p").count == BLOCKS
        assert rows(client)[0]["kept_bytes"] > 0
        with pytest.raises(RequestError) as refused:
            client.prefetch(KEYS[1:], timeout=600, task_id="p")
        assert refused.value.reason == "task_id_conflict"
        assert client.cancel("p")
        assert not client.cancel("p")
        assert rows(client)[0]["kept_bytes"] == 0
        assert client.prefetch(KEYS, timeout=2.0).count == BLOCKS
        wait_until(lambda: rows(client)[0]["kept_bytes"] == 0, "its deadline has passed")
        with SyncClient(daemon.endpoint) as other:
            other.prefetch(KEYS, timeout=600)
            assert rows(client)[0]["kept_bytes"] > 0
        wait_until(lambda: rows(client)[0]["kept_bytes"] == 0, "its client has left")
        assert rows(client)[0]["objects"] == OBJECTS, "they are there, like others"


def test_a_full_level_is_bounded_and_tasks_go_on(tmp_path: Path) -> None:
    """The first level has room for half of the blocks: a quarter of it may wait for its use."""
    with daemon_of(tree(tmp_path), tmp_path / "size") as (_, client):
        filled(client)
        write(client)
        each = rows(client)[0]["bytes"] // OBJECTS
    config = tree(tmp_path, memory={"capacity": each * OBJECTS // 2}, level={"file": {"promote": 0}})
    with daemon_of(config, tmp_path / "small") as (_, client):
        kept = filled(client)
        write(client, "w2")
        result = client.prefetch(KEYS, timeout=600)
        assert result.status is Status.PARTIAL
        assert result.error is not None
        assert (result.error.code, "25% of the level memory" in result.error.message) == ("storage_full", True)
        assert 0 < rows(client)[0]["kept_bytes"] <= each * OBJECTS // 8
        assert read(client, "r").status is Status.OK
        assert same(kept, client)


@pytest.mark.parametrize("brought", [0, 1, OBJECTS // 2])
def test_a_kill_in_the_middle_loses_nothing(tmp_path: Path, brought: int) -> None:
    config = tree(tmp_path)
    context, kept = restarted(tmp_path, config)
    with context as (daemon, client):
        ended: list[BaseException | int] = []

        def prefetch() -> None:
            with contextlib.suppress(Exception):
                ended.append(client.prefetch(KEYS).count)

        thread = threading.Thread(target=prefetch)
        thread.start()
        wait_until(lambda: rows(client)[0]["prefetched"] >= brought, "so many have come up")
        daemon.kill()
        thread.join(60)
        assert not thread.is_alive()
    with daemon_of(config, tmp_path / "c") as (_, client):
        assert client.prefetch(KEYS).count == BLOCKS
        assert read(client, "r").status is Status.OK
        assert same(kept, client)


def test_host_blocks_and_a_store_of_one_level(tmp_path: Path) -> None:
    config = tree(tmp_path)
    config["cache"] |= {"host_blocks": BLOCKS}
    del config["storage"]["levels"]
    config["storage"]["backend"] = "file"
    with daemon_of(config, tmp_path / "a") as (_, client):
        filled(client)
        assert write(client).status is Status.OK
        result = client.prefetch(KEYS, "host", cpu_block_ids=list(range(BLOCKS)))
        assert (result.status, result.block_ids) == (Status.OK, list(range(BLOCKS)))
        assert client.prefetch([*KEYS, "absent"], "file").count == BLOCKS
        with pytest.raises(RequestError, match="it has file") as refused:
            client.prefetch(KEYS, "memory")
        assert refused.value.reason == "unknown_level"
        with pytest.raises(RequestError):
            client.prefetch(KEYS, "host")


def warm(endpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "transferd", "warm", "--endpoint", endpoint, "--format", "json", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_warm_after_a_restart(tmp_path: Path) -> None:
    context, kept = restarted(tmp_path, tree(tmp_path, level={"file": {"promote": 0}}))
    with context as (daemon, client):
        none = warm(daemon.endpoint, "--newest", "50GiB", "--model", "another")
        assert json.loads(none.stdout) == {"level": "memory", "objects": 0, "bytes": 0}
        each = rows(client)[1]["bytes"] // OBJECTS
        some = json.loads(warm(daemon.endpoint, "--newest", str(4 * each), "--model", "m").stdout)
        assert some["level"] == "memory"
        assert 0 < some["objects"] <= 4
        rest = json.loads(warm(daemon.endpoint, "--newest", "50GiB", "--model", "m").stdout)
        assert some["objects"] + rest["objects"] == OBJECTS
        above = rows(client)[0]
        assert (above["objects"], above["kept_bytes"], above["evictions"]) == (OBJECTS, 0, 0)
        assert client.stats()["storage"]["warming_bytes"] == 0
        assert read(client, "r").status is Status.OK
        assert same(kept, client)
        assert rows(client)[1]["hits"] == 0
        bad = warm(daemon.endpoint, "--newest", "1GiB", "--to", "attic")
        assert (bad.returncode, "it has memory, file" in bad.stderr) == (1, True)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[S3Server, dict[str, Any]]]:
    """A server of its own, and the configuration of a daemon with memory above it."""
    with serving(tmp_path / "s3", monkeypatch) as server:
        section = {"url": "s3://blocks/x", "endpoint": server.endpoint, "region": "us-east-1", "timeout": 5.0}
        config = tree(tmp_path, ("memory", "object"), object=section, level={"object": {"promote": 0}})
        del config["storage"]["file"]
        yield server, config


def test_a_load_that_comes_while_its_blocks_are_brought(
    tmp_path: Path, bucket: tuple[S3Server, dict[str, Any]]
) -> None:
    server, config = bucket
    context, kept = restarted(tmp_path, config)
    with context as (_, client), ThreadPoolExecutor() as pool:
        before = client.stats()["memory"]["carried"]
        os.kill(server.pid, signal.SIGSTOP)
        try:
            brought = pool.submit(client.prefetch, KEYS, timeout=600)
            wait_until(lambda: client.stats()["memory"]["carried"] > before, "it has begun")
            loaded = pool.submit(read, client, "r")
            wait_until(lambda: client.tasks("running"), "the load has begun")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert loaded.result(60).status is Status.OK
        assert same(kept, client)
        assert (brought.result(60).status, brought.result().count) == (Status.OK, BLOCKS)
        assert rows(client)[0]["objects"] == OBJECTS
        asked = rows(client)[1]["hits"]
        assert read(client, "again").status is Status.OK
        assert same(kept, client)
        assert rows(client)[1]["hits"] == asked, "all from memory"


def test_a_lower_level_that_is_silent_and_one_that_is_dead(
    tmp_path: Path, bucket: tuple[S3Server, dict[str, Any]]
) -> None:
    """A cancel and a deadline answer while the bucket does not; loads of what is there go on."""
    server, config = bucket
    context, kept = restarted(tmp_path, config)
    with context as (_, client):
        half = KEYS[: BLOCKS // 2]
        assert client.prefetch(half, timeout=600).status is Status.OK
        os.kill(server.pid, signal.SIGSTOP)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(client.prefetch, KEYS, timeout=600, task_id="p")
            wait_until(lambda: client.cancel("p"), "it runs")
            result = asked.result(60)
            assert (result.status, result.error and result.error.code) == (Status.CANCELLED, "cancelled")
        late = client.prefetch(KEYS, timeout=0.3)
        assert (late.status, late.count) == (Status.PARTIAL, BLOCKS // 2)
        assert late.error is not None
        assert late.error.code == "expired"
        assert read(client, "r1", half).status is Status.OK
        assert same(kept, client, BLOCKS // 2)
        server.kill()
        dead = client.prefetch(KEYS, timeout=60)
        assert (dead.status, dead.count) == (Status.PARTIAL, BLOCKS // 2)
        assert dead.error is not None
        assert dead.error.code.startswith("storage_")
        server.start()
        wait_until(lambda: client.prefetch(KEYS, timeout=60).count == BLOCKS, "the bucket answers again", within=60)
        assert read(client, "r2").status is Status.OK
        assert same(kept, client)


async def test_a_cancelled_call_cancels_the_prefetch(tmp_path: Path) -> None:
    config = tree(tmp_path)
    with running(config, tmp_path / "a") as daemon:
        async with Client(daemon.endpoint) as client:
            asking = asyncio.ensure_future(client.prefetch(KEYS, timeout=600, task_id="p"))
            await asyncio.sleep(0)  # it is sent
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert not await client.cancel("p")


async def test_a_group_counts_what_all_nodes_have(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        nodes = []
        for number in range(2):
            place = tmp_path / str(number)
            config = tree(place)
            config["cache"] |= {"first_rank": RANKS * number, "group_ranks": 2 * RANKS}
            nodes.append(stack.enter_context(running(config, place)))
        async with GroupClient([node.endpoint for node in nodes]) as group:
            for client in group.clients:
                for rank in range(RANKS):
                    await client.attach(rank)
            ids = list(range(BLOCKS))
            stored = await group.submit(WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=ids))
            assert stored.status is Status.OK
            result = await group.prefetch([*KEYS, "absent"], "memory", timeout=60)
            assert (result.status, result.count, len(result.ranks)) == (Status.PARTIAL, BLOCKS, 2 * RANKS)
            only = await group.clients[1].purge(keys=[KEYS[3]])
            assert only.objects >= RANKS, "it may be in the file, too"
            assert (await group.prefetch(KEYS)).block_ids == [i for i in ids if i != 3]
            with pytest.raises(RequestError, match="attic"):
                await group.prefetch(KEYS, "attic")
