"""Blocks of the host pool to and from storage, without the device: bytes, order, contents, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transferd import ReadStorageTask, Status, SwapInTask, SwapOutTask, SyncClient, WriteStorageTask
from transferd.client.launch import running

RANKS, BLOCKS = 2, 16
IDS = list(range(BLOCKS))
KEYS = [f"k{i}" for i in IDS]
SHAPE = {"ranks": RANKS, "layers": 2, "kv_heads": 1, "head_dim": 64, "block_size": 64}


def tree(host_blocks: int = 3 * BLOCKS, **storage: Any) -> dict[str, Any]:
    return {
        "cache": SHAPE | {"device_blocks": 2 * BLOCKS, "host_blocks": host_blocks},
        "storage": {"backend": "file"} | storage,
    }


@pytest.fixture(params=["file", "memory", "fastdeploy"])
def storage(request: pytest.FixtureRequest) -> dict[str, Any]:
    """FastDeploy's objects have no checksum, so their blocks go through slots."""
    if request.param == "fastdeploy":
        return {"backend": "file", "key_schema": "fastdeploy"}
    return {"backend": request.param}


@pytest.fixture
def client(storage: dict[str, Any], tmp_path: Path) -> Iterator[SyncClient]:
    with running(tree(**storage), tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        yield client


def filled(client: SyncClient) -> list[dict[str, list[Any]]]:
    caches = [client.attach(rank) for rank in range(RANKS)]
    random = np.random.default_rng(3)
    for cache in caches:
        for layers in cache.values():
            for layer in layers:
                layer[:] = random.integers(0, 2**15, layer.shape).astype(layer.dtype)
    return caches


def halves_equal(caches: list[dict[str, list[Any]]], blocks: int = BLOCKS) -> bool:
    """Whether the second half of each cache holds the first `blocks` blocks of its first half."""
    return all(
        np.array_equal(layer[:blocks], layer[BLOCKS : BLOCKS + blocks])
        for cache in caches
        for layers in cache.values()
        for layer in layers
    )


def swap_out(task_id: str, device: list[int], host: list[int]) -> SwapOutTask:
    return SwapOutTask(task_id=task_id, gpu_block_ids=device, cpu_block_ids=host)


def swap_in(task_id: str, host: list[int], device: list[int]) -> SwapInTask:
    return SwapInTask(task_id=task_id, gpu_block_ids=device, cpu_block_ids=host)


def test_a_host_block_is_stored_and_comes_back_to_host_and_device(client: SyncClient) -> None:
    caches = filled(client)
    host, other = [i + 5 for i in IDS], [i + BLOCKS + 9 for i in IDS]
    device = [i + BLOCKS for i in IDS]
    assert client.submit(swap_out("o", IDS, host)).status is Status.OK
    written = client.submit(WriteStorageTask(task_id="w", keys=KEYS, cpu_block_ids=host))
    assert (written.status, written.block_ids) == (Status.OK, host)
    assert client.match(KEYS) == BLOCKS
    read = ReadStorageTask(task_id="r", keys=KEYS, cpu_block_ids=other)
    result = client.submit(read)
    assert (result.status, result.block_ids, result.mask(read)) == (Status.OK, other, [True] * BLOCKS)
    assert client.submit(swap_in("i", other, device)).status is Status.OK
    assert halves_equal(caches)
    for cache in caches:
        for layers in cache.values():
            for layer in layers:
                layer[BLOCKS:] = 0
    assert client.submit(ReadStorageTask(task_id="d", keys=KEYS, gpu_block_ids=device)).status is Status.OK
    assert halves_equal(caches)


def test_tasks_that_are_pushed_at_once_keep_the_order_of_their_host_blocks(client: SyncClient) -> None:
    caches = filled(client)
    futures = []
    for turn in range(8):
        ids, host = IDS[turn % 4 :: 4], [turn % 3 * 4 + i for i in range(4)]
        keys = [f"{turn}-{i}" for i in ids]
        futures += [
            client.start(swap_out(f"o{turn}", ids, host)),
            client.start(WriteStorageTask(task_id=f"w{turn}", keys=keys, cpu_block_ids=host)),
            client.start(ReadStorageTask(task_id=f"r{turn}", keys=keys, cpu_block_ids=[30 + i for i in range(4)])),
            client.start(swap_in(f"i{turn}", [30 + i for i in range(4)], [BLOCKS + i for i in ids])),
        ]
    assert {future.result(60).status for future in futures} == {Status.OK}
    assert halves_equal(caches)


def test_an_empty_host_block_is_refused_until_a_read_has_filled_it(client: SyncClient) -> None:
    filled(client)
    refused = client.submit(WriteStorageTask(task_id="w0", keys=["x"], cpu_block_ids=[7]))
    assert (refused.status, refused.error and refused.error.code) == (Status.REJECTED, "empty_block")
    stored = client.submit(WriteStorageTask(task_id="w1", keys=KEYS, gpu_block_ids=IDS))
    assert stored.status is Status.OK
    assert client.submit(ReadStorageTask(task_id="r", keys=KEYS[:1], cpu_block_ids=[7])).status is Status.OK
    assert client.submit(WriteStorageTask(task_id="w2", keys=["x"], cpu_block_ids=[7])).status is Status.OK


def test_a_read_that_ends_at_a_missing_block_leaves_the_blocks_behind_it_empty(client: SyncClient) -> None:
    caches = filled(client)
    assert client.submit(WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=IDS)).status is Status.OK
    assert client.submit(swap_out("o", IDS, IDS)).status is Status.OK
    keys = [*KEYS[:5], "absent", *KEYS[6:]]
    result = client.submit(ReadStorageTask(task_id="r", keys=keys, cpu_block_ids=IDS))
    assert (result.status, result.block_ids) == (Status.PARTIAL, IDS[:5])
    whole = client.submit(swap_in("i", IDS[:5], [BLOCKS + i for i in range(5)]))
    assert whole.status is Status.OK
    assert halves_equal(caches, 5)
    refused = client.submit(swap_in("j", [5], [BLOCKS]))
    assert refused.error is not None
    assert refused.error.code == "empty_block"


def test_host_tasks_need_no_device_memory_of_the_engine(tmp_path: Path) -> None:
    with running(tree(), tmp_path) as daemon:
        with SyncClient(daemon.endpoint) as client:
            filled(client)
            assert client.submit(swap_out("o", IDS, IDS)).status is Status.OK
        with SyncClient(daemon.endpoint, await_ready=False) as client:
            assert client.submit(WriteStorageTask(task_id="w", keys=KEYS, cpu_block_ids=IDS)).status is Status.OK


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"gpu_block_ids": [0], "cpu_block_ids": [0]}, "bad_value"),
        ({"cpu_block_ids": [0], "after": (0, 1)}, "bad_value"),
        ({"cpu_block_ids": [0, 1]}, "length_mismatch"),
        ({"cpu_block_ids": [10_000]}, "id_out_of_range"),
        ({}, "length_mismatch"),
    ],
)
def test_impossible_tasks_are_rejected(fields: dict[str, Any], code: str, tmp_path: Path) -> None:
    with running(tree(), tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        filled(client)
        result = client.submit(WriteStorageTask(task_id="w", keys=["k"], **fields))
        assert (result.status, result.error and result.error.code) == (Status.REJECTED, code), result


def test_without_a_host_tier_the_task_is_rejected(tmp_path: Path) -> None:
    with running(tree(host_blocks=0), tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        filled(client)
        result = client.submit(ReadStorageTask(task_id="r", keys=["k"], cpu_block_ids=[0]))
        assert result.error is not None
        assert result.error.code == "no_host_tier"
