"""`transferd purge`, `pin`, `warm` and `level`: for operators, and for scripts of an engine's user."""

from __future__ import annotations

import enum
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from transferd.cli.asking import AskedDaemon, asks
from transferd.observability.units import size

if TYPE_CHECKING:
    from transferd.wire.answers import Purged

NOT_REACHED = 3  # the exit code of a purge that has not reached every place
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

KeysArgument = Annotated[list[str] | None, typer.Argument(help="Keys of blocks.", show_default=False)]
KeysFromOption = Annotated[
    Path | None, typer.Option("--keys-from", help="A file with one key a line; - for standard input.", allow_dash=True)
]
EngineOption = Annotated[str, typer.Option("--engine", help="Whose blocks (default: see the text above).")]


@asks(timeout=600.0)
def purge(
    daemon: AskedDaemon,
    keys: KeysArgument = None,
    keys_from: KeysFromOption = None,
    engine: EngineOption = "",
    model: Annotated[str | None, typer.Option("--model", help="Only blocks of this model.")] = None,
    generation: Annotated[str | None, typer.Option("--generation", help="Only blocks of this generation.")] = None,
    older_than: Annotated[
        str | None, typer.Option("--older-than", help="Only what was not used for so long, such as 7d, 12h, 30m, 90s.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything that is stored.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; say what would be removed.")] = False,
    shared: Annotated[
        bool, typer.Option("--shared", help="Also from a bucket or pool, for all nodes that use it.")
    ] = False,
) -> None:
    """Remove stored blocks while the daemon runs: those that fit everything that is given.

    Loads that run finish; new ones do not find the blocks. Run it as the engine's user for what that engine stored, or
    as the daemon's user or root for everything. Exits 3 if a place was not reached that may have some of them.
    """
    named = _keys(keys, keys_from)
    age = None if older_than is None else _duration("--older-than", older_than)
    given = named is not None or engine or model is not None or generation is not None or age is not None
    if bool(given) == everything:
        both = "--all removes everything: leave out the rest" if everything else "say what to remove, or --all"
        raise typer.BadParameter(both)

    purged = daemon.ask(
        lambda client: client.purge(named, model, generation, engine or None, age, dry_run, shared),
        engine=engine,
        shows="" if dry_run else "purging",
    )
    did = "would remove" if dry_run else "removed"
    tree: dict[str, Any] = {"objects": purged.objects, "bytes": purged.bytes, "dry_run": dry_run}
    if not dry_run:
        tree |= {"complete": purged.complete} | {key: purged[key] for key in ("not_reached", "kept_by", "shared")}
    daemon.show(
        tree, f"{did} {purged.objects} objects, {size(purged.bytes)}{_not_reached(purged, by_age=age is not None)}"
    )
    raise typer.Exit(0 if purged.complete else NOT_REACHED)


def _not_reached(purged: Purged, *, by_age: bool) -> str:
    """What a purge has left, and when that goes. by_age: a level that others use does not know how old its use is."""
    unused = "" if by_age else ": this daemon uses them no more until it stores them again, or restarts"
    keeps = f"keeps its objects, because others use it{unused} (--shared removes them for all)"
    stays = "".join(f"; the level {level} {keeps}" for level in purged.shared)
    if not purged.not_reached:
        return stays
    away = ", ".join(purged.not_reached)
    one = len(purged.not_reached) == 1
    goes = "was away: its objects go when it returns" if one else "were away: their objects go when they return"
    kept = f" (the order is on {', '.join(purged.kept_by)})" if purged.kept_by else ""
    return f"; {away} {goes}{kept or '; if the daemon restarts before, purge again'}{stays}"


@asks(timeout=30.0)
def pin(
    daemon: AskedDaemon,
    keys: KeysArgument = None,
    keys_from: KeysFromOption = None,
    ttl: Annotated[str, typer.Option("--ttl", help="For how long, such as 7d, 12h, 30m, 90s.")] = "1h",
    unpin: Annotated[bool, typer.Option("--unpin", help="End the pins of these keys instead.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="With --unpin: end all pins of the engine.")] = False,
    engine: Annotated[str, typer.Option("--engine", help="Whose (default: the engine of [cache]).")] = "",
) -> None:
    """Keep stored blocks from being evicted for some time, such as those of a system prompt.

    Exits 1 if not all of them are stored. `transferd stats` shows what is pinned. Run it as the engine's user, the
    daemon's user or root.
    """
    named = _keys(keys, keys_from)
    if (named is None) != (unpin and everything):
        raise typer.BadParameter("name keys, or --unpin --all")
    seconds = _duration("--ttl", ttl)

    if unpin:
        daemon.ask(lambda client: client.unpin(named), engine=engine)
        daemon.show({"unpinned": named}, "unpinned")
        return
    done = daemon.ask(lambda client: client.pin(named or [], seconds), engine=engine)
    wanted = len(named or ())
    figures = {"pinned": int(done), "durable": done.durable, "reachable": done.reachable}
    said = f"pinned {int(done)} of {wanted} blocks for {ttl}; {done.durable} are on disk"
    if done.reachable < done:
        said += f"; {done.reachable} can be reached: pin the blocks before the others, too"
    daemon.show(figures | {"keys": wanted, "ttl_s": seconds}, said)
    raise typer.Exit(0 if done == wanted else 1)


@asks(timeout=3600.0)
def warm(
    daemon: AskedDaemon,
    newest: Annotated[str, typer.Option("--newest", help="At most this much, the last used first, such as 50GiB.")],
    model: Annotated[str | None, typer.Option("--model", help="Only blocks of this model.")] = None,
    to: Annotated[str, typer.Option("--to", help="A level of storage (default: the first).")] = "",
    engine: Annotated[str, typer.Option("--engine", help="Ask as this engine (default: that of [cache]).")] = "",
) -> None:
    """Bring the newest stored blocks up to a fast level after a restart, while the daemon serves.

    Fills only free room, and gives way to loads and stores. Run it as the engine's user, the daemon's user or root.
    """
    from transferd.config import Size

    try:
        nbytes = int(Size.parse(newest))
    except ValueError as error:
        raise typer.BadParameter(f"--newest {newest}: {error}") from error

    warmed = daemon.ask(lambda client: client.warm(nbytes, to, model), engine=engine, shows="warming_bytes")
    tree = {"level": warmed.level, "objects": warmed.objects, "bytes": warmed.bytes}
    daemon.show(tree, f"brought {warmed.objects} objects, {size(warmed.bytes)}, up to the level {warmed.level}")


class LevelAction(str, enum.Enum):
    DRAIN = "drain"
    USE = "use"


@asks(timeout=3600.0)
def level(
    daemon: AskedDaemon,
    action: Annotated[LevelAction, typer.Argument(help="drain: take it out. use: put it back.")],
    name: Annotated[str, typer.Argument(help="A level of storage.levels.")],
) -> None:
    """Take a level of storage out while the daemon serves, or put it back. For the daemon's user and root.

    A drain stores nothing more in the level at once, and copies what only it has to another level, as far as there is
    room. Then the level is not read any more, until `use`, or a restart of the daemon, puts it back with what it has.
    """

    if action is LevelAction.USE:
        change = daemon.ask(lambda client: client.use_level(name))
    else:
        change = daemon.ask(lambda client: client.drain_level(name), shows="draining_bytes")
    alone = f"; {change.objects} objects, {size(change.bytes)}, are in no other level" if change.objects else ""
    report = {"level": change.level, "state": change.state, "objects": change.objects, "bytes": change.bytes}
    daemon.show(report, f"the level {change.level} is {change.state}{alone}")


def _keys(keys: list[str] | None, file: Path | None) -> list[str] | None:
    """The keys of the command line and of the file; None if neither was given."""
    if file is None:
        return keys or None
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--keys-from {file}: cannot be read: {error}") from error
    return [*(keys or []), *(line for line in text.splitlines() if line)]


def _duration(option: str, text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip())
    if match is None:
        raise typer.BadParameter(f"{option} {text}: expected a duration such as 7d, 12h, 30m or 90s")
    return float(match[1]) * _UNITS[match[2]]
