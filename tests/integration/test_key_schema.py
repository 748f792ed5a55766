"""storage.key_schema = "fastdeploy": what lies in the pool is, name by name and byte by byte, what FastDeploy stores.

Its side is played from the layout it documents: one object a plane, [layers, heads, block_size, head_dim].
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from transferd import ReadStorageTask, Status, SyncClient, WriteStorageTask
from transferd.cli.pool.local import Master
from transferd.cli.pool.master import master_executable
from transferd.client.launch import running
from transferd.storage.paths import path_of

RANKS = 2
KEYS = ["3f" * 32, "a0" * 32, "77" * 32 + ":partial:5"]
SMALL: dict[str, Any] = {"ranks": RANKS, "layers": 3, "block_size": 8, "device_blocks": 12, "host_blocks": 0}
CACHES: dict[str, dict[str, Any]] = {
    "gqa": {"kv_heads": 2, "head_dim": 16},
    "fp8 with scales and an MTP layer": {"kv_heads": 2, "head_dim": 16, "dtype": "block_wise_fp8", "mtp_layers": 1},
    "mla": {"attention": "mla", "kv_lora_rank": 32, "qk_rope_head_dim": 16},
}

Array = npt.NDArray[Any]
Caches = list[dict[str, list[Array]]]


def tree(cache: dict[str, Any], **storage: Any) -> dict[str, Any]:
    return {
        "cache": SMALL | cache,
        "host": {"staging": "1MiB"},
        "storage": {"key_schema": "fastdeploy", "generation": "RL-STEP03"} | storage,
    }


def attach(client: SyncClient) -> Caches:
    return [client.attach(rank) for rank in range(RANKS)]


def randomise(caches: Caches, blocks: list[int]) -> None:
    random = np.random.default_rng(11)
    for array in each(caches):
        raw = array.reshape(len(array), -1).view(np.uint8)
        raw[blocks] = random.integers(0, 256, raw[blocks].shape, dtype=np.uint8)


def each(caches: Caches) -> Iterator[Array]:
    for cache in caches:
        for layers in cache.values():
            yield from layers


def as_fastdeploy_stores(caches: Caches, blocks: list[int]) -> dict[str, bytes]:
    """Names and bytes of the objects of these blocks, by its own rule: all layers of a plane, one after the other."""
    return {
        f"prefixRL-STEP03_{key}_{rank}_{plane}": np.stack([array[block] for array in layers]).tobytes()
        for rank, cache in enumerate(caches)
        for plane, layers in cache.items()
        for key, block in zip(KEYS, blocks, strict=True)
    }


def test_one_line_at_the_start_says_what_these_names_cannot_tell_apart(tmp_path: Path) -> None:
    for schema, lines in (("fastdeploy", 1), ("transferd", 0)):
        (tmp_path / schema).mkdir()
        with running(tree({}, key_schema=schema), tmp_path / schema) as daemon:
            pass
        assert daemon.log.count("names of objects contain neither model nor dtype nor layout") == lines


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_objects_are_written_as_fastdeploy_reads_them(cache: dict[str, Any], tmp_path: Path) -> None:
    with running(tree(cache), tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        caches = attach(client)
        blocks = [1, 5, 2]
        randomise(caches, blocks)
        assert client.submit(WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=blocks)).status is Status.OK
        expected = as_fastdeploy_stores(caches, blocks)
        stored = [path for path in (tmp_path / "blocks" / "objects").rglob("*") if path.is_file()]
        assert len(stored) == len(expected)
        for name, data in expected.items():
            assert (tmp_path / "blocks" / "objects" / path_of(name)).read_bytes() == data, name


@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_fastdeploys_objects_are_read_and_a_block_without_all_planes_is_missing(
    cache: dict[str, Any], tmp_path: Path
) -> None:
    with running(tree(cache), tmp_path, name="first") as daemon, SyncClient(daemon.endpoint) as client:
        caches = attach(client)
        randomise(caches, [1, 5, 2])
        stored = as_fastdeploy_stores(caches, [1, 5, 2])
        before = [array[[1, 5, 2]].copy() for array in each(caches)]
    last = next(reversed(caches[1]))
    del stored[f"prefixRL-STEP03_{KEYS[2]}_1_{last}"]
    for name, data in stored.items():
        path = tmp_path / "blocks" / "objects" / path_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with running(tree(cache), tmp_path, name="second") as daemon, SyncClient(daemon.endpoint) as client:
        caches = attach(client)
        assert client.match(KEYS) == 2
        result = client.submit(ReadStorageTask(task_id="r", keys=KEYS, gpu_block_ids=[7, 8, 9]))
        assert (result.status, result.block_ids) == (Status.PARTIAL, [7, 8])
        for array, expected in zip(each(caches), before, strict=True):
            np.testing.assert_array_equal(array[[7, 8]], expected[:2])
        # Writing the block again completes it.
        write = WriteStorageTask(task_id="w", keys=KEYS[2:], gpu_block_ids=[8])
        assert client.submit(write).status is Status.OK
        assert client.match(KEYS) == 3


def test_another_version_is_out_of_reach(tmp_path: Path) -> None:
    with running(tree(CACHES["gqa"]), tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        attach(client)
        written = client.submit(WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=[1, 2, 3]))
        assert written.status is Status.OK
        assert client.match(KEYS) == 3
        client.set_generation("RL-STEP04")
        assert client.match(KEYS) == 0
        client.set_generation("RL-STEP03")
        assert client.match(KEYS) == 3


def test_the_version_comes_from_version_yaml(tmp_path: Path) -> None:
    """As FastDeploy's training loop leaves it beside the model; the first two parts are the generation."""
    file = tmp_path / "version.yaml"
    file.write_text("version: RL-STEP03-20260801-5d1f\n")
    settings = tree(CACHES["gqa"], generation="", version_file=str(file))
    with running(settings, tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        assert client.generation == client.stats()["generation"] == "RL-STEP03"
        caches = attach(client)
        written = client.submit(WriteStorageTask(task_id="w", keys=KEYS[:1], gpu_block_ids=[1]))
        assert written.status is Status.OK
        for name in as_fastdeploy_stores(caches, [1, 1, 1]):
            if KEYS[0] in name:
                assert (tmp_path / "blocks" / "objects" / path_of(name)).exists()


@pytest.mark.skipif(master_executable() is None, reason="mooncake-transfer-engine is not installed")
def test_a_pool_is_shared_with_a_fastdeploy_that_talks_to_mooncake_itself(tmp_path: Path) -> None:
    """Its calls on the library: put and get of whole objects under its names, in both directions."""
    from mooncake.store import MooncakeDistributedStore

    master = Master(tmp_path / "master.log")
    master.start()
    joining = {"master_server_addr": master.address, "global_segment_size": "32MiB", "local_buffer_size": "16MiB"}
    theirs = MooncakeDistributedStore()
    try:
        size = 32 * 1024**2
        assert theirs.setup("127.0.0.1", "P2PHANDSHAKE", size, size // 2, "tcp", "", master.address) == 0
        settings = tree(CACHES["gqa"], backend="mooncake", mooncake=joining)
        with running(settings, tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
            caches = attach(client)
            randomise(caches, [1, 2, 3])
            ours = as_fastdeploy_stores(caches, [1, 2, 3])
            assert client.submit(WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=[1, 2, 3])).status is Status.OK
            for name, data in ours.items():
                assert theirs.get(name) == data, name
            randomise(caches, [4])
            for name, data in as_fastdeploy_stores(caches, [4, 4, 4]).items():
                assert theirs.put(name.replace("3f" * 32, "5c" * 32), data) == 0
            result = client.submit(ReadStorageTask(task_id="r", keys=["5c" * 32], gpu_block_ids=[9]))
            assert result.block_ids == [9]
            for array in each(caches):
                np.testing.assert_array_equal(array[9], array[4])
    finally:
        theirs.close()
        master.stop()
