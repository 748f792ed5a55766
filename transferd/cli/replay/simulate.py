"""`transferd replay TRACE --simulate`: how much host memory and storage are worth having for this traffic."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from transferd import config as configuration
from transferd.cli.replay.chart import chart
from transferd.cli.replay.command import progress_bar
from transferd.cli.replay.own import settings
from transferd.cli.replay.rates import measure_rates
from transferd.cli.replay.sizing import BlockSizes, Rates, default_storage_sizes, print_points, size_points, tree
from transferd.cli.replay.trace import TraceRequest
from transferd.cli.terminal import stdout
from transferd.config import Size
from transferd.errors import RequestError, TransferError


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
