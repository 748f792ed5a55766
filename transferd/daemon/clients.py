"""The daemon's clients: which are connected, their sessions, and every message to them.

A client is identified by the name of its connection. It has a session (see protocol.py) from its first message until
it leaves or is lost. When an answer cannot be delivered, a new session begins, so that the client repeats its requests.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from transferd.daemon.engine import HostedEngine
from transferd.observability.recorder import Recorder
from transferd.tasks import ErrorInfo, TaskResult
from transferd.wire import protocol as wire
from transferd.wire.transport import ServerPeer, ServerTransport

SESSIONS_KEPT = 64  # of one connection; each lost answer begins another


@dataclass(slots=True, eq=False)
class KnownClient:
    """A connected client, or one that keeps an engine and may come back. The connections bound their number."""

    peer: bytes  # the name of its connection
    first_session: int  # the first session of this connection; later ones have larger numbers
    session: int
    came_at: float
    seen_at: float
    connection: ServerPeer | None = None  # None if it had ended already when its first message was handled
    observer: bool = False  # it may only ask for reports
    hello_requested: bool = False  # we have asked it to say Hello, because a newer session has begun
    behind: bool = False  # its newest message was of an earlier session; it will resend that message
    engine_name: str = ""  # from its Hello; "" before the first one
    said: wire.Hello | None = field(default=None, repr=False)  # its newest Hello
    engine: HostedEngine | None = None  # its engine (engines.py)
    holds: bool = False  # it has registered, offered, attached or pushed, so its engine stays while it lives
    refused: ErrorInfo | None = None  # why it does not belong to the engine of that name
    ended: ErrorInfo | None = None  # how the registration ended whose token its Hello shows
    generation: str | None = None  # from its Hello: its engine's generation; None without one
    turned_away: int = 0  # tasks that it has rejected itself
    waiting: set[asyncio.Future[None]] = field(default_factory=set)  # its requests that wait for something
    welcomed: deque[int] = field(default_factory=lambda: deque(maxlen=SESSIONS_KEPT))  # sessions that it may name

    @property
    def belongs(self) -> bool:
        """Whether it is a part of its engine; else it may only control the engine."""
        return self.engine is not None and self.refused is None

    @property
    def who(self) -> tuple[int | None, int | None]:
        """The user id and process that are connected, from the kernel; None and None on tcp."""
        credentials = None if self.connection is None else self.connection.credentials
        return (None, None) if credentials is None else (credentials.uid, credentials.pid)

    @property
    def uid(self) -> int | None:
        """The user id of the connected process; None on tcp."""
        return self.who[0]


class Clients:
    """The connected clients. Borrows the transport. undeliverable: how many answers could not be delivered."""

    def __init__(self, transport: ServerTransport, boot_id: str, recorder: Recorder) -> None:
        self.transport = transport
        self.boot_id = boot_id
        self.undeliverable = 0
        self.recorder = recorder
        self._peers: dict[bytes, KnownClient] = {}
        self.get = self._peers.get
        self._left = asyncio.Event()  # set when a client leaves
        # Start with a number that no earlier or later daemon uses, and that fits an int of any language.
        self._sessions = itertools.count((zlib.crc32(boot_id.encode()) << 20) + 1)

    def __len__(self) -> int:
        return len(self._peers)

    @property
    def connected(self) -> int:
        """How many have an open connection."""
        return sum(self.transport.peer(peer) is not None for peer in self._peers)

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._peers))

    def of(self, engine: str) -> Iterator[KnownClient]:
        """The clients that name this engine, or, if it is "", all; the oldest first."""
        return (client for client in self._peers.values() if engine in ("", client.engine_name))

    def at(self, engine: HostedEngine) -> list[KnownClient]:
        """The clients that are bound to this engine, the oldest first."""
        return [client for client in self._peers.values() if client.engine is engine]

    def by_engine(self) -> dict[HostedEngine | None, list[KnownClient]]:
        """The same for all engines that have some: who asks for each engine walks all clients once."""
        each = defaultdict[HostedEngine | None, list[KnownClient]](list)
        for client in self._peers.values():
            each[client.engine].append(client)
        return dict(each)

    def __getitem__(self, peer: bytes) -> KnownClient:
        return self._peers[peer]

    def engine_of(self, peer: bytes) -> str | None:
        """The name of the engine in a client's Hello; None before its first Hello."""
        client = self._peers.get(peer)
        return None if client is None else client.engine_name or None

    def meet(self, peer: bytes, now: float) -> KnownClient:
        """Register a client at its first message."""
        session, connection = next(self._sessions), self.transport.peer(peer)
        observer = connection is not None and connection.observer
        client = self._peers[peer] = KnownClient(peer, session, session, now, now, connection, observer)
        self.recorder.aside("", "client came", peer, client.session)
        return client

    def leave(self, peer: bytes) -> KnownClient | None:
        """Remove and return a client that left or was lost; None if it was not known."""
        self._left.set()
        return self._peers.pop(peer, None)

    async def gone(self, session: int, *, but: KnownClient) -> None:
        """Wait until no client other than `but` may name this session. Returns at once if there is none."""
        while any(session in client.welcomed for client in self._peers.values() if client is not but):
            self._left.clear()
            await self._left.wait()

    def send(self, peer: bytes, seq: int, body: wire.ReplyBody) -> None:
        """Send an answer. Does nothing if the client is not connected any more."""
        if not self._sent(peer, wire.encode_reply(seq, body)):
            self._answer_lost(peer, seq)

    def refuse_stale(self, peer: bytes, seq: int, refused: wire.Refused) -> None:
        """Refuse a request of another connection's session. If this is lost, no new session begins.

        The client repeats the request anyway, once its next heartbeat names the current session.
        """
        if not self._sent(peer, wire.encode_reply(seq, refused)):
            self.undeliverable += 1

    def tell_of_session(self, client: KnownClient) -> None:
        """Make this client say Hello, once, because an answer to it was lost. Its next heartbeat would do so later."""
        if not client.hello_requested:
            lost = wire.Refused(ErrorInfo(wire.STALE_SESSION, "an answer was lost; say Hello"))
            client.hello_requested = self._sent(client.peer, wire.encode_reply(0, lost))

    def deliver(self, client: bytes, seq: int, result: TaskResult) -> None:
        """Send one terminal result to the client that waits for it.

        Raises what sending raises; the client then repeats its request, as after any lost answer.
        """
        there = False
        try:
            there = self._sent(client, wire.encode_reply(seq, wire.Result(result)))
        finally:
            if not there:
                self._answer_lost(client, seq)

    def progressed(self, client: bytes, seq: int, layers: int) -> None:
        """Report the part of a task that is there. If the report is lost, the result still comes."""
        self._sent(client, wire.encode_reply(seq, wire.TaskProgress(layers)))

    def say_hello(self, engine: HostedEngine, why: str, *, but: KnownClient | None = None) -> None:
        """Make the clients of an engine say Hello at once, because the Welcome contains the change."""
        again = wire.Refused(ErrorInfo(wire.STALE_SESSION, f"{why}; say Hello"))
        for client in self.at(engine):
            if client is not but:
                self.send(client.peer, 0, again)

    def where(self, peer: bytes) -> str:
        """Where a peer connects from, for a log; "" if unknown."""
        connection = self._connection(peer)
        return "" if connection is None else connection.where

    def _sent(self, peer: bytes, payload: bytes) -> bool:
        """Send a message. Returns False if the peer is gone or does not read its answers."""
        connection = self._connection(peer)
        return connection is not None and connection.send(payload)

    def _connection(self, peer: bytes) -> ServerPeer | None:
        client = self._peers.get(peer)
        # A message that cannot be read is refused before its sender is a client.
        return self.transport.peer(peer) if client is None else client.connection

    def _answer_lost(self, peer: bytes, seq: int) -> None:
        """Begin a new session: the client learns of it at its next heartbeat and repeats its pending requests."""
        self.undeliverable += 1
        client = self._peers.get(peer)
        if client is not None:
            client.session = next(self._sessions)
            self.recorder.aside("", "answer lost", peer, seq, client.session)
