"""`transferd pool`: master and status of a pool, and the copies of its objects."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from transferd.cli.asking import AskedDaemon, Format, FormatOption, asks, show
from transferd.cli.init import ConfigOption, SetOption
from transferd.errors import ConfigError
from transferd.observability import logs
from transferd.observability.units import size

DEFAULT_PORT = 50051
DEFAULT_METRICS_PORT = 9003

app = typer.Typer(name="pool", help="Run a small Mooncake pool, or inspect any pool.", no_args_is_help=True)


@app.command()
def master(
    listen: Annotated[str, typer.Option(help="host:port for the pool's members.")] = f"127.0.0.1:{DEFAULT_PORT}",
    metrics_port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP, on the same host.")] = DEFAULT_METRICS_PORT,
    lease: Annotated[str, typer.Option(help="How long an object is protected from eviction after a lookup.")] = "5s",
    etcd: Annotated[str, typer.Option(help="host:port,… of an etcd that other masters share: one of them leads.")] = "",
) -> None:
    """Run a Mooncake master in the foreground, until SIGTERM or SIGINT.

    With --etcd it is one of several masters: if the one that leads dies, another one takes over, with all objects.
    """
    from transferd.cli.pool.master import master_command
    from transferd.runtime.address import host_and_port

    address = host_and_port(listen)
    if address is None:
        raise ConfigError("--listen", "expected host:port", listen)
    host, port = address
    command = master_command(host, port, metrics_port, lease, etcd)
    joined = f"etcd://{etcd.replace(',', ';')}" if etcd else listen
    logs.say(
        f'Mooncake master on {listen}: set storage.mooncake.master_server_addr = "{joined}".\n'
        f"Show its status with: transferd pool status --metrics {listen.rpartition(':')[0]}:{metrics_port}",
        level="info",
    )
    logs.flush()
    os.execv(command[0], command)  # signals and the exit code are the master's own


@app.command()
def lend(config: ConfigOption = None, set_: SetOption = None) -> None:
    """Lend this node's memory to a pool, in the place of its daemon, until SIGTERM or SIGINT.

    It lends storage.mooncake.global_segment_size at storage.mooncake.lender. A daemon with the same configuration
    stores there, so what it has stored outlives its restarts.
    """
    from transferd import config as configuration
    from transferd.cli.pool.lend import run

    run(configuration.load(config, overrides=set_ or ()).storage.mooncake)


@app.command()
def status(
    metrics: Annotated[
        str, typer.Option(help="host:port of the master's HTTP pages.", envvar="TRANSFERD_POOL_METRICS")
    ] = f"127.0.0.1:{DEFAULT_METRICS_PORT}",
    keys: Annotated[int, typer.Option(min=0, help="Number of keys to list.")] = 0,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for an answer.")] = 2.0,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Show a pool's health, segments, capacity and keys; exit 1 if it is not serving."""
    from transferd.cli.pool.status import print_status, read_status
    from transferd.cli.terminal import stdout

    report = read_status(metrics, timeout, keys=keys)
    show(format_, report, lambda: print_status(report, stdout()))
    raise typer.Exit(0 if report["ready"] and report["health"] == "ok" else 1)


@app.command()
@asks(timeout=3600.0)
def drain(
    daemon: AskedDaemon,
) -> None:
    """Copy the objects that only this daemon's node has to other nodes, before it leaves; exit 1 if some are left.

    The daemon goes on serving, and stores here as before: run it again, or set storage.mooncake.drain_at_stop, for
    objects stored meanwhile. It removes nothing, and other nodes evict nothing for it. It copies the objects that were
    used last first. For the daemon's user and root.
    """
    _copies(daemon, leaves=True)


@app.command()
@asks(timeout=3600.0)
def mend(
    daemon: AskedDaemon,
) -> None:
    """Copy the pool's objects that lack copies, for example after a node died; exit 1 if some still lack one.

    Each object gets storage.mooncake.replica_num copies, as in this daemon's configuration. For the daemon's user and
    root.
    """
    _copies(daemon, leaves=False)


def _copies(daemon: AskedDaemon, *, leaves: bool) -> None:
    made = daemon.ask(lambda client: client.drain_pool() if leaves else client.mend_pool(), shows="copying_bytes")
    lack = "are on no other node" if leaves else "still lack copies"
    left = f"; {made.left} objects, {size(made.left_bytes)}, {lack}: {made.why}" if made.left else ""
    tree = {"objects": made.objects, "bytes": made.bytes, "left": made.left, "left_bytes": made.left_bytes}
    daemon.show(tree | {"why": made.why}, f"copied {made.objects} objects, {size(made.bytes)}{left}")
    raise typer.Exit(1 if made.left else 0)
