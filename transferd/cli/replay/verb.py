"""The verb `transferd replay`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from transferd.cli.asking import INTERRUPTED, EndpointOption, Format, FormatOption, show
from transferd.cli.init import ConfigOption

Simulate = Annotated[
    bool, typer.Option("--simulate", help="Move nothing: predict the hits of several sizes of host and storage.")
]
HostSizes = Annotated[
    str | None, typer.Option(help="With --simulate: host memory sizes, such as 0,64GiB (default: the configured).")
]
StorageSizes = Annotated[
    str | None,
    typer.Option(
        help="With --simulate: storage sizes; of several levels joined by +, such as 64GiB+1TB,64GiB+2TB "
        "(default: doubling up to the whole trace)."
    ),
]
PrefillRate = Annotated[
    float | None, typer.Option(min=1, help="With --simulate: prefill tokens per second; shows the time saved.")
]
LoadRates = Annotated[
    str | None,
    typer.Option(
        help="With --simulate: bytes per second from host and storage, or each of its levels, such as 40GB,5GB "
        "(default: measured)."
    ),
]
Chart = Annotated[
    Path | None, typer.Option(help="With --simulate: write the curve of hit rate over size to this SVG file.")
]
Nodes = Annotated[str | None, typer.Option(help="With --simulate: predict fleets of so many nodes, such as 1,4,16.")]
Router = Annotated[str, typer.Option(help="With --nodes: how requests find a node: prefix, load, random, or several.")]
Levels = Annotated[
    str | None, typer.Option(help="With --simulate: a node's own levels, such as memory=256GB,file=4TB.")
]
Pool = Annotated[
    str | None, typer.Option(help="With --simulate: memory that each node lends to a pool of all; 0 for no pool.")
]
Events = Annotated[
    str | None, typer.Option(help="With --nodes: also predict dead (a node dies), upgrade, drain, or several.")
]
Away = Annotated[
    float, typer.Option(min=0, help="With --events: seconds for which a node that restarts takes no requests.")
]
Copies = Annotated[
    int, typer.Option(min=1, help="With --nodes: so many times the traffic, from other users with the same habits.")
]
Costs = Annotated[str | None, typer.Option(help="With --nodes: other costs of what adds up, such as lookup_s=2e-6.")]


def replay(
    trace: Annotated[Path, typer.Argument(help="A trace in Mooncake's format (JSON lines).", exists=True)],
    requests: Annotated[int | None, typer.Option(min=1, help="Number of requests to replay (default: all).")] = None,
    ranks: Annotated[int | None, typer.Option(min=1, help="Number of ranks of the private daemon.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Number of requests in flight.")] = 8,
    config: ConfigOption = None,
    endpoint: EndpointOption = None,
    simulate: Simulate = False,
    host_sizes: HostSizes = None,
    storage_sizes: StorageSizes = None,
    prefill_rate: PrefillRate = None,
    load_rates: LoadRates = None,
    chart: Chart = None,
    nodes: Nodes = None,
    router: Router = "prefix",
    levels: Levels = None,
    pool: Pool = None,
    events: Events = None,
    away: Away = 0.0,
    copies: Copies = 1,
    costs: Costs = None,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Replay a request trace and check every byte that comes back. Without --endpoint, starts a private daemon."""
    from transferd.cli.replay import command
    from transferd.cli.replay.trace import read_trace

    requests_ = read_trace(trace, requests)
    if simulate:
        from transferd.cli.replay import simulate as simulation

        sizes = (host_sizes, storage_sizes, prefill_rate, load_rates)
        wanted = simulation.Wanted(*sizes, nodes, router, events, levels, pool, copies, away, costs)
        simulation.run(requests_, wanted, config=config, ranks=ranks, chart_file=chart, format_=format_)
        return
    quiet = format_ is Format.JSON
    report = command.run(requests_, endpoint=endpoint, config=config, ranks=ranks, concurrency=concurrency, quiet=quiet)
    from transferd.cli.terminal import stdout

    show(format_, report.tree(), lambda: report.print(stdout()))
    raise typer.Exit(INTERRUPTED if report.interrupted else 0 if report.good else 1)
