"""Loads from files of the page cache straight into blocks, seen from outside the daemon."""

from __future__ import annotations

from pathlib import Path

from tests.integration.caches import attach, fill, snapshot, wipe
from transferd import Client, ReadStorageTask, Status, WriteStorageTask
from transferd.client.launch import running

BLOCKS = 12  # of 2 MiB each: files are mapped from there on
CACHE = {"ranks": 1, "layers": 16, "kv_heads": 4, "head_dim": 128, "block_size": 64, "device_blocks": 2 * BLOCKS}


async def test_a_daemon_keeps_no_file_mapped_after_a_load(tmp_path: Path) -> None:
    """A file that is mapped keeps its bytes in memory and on the disk, also after it was evicted."""
    config = {"cache": CACHE, "storage": {"backend": "file", "file": {"path": str(tmp_path / "blocks")}}}
    keys, written, loaded = [f"key {i}" for i in range(BLOCKS)], list(range(BLOCKS)), list(range(BLOCKS, 2 * BLOCKS))
    with running(config, tmp_path) as daemon:
        async with Client(daemon.endpoint) as client:
            caches = await attach(client, 1)
            fill(caches, written, seed=1)
            wanted = snapshot(caches, written)
            write = WriteStorageTask(task_id="w", keys=keys, gpu_block_ids=written)
            assert (await client.submit(write)).status is Status.OK
            for attempt in range(3):
                wipe(caches, loaded)
                read = ReadStorageTask(task_id=f"r{attempt}", keys=keys, gpu_block_ids=loaded)
                assert (await client.submit(read)).status is Status.OK
                assert snapshot(caches, loaded) == wanted
                mapped = Path(f"/proc/{daemon.pid}/maps").read_text().splitlines()
                assert [line for line in mapped if str(tmp_path / "blocks") in line] == []
