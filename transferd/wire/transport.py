"""The socket seam: whole messages in and out, never blocking, on one event loop.

Contract, for both sides:

1. `start` is called once, on the running loop; callbacks run on that loop and never inside `send`.
2. `send` never blocks and never raises because of a peer: it returns False if the message was not accepted.
   True means that it was handed to the network, not that it arrived.
3. Messages of one connection keep their order. A connection that breaks loses the messages in flight.
4. `close` is idempotent; no callback runs after it.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast

import zmq

from transferd.config import ServerSection
from transferd.errors import Closed, ConfigError, NoDescriptors
from transferd.runtime.descriptors import check_free
from transferd.wire.credentials import Credentials, resolve_group, resolve_uids
from transferd.wire.curve import ClientCurve, client_keys, server_side
from transferd.wire.obstacle import find_obstacle

if TYPE_CHECKING:
    from transferd.wire.acceptor import Acceptor
    from transferd.wire.connection import Door
    from transferd.wire.curve_server import CurveServer
    from transferd.wire.passing import Descriptors


def one_frame(socket: zmq.Socket[bytes]) -> bytes | memoryview:
    """Receive a message of one frame, as a view of it; return b"" if it has several: drops the others.

    A copying `recv` removes the message from the socket before it runs out of memory for the copy.
    """
    frame = socket.recv(zmq.DONTWAIT, copy=False)
    if frame.more:
        socket.recv_multipart(zmq.DONTWAIT)
        return b""
    return frame.buffer


_READABLE = int(zmq.POLLIN)
ROUTED = frozenset((b"DEALER", b"REQ", b"ROUTER"))  # the sockets of peers that a ROUTER speaks with
DRAIN_LIMIT = 64  # messages per wake-up: about a millisecond of work before timers run again

ServerMessage = Callable[[bytes, bytes | memoryview], None]
PeerLeft = Callable[[bytes], None]
ClientMessage = Callable[[bytes | memoryview], None]


class ServerPeer(Protocol):
    """A peer's connection. Once that has ended, `send` returns False."""

    @property
    def observer(self) -> bool:
        """Whether this peer may only look: it uses the observers' endpoint, or its uid is in the list of observers."""
        ...

    @property
    def credentials(self) -> Credentials | None:
        """Who opened the connection, as the kernel says; None if it does not."""
        ...

    @property
    def where(self) -> str:
        """Where this peer connects from, for a log; "" if unknown."""
        ...

    def send(self, payload: bytes, /) -> bool:
        """Send one message. Returns False if the peer is gone or does not read its answers."""
        ...

    async def passed(self, token: bytes) -> Descriptors:
        """The descriptors that this peer's user has passed with this token. Raises TierError."""
        ...


class ServerTransport(Protocol):
    """The daemon's side: many peers, each with an opaque name for as long as it stays connected.

    The transport makes the names, as ASCII text, and uses none of them again: a name means one connection. No message
    of a peer can contain a name that counts, so reports and logs may show them.
    """

    @property
    def endpoints(self) -> Sequence[str]:
        """The endpoints that this transport listens on; after `start`, with wildcards filled in."""
        ...

    def start(self, on_message: ServerMessage, left: PeerLeft = ..., /) -> None:
        """Listen, and call `on_message(peer, payload)` for each message. Raises ConfigError naming the endpoint.

        left: called with the name of a peer whose connection has ended.

        A message that is not exactly one frame arrives as an empty payload, which the protocol rejects.
        """
        ...

    def peer(self, name: bytes) -> ServerPeer | None:
        """The peer of this name, if it is connected."""
        ...

    # The defaults are for a transport that has no keys or limits.
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

    libzmq's descriptor is edge-triggered: it signals a change once, and both reading *and sending* may consume that
    signal. So after any work on the socket, EVENTS is checked again: one check for all work of a turn of the loop. It
    reads a bounded number of messages, so that others get their turn, and schedules another if there may be more.

    send: sends a frame, with libzmq's flags; then call `check_soon`. If it is dropped without `close`, socket and
    context are freed all the same.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        receive: Callable[[zmq.Socket[bytes]], None],
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """Owns the socket, and the context if there is one. receive: reads one message, or raises zmq.Again."""
        self._context = context
        self.socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._check_scheduled = False
        # Without pyzmq's layer in Python, which is for options that we do not use.
        self.send = cast("Callable[[bytes, int], object]", functools.partial(zmq.backend.Socket.send, socket))
        self._fd = cast("int", socket.getsockopt(zmq.FD))
        self._events = cast("Callable[[], int]", functools.partial(socket.getsockopt, zmq.EVENTS))
        # pyzmq alone would hang: a context that is collected together with an open socket waits for that socket.
        self._freed = weakref.finalize(self, _free, socket, context, os.getpid())
        self._freed.atexit = False  # at exit another thread may still use the socket
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
        if self._context is not None:
            self._context.term()

    def _wake(self) -> None:
        """The descriptor has signalled: read one message at once. `_check` reads the others.

        So the usual single message is read without a check first. One check follows both the read and our answers.
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
    """ServerTransport that speaks ZMTP itself, as a ROUTER socket does, on unix sockets and tcp.

    It does not use libzmq's ROUTER: there a peer chooses its own name, can take the next name that libzmq assigns, and
    so end the process (docs/adr/0066). Here a peer is a connection (connection.py); acceptor.py bounds what all hold.
    """

    MOST_UNREAD = 64 * 1024**2  # bytes of answers that one peer has not read; a single one may be larger

    def __init__(self, config: ServerSection) -> None:
        self._config = config
        self._acceptor: Acceptor | None = None
        self._keys: frozenset[bytes] | None = None  # of permitted clients, 32 bytes each; None permits any key
        self.endpoints: Sequence[str] = list(config.endpoints)
        self.observer_endpoint = config.observer_endpoint

    def start(self, on_message: ServerMessage, left: PeerLeft = lambda _: None, /) -> None:
        """Lock and bind every endpoint, or none. Raises ConfigError."""
        from transferd.wire.acceptor import Acceptor  # clients, which share this module, do not need it

        config = self._config
        curve = self._curve()
        allowed = resolve_uids("server.allowed_uids", config.allowed_uids)
        observing = resolve_uids("server.observer_uids", config.observer_uids)
        group = resolve_group("server.socket_group", config.socket_group)
        observer_group = resolve_group("server.observer_group", config.observer_group)
        common = self._door(on_message, allowed and allowed | observing, observing - allowed)
        watching = self._door(on_message, observing and allowed | observing, None)
        acceptor = Acceptor(config.max_connections, receive_limit(config.max_message), lambda one: left(one.peer))

        def listen(key: str, endpoint: str, door: Door, mode: int, gid: int) -> str:
            """Keys are for tcp: the kernel identifies the peers of unix sockets, and so they need none."""
            door = replace(door, curve=curve) if _is_tcp(endpoint) else replace(door, passes=True)
            return acceptor.listen(endpoint, f"server.{key}", door, mode, gid)

        try:
            mode = int(config.socket_mode, 8)
            self.endpoints = [listen("endpoint", endpoint, common, mode, group) for endpoint in config.endpoints]
            if config.observer_endpoint:
                mode = int(config.observer_mode, 8)
                there = listen("observer_endpoint", config.observer_endpoint, watching, mode, observer_group)
                self.observer_endpoint = there
        except BaseException:
            acceptor.close()
            raise
        self._acceptor = acceptor

    def _door(self, on_message: ServerMessage, users: frozenset[int], observers: frozenset[int] | None) -> Door:
        """What a ROUTER socket of these users accepts.

        users: those who may enter; empty for everybody.
        observers: those of them who may only look; None for all.
        """
        from transferd.wire.connection import Door, one_frame

        def refusal(who: Credentials | None) -> str:
            return "unknown_user" if users and (who is None or who.uid not in users) else ""

        def observes(who: Credentials | None) -> bool:
            return observers is None or (bool(observers) and (who is None or who.uid in observers))

        limit = receive_limit(self._config.max_message)
        return Door(b"ROUTER", ROUTED, limit, one_frame(on_message), refusal, observes, unread=self.MOST_UNREAD)

    def _curve(self) -> Callable[[], CurveServer] | None:
        """Makes the server's side of a handshake with keys; None without [server.curve]. Raises ConfigError."""
        if self._config.curve is None:
            return None
        curve_server, self._keys = server_side(self._config.curve)
        return lambda: curve_server(b"ROUTER", ROUTED, lambda key: self._keys is None or key in self._keys)

    def peer(self, name: bytes) -> ServerPeer | None:
        return None if self._acceptor is None else self._acceptor.connections.get(name)

    def refused(self) -> dict[str, int]:
        """Connections refused or broken off since the start, by reason."""
        return {} if self._acceptor is None else dict(self._acceptor.refused)

    def read_keys(self) -> tuple[int, int]:
        """Read `curve.client_keys_dir` again; return how many keys were added and revoked. Raises ConfigError.

        The connections of revoked keys end.
        """
        curve = self._config.curve
        if self._acceptor is None or curve is None or not curve.client_keys_dir or self._keys is None:
            return 0, 0
        before, self._keys = self._keys, client_keys(curve.client_keys_dir)
        revoked = before - self._keys
        for connection in list(self._acceptor.connections.values()):
            if connection.key in revoked:
                connection.end()
        return len(self._keys - before), len(revoked)

    def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()


class ZmqClientTransport:
    """ClientTransport on a DEALER socket. curve: keys, which a daemon may require on tcp."""

    SEND_HWM = 16384  # requests queued for a daemon that reads slowly
    LINGER_MS = 100  # to get a Bye out
    DESCRIPTORS = 16  # a context, its two threads and a connection take ten

    def __init__(self, endpoint: str, *, curve: ClientCurve | None = None) -> None:
        self._endpoint = endpoint
        self._curve = curve if _is_tcp(endpoint) else None
        self._channel: Channel | None = None

    def start(self, on_message: ClientMessage) -> None:
        """Connect in the background. Raises ConfigError, NoDescriptors."""
        check_free(self.DESCRIPTORS, f"a connection to {self._endpoint}")  # without any, libzmq ends this process
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        try:
            self._set_options(socket)
            socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            context.term()
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise NoDescriptors(f"cannot connect to {self._endpoint}: {os.strerror(error.errno)}") from error
            problem = f"cannot connect: {os.strerror(error.errno or 0)}"
            if error.errno in (zmq.EPROTONOSUPPORT, zmq.EINVAL):
                problem = "expected ipc:///path or tcp://host:port"
            raise ConfigError("endpoint", problem, self._endpoint) from error
        self._channel = Channel(socket, lambda socket: on_message(one_frame(socket)), context)

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


_inherited: list[object] = []


def keep(*things: object) -> None:
    """Keep references to objects that a forked child may neither use nor free: they share the parent's descriptors."""
    _inherited.append(things)


def _free(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]] | None, pid: int) -> None:
    if os.getpid() != pid:
        keep(socket, context)
        return
    socket.close(0)
    if context is not None:
        context.term()
