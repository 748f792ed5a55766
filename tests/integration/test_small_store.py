"""A store that is smaller than what is written to it: a chain keeps its root, and the answer says what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from transferd import ReadStorageTask, Status, SyncClient, WriteStorageTask
from transferd.client.launch import running

RANKS = 2
OBJECT = 4096 + 128  # one layer, one head: key and value of 16 tokens
BLOCKS = 24  # that the store holds, of every rank


def tree(backend: str, **more: Any) -> dict[str, Any]:
    counted = 8192 if backend == "file" else OBJECT  # in whole blocks of the disk
    storage = {"backend": backend, backend: {"capacity": RANKS * BLOCKS * counted}}
    cache = {"ranks": RANKS, "layers": 1, "kv_heads": 1, "head_dim": 64, "block_size": 16}
    return {"cache": cache | {"device_blocks": 64, "host_blocks": 0}, "storage": storage} | more


def fill(caches: list[dict[str, list[Any]]]) -> None:
    """Every block of every rank with its own pattern."""
    for rank, cache in enumerate(caches):
        for plane, layers in enumerate(cache.values()):
            for block in range(len(layers[0])):
                layers[0][block] = 1 + block + 100 * plane + 1000 * rank


@pytest.mark.parametrize("backend", ["file", "memory"])
# A slot is 8 KiB: with the small staging a write takes many chunks.
@pytest.mark.parametrize("staging", ["64MiB", "64KiB"])
def test_a_chain_longer_than_the_store_keeps_its_root_and_is_reported(
    backend: str, staging: str, tmp_path: Path
) -> None:
    keys = [f"k{i}" for i in range(64)]
    blocks = list(range(64))
    with (
        running(tree(backend, host={"staging": staging}), tmp_path) as daemon,
        SyncClient(daemon.endpoint) as client,
    ):
        caches = [client.attach(rank) for rank in range(RANKS)]
        fill(caches)
        written = client.submit(WriteStorageTask(task_id="w", keys=keys, gpu_block_ids=blocks))
        assert written.status is Status.PARTIAL
        assert written.error is not None
        assert written.error.code == "storage_full"
        there = client.match(keys)
        assert there == BLOCKS, (there, written)
        assert written.block_ids == blocks[:there], "the root of the chain"
        before = [{plane: layers[0].copy() for plane, layers in cache.items()} for cache in caches]
        for cache in caches:
            for layers in cache.values():
                layers[0][:] = 0
        read = client.submit(ReadStorageTask(task_id="r", keys=keys, gpu_block_ids=blocks))
        assert read.block_ids == blocks[:there]
        found = client.submit(ReadStorageTask(task_id="s", keys=keys, gpu_block_ids=blocks, prefix=False))
        assert found.block_ids == written.block_ids, "what was reported is there, and nothing else"
        for cache, kept in zip(caches, before, strict=True):
            for plane, layers in cache.items():
                assert (layers[0][found.block_ids] == kept[plane][found.block_ids]).all()


@pytest.mark.parametrize("backend", ["file", "memory"])
def test_a_chain_that_grows_one_block_a_task_keeps_its_root(backend: str, tmp_path: Path) -> None:
    keys = [f"k{i}" for i in range(64)]
    with running(tree(backend), tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        for rank in range(RANKS):
            client.attach(rank)
        for i in range(64):
            task = WriteStorageTask(task_id=f"w{i}", keys=keys[: i + 1], gpu_block_ids=list(range(i + 1)))
            result = client.submit(task)
            assert result.status is (Status.OK if i < BLOCKS else Status.PARTIAL)
        assert client.match(keys) == BLOCKS


@pytest.mark.parametrize("backend", ["file", "memory"])
def test_another_chain_eats_the_first_from_its_leaf_on_all_ranks(backend: str, tmp_path: Path) -> None:
    first, second = [f"a{i}" for i in range(BLOCKS)], [f"b{i}" for i in range(10)]
    with running(tree(backend), tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        for rank in range(RANKS):
            client.attach(rank)
        for name, keys in (("a", first), ("b", second)):
            task = WriteStorageTask(task_id=name, keys=keys, gpu_block_ids=list(range(len(keys))))
            assert client.submit(task).status is Status.OK
        assert client.match(second) == len(second)
        assert client.match(first) == len(first) - len(second)


def test_an_object_without_its_bytes_is_not_stored_after_a_restart_and_is_written_again(tmp_path: Path) -> None:
    keys, blocks = [f"k{i}" for i in range(4)], list(range(4))
    for start in range(2):
        with running(tree("file"), tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
            for rank in range(RANKS):
                client.attach(rank)
            if start:
                assert client.match(keys) < len(keys)
            result = client.submit(WriteStorageTask(task_id="w", keys=keys, gpu_block_ids=blocks))
            assert result.status is Status.OK
            assert result.bytes == (OBJECT - 128 if start else 8 * (OBJECT - 128)), "what was damaged, and only that"
            assert client.match(keys) == len(keys)
            read = client.submit(ReadStorageTask(task_id="r", keys=keys, gpu_block_ids=blocks))
            assert read.status is Status.OK
        if not start:
            [damaged, *_] = sorted((tmp_path / "blocks" / "objects").rglob("*@0"))
            damaged.write_bytes(b"")
