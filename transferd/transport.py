"""The socket seam: ZeroMQ on an event loop, without a future per message.

One plain socket, its fd watched by the loop, and a drain that takes what is there without waiting.
The fd of a ZeroMQ socket is edge-triggered: it says "something happened", once. So every time after
reading *or writing*, the socket is asked whether more is there (`zmq.EVENTS`), and a drain that
stopped at its bound continues in the next turn of the loop, after everybody else had theirs.

Awaiting each message through zmq.asyncio costs about twice the round trip and a third of the rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import zmq

from transferd.config import ServerSection
from transferd.errors import Closed, ConfigError

# Messages taken per turn of the loop: enough to amortise the wake-up, few enough to stay fair.
DRAIN_BOUND = 256
# Messages a peer may leave unread before more for it are dropped (results can be asked for again).
HIGH_WATER_MARK = 65536
LINGER_MS = 1000  # how long close() may take to hand out what was sent
HEARTBEAT_MS = 2000  # finds peers that vanished without a word on tcp

ServerMessage = Callable[[bytes, bytes], None]
ClientMessage = Callable[[bytes], None]


class ServerTransport(Protocol):
    """Many peers, each known by an opaque name."""

    @property
    def endpoints(self) -> Sequence[str]: ...
    def start(self, on_message: ServerMessage) -> None:
        """Listen. Raises ConfigError when an endpoint cannot be had."""
        ...

    def send(self, peer: bytes, payload: bytes) -> bool:
        """False if the peer has gone or does not read; never waits."""
        ...

    def close(self) -> None: ...


class ClientTransport(Protocol):
    """One peer, the daemon; reconnects by itself."""

    def start(self, on_message: ClientMessage) -> None: ...
    def send(self, payload: bytes) -> bool:
        """False if it cannot be taken now; never waits."""
        ...

    def close(self) -> None: ...


class _Pump:
    """A plain socket on the running loop: calls `receive` for each message."""

    def __init__(self, socket: zmq.Socket[bytes], receive: Callable[[], None]) -> None:
        self._socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._fd = _number(socket, zmq.FD)
        self._loop.add_reader(self._fd, self._drain)
        self.look_again()

    def look_again(self) -> None:
        """Call after every send: it may have swallowed the edge that announced a message."""
        if not self._scheduled and _number(self._socket, zmq.EVENTS) & zmq.POLLIN:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if self._socket.closed:
            return
        try:
            for _ in range(DRAIN_BOUND):
                self._receive()
        except zmq.Again:
            return
        except BaseException:
            self.look_again()  # whatever one message did, the next ones are read
            raise
        self.look_again()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close(LINGER_MS)


def _number(socket: zmq.Socket[bytes], option: int) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value


def _common_options(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.IPV6, 0)  # names like "localhost" mean one address
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * HEARTBEAT_MS)


class ZmqServerTransport:
    """A ROUTER socket bound to every endpoint of the configuration."""

    def __init__(self, config: ServerSection) -> None:
        self._config = config
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._pump: _Pump | None = None
        self._locks: list[int] = []
        self._paths: list[str] = []
        self._endpoints: list[str] = list(config.endpoints)
        self._on_message: ServerMessage | None = None

    @property
    def endpoints(self) -> Sequence[str]:
        return self._endpoints

    def start(self, on_message: ServerMessage) -> None:
        self._on_message = on_message
        socket = self._context.socket(zmq.ROUTER)
        self._socket = socket
        _common_options(socket)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a peer that has gone is an error, not a silence
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects under its name is that client
        # Twice what we promise: up to it a message gets a typed answer, beyond it the connection is cut.
        socket.setsockopt(zmq.MAXMSGSIZE, 2 * self._config.max_message)
        if self._config.curve is not None:
            _apply_curve(socket, self._config.curve.secret_key_file)
        self._endpoints = [self._bind(socket, endpoint) for endpoint in self._config.endpoints]
        self._pump = _Pump(socket, self._receive)

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str) -> str:
        path = endpoint.removeprefix("ipc://") if endpoint.startswith("ipc://") else ""
        if path:
            self._lock(path, endpoint)
        try:
            socket.bind(endpoint)
            if path:
                self._paths.append(path)
                os.chmod(path, int(self._config.socket_mode, 8))
        except (zmq.ZMQError, OSError) as error:
            raise ConfigError(
                "server.endpoint", f"cannot be bound: {os.strerror(error.errno or 0)}", endpoint
            ) from error
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _lock(self, path: str, endpoint: str) -> None:
        """libzmq replaces the socket file of a living daemon without a word; a lock beside it says who lives."""
        try:
            fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError("server.endpoint", f"cannot be bound: {error.strerror}", endpoint) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise ConfigError("server.endpoint", "another daemon is serving there", endpoint) from error
        self._locks.append(fd)

    def _receive(self) -> None:
        assert self._socket is not None
        assert self._on_message is not None
        frames = self._socket.recv_multipart(zmq.DONTWAIT)
        self._on_message(frames[0], frames[-1] if len(frames) == 2 else b"")

    def send(self, peer: bytes, payload: bytes) -> bool:
        if self._socket is None or self._pump is None:
            return False
        try:
            self._socket.send_multipart((peer, payload), zmq.DONTWAIT)
        except zmq.ZMQError:  # EHOSTUNREACH: gone; EAGAIN: does not read
            return False
        finally:
            self._pump.look_again()
        return True

    def close(self) -> None:
        if self._pump is not None:
            self._pump.close()
        elif self._socket is not None:
            self._socket.close(0)
        self._pump = None
        self._socket = None
        self._context.term()
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        for fd in self._locks:
            os.close(fd)
        self._paths, self._locks = [], []


class ZmqClientTransport:
    """A DEALER socket connected to the daemon."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._pump: _Pump | None = None
        self._on_message: ClientMessage | None = None

    def start(self, on_message: ClientMessage) -> None:
        self._on_message = on_message
        socket = self._context.socket(zmq.DEALER)
        _common_options(socket)
        socket.setsockopt(zmq.LINGER, 0)  # a client that leaves has said Bye; the rest is of no use to anybody
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise ConfigError("endpoint", f"cannot be connected to: {error}", self._endpoint) from error
        self._socket = socket
        self._pump = _Pump(socket, self._receive)

    def _receive(self) -> None:
        assert self._socket is not None
        assert self._on_message is not None
        self._on_message(self._socket.recv(zmq.DONTWAIT))

    def send(self, payload: bytes) -> bool:
        if self._socket is None or self._pump is None:
            raise Closed("the client is closed")
        try:
            self._socket.send(payload, zmq.DONTWAIT)
        except zmq.Again:
            return False
        finally:
            self._pump.look_again()
        return True

    def close(self) -> None:
        if self._pump is not None:
            self._pump.close()
        self._pump = None
        self._socket = None
        self._context.term()


def _apply_curve(socket: zmq.Socket[Any], secret_key_file: str) -> None:
    try:
        with open(secret_key_file, encoding="ascii") as file:
            secret = file.read().strip().encode()
        public = zmq.curve_public(secret)
    except (OSError, ValueError, zmq.ZMQError) as error:
        raise ConfigError("server.curve.secret_key_file", f"is not a usable key: {error}", secret_key_file) from error
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
