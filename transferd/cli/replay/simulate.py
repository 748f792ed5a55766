"""`transferd replay TRACE --simulate`: how much host memory and storage are worth having for this traffic."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console

from transferd import config as configuration
from transferd.cli.replay.chart import chart
from transferd.cli.replay.command import progress_bar
from transferd.cli.replay.kvdata import KvData
from transferd.cli.replay.own import own_daemon, settings
from transferd.cli.replay.sizing import BlockSizes, Rates, default_storage_sizes, print_points, size_points, tree
from transferd.cli.replay.trace import TraceRequest
from transferd.cli.terminal import stdout
from transferd.client.sync_client import SyncClient
from transferd.config import Size
from transferd.errors import RequestError, TransferError
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, Task, WriteStorageTask


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of the command line, as text. None: the default."""

    host_sizes: str | None = None
    storage_sizes: str | None = None
    prefill_rate: float | None = None
    load_rates: str | None = None


def run(
    requests: Sequence[TraceRequest],
    wanted: Wanted,
    *,
    config: Path | None,
    ranks: int | None,
    chart_file: Path | None,
    as_json: bool,
) -> None:
    """Predict, print, and write the chart. Raises ConfigError, RequestError for an option, TransferError."""
    footprint = BlockSizes.of(configuration.from_tree(settings(config, ranks, {})))
    hosts = _sizes("--host-sizes", wanted.host_sizes) or [footprint.host_pool]
    storages = _sizes("--storage-sizes", wanted.storage_sizes) or default_storage_sizes(requests, footprint)
    rates = replace(_rates(wanted.load_rates, config, ranks), prefill=wanted.prefill_rate)
    console = Console(file=sys.stderr, quiet=as_json)
    with progress_bar(console, "predicting") as progress:
        bar = progress.add_task("predicting", total=len(set(hosts)) * len(set(storages)))
        points = size_points(requests, footprint, rates, hosts, storages, lambda: progress.advance(bar))
    if chart_file is not None:
        try:
            chart_file.write_text(
                chart(points, f"Blocks without prefill, {len(requests):,} requests"), encoding="utf-8"
            )
        except OSError as error:
            raise RequestError(f"--chart {chart_file}: cannot be written: {error.strerror}") from error
    if as_json:
        print(json.dumps(tree(points, rates)))
    else:
        print_points(points, rates, stdout())


def _sizes(option: str, text: str | None) -> list[int]:
    try:
        return [Size.parse(part) for part in (text or "").split(",") if part.strip()]
    except ValueError as error:
        raise RequestError(f"{option} {text}: {error}") from error


def _rates(text: str | None, config: Path | None, ranks: int | None) -> Rates:
    if text is None:
        try:
            return measure_rates(config, ranks)
        except TransferError as error:
            problem = (
                f"cannot measure how fast blocks load here: {error}; name the rates with --load-rates HOST,STORAGE"
            )
            raise TransferError(problem, code=error.reason) from error
    given = _sizes("--load-rates", text)
    if len(given) != 2 or not all(given):
        raise RequestError(f"--load-rates {text}: expected two rates, host,storage, such as 40GB,5GB")
    return Rates(host=given[0], storage=given[1])


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
