"""Resident memory of a daemon in a process of its own, with bounds that are small enough to be reached."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from transferd import ReadStorageTask, Status, SyncClient, WriteStorageTask
from transferd.client.launch import running
from transferd.tasks import TokenIds

KEYS = 1000
TREE: dict[str, Any] = {
    "cache": {
        "ranks": 1,
        "layers": 1,
        "kv_heads": 1,
        "head_dim": 8,
        "block_size": 1,
        "device_blocks": KEYS,
        "host_blocks": 0,
    },
    "storage": {"backend": "memory"},
    "recorder": {"tasks": 16},
    "server": {"max_result_bytes": "64KiB", "max_queued_bytes": "8MiB"},
}
MIB = 1024**2


def resident(pid: int) -> int:
    """Bytes of private memory."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell RssAnon")


@pytest.mark.one_loop
def test_resident_memory_after_many_large_tasks_is_that_after_few(tmp_path: Path) -> None:
    """100,000 of them: python -m benchmarks.growth --tasks."""
    keys, ids = [f"block-{i}" for i in range(KEYS)], list(range(KEYS))
    tokens = TokenIds(range(50_000))
    marks: list[int] = []
    with running(TREE, tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        client.attach(0)
        for number in range(200):
            task = WriteStorageTask(
                task_id=f"t{number}", keys=keys, gpu_block_ids=ids, token_ids=tokens, timeout=3600.0
            )
            assert client.submit(task).status is Status.OK
            if number in (19, 199):
                marks.append(resident(daemon.pid))
        stats = client.stats()
    assert 0 < stats["result_bytes"] <= 64 * 1024
    assert stats["argument_bytes"] == 0
    assert marks[1] <= 1.1 * marks[0], marks


@pytest.mark.one_loop
def test_token_ids_that_storage_does_not_need_fill_no_queue(tmp_path: Path) -> None:
    """Twenty queued reads of one block, each with 2 MB of token ids, and a bound of 8 MiB."""
    tokens = TokenIds(range(500_000))
    with running(TREE, tmp_path) as daemon, SyncClient(daemon.endpoint) as client:
        client.attach(0)
        client.pause()
        before = resident(daemon.pid)
        futures = [
            client.push(
                ReadStorageTask(task_id=f"t{i}", keys=["k"], gpu_block_ids=[i], token_ids=tokens, timeout=600.0)
            )
            for i in range(20)
        ]
        refused = [future.result(60).status for future in futures[4:]]
        assert set(refused) == {Status.BUSY}
        assert client.stats()["argument_bytes"] <= 8 * MIB
        # What is on its way in comes on top: a message, and its token ids.
        assert resident(daemon.pid) - before <= (8 + 16) * MIB
        client.resume()
        assert Counter(future.result(60).status for future in futures[:4]) == {Status.MISS: 4}
        assert client.stats()["argument_bytes"] == 0
