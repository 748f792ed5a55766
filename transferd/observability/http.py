"""A small HTTP/1.1 server for status pages: GET and HEAD of a few fixed paths, one request per connection.

h11 parses. The number of connections, the bytes of a header and the time of a connection are bounded. When all places
are taken, the server drops the oldest connection without a complete request, so that silent ones block no probe.

A web page from elsewhere must not read what is served here. Its host can have its own name resolve to this address
(DNS rebinding), and the browser then takes us for that host, but it still sends that name in `Host`. So a request is
answered only if its Host is an address, which no DNS answers for, or a name that is expected.
"""

from __future__ import annotations

import asyncio
import functools
import http
import ipaddress
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import cast

import h11
import structlog

from transferd.errors import ConfigError
from transferd.runtime.aio import Timer
from transferd.runtime.loop_turns import LoopTurns, Spent, loop_turns, now

log = structlog.get_logger(__name__)

# More than the kernel's queue delivers at once, so that a request is read before its connection becomes the oldest one,
# and few enough to leave descriptors for the daemon's clients (runtime/descriptors.py).
MAX_CONNECTIONS = 512
BACKLOG = 256
MAX_HEADER_BYTES = 16 * 1024
PIECE_BYTES = 4096  # small, because h11 checks the size of an incomplete header after each piece
REQUEST_TIMEOUT_S = 5.0
ANY_HOST = "*"
_HOST = re.compile(r"(\[(?P<address>[^\[\]]+)\]|(?P<name>[^:\[\]]+))(:\d*)?", re.ASCII)
ANSWER_BYTES = 64 * 1024  # of an answer, in a turn of the loop: metrics of many engines have 5 MB
ANSWER_S = 10.0  # how long a client may take to read its answer
LINGER_S = 1.0  # how long an answered client may take to close; further input is discarded


@dataclass(frozen=True, slots=True)
class Page:
    """A route's answer."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


Route = Callable[[str], Page | asyncio.Future[Page]]  # called with the query string


@dataclass(eq=False, repr=False)
class HttpServer:
    """Serves `routes` on host:port. With port 0, `port` is the real one after `start`.

    hosts: names that a request's Host may have, besides addresses and this machine's own; ANY_HOST for any.
    refused: requests and connections that were refused since the start, by reason.
    """

    listen: str
    routes: dict[str, Route]
    hosts: Collection[str] = ()
    max_connections: int = MAX_CONNECTIONS

    def __post_init__(self) -> None:
        own = (self.listen.rpartition(":")[0], "localhost", socket.gethostname())
        self._expected = {name.lower().rstrip(".") for name in (*own, *self.hosts)}
        self._server: asyncio.Server | None = None
        self._connections: dict[_Connection, None] = {}  # oldest first
        self.spent = Spent()  # by all requests: they have one share of the loop's time
        self.refused = Counter[str](
            http_bad_request=0, http_too_large=0, http_silent=0, http_crowded_out=0, http_wrong_host=0
        )
        self.port = 0

    async def start(self) -> None:
        """Listen. Raises ConfigError."""
        host, _, port = self.listen.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _Connection(self), host.strip("[]"), int(port), backlog=BACKLOG
            )
        except (OSError, OverflowError, UnicodeError) as error:
            problem = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            raise ConfigError("metrics.listen", f"cannot bind: {problem}", self.listen) from error
        self.port = self._server.sockets[0].getsockname()[1]
        if int(port) == 0:
            log.info("pages are served", url=f"http://{host}:{self.port}")

    async def close(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections):
            connection.drop()
        await self._server.wait_closed()
        self._server = None

    def opened(self, connection: _Connection) -> None:
        """Note a new connection; if there are too many, drop the oldest one."""
        self._connections[connection] = None
        if len(self._connections) > self.max_connections:
            oldest = next(iter(self._connections))
            oldest.drop("http_crowded_out")

    def closed(self, connection: _Connection) -> None:
        self._connections.pop(connection, None)

    def refuse(self, reason: str, peer: str, problem: str) -> None:
        self.refused[reason] += 1
        log.warning("http request refused", reason=reason, peer=peer, problem=problem)

    def answer(self, request: h11.Request, peer: str) -> Page | asyncio.Future[Page]:
        """The page for a request, or a future of it. Never raises, whatever the request is."""
        host = next((value.decode("latin-1") for name, value in request.headers if name == b"host"), "")
        if not is_expected(host, self._expected):
            self.refuse("http_wrong_host", peer, f"the Host {host[:80]!r} is not expected")
            what = b"this name is not expected; list it in metrics.hosts, or use an address of this machine\n"
            return Page(what, status=http.HTTPStatus.MISDIRECTED_REQUEST)
        if request.method not in (b"GET", b"HEAD"):
            return Page(b"method not allowed; use GET or HEAD\n", status=405, headers=(("allow", "GET, HEAD"),))
        target = request.target.decode("ascii", "replace")
        if target.lower().startswith("http://"):  # as clients send it to a proxy
            target = "/" + target[len("http://") :].partition("/")[2]
        path, _, query = target.partition("?")
        route = self.routes.get(path)
        if route is None:
            return Page(f"no such page; try {' '.join(self.routes)}\n".encode(), status=404)
        return route(query)


def is_expected(host: str, expected: Collection[str]) -> bool:
    """Whether a Host header, with or without a port, is empty, an address, or one of the expected names."""
    host = host.strip()
    if not host or ANY_HOST in expected:
        return True
    parts = _HOST.fullmatch(host)
    if parts is None:
        return False
    name = parts["address"] or parts["name"]
    if name.lower().rstrip(".") in expected:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class _Connection(asyncio.Protocol):
    """One connection, from its first byte to its end."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._http: h11.Connection | None = None  # created at the first byte, so that silent connections cost little
        self._transport: asyncio.Transport  # from connection_made on
        self._timer = Timer()
        self._answered = self._sent = False
        self._peer = ""
        self._received = b""
        self._rest = memoryview(b"")  # of the answer
        self._next: Callable[[], None] = self._read  # what to do in the next turn
        self._turns: LoopTurns = loop_turns()
        self.spent = server.spent
        self.closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the same methods but another base class
        host, port = (self._transport.get_extra_info("peername") or ("", 0))[:2]
        self._peer = f"{host}:{port}"
        self._timer.set(REQUEST_TIMEOUT_S, self.drop, "http_silent")
        self._server.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return
        waits, self._received = bool(self._received), self._received + data
        if waits:
            return
        if self._turns.free:
            self.work(1)
        else:
            self._transport.pause_reading()
            self._turns.wait(self)

    def work(self, _most: int) -> None:
        began = now()
        self._next()
        self._turns.took(self, now() - began)

    def _read(self) -> None:
        """Parse what has arrived, and answer a complete request."""
        data, self._received = self._received, b""
        self._transport.resume_reading()
        if self._http is None:
            self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEADER_BYTES)
        try:
            for start in range(0, len(data), PIECE_BYTES):
                self._http.receive_data(data[start : start + PIECE_BYTES])
                event = self._http.next_event()
                if isinstance(event, h11.Request):
                    page, head = self._server.answer(event, self._peer), event.method == b"HEAD"
                    if isinstance(page, Page):
                        self._answer(self._http, page, head=head)
                    else:
                        self._answered = True  # what comes now is discarded
                        page.add_done_callback(functools.partial(self._made, self._http, head))
                    return
        except h11.RemoteProtocolError as error:
            error.__traceback__ = None  # frames that refer to this object
            reason = "http_too_large" if error.error_status_hint == 431 else "http_bad_request"
            status = http.HTTPStatus(error.error_status_hint)
            self._server.refuse(reason, self._peer, status.phrase)
            self._answer(self._http, Page(f"{status.phrase}\n".encode(), status=status), head=False)

    def _made(self, connection: h11.Connection, head: bool, made: asyncio.Future[Page]) -> None:
        if not self.closed:
            what = "the page could not be made\n"
            bad = made.cancelled() or made.exception() is not None
            page = Page(what.encode(), status=500) if bad else made.result()
            self._next = functools.partial(self._answer, connection, page, head=head)
            self._turns.wait(self)

    def _answer(self, connection: h11.Connection, page: Page, *, head: bool) -> None:
        headers = [
            ("content-type", page.content_type),
            ("content-length", str(len(page.body))),
            ("connection", "close"),
            ("cache-control", "no-store"),
            *page.headers,
        ]
        reason = http.HTTPStatus(page.status).phrase.encode()
        self._answered = True
        start = connection.send(h11.Response(status_code=page.status, headers=headers, reason=reason)) or b""
        self._rest = memoryview(b"" if head else page.body)
        self._next = self._send
        self._timer.set(ANSWER_S, self.drop)
        self._transport.set_write_buffer_limits(0)  # so that `resume_writing` comes once everything has gone
        self._transport.write(start)
        self._send()

    def _send(self) -> None:
        """Write a piece of the answer, which all who get it share. The next one follows once this one has gone."""
        piece, self._rest = self._rest[:ANSWER_BYTES], self._rest[ANSWER_BYTES:]
        self._transport.write(piece)
        if self._rest:
            if not self._transport.get_write_buffer_size():
                self._turns.wait(self)
            return
        self._sent = True
        # Closing now would reset the connection while the client still sends, and the client would lose the answer.
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._timer.set(LINGER_S, self.drop)

    def resume_writing(self) -> None:
        if self._rest:
            self._turns.wait(self)

    def eof_received(self) -> bool:
        return self._answered and not self._sent  # whether to leave it open

    def connection_lost(self, _: Exception | None) -> None:
        self.closed = True
        self._timer.cancel()
        self._server.closed(self)
        self._http, self._rest = None, memoryview(b"")
        del self._next  # of this object itself: the collector, which runs rarely, would keep thousands of them

    def drop(self, reason: str = "") -> None:
        """Close it now. reason: the reason to report, unless the request was already answered."""
        if reason and not self._answered:
            self._server.refuse(reason, self._peer, "no complete request was received")
        self.closed = True
        self._server.closed(self)
        self._transport.abort()
