"""The socket seam: whole messages in and out, never blocking, on one event loop.

Contract, for both sides:

1. `start` is called once, on the running loop; callbacks run on that loop and never inside `send`.
2. `send` never blocks and never raises because of a peer: it returns False if the message was not accepted.
   True means that it was handed to the network, not that it arrived.
3. Messages of one connection keep their order. A connection that breaks loses the messages in flight.
4. `close` is idempotent; no callback runs after it.

How the ZeroMQ implementations keep it: the loop watches the file descriptor of one plain socket. libzmq's descriptor
is edge-triggered: it signals a change once, and both reading *and sending* may consume that signal. Hence the one rule
here: after any work on the socket, check EVENTS again before relying on the loop to wake us. One check is scheduled
for all work of a turn of the loop. It reads a bounded number of messages, so that timers and other sockets get their
turn, and schedules another if there may be more.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, cast

import zmq

from transferd.config import ServerSection
from transferd.errors import Closed, ConfigError
from transferd.wire.abandoned import free_with
from transferd.wire.credentials import resolve_group, resolve_uids
from transferd.wire.curve import ClientCurve, ServerCurve, client_keys
from transferd.wire.endpoint import EndpointLock
from transferd.wire.frames import number_of, one_frame
from transferd.wire.obstacle import find_obstacle
from transferd.wire.peers import LIBZMQ_NAMED, OBSERVER_BY_ENDPOINT, Peers
from transferd.wire.zap import ConnectionGate

if TYPE_CHECKING:
    from transferd.wire.connection_limit import ConnectionLimit

# A plain int: combining two flags of the enum at every send costs more than the frame.
_MORE, _READABLE = int(zmq.SNDMORE | zmq.DONTWAIT), int(zmq.POLLIN)
# The ZAP domain of each socket's unix endpoints (that of tcp is zap.KEYS).
_EVERYBODY, _OBSERVERS = b"endpoint", b"observer_endpoint"
REFUSALS = ("unknown_key", "unknown_user", "handshake_failed", "too_many_connections")
DRAIN_LIMIT = 64  # messages per wake-up: about a millisecond of work before timers run again

ServerMessage = Callable[[bytes, bytes | memoryview], None]
ClientMessage = Callable[[bytes | memoryview], None]


class ServerTransport(Protocol):
    """The daemon's side: many peers, each with an opaque name for as long as it stays connected."""

    @property
    def endpoints(self) -> Sequence[str]:
        """The endpoints that this transport listens on; after `start`, with wildcards filled in."""
        ...

    def start(self, on_message: ServerMessage) -> None:
        """Listen, and call `on_message(peer, payload)` for each message. Raises ConfigError naming the endpoint.

        A message that is not exactly one frame arrives as an empty payload, which the protocol rejects.
        """
        ...

    def send(self, peer: bytes, payload: bytes) -> bool:
        """Send one message. Returns False if the peer is gone or does not read its answers."""
        ...

    # The defaults are for a transport that has no observers, keys or limits.
    def observes(self, peer: bytes) -> bool:  # noqa: ARG002
        """Whether this peer is an observer: it uses the observers' endpoint, or its uid is in the list of observers."""
        return False

    def describe(self, peer: bytes) -> str:  # noqa: ARG002
        """Where this peer connects from, for a log; "" if unknown."""
        return ""

    def refused(self) -> dict[str, int]:
        """Connections refused since the start, by reason."""
        return {}

    def read_keys(self) -> tuple[int, int]:
        """Read the keys of permitted clients again; return how many were added and revoked. Raises ConfigError."""
        return 0, 0

    def close(self) -> None: ...


class ClientTransport(Protocol):
    """A client's side: one daemon. It reconnects by itself for as long as it is open."""

    def start(self, on_message: ClientMessage) -> None:
        """Connect in the background; call `on_message(payload)` for each message. Raises ConfigError."""
        ...

    def send(self, payload: bytes) -> bool:
        """Send one message, even before a connection exists. Returns False if the queue is full. Raises Closed."""
        ...

    def close(self) -> None: ...

    async def obstacle(self) -> str:
        """Say briefly why the daemon cannot be reached; "" if no reason can be found. Takes at most a second."""
        ...


class Channel:
    """One ZeroMQ socket on the running loop: calls `receive` for every message and never waits.

    send: sends a frame, with libzmq's flags; then call `check_soon`.
    If it is dropped without `close`, socket and context are freed all the same.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        receive: Callable[[zmq.Socket[bytes]], None],
        *,
        owns_context: bool = True,
    ) -> None:
        """Owns the socket, and the context if `owns_context`. receive: reads one message, or raises zmq.Again."""
        self.context = context
        self._owns_context = owns_context
        self.socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._check_scheduled = False
        # Without pyzmq's layer in Python, which is for options that we do not use.
        self.send = cast("Callable[[bytes, int], object]", functools.partial(zmq.backend.Socket.send, socket))
        self._fd = number_of(socket, zmq.FD)
        self._events = cast("Callable[[], int]", functools.partial(socket.getsockopt, zmq.EVENTS))
        self._freed = free_with(self, socket, context if owns_context else None)
        self._loop.add_reader(self._fd, self._wake)
        self.check_soon()  # messages that arrived before now cause no new edge

    def check_soon(self) -> None:
        """Call after every send: it may have consumed the edge that announced a message."""
        if not self._check_scheduled:
            self._check_scheduled = True
            self._loop.call_soon(self._check)

    def close(self) -> None:
        """Flush sent messages (bounded by LINGER), then free socket and context. The loop may be closed."""
        self._freed.detach()
        if self._loop.is_closed():
            self.socket.close(0)
        else:
            self._loop.remove_reader(self._fd)
            self.socket.close()
        if self._owns_context:
            self.context.term()

    def _wake(self) -> None:
        """The descriptor has signalled: read one message at once. `_check` reads the others.

        So the usual single message waits for nothing, and one check follows both it and what it makes us send.
        """
        if self.socket.closed:
            return
        try:
            self._receive(self.socket)
        except zmq.Again:
            pass  # the signal was for something else
        finally:
            self.check_soon()  # even if a callback raised: the loop reports the error, and we read the other messages

    def _check(self) -> None:
        """Read a bounded number of messages, if there are any. Once none is left, the descriptor signals new ones."""
        self._check_scheduled = False
        socket = self.socket
        # A failing receive costs four times as much as this, and usually there is no message.
        if socket.closed or not self._events() & _READABLE:
            return
        drained = False
        try:
            for _ in range(DRAIN_LIMIT):
                self._receive(socket)
                if socket.closed:
                    return
        except zmq.Again:
            drained = True
        finally:
            if not drained:
                self.check_soon()


def _is_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")


class ZmqServerTransport:
    """ServerTransport on ROUTER sockets: one for all endpoints, and one for observers if they have their own.

    zap.py decides who may connect; peers.py tells the peers apart.
    """

    SEND_HWM = 16384  # answers queued for one peer: Accepted and Result for a full queue, with room to spare
    RECEIVE_HWM = 4096  # messages of one peer queued here; further ones wait at the sender
    LINGER_MS = 250  # how long close() waits for a peer that does not read

    def __init__(self, config: ServerSection) -> None:
        self._config = config
        self._marked = bool(config.observer_uids or config.observer_endpoint)
        self._peers = Peers(marked=self._marked)
        self._channel: Channel | None = None
        self._observers: Channel | None = None
        self.observer_endpoint = config.observer_endpoint
        self._gate: ConnectionGate | None = None
        self._limits: list[ConnectionLimit] = []
        self._locks: list[EndpointLock] = []
        self._endpoints: list[str] = list(config.endpoints)

    @property
    def endpoints(self) -> Sequence[str]:
        return self._endpoints

    def start(self, on_message: ServerMessage) -> None:
        """Lock and bind every endpoint, or none. Raises ConfigError."""
        config = self._config
        curve = ServerCurve.load(config.curve) if config.curve is not None else None
        allowed = resolve_uids("server.allowed_uids", config.allowed_uids)
        observing = resolve_uids("server.observer_uids", config.observer_uids)
        self._peers = Peers(marked=self._marked, observers=observing - allowed)
        group = resolve_group("server.socket_group", config.socket_group)
        observer_group = resolve_group("server.observer_group", config.observer_group)
        uids = {_EVERYBODY: allowed and allowed | observing, _OBSERVERS: observing and allowed | observing}
        keys = curve.allowed if curve is not None else None
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        everybody = context.socket(zmq.ROUTER)
        observers = context.socket(zmq.ROUTER) if config.observer_endpoint else None
        try:
            if keys is not None or any(uids.values()):
                self._gate = ConnectionGate(context, uids, keys or frozenset())
            self._prepare(everybody, _EVERYBODY if uids[_EVERYBODY] else b"")
            mode = int(config.socket_mode, 8)
            self._endpoints = self._bind_all(everybody, "endpoint", config.endpoints, curve, mode, group)
            if observers is not None:
                self._prepare(observers, _OBSERVERS if uids[_OBSERVERS] else b"")
                mode, endpoints = int(config.observer_mode, 8), [config.observer_endpoint]
                bound = self._bind_all(observers, "observer_endpoint", endpoints, curve, mode, observer_group)
                self.observer_endpoint = bound[0]
        except BaseException:
            self._close_limits()
            for socket in filter(None, (everybody, observers)):
                socket.close(0)
            self._release(context)
            raise
        self._channel = Channel(context, everybody, self._peers.receiver(on_message), owns_context=False)
        if observers is not None:
            receive = self._peers.observers_receiver(on_message)
            self._observers = Channel(context, observers, receive, owns_context=False)

    def _prepare(self, socket: zmq.Socket[bytes], domain: bytes) -> None:
        """Do everything that must precede bind. domain: the ZAP domain; without one, libzmq does not ask the gate."""
        from transferd.runtime.descriptors import (
            first_refused,  # imported here because clients, which share this module, do not need it
        )
        from transferd.wire.connection_limit import ConnectionLimit

        self._set_options(socket)
        self._limits.append(ConnectionLimit(socket.context, socket, first_refused(self._config.max_connections)))
        if domain:
            socket.setsockopt(zmq.ZAP_DOMAIN, domain)

    def _set_options(self, socket: zmq.Socket[bytes]) -> None:
        endpoints = [*self._config.endpoints, self._config.observer_endpoint]
        set_common_options(socket, endpoints, self.LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, self.SEND_HWM)
        socket.setsockopt(zmq.RCVHWM, self.RECEIVE_HWM)
        socket.setsockopt(zmq.MAXMSGSIZE, receive_limit(self._config.max_message))
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a peer that is gone fails instead of being dropped
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)  # no client can take over another's name, and its answers
        socket.setsockopt(zmq.BACKLOG, 1024)  # an engine may start hundreds of clients at once

    def _bind_all(
        self,
        socket: zmq.Socket[bytes],
        key: str,
        endpoints: Sequence[str],
        curve: ServerCurve | None,
        mode: int,
        gid: int,
    ) -> list[str]:
        """Bind one socket to all endpoints; return the actual endpoints in the same order.

        A socket option applies only to later binds. So unix sockets come first: the kernel identifies their peers,
        and clients on this machine (the command line, an engine) need no keys.
        """
        bound: dict[str, str] = {}
        for endpoint in sorted(endpoints, key=_is_tcp):
            if curve is not None and _is_tcp(endpoint):
                curve.apply(socket)
            lock = EndpointLock(endpoint, f"server.{key}")
            self._locks.append(lock)
            bound[endpoint] = lock.bind(socket, mode, gid)
        return [bound[endpoint] for endpoint in endpoints]

    def observes(self, peer: bytes) -> bool:
        return self._peers.observes(peer)

    def describe(self, peer: bytes) -> str:
        return self._peers.describe(peer)

    def refused(self) -> dict[str, int]:
        """Connections refused since the start, by reason."""
        counts = Counter[str](dict.fromkeys(REFUSALS, 0))
        for source in (self._gate, *self._limits):
            if source is not None:
                counts.update(source.refused)
        return dict(counts)

    def read_keys(self) -> tuple[int, int]:
        """Read `curve.client_keys_dir` again; return how many keys were added and revoked. Raises ConfigError.

        Connections with a revoked key must end, but libzmq does not say which these are. So if any key was revoked,
        every tcp connection ends; clients with a valid key reconnect by themselves.
        """
        curve = self._config.curve
        if self._gate is None or curve is None or not curve.client_keys_dir:
            return 0, 0
        before, self._gate.keys = self._gate.keys, client_keys(curve.client_keys_dir)
        revoked = before - self._gate.keys
        if revoked:
            for limit in self._limits:
                limit.end_tcp()
        return len(self._gate.keys - before), len(revoked)

    def send(self, peer: bytes, payload: bytes) -> bool:
        channel, name = self._channel, peer
        if self._marked and peer[:1] != LIBZMQ_NAMED:
            channel = self._observers if peer[:1] == OBSERVER_BY_ENDPOINT else channel
            name = peer[1:]
        if channel is None:
            return False
        try:
            channel.send(name, _MORE)
            channel.send(payload, zmq.DONTWAIT)
        except zmq.Again:  # the peer does not read its answers
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:  # the peer is gone
                raise
            return False
        finally:
            channel.check_soon()
        return True

    def close(self) -> None:
        channel, observers = self._channel, self._observers
        self._channel = self._observers = None
        if channel is None:
            return
        self._close_limits()
        if observers is not None:
            observers.close()
        channel.close()
        self._release(channel.context)

    def _close_limits(self) -> None:
        while self._limits:
            self._limits.pop().close()

    def _release(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        if self._gate is not None:
            self._gate.close()
        context.term()
        for lock in self._locks:
            lock.release()
        self._locks, self._gate = [], None


class ZmqClientTransport:
    """ClientTransport on a DEALER socket. curve: keys, which a daemon may require on tcp."""

    SEND_HWM = 16384  # requests queued for a daemon that reads slowly
    LINGER_MS = 100  # to get a Bye out

    def __init__(self, endpoint: str, *, curve: ClientCurve | None = None) -> None:
        self._endpoint = endpoint
        self._curve = curve if _is_tcp(endpoint) else None
        self._channel: Channel | None = None

    def start(self, on_message: ClientMessage) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        try:
            self._set_options(socket)
            socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            context.term()
            problem = f"cannot connect: {os.strerror(error.errno or 0)}"
            if error.errno in (zmq.EPROTONOSUPPORT, zmq.EINVAL):
                problem = "expected ipc:///path or tcp://host:port"
            raise ConfigError("endpoint", problem, self._endpoint) from error
        self._channel = Channel(context, socket, lambda socket: on_message(one_frame(socket)))

    def _set_options(self, socket: zmq.Socket[bytes]) -> None:
        set_common_options(socket, [self._endpoint], self.LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, self.SEND_HWM)
        # No limit is needed: each message answers a request that we hold in memory. With a limit, the daemon would
        # drop answers to a client that pushes many tasks before it reads.
        socket.setsockopt(zmq.RCVHWM, 0)
        # Keep messages that were sent without a connection. (1 would drop them, which the protocol's sessions make
        # unnecessary; at a disconnect it would also drop every answer that has arrived but was not read.)
        socket.setsockopt(zmq.IMMEDIATE, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        if self._curve is not None:
            self._curve.apply(socket)

    async def obstacle(self) -> str:
        return await find_obstacle(self._endpoint, self._set_options, keys=self._curve is not None)

    def send(self, payload: bytes) -> bool:
        channel = self._channel
        if channel is None:
            raise Closed("the client is closed")
        try:
            channel.send(payload, zmq.DONTWAIT)
        except zmq.Again:
            return False
        finally:
            channel.check_soon()
        return True

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def receive_limit(max_message: int) -> int:
    """Message size above which libzmq closes the connection. Below it, but above max_message, we answer an error."""
    return max_message + max(max_message, 16 * 1024 * 1024)


def set_common_options(socket: zmq.Socket[bytes], endpoints: Sequence[str], linger_ms: int) -> None:
    socket.setsockopt(zmq.LINGER, linger_ms)
    # Resolve names like "localhost" to IPv4, unless an endpoint is written as IPv6.
    socket.setsockopt(zmq.IPV6, int(any(endpoint.startswith("tcp://[") for endpoint in endpoints)))
    # The protocol's own heartbeat shows that the peer's event loop is alive. ZMTP's does not (an I/O thread answers
    # it), and it would close the connection of a process that is only suspended, with every message in flight.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    # Drop a remote host that lost power after a minute. No effect on ipc.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)  # how long a connection without a greeting may hold a descriptor
