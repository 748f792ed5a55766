"""`transferd replay TRACE --simulate`: how much host memory and storage are worth having for this traffic."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from transferd import config as configuration
from transferd.cli.asking import Format, show
from transferd.cli.replay import fleet
from transferd.cli.replay.chart import chart
from transferd.cli.replay.kvdata import KvData
from transferd.cli.replay.own import own_daemon, settings
from transferd.cli.replay.sizing import (
    BlockSizes,
    Rates,
    Sizes,
    default_storage_sizes,
    in_processes,
    print_points,
    size_points,
    tree,
)
from transferd.cli.replay.trace import TraceRequest
from transferd.cli.terminal import stdout
from transferd.client.sync_client import SyncClient
from transferd.config import Size
from transferd.errors import RequestError, TransferError
from transferd.storage.registry import NO_BACKEND
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, Task, WriteStorageTask


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options of the command line, as text; None for the default."""

    host_sizes: str | None = None
    storage_sizes: str | None = None
    prefill_rate: float | None = None
    load_rates: str | None = None
    nodes: str | None = None
    router: str = "prefix"
    events: str | None = None
    levels: str | None = None
    pool: str | None = None
    copies: int = 1
    away: float = 0.0
    costs: str | None = None


def run(
    requests: Sequence[TraceRequest],
    wanted: Wanted,
    *,
    config: Path | None,
    ranks: int | None,
    chart_file: Path | None,
    format_: Format,
) -> None:
    """Predict, print, and write the chart. Raises ConfigError, RequestError for an option, TransferError."""
    tree_ = with_levels(settings(config, ranks, {}), wanted.levels, wanted.pool)
    footprint = BlockSizes.of(configuration.from_tree(tree_))
    names = [level.name for level in footprint.levels]
    if wanted.nodes is not None:
        _run_fleets(requests, wanted, footprint, format_)
        return
    hosts = _sizes("--host-sizes", wanted.host_sizes) or [footprint.host_pool]
    storages = _storage_sizes(wanted.storage_sizes, names) or default_storage_sizes(requests, footprint)
    rates = replace(_rates(wanted.load_rates, names, config, ranks), prefill=wanted.prefill_rate)
    points = size_points(requests, footprint, rates, hosts, storages, quiet=format_ is Format.JSON)
    if chart_file is not None:
        try:
            chart_file.write_text(
                chart(points, f"Blocks without prefill, {len(requests):,} requests"), encoding="utf-8"
            )
        except OSError as error:
            raise RequestError(f"--chart {chart_file}: cannot be written: {error.strerror}") from error
    show(format_, tree(points, rates), lambda: print_points(points, rates, stdout()))


POOL = "mooncake"  # what `--pool` sets up


def with_levels(tree: dict[str, Any], levels: str | None, pool: str | None) -> dict[str, Any]:
    """The configuration with these levels of a node, and this much memory that it lends to a pool of all below them."""
    storage = tree["storage"]
    configured = storage.get("levels") or [storage["backend"]]
    own = [name for name in configured if _is_own(name)]
    shared = [name for name in configured if not _is_own(name) and name != NO_BACKEND]
    if levels is not None:
        own = []
        for part in levels.split(","):
            name, _, size = part.strip().partition("=")
            if not _is_own(name) or not size:
                raise RequestError(f"--levels {levels}: expected levels of a node, such as memory=256GB,file=4TB")
            storage[name] = storage.get(name, {}) | {"capacity": _sizes("--levels", size)[0]}
            own.append(name)
    if pool is not None:
        lent = _sizes("--pool", pool)[0]
        section = {"master_server_addr": "predicted:0", "global_segment_size": lent, "local_buffer_size": 0}
        storage[POOL] = storage.get(POOL, {}) | section
        shared = [*[POOL] * bool(lent), *(name for name in shared if name != POOL)]
    names = [*own, *shared]
    storage.pop("backend" if len(names) > 1 else "levels", None)
    storage |= {"levels": names} if len(names) > 1 else {"backend": names[0] if names else NO_BACKEND}
    storage["level"] = {
        name: one for name, one in storage.get("level", {}).items() if name in storage.get("levels", ())
    }
    return tree


def _is_own(name: str) -> bool:
    """Whether a level of this name is a node's own: its section has a capacity."""
    return hasattr(getattr(configuration.StorageSection(), name, None), "capacity")


def _run_fleets(requests: Sequence[TraceRequest], wanted: Wanted, sizes: BlockSizes, format_: Format) -> None:
    if wanted.prefill_rate is None:
        raise RequestError("--nodes needs --prefill-rate: the tokens a second that one of your nodes computes")
    if sizes.levels[0].name == NO_BACKEND:
        raise RequestError("--nodes: the nodes have no storage; name it with --levels, --pool or --config")
    if len(shared := [level.name for level in sizes.levels if level.lent is not None]) > 1:
        raise RequestError(f"--nodes: only one level can be of all nodes, not {' and '.join(shared)}")
    names = [level.name for level in sizes.levels]
    if wanted.load_rates is None:
        example = ",".join(["20GB", *["5GB"] * len(names)])
        raise RequestError(f"--nodes needs --load-rates {','.join(['host', *names])} of your nodes, such as {example}")
    rates = replace(_rates(wanted.load_rates, names, None, None), prefill=wanted.prefill_rate)
    routers = _chosen("--router", wanted.router, fleet.ROUTERS)
    events = ["", *_chosen("--events", wanted.events or "", fleet.EVENTS)]
    try:
        nodes = [int(number) for number in (wanted.nodes or "").split(",")]
        costs = fleet.costs_from(wanted.costs or "")
    except ValueError as error:
        raise RequestError(f"--nodes {wanted.nodes}, --costs {wanted.costs}: {error}") from error
    if min(nodes) < 1:
        raise RequestError(f"--nodes {wanted.nodes}: expected numbers of nodes, such as 1,4,16")
    jobs = [
        (fleet.Fleet(number, router, event, wanted.copies, wanted.away),)
        for number in nodes
        for router in routers
        for event in events
        if number > 1 or event != "dead"
    ]
    given = (requests, sizes, rates, costs)
    points = in_processes(fleet.fleet_point, jobs, given, quiet=format_ is Format.JSON)
    show(format_, fleet.tree(points, rates, costs), lambda: fleet.print_points(points, stdout()))


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if wrong := [name for name in names if name not in known]:
        raise RequestError(f"{option} {text}: there is no {wrong[0]}, only {', '.join(known)}")
    return names


def _sizes(option: str, text: str | None) -> list[int]:
    try:
        return [Size.parse(part) for part in (text or "").split(",") if part.strip()]
    except ValueError as error:
        raise RequestError(f"{option} {text}: {error}") from error


def _storage_sizes(text: str | None, names: Sequence[str]) -> list[Sizes]:
    """Sizes of all levels are joined by "+", the fastest first."""
    wanted = []
    for part in (text or "").split(","):
        if part.strip():
            sizes = _sizes("--storage-sizes", part.replace("+", ","))
            if len(sizes) != len(names):
                expected = " + ".join(names)
                raise RequestError(f"--storage-sizes {part}: expected a size for each level, {expected}")
            wanted.append(tuple(sizes))
    return wanted


def _rates(text: str | None, names: Sequence[str], config: Path | None, ranks: int | None) -> Rates:
    wanted = ",".join(["host", *(names if len(names) > 1 else ["storage"])])
    if text is None:
        try:
            return measure_rates(names, config, ranks)
        except TransferError as error:
            problem = (
                f"cannot measure how fast blocks load here: {error}; name the rates with --load-rates {wanted.upper()}"
            )
            raise TransferError(problem, code=error.reason) from error
    given = _sizes("--load-rates", text)
    if len(given) != 1 + len(names) or not all(given):
        such = ",".join(["40GB", "5GB", *["1GB"] * (len(names) - 1)])
        raise RequestError(f"--load-rates {text}: expected the rates {wanted}, such as {such}")
    return Rates(host=given[0], storage=tuple(given[1:]))


BLOCKS = 32  # moved by one task
ROUNDS = 5


def measure_rates(names: Sequence[str], config: Path | None, ranks: int | None) -> Rates:
    """Load random blocks from host memory and from each level of storage, a few times each; the median counts.

    names: of the levels. Each is measured alone, as the only backend of a daemon. Objects in files are read while the
    page cache still has them, unless they go past it (`direct_io`), so this does not measure a slow disk.
    Raises ConfigError; TransferError if a daemon with device memory that this process can fill does not start
    here, if a task fails, or if bytes come back wrong.
    """
    each = [_measure(name, config, ranks) for name in names]
    return Rates(host=max(host for host, _ in each), storage=tuple(storage for _, storage in each))


def _measure(level: str, config: Path | None, ranks: int | None) -> tuple[float, float]:
    """The speed of host memory, and of a backend."""
    host: list[float] = []
    storage: list[float] = []
    alone = own_daemon(settings(config, ranks, {}, blocks=2 * BLOCKS, backend=level))
    with alone as endpoint, SyncClient(endpoint) as client:
        stats = client.stats()
        if level == NO_BACKEND:
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
    return median(host), median(storage)


def _run(client: SyncClient, task: Task) -> float:
    """Run one task to its end; returns bytes per second."""
    before = time.monotonic()
    result = client.submit(task)
    seconds = time.monotonic() - before
    if result.status is not Status.OK:
        raise TransferError(f"{task.kind}: {result.status}: {result.error}", code="not_measured")
    return result.bytes / seconds
