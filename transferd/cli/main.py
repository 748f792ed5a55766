"""The command line: start the daemon, query it, replay traffic against it, measure it.

Exit codes: 0 success, 1 failure, 2 bad usage or configuration (one line on stderr names key and value), 130 ended by
Ctrl-C, after a report of what was done.
Only JSON and reports go to stdout; logs go to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from transferd.cli import lists
from transferd.cli.asking import (
    INTERRUPTED,
    AskedDaemon,
    EndpointOption,
    Format,
    FormatOption,
    KeyFileOption,
    ServerKeyFileOption,
    asks,
    await_ready,
    connected,
    show,
)
from transferd.cli.doctor.command import doctor
from transferd.cli.files import files
from transferd.cli.generation import app as generation_app
from transferd.cli.init import ConfigOption, SetOption, check
from transferd.cli.init import app as config_app
from transferd.cli.keeping import level, pin, purge, warm
from transferd.cli.pool.command import app as pool_app
from transferd.cli.record import record
from transferd.cli.replay.verb import replay
from transferd.cli.restart_check import restart_check
from transferd.cli.top.command import top
from transferd.cli.why import why
from transferd.errors import ConfigError, ConnectTimeout, TransferError, one_line
from transferd.observability import logs
from transferd.runtime.descriptors import fill_standard

if TYPE_CHECKING:
    from rich.console import Console

    from transferd.client.client import Client


# Commands that run no part of a daemon in this process, so that nothing here logs by structlog.
ONLY_ASK = {
    *("--version", "--help", "-h", "version", "files", "ping", "stats", "tasks", "clients", "explain", "top"),
    *("pin", "purge", "warm", "level", "generation", "engines", "pause", "resume", "restart-check", "why", "record"),
}


class _Interrupted(Exception):
    """Carries Ctrl-C past typer: its newer versions swallow KeyboardInterrupt."""


class _Commands(TyperGroup):
    """All commands."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        _keep_brackets(self)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise _Interrupted from error


def _keep_brackets(command: Any) -> None:
    """Have [cache] in a help text printed, and not taken for a style."""
    for one in (command, *command.params):
        one.help = one.help and re.sub(r"(\[[a-z#/@][^\[]*?\])", r"\\\1", one.help)
    for inner in getattr(command, "commands", {}).values():
        _keep_brackets(inner)


app = typer.Typer(
    name="transferd",
    cls=_Commands,
    help="Moves an LLM engine's KV cache between device memory, pinned host memory and storage.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# typer has moved this between its versions.
_UsageError: Any = typer.BadParameter.__base__


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def transferd(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Moves an LLM engine's KV cache between device memory, pinned host memory and storage."""


def serve(
    config: ConfigOption = None,
    set_: SetOption = None,
    until_stdin_ends: Annotated[bool, typer.Option("--until-stdin-ends", hidden=True)] = False,  # client/launch.py
) -> None:
    """Run the daemon until SIGTERM or SIGINT."""
    from transferd import config as configuration
    from transferd.runtime.signals import hold_dump_signals, stop_when_stdin_ends

    hold_dump_signals()  # before the next import: importing numpy starts threads
    if until_stdin_ends:
        stop_when_stdin_ends()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # transferd does no linear algebra
    from transferd.daemon.process import serve as run

    def read() -> configuration.Config:
        return configuration.load(config, overrides=set_ or ())

    sources = configuration.origins(config, overrides=set_ or ())
    effective = read()
    if sources.get("server.endpoint") == configuration.PERSONAL:
        where = f"serving at {effective.server.endpoint}, where this user's commands look for it"
        logs.say(f"{where}; blocks are in {effective.storage.file.path}", "info")
    raise typer.Exit(run(effective, reload=read, warnings=configuration.outdated(sources)))


def verify(
    config: ConfigOption = None,
    set_: SetOption = None,
    path: Annotated[Path | None, typer.Option("--path", help="Store directory (default: the configured one).")] = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Set damaged objects aside; stop the daemon first.")
    ] = False,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Check every object of a file store, without its daemon; exit 1 if one is damaged."""
    from rich.console import Console

    from transferd import config as configuration
    from transferd.cli.terminal import stdout
    from transferd.cli.verify import verify_with_progress

    if path is None:
        from transferd.storage.registry import backends_of

        effective = configuration.load(config, overrides=set_ or ())
        kinds = [kind for kind in backends_of(effective) if kind.scrubs]
        paths = [section.paths[0] for kind in kinds for section in kind.directories(effective.storage)]
        if not paths:
            raise ConfigError("storage.backend", "verify supports only the file backend", effective.storage.title)
    else:
        paths = [str(path)]
    report = verify_with_progress(*paths, console=Console(stderr=True), quarantine=quarantine)
    show(format_, report.tree(), lambda: report.print(stdout()))
    raise typer.Exit(INTERRUPTED if report.interrupted else 0 if report.good else 1)


def version(format_: FormatOption = Format.TEXT) -> None:
    """Print the version, and the commit that this package was built from."""
    from transferd.runtime.version import VERSION, commit

    show(format_, {"version": VERSION, "commit": commit() or None}, f"transferd {VERSION}")


def ping(
    endpoint: EndpointOption = None,
    ready: Annotated[bool, typer.Option("--ready", help="Also exit 1 if the daemon is not ready.")] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0.0, help="Seconds to wait for a daemon that is starting (2).")
    ] = None,
    key_file: KeyFileOption = None,
    server_key_file: ServerKeyFileOption = None,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Print the daemon's boot_id and round-trip time; exit 1 if no daemon answers.

    With --ready or --timeout, waits until the daemon is ready, and prints on stderr what for. Without them, says at
    once why no daemon can be reached, or that the daemon is not ready. Says on stderr if the daemon has another version
    than this command: it was not restarted after an upgrade.
    """
    import asyncio

    from transferd.runtime import compat
    from transferd.runtime.version import VERSION

    waits, limit = ready or timeout is not None, 2.0 if timeout is None else timeout

    async def question() -> tuple[str, float, bool]:
        reached = connected(endpoint, limit, key_file, server_key_file, wait=waits)
        async with reached as client, compat.timeout(limit + 2):
            # `ready` as on /readyz: a daemon without [cache] has no engine of this client's that could become ready.
            found = await client.stats()
            is_ready = found["ready"]
            if found["version"] != VERSION:
                logs.say(f"the daemon is {found['version']}, this command {VERSION}: restart the daemon")
            if not is_ready:
                try:
                    await (await_ready(client, limit) if waits else client.wait_ready(0.0))
                    is_ready = True
                except ConnectTimeout as not_ready:
                    logs.say(str(not_ready))
            return *await client.ping(), is_ready

    boot_id, seconds, is_ready = asyncio.run(question())
    said = f"boot {one_line(boot_id)} answered in {seconds * 1000:.3f} ms"
    show(format_, {"boot_id": boot_id, "round_trip_ms": seconds * 1000}, said)
    raise typer.Exit(1 if ready and not is_ready else 0)


@asks()
def stats(
    daemon: AskedDaemon,
    engine: Annotated[str, typer.Option("--engine", help="Show this engine: its model, weights and layout.")] = "",
) -> None:
    """Print the daemon's report: one screen of text, or everything as JSON."""
    report = daemon.ask(lambda client: client.stats())
    if daemon.as_json and (not engine or engine in report["engines"]):
        print(json.dumps(report["engines"][engine] if engine else report))
        return
    from transferd.cli.stats_view import engine_view, view
    from transferd.cli.terminal import stdout
    from transferd.observability.report import read

    console = stdout()
    console.print(engine_view(read(report), engine, console.width) if engine else view(read(report), console.width))


def keygen(
    directory: Annotated[Path, typer.Argument(help="Directory for the key files; created if absent.", file_okay=False)],
    client: Annotated[str, typer.Option("--client", help="Name of the client that gets the second pair.")] = "client",
    format_: FormatOption = Format.TEXT,
) -> None:
    """Create CURVE keys for a tcp:// endpoint: the daemon's pair, unless it exists, and a client's pair."""
    from transferd.cli.keygen import make_keys

    keys = make_keys(directory, client)
    show(format_, keys.tree(), keys.text())


@asks()
def explain(
    daemon: AskedDaemon,
    task_id: Annotated[str, typer.Argument(help="The task's id.")],
    dump: Annotated[
        Path | None, typer.Option("--dump", help="A dump file, or a directory: its newest dump is used.")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="Whose task it is (default: any engine's).")] = "",
) -> None:
    """Show the story of one task, rank by rank, from a running daemon or from a flight recorder dump."""
    from transferd.cli.stats_view import fingerprint_of
    from transferd.config import DEFAULT_ENGINE
    from transferd.observability import story as stories
    from transferd.observability.dump_file import read_dump
    from transferd.observability.report import read

    async def question(client: Client) -> dict[str, Any]:
        story = await client.explain(task_id, engine)
        there = read(await client.stats()).engines.get(story.get("engine", DEFAULT_ENGINE))
        return story if there is None else story | {"identity": fingerprint_of(there)}

    story = daemon.ask(question) if dump is None else read_dump(dump).story(task_id, engine)
    daemon.show(story, stories.as_text(story))


def demo(
    pd: Annotated[bool, typer.Option("--pd", help="Show prefill to decode between two nodes, in both modes.")] = False,
    format_: FormatOption = Format.TEXT,
) -> None:
    """Show the main job on a generated workload, in under a minute, on a private daemon."""
    from rich.console import Console

    from transferd.cli import demo as command

    console = Console(stderr=format_ is Format.JSON)
    if pd:
        _demo_pd(console, format_)
    report = command.run(console)
    show(format_, report.tree(), lambda: command.print_summary(report, console))
    raise typer.Exit(0 if report.good else 1)


def _demo_pd(console: Console, format_: Format) -> NoReturn:
    try:
        from transferd.cli.demo_pd import command
    except ModuleNotFoundError:
        raise ConfigError(
            "--pd", "is shown from a checkout of transferd; this installation has no part of it"
        ) from None

    reports = command.run(console)
    command.print_summary(reports, console)
    if format_ is Format.JSON:
        print(json.dumps({report.mode: report.tree() for report in reports}))
    raise typer.Exit(0 if all(report.good for report in reports) else 1)


# The verbs, in the groups and the order of the help.
VERBS: dict[str, list[Any]] = {
    "Set up and run": [serve, config_app, doctor, restart_check, lists.pause, lists.resume, files, keygen, version],
    "Look": [ping, stats, top, lists.tasks, lists.clients, lists.engines, explain, why],
    "Stored blocks": [purge, pin, warm, level, generation_app, pool_app, verify],
    "Try and measure": [demo, record, replay],
}
with contextlib.suppress(ModuleNotFoundError):  # in a checkout, and in no wheel (setup.py)
    from transferd.cli.bench.command import app as bench_app

    VERBS["Try and measure"].append(bench_app)
for panel, verbs in VERBS.items():
    for verb in verbs:
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, rich_help_panel=panel)
        else:
            app.command(rich_help_panel=panel)(verb)
app.command("check-config", hidden=True)(check)  # its name until 0.4: `config check`


_WANTED = {"int range": "whole number", "integer": "whole number", "int": "whole number", "float range": "number"}


def _mistake(error: Any) -> str:
    """A usage error in one line, with what was typed and where to look; "" for a bare command: its help was printed."""
    problem = error.format_message().strip()
    if not problem or "\n" in problem:
        return str(problem)
    for name, wanted in _WANTED.items():
        problem = problem.replace(f"is not a valid {name}.", f"is not a {wanted}.")
    context = error.ctx
    path = "transferd" if context is None else context.command_path
    return f"{problem} (in: {shlex.join(sys.argv[1:])}; `{path} --help` says what there is)"


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of print(), which name no file


def main() -> NoReturn:
    """The entry point: turn errors into one line and an exit code."""
    fill_standard()
    if sys.argv[1:2] != ["serve"]:  # `serve` handles SIGTERM itself
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a daemon started for a command ends with it
    # stdout is for reports alone; `serve` sets up its own logging from the configuration.
    configure = logs.configure_without_structlog if set(sys.argv[1:2]) & ONLY_ASK else logs.configure
    configure("warning", "console")
    client_log = logging.getLogger("transferd.client")
    level = client_log.level
    client_log.setLevel(logging.ERROR)  # the final error says what the client waited for
    try:
        code = app(standalone_mode=False, prog_name="transferd")
    except _UsageError as error:
        if problem := _mistake(error):
            logs.say(problem)
        _end(error.exit_code)
    except ConfigError as error:
        logs.say(str(error))
        _end(2)
    except (
        _Interrupted,
        KeyboardInterrupt,
        typer.Abort,
    ):  # a command that was interrupted has already reported what it did
        logs.say("interrupted")
        _end(INTERRUPTED)
    except (TransferError, TimeoutError) as error:
        logs.say(str(error) or "the daemon did not answer in time")
        _end(1)
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        logs.say(f"stdout: {error.strerror}")
        _end(1)
    finally:
        client_log.setLevel(level)
    _end(code or 0)


def _end(code: int) -> NoReturn:
    """Exit. If the report cannot be written, say so here, before the interpreter does at its exit."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # a reader that stops early is fine: `transferd stats | head`
            logs.say(f"stdout: {error.strerror}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what is still in the buffer
        code = code or 1
    sys.exit(code)
