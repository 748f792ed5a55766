"""`transferd replay`: plays a trace against a daemon (a private one if none is named) and reports the result."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from transferd.cli.asking import await_ready, connected
from transferd.cli.replay.engine import ReplayEngine, Tiers
from transferd.cli.replay.kvdata import KvData
from transferd.cli.replay.own import own_daemon, settings
from transferd.cli.replay.report import ReplayReport
from transferd.cli.replay.trace import TraceRequest
from transferd.config import DEFAULT_ENGINE
from transferd.errors import TransferError
from transferd.runtime.compat import Runner, uncancel
from transferd.runtime.threads import ThreadPools

CONNECT_TIMEOUT_S = 10.0


async def replay(endpoint: str, requests: Sequence[TraceRequest], concurrency: int, console: Console) -> ReplayReport:
    """Play requests against the daemon at `endpoint`. The progress bar shows on a terminal only.

    If the replay ends early, the report says why. Raises ConnectTimeout, and TierError if the daemon's device
    memory cannot be attached as arrays.
    """
    report = ReplayReport()
    threads = ThreadPools(1)
    try:
        async with connected(endpoint, CONNECT_TIMEOUT_S) as client:
            await await_ready(client, CONNECT_TIMEOUT_S)
            stats = await client.stats()
            ranks = [rank["rank"] for rank in stats["ranks"] if rank["engine"] == DEFAULT_ENGINE]  # not others'
            data = KvData([await client.attach(rank) for rank in ranks])
            engine = ReplayEngine(client, data, Tiers.of(stats), report, threads)
            with progress_bar(console, "replaying") as progress:
                bar = progress.add_task("replaying", total=len(requests))
                before = time.monotonic()
                try:
                    await engine.play(requests, concurrency, lambda: progress.advance(bar))
                except TransferError as error:
                    report.aborted = str(error)
                except asyncio.CancelledError:  # Ctrl-C, as asyncio.Runner passes it on
                    task = asyncio.current_task()
                    assert task is not None
                    uncancel(task)
                    report.interrupted = True
                    report.aborted = "interrupted"
                report.seconds = time.monotonic() - before
    finally:
        threads.close()
    return report


class _Rate(ProgressColumn):
    """Requests per second, once there are any."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.0f}/s")


def progress_bar(console: Console, what: str) -> Progress:
    """A bar with rate and time left. It shows on a terminal only."""
    columns = (
        *(TextColumn(what), BarColumn(), MofNCompleteColumn()),
        *(_Rate(), TimeElapsedColumn(), TimeRemainingColumn()),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def run(
    requests: Sequence[TraceRequest],
    *,
    endpoint: str | None,
    config: Path | None,
    ranks: int | None,
    concurrency: int,
    quiet: bool,
    cache: Mapping[str, Any] = MappingProxyType({}),
) -> ReplayReport:
    """Replay against `endpoint`, or against a private daemon. Progress goes to stderr.

    cache: overrides of own.CACHE for a private daemon without a configuration file.
    quiet: no progress bar.

    Raises ConfigError for a bad file, and TransferError if no daemon answers or the private one did not stop cleanly.
    """
    import uvloop

    console = Console(file=sys.stderr, quiet=quiet)
    with contextlib.ExitStack() as stack:
        at = endpoint or stack.enter_context(own_daemon(settings(config, ranks, cache)))
        with Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(replay(at, requests, concurrency, console))
