"""The options that commands share, and how a command asks a running daemon: with one short-lived client.

Each command loads this file, so the client is imported only inside the functions that ask (tests/cli/test_imports.py).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import typing
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from transferd.errors import ConfigError, ConnectTimeout
from transferd.observability import logs

if TYPE_CHECKING:
    from transferd.client.client import Client

INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell


class Format(str, Enum):
    """How a report is printed."""

    TEXT = "text"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="text or json.")]


T = TypeVar("T")

PROBE_AFTER_S = 0.1  # a running daemon nearly always answers within this time

EndpointOption = Annotated[
    str | None, typer.Option("--endpoint", envvar="TRANSFERD_ENDPOINT", help="Where the daemon listens.")
]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds to wait for an answer.")]
KeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        envvar="TRANSFERD_CURVE_KEY_FILE",
        help="This client's secret CURVE key, for a tcp:// daemon that asks for keys.",
    ),
]
ServerKeyFileOption = Annotated[
    Path | None,
    typer.Option("--server-key-file", envvar="TRANSFERD_CURVE_SERVER_KEY_FILE", help="The daemon's public CURVE key."),
]


@contextlib.asynccontextmanager
async def connected(
    endpoint: str | None,
    timeout: float,
    key_file: Path | None = None,
    server_key_file: Path | None = None,
    *,
    wait: bool = False,
    engine: str = "",
) -> AsyncIterator[Client]:
    """A client of a daemon that answers, ready or not.

    If the connection is refused (no such socket, permission, key, …), this fails at once and says why. With `wait` it
    reports the reason on stderr and keeps trying until the timeout, since the daemon may still be starting.

    Raises ConnectTimeout, and ConfigError for bad keys or a bad endpoint.
    """
    import asyncio

    from transferd.client.client import Client
    from transferd.wire.curve import ClientCurve
    from transferd.wire.obstacle import is_refusal
    from transferd.wire.transport import ZmqClientTransport

    where = endpoint or _found()
    curve = ClientCurve.load(key_file, server_key_file) if key_file or server_key_file else None
    transport = ZmqClientTransport(where, curve=curve)
    client = Client(where, connect_timeout=timeout, await_ready=False, transport=transport, engine=engine)
    connecting = asyncio.ensure_future(client.connect())
    try:
        await asyncio.wait({connecting}, timeout=PROBE_AFTER_S)
        obstacle = "" if connecting.done() else await transport.obstacle()
        if not connecting.done() and is_refusal(obstacle):
            what = f"{where}: no daemon answered: {obstacle}"
            if not wait:
                raise ConnectTimeout(f"{what}{_remedy(obstacle)}")
            logs.say(f"{what} (waiting up to {timeout:g} s)", "warning")
        await connecting
        yield client
    finally:
        connecting.cancel()
        await asyncio.wait({connecting})
        await client.close()


def _found() -> str:
    """The default endpoint or, if nobody listens there, that of the one daemon that an engine of this user has started.

    Raises ConfigError that names them if there are several.
    """
    from transferd.adapters.common.directories import started_daemons
    from transferd.adapters.common.packaged import nobody_listens
    from transferd.client.client import default_endpoint

    default = default_endpoint()
    started = started_daemons() if nobody_listens(default) else []
    if len(started) > 1:
        raise ConfigError("--endpoint", "must name one of the daemons that engines have started", ", ".join(started))
    if started:
        logs.say(f"{started[0]}: a daemon that an engine of this user has started")
    return started[0] if started else default


def _remedy(obstacle: str) -> str:
    from transferd.wire.obstacle import NO_SOCKET, NOBODY_LISTENS

    if obstacle in (NO_SOCKET, NOBODY_LISTENS):
        return " Start it (systemctl start transferd, or `transferd serve`), or name another endpoint with --endpoint."
    return "; see --key-file and --server-key-file" if "CURVE keys" in obstacle else ""


async def await_ready(client: Client, timeout: float) -> None:
    """Wait until the daemon is ready; say on stderr what it waits for. Raises ConnectTimeout."""
    try:
        await client.wait_ready(0.0)
    except ConnectTimeout as not_ready:
        logs.say(f"{not_ready} (waiting up to {timeout:g} s)", "warning")
        await client.wait_ready(timeout)


@dataclass(frozen=True, slots=True)
class AskedDaemon:
    """The daemon that a command asks, as its options name it."""

    endpoint: str | None
    timeout: float
    key_file: Path | None
    server_key_file: Path | None
    format: Format

    @property
    def as_json(self) -> bool:
        return self.format is Format.JSON

    def connected(self, *, engine: str = "") -> contextlib.AbstractAsyncContextManager[Client]:
        return connected(self.endpoint, self.timeout, self.key_file, self.server_key_file, engine=engine)

    def ask(self, question: Callable[[Client], Awaitable[T]], *, engine: str = "", shows: str = "") -> T:
        """Connect, ask one question, disconnect.

        engine: whom the question is about; "" is that of [cache].
        shows: the figure of the storage report that says how much is left, for a progress bar on a terminal.

        Raises ConnectTimeout, which says what prevents it, and TimeoutError.
        """
        import asyncio

        from transferd.runtime import compat

        async def go() -> T:
            # Connecting has a time limit of its own, and takes a little longer to find out what prevents it.
            async with self.connected(engine=engine) as client, compat.timeout(self.timeout + 1):
                if not sys.stderr.isatty():
                    return await question(client)
                from transferd.cli.terminal import progress

                async with progress(client, shows):
                    return await question(client)

        return asyncio.run(go())

    def show(self, tree: Any, text: str | Callable[[], object]) -> None:
        show(self.format, tree, text)


def show(format_: Format, tree: Any, text: str | Callable[[], object]) -> None:
    """Print an answer on stdout. text: what it says, or a function that prints it."""
    if format_ is Format.JSON:
        print(json.dumps(tree))
    elif isinstance(text, str):
        print(text)
    else:
        text()


OPTIONS = {
    "endpoint": (EndpointOption, None),
    "timeout": (TimeoutOption, 2.0),
    "key_file": (KeyFileOption, None),
    "server_key_file": (ServerKeyFileOption, None),
    "format_": (FormatOption, Format.TEXT),
}


def asks(*, timeout: float = 2.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of every command that asks a daemon. Its first parameter is an AskedDaemon."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def called(**given: Any) -> None:
            daemon = AskedDaemon(*(given.pop(name) for name in OPTIONS))
            command(daemon, **given)

        hints = typing.get_type_hints(command, include_extras=True)
        own = list(inspect.signature(command).parameters.values())[1:]
        kinds = {one.name: hints[one.name] for one in own} | {name: kind for name, (kind, _) in OPTIONS.items()}
        defaults = {one.name: one.default for one in own} | {name: value for name, (_, value) in OPTIONS.items()}
        defaults["timeout"] = timeout
        only = inspect.Parameter.KEYWORD_ONLY
        called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, only, default=defaults[name], annotation=kind) for name, kind in kinds.items()]
        )
        called.__annotations__ = kinds
        del called.__wrapped__
        return called

    return decorated
