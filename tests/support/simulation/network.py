"""SimNetwork: the transport seam without sockets: one daemon, many clients, connections that take time and break.

What holds of ZeroMQ holds here. Messages of one connection arrive in the order sent; a connection
that breaks loses the tail of what was in it; the next one has another name at the daemon, so an
answer to the old name goes nowhere. What a client sends while nobody is connected waits for the
connection, up to a bound; past it, and when a peer does not read, `send` takes nothing (EAGAIN).
The real transports pass the same suite: tests/wire/test_transport_contract.py.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context

from tests.support.named_peers import NamedPeers
from tests.support.simulation.faults import NetworkFaults, note
from transferd.errors import Closed, ConfigError

SEND_HWM = 1024  # messages that wait for a daemon that is not there, or for a peer that does not read
REMEMBERED = 8  # messages of a connection that may be sent again on the next one
ENDPOINT = "sim://daemon"


class _Pipe:
    """One direction of one connection: first in, first out, each message after its latency."""

    def __init__(
        self, label: str, network: SimNetwork, receiver: Context | None, deliver: Callable[[bytes], None]
    ) -> None:
        """receiver: messages arrive in its process, which may be suspended (loop.py)."""
        self._label = label
        self._network = network
        self._receiver = receiver
        self._deliver = deliver
        self._on_the_way: deque[tuple[bytes, asyncio.TimerHandle]] = deque()
        self._last_arrival = 0.0
        self.arrived: deque[bytes] = deque(maxlen=REMEMBERED)

    def send(self, payload: bytes) -> bool:
        """False: too much is on its way, or the other end does not read."""
        network = self._network
        refuse = network.faults.refuse
        if len(self._on_the_way) >= SEND_HWM or (refuse and network.rng.random() < refuse):
            network.refused += 1
            note(f"{self._label}: not taken")
            return False
        self.put(payload)
        return True

    def put(self, payload: bytes) -> None:
        """What was taken before: it goes."""
        loop, network = asyncio.get_running_loop(), self._network
        # Never before the message ahead; those due together each deliver the head of the line.
        due = max(self._last_arrival, loop.time() + network.faults.latency.draw(network.rng))
        self._last_arrival = due
        context = None if self._receiver is None else self._receiver.copy()
        self._on_the_way.append((payload, loop.call_at(due, self._arrive, context=context)))

    def lose_tail(self) -> None:
        """The connection breaks: from some message on, nothing arrives any more."""
        network = self._network
        survivors = 0
        while survivors < len(self._on_the_way) and network.rng.random() >= network.faults.lose:
            survivors += 1
        self.lose(len(self._on_the_way) - survivors)

    def lose(self, count: int | None = None) -> None:
        """The last `count` messages, or all, do not arrive."""
        for _ in range(len(self._on_the_way) if count is None else count):
            self._on_the_way.pop()[1].cancel()
            self._network.lost += 1
            note(f"{self._label}: lost")

    def _arrive(self) -> None:
        payload, _ = self._on_the_way.popleft()
        self.arrived.append(payload)
        note(f"{self._label}: {len(payload)} bytes")
        self._deliver(payload)


class _Connection:
    """From its making to its break: a name at the daemon, and a pipe each way."""

    def __init__(self, peer: bytes, network: SimNetwork, client: SimClientTransport) -> None:
        self.peer = peer
        label = peer.decode(errors="replace")
        server = network.server_context
        self.outward = _Pipe(f"{label} to daemon", network, server, lambda payload: network.to_server(peer, payload))
        self.inward = _Pipe(f"daemon to {label}", network, client.context, client.received)


class SimNetwork:
    """Connects clients to one daemon at a time. `server()` and `client(name)` make the transports.

    faults: the plan, may be replaced at any time. lost, duplicated, refused: messages so far. refused_at: when one
    for this connection, or of it, was refused last.
    """

    def __init__(self, *, faults: NetworkFaults | None = None, rng: random.Random | None = None) -> None:
        self.faults = faults or NetworkFaults()
        self.rng = rng or random.Random(0)
        self.lost = 0
        self.duplicated = 0
        self.refused = 0
        self.refused_at: dict[bytes, float] = {}
        self._server: SimServerTransport | None = None
        self._clients: dict[str, SimClientTransport] = {}
        self._connections: dict[bytes, _Connection] = {}  # standing ones, by the daemon's name for them
        self._numbers = itertools.count(1)

    @property
    def server_context(self) -> Context | None:
        """That of the process that serves now."""
        return None if self._server is None else self._server.context

    def server(self) -> SimServerTransport:
        return SimServerTransport(self)

    def client(self, name: str) -> SimClientTransport:
        """A client's end. `name` is for `cut`, `mend` and the trace; the daemon sees a name per connection."""
        return SimClientTransport(self, name)

    def cut(self, name: str) -> None:
        """Break a client's connection. It stays broken until `mend`."""
        client = self._clients[name]
        client.broken = True
        self._disconnect(client)

    def mend(self, name: str) -> None:
        """Let a client connect again."""
        client = self._clients.get(name)
        if client is not None:
            client.broken = False
            self._connect(client)

    # --- called by the transports -------------------------------------------------------------------

    def listen(self, server: SimServerTransport) -> None:
        if self._server is not None:
            raise ConfigError("server.endpoint", "another daemon is serving there", ENDPOINT)
        self._server = server
        for client in self._clients.values():
            self._connect(client)

    def stop_listening(self, server: SimServerTransport) -> None:
        """What the daemon sent last still arrives (it lingers); what is for it does not."""
        if self._server is server:
            self._server = None
            for client in self._clients.values():
                if client.connection is not None:
                    client.connection.outward.lose()
                    self._forget(client)

    def crash(self) -> None:
        """The daemon's process dies: nothing reaches it, or leaves it, any more; the next one may listen."""
        self._server = None
        for client in self._clients.values():
            if client.connection is not None:
                client.connection.outward.lose()
                client.connection.inward.lose_tail()
                self._forget(client)

    def join(self, client: SimClientTransport) -> None:
        if client.name in self._clients:
            raise ConfigError("endpoint", "is used by another client of this name", client.name)
        self._clients[client.name] = client
        self._connect(client)

    def leave(self, client: SimClientTransport) -> None:
        """What the client sent last still arrives; what is for it does not."""
        if self._clients.get(client.name) is client:
            del self._clients[client.name]
            if client.connection is not None:
                client.connection.inward.lose()
                self._forget(client)

    def to_client(self, peer: bytes, payload: bytes) -> bool:
        connection = self._connections.get(peer)
        if connection is None:
            return False
        return self._taken(connection, connection.inward.send(payload))

    def to_daemon(self, connection: _Connection, payload: bytes) -> bool:
        return self._taken(connection, connection.outward.send(payload))

    def _taken(self, connection: _Connection, taken: bool) -> bool:
        if not taken:
            self.refused_at[connection.peer] = asyncio.get_running_loop().time()
        return taken

    def to_server(self, peer: bytes, payload: bytes) -> None:
        if self._server is not None:
            self._server.received(peer, payload)

    # --- inside -------------------------------------------------------------------------------------

    def _connect(self, client: SimClientTransport) -> None:
        if self._server is None or client.broken or client.connection is not None:
            return
        peer = f"{client.name}/{next(self._numbers)}".encode()
        client.connection = self._connections[peer] = _Connection(peer, self, client)
        note(f"{peer.decode()} connected")
        client.connected()

    def _disconnect(self, client: SimClientTransport) -> None:
        connection = client.connection
        if connection is None:
            return
        again = [payload for payload in connection.outward.arrived if self.rng.random() < self.faults.duplicate]
        connection.outward.lose_tail()
        connection.inward.lose_tail()
        self.duplicated += len(again)
        client.again.extend(again)
        self._forget(client)

    def _forget(self, client: SimClientTransport) -> None:
        assert client.connection is not None
        note(f"{client.connection.peer.decode()} disconnected")
        del self._connections[client.connection.peer]
        client.connection = None


class SimServerTransport(NamedPeers):
    """The daemon's end."""

    endpoints = (ENDPOINT,)

    def __init__(self, network: SimNetwork) -> None:
        self._network = network
        self._on_message: Callable[[bytes, bytes], None] | None = None
        self.context: Context | None = None

    def start(self, on_message: Callable[[bytes, bytes], None], *_: object) -> None:
        self._on_message, self.context = on_message, copy_context()
        self._network.listen(self)

    def send(self, peer: bytes, payload: bytes) -> bool:
        return self._on_message is not None and self._network.to_client(peer, payload)

    def close(self) -> None:
        self._on_message = None
        self._network.stop_listening(self)

    def received(self, peer: bytes, payload: bytes) -> None:
        if self._on_message is not None:
            self._on_message(peer, payload)


class SimClientTransport:
    """A client's end: a ClientTransport. `again`: what it sends once more when it is connected."""

    def __init__(self, network: SimNetwork, name: str) -> None:
        self.endpoint = ENDPOINT
        self.name = name
        self.broken = False
        self.connection: _Connection | None = None
        self.again: deque[bytes] = deque()
        self._network = network
        self._on_message: Callable[[bytes], None] | None = None
        self.context: Context | None = None

    def start(self, on_message: Callable[[bytes], None]) -> None:
        self._on_message, self.context = on_message, copy_context()
        self._network.join(self)

    def send(self, payload: bytes) -> bool:
        if self._on_message is None:
            raise Closed("the client is closed")
        if self.connection is not None:
            return self._network.to_daemon(self.connection, payload)
        if len(self.again) >= SEND_HWM:
            return False
        self.again.append(payload)
        return True

    def close(self) -> None:
        self._on_message = None
        self._network.leave(self)

    async def obstacle(self) -> str:
        return ""

    # --- called by the network ----------------------------------------------------------------------

    def connected(self) -> None:
        assert self.connection is not None
        while self.again:
            self.connection.outward.put(self.again.popleft())

    def received(self, payload: bytes) -> None:
        if self._on_message is not None:
            self._on_message(payload)
