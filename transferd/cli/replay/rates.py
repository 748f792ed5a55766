"""Measures how fast a private daemon of this configuration loads blocks on this machine, for a prediction of cost."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from transferd.cli.replay.kvdata import KvData
from transferd.cli.replay.own import own_daemon
from transferd.cli.replay.sizing import Rates
from transferd.client.sync_client import SyncClient
from transferd.errors import TransferError
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, Task, WriteStorageTask

BLOCKS = 32  # moved by one task
ROUNDS = 5


def measure_rates(config: Path | None, ranks: int | None) -> Rates:
    """Load random blocks from host memory and from storage, a few times each; the median counts.

    Objects in storage are read while the page cache still has them, so this does not measure a slow disk.
    Raises ConfigError; TransferError if a daemon with device memory that this process can fill does not start
    here, if a task fails, or if bytes come back wrong.
    """
    host: list[float] = []
    storage: list[float] = []
    with own_daemon(config, ranks, {}, blocks=2 * BLOCKS) as endpoint, SyncClient(endpoint) as client:
        stats = client.stats()
        if stats["storage"]["backend"] == "none":
            raise TransferError("the configuration has no storage to measure", code="no_storage")
        data = KvData([client.attach(rank["rank"]) for rank in stats["ranks"]])
        blocks, on_host = list(range(BLOCKS)), list(range(BLOCKS))
        for number in range(ROUNDS):
            contents = [number * BLOCKS + block for block in blocks]
            keys = [f"rates-{content}" for content in contents]
            for block, content in zip(blocks, contents, strict=True):
                data.fill(block, content)
            task = f"rates-{number}"
            _run(client, WriteStorageTask(task_id=f"{task}-write", keys=keys, gpu_block_ids=blocks))
            _run(client, SwapOutTask(task_id=f"{task}-out", gpu_block_ids=blocks, cpu_block_ids=on_host))
            for rates, load in (
                (storage, ReadStorageTask(task_id=f"{task}-read", keys=keys, gpu_block_ids=blocks)),
                (host, SwapInTask(task_id=f"{task}-in", gpu_block_ids=blocks, cpu_block_ids=on_host)),
            ):
                data.poison(blocks)
                rates.append(_run(client, load))
                for block, content in zip(blocks, contents, strict=True):
                    if wrong := data.verify(block, content):
                        raise TransferError(f"wrong bytes: {wrong}", code="wrong_bytes")
    return Rates(host=median(host), storage=median(storage))


def _run(client: SyncClient, task: Task) -> float:
    """Run one task to its end; returns bytes per second."""
    before = time.monotonic()
    result = client.submit(task)
    seconds = time.monotonic() - before
    if result.status is not Status.OK:
        raise TransferError(f"{task.kind}: {result.status}: {result.error}", code="not_measured")
    return result.bytes / seconds
