"""The options that commands share, and how a command asks a running daemon: with one short-lived client.

Each command loads this file, so the client is imported only inside the functions that ask (tests/cli/test_imports.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from transferd.errors import ConnectTimeout
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

    from transferd.client.client import Client, default_endpoint
    from transferd.wire.curve import ClientCurve
    from transferd.wire.obstacle import is_refusal
    from transferd.wire.transport import ZmqClientTransport

    where = endpoint or default_endpoint()
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


def ask(
    question: Callable[[Client], Awaitable[T]],
    endpoint: str | None,
    timeout: float,
    key_file: Path | None = None,
    server_key_file: Path | None = None,
    *,
    engine: str = "",
) -> T:
    """Connect, ask one question, disconnect. engine: whom the question is about; "" is that of [cache].

    Raises ConnectTimeout, which says what prevents it, and TimeoutError.
    """
    import asyncio

    from transferd.runtime import compat

    async def go() -> T:
        # Connecting has a time limit of its own, and takes a little longer to find out what prevents it.
        reached = connected(endpoint, timeout, key_file, server_key_file, engine=engine)
        async with reached as client, compat.timeout(timeout + 1):
            return await question(client)

    return asyncio.run(go())
