"""`transferd replay`: a trace, a daemon (an own one if none is named), a report."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from transferd.client import Client
from transferd.launch import running
from transferd.replay.engine import Engine
from transferd.replay.kvdata import KvData
from transferd.replay.report import Report
from transferd.replay.trace import TraceRequest

# An own daemon's cache: a real layout in small, with pools small enough that every tier is used.
OWN_CACHE: dict[str, Any] = {
    "layers": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "block_size": 64,
    "device_blocks": 512,
    "host_blocks": 1024,
}


@contextlib.contextmanager
def own_daemon(ranks: int | None, config: Path | None, cache: Mapping[str, Any]) -> Iterator[str]:
    """A daemon on the shm device and the file backend in a temporary directory. Yields its endpoint."""
    tree: dict[str, Any] = {"cache": OWN_CACHE | dict(cache), "storage": {"backend": "file", "model": "replay"}}
    if config is not None:
        tree = tomllib.loads(config.read_text(encoding="utf-8"))
    if ranks is not None:
        tree.setdefault("cache", {})["ranks"] = ranks
        tree["cache"].pop("devices", None)
    with tempfile.TemporaryDirectory(prefix="transferd-replay-") as directory:
        if config is not None:  # its rules for the cache, our places for everything it would write to
            tree.setdefault("server", {}).pop("endpoint", None)
            tree.setdefault("metrics", {})["listen"] = ""
            tree.setdefault("storage", {}).setdefault("file", {}).pop("path", None)
        with running(tree, Path(directory)) as daemon:
            yield daemon.endpoint


async def replay(endpoint: str, requests: Sequence[TraceRequest], concurrency: int, console: Console) -> Report:
    """Play requests against the daemon at `endpoint`; the progress bar shows on a terminal only."""
    report = Report()
    async with Client(endpoint) as client:
        stats = await client.stats()
        caches = [await client.attach(rank["rank"]) for rank in stats["ranks"]]
        engine = Engine(client, KvData(caches), report, stats["layout"]["device_blocks"], stats["host"]["blocks"])
        columns = ("replaying", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
            bar = progress.add_task("requests", total=len(requests))
            before = time.monotonic()
            await engine.play(requests, concurrency, lambda: progress.advance(bar))
            report.seconds = time.monotonic() - before
    return report


def run(
    requests: Sequence[TraceRequest],
    *,
    endpoint: str | None,
    config: Path | None,
    ranks: int | None,
    concurrency: int,
    quiet: bool,
    cache: Mapping[str, Any] = MappingProxyType({}),
) -> Report:
    """Replay against `endpoint`, or against an own daemon. Progress goes to stderr.

    cache: overrides of OWN_CACHE for an own daemon without a configuration file.
    """
    import uvloop

    console = Console(file=sys.stderr, quiet=quiet)
    with contextlib.ExitStack() as stack:
        at = endpoint or stack.enter_context(own_daemon(ranks, config, cache))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(replay(at, requests, concurrency, console))
