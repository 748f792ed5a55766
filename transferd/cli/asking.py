"""How a command puts a question to a running daemon: the options for it, and one short-lived client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from transferd.client.client import Client

T = TypeVar("T")

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


def client_for(
    endpoint: str | None, timeout: float, key_file: Path | None = None, server_key_file: Path | None = None
) -> Client:
    """A client that is not connected yet and does not insist on a ready daemon. Raises ConfigError for bad keys."""
    from transferd.client.client import Client, default_endpoint
    from transferd.wire.curve import ClientCurve
    from transferd.wire.transport import ZmqClientTransport

    where = endpoint or default_endpoint()
    curve = ClientCurve.load(key_file, server_key_file) if key_file or server_key_file else None
    transport = ZmqClientTransport(where, curve=curve)
    return Client(where, connect_timeout=timeout, await_ready=False, transport=transport)


def ask(
    question: Callable[[Client], Awaitable[T]],
    endpoint: str | None,
    timeout: float,
    key_file: Path | None = None,
    server_key_file: Path | None = None,
) -> T:
    """Connect, ask one question, disconnect. Raises ConnectTimeout, which says what is in the way, and TimeoutError."""

    async def go() -> T:
        # Connecting has a limit of its own, and takes a little longer to find out what is in the way.
        async with client_for(endpoint, timeout, key_file, server_key_file) as client, asyncio.timeout(timeout + 1):
            return await question(client)

    return asyncio.run(go())
