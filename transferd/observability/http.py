"""A small HTTP/1.1 server for reports: GET and HEAD of a few fixed paths, one request a connection.

Parsing is h11's. Everything is bounded: connections, header bytes, and the time a request may take.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import h11

from transferd.errors import ConfigError

MAX_CONNECTIONS = 64
MAX_HEADER_BYTES = 16 * 1024
REQUEST_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Page:
    """What a route answers."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Route = Callable[[], Page]


class HttpServer:
    """Serves `routes` on host:port. `port` is the real one after `start`, also for port 0."""

    def __init__(self, listen: str, routes: Mapping[str, Route]) -> None:
        self._listen = listen
        self._routes = dict(routes)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self) -> None:
        """Listen. Raises ConfigError."""
        host, _, port = self._listen.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._connected, host.strip("[]"), int(port), limit=MAX_HEADER_BYTES
            )
        except (OSError, OverflowError) as error:
            problem = getattr(error, "strerror", None) or str(error)
            raise ConfigError("metrics.listen", f"cannot be bound: {problem}", self._listen) from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        await self._server.wait_closed()
        self._server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) <= MAX_CONNECTIONS:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    await self._serve(reader, writer)
        except (TimeoutError, ConnectionError, asyncio.CancelledError):
            pass  # a client that dawdles or leaves, or we are closing
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        head = False
        try:
            request = await _request(connection, reader)
            if request is None:
                return
            head = request.method == b"HEAD"
            page = self._answer(request)
        except h11.RemoteProtocolError as error:
            page = Page(f"{error}\n".encode(), status=error.error_status_hint)
        headers = [
            ("content-type", page.content_type),
            ("content-length", str(len(page.body))),
            ("connection", "close"),
            ("cache-control", "no-store"),
        ]
        writer.write(connection.send(h11.Response(status_code=page.status, headers=headers)) or b"")
        if not head:
            writer.write(page.body)
        await writer.drain()

    def _answer(self, request: h11.Request) -> Page:
        if request.method not in (b"GET", b"HEAD"):
            return Page(b"only GET and HEAD\n", status=405)
        path = request.target.partition(b"?")[0].decode("ascii", "replace")
        route = self._routes.get(path)
        if route is None:
            return Page(f"not here; try {' '.join(self._routes)}\n".encode(), status=404)
        return route()


async def _request(connection: h11.Connection, reader: asyncio.StreamReader) -> h11.Request | None:
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(4096))
        elif isinstance(event, h11.Request):
            return event
        else:  # the client closed without a request
            return None
