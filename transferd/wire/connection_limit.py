"""Limits the connections of a listening socket, and reports failed handshakes.

libzmq accepts every connection, and each one costs memory and a descriptor. The socket's monitor reports each one
with its descriptor number. A separate thread reads the monitor, because it must keep up with a burst of connections
while the event loop is busy. It refuses a connection with shutdown(2); libzmq then closes it like any other. A
refused client reconnects by itself, with growing delays, and succeeds once there is room.

If the thread falls behind, libzmq waits for it: libzmq's I/O thread blocks when the monitor is full, and accepts
nothing meanwhile. So there are at most `descriptors.UNSEEN` open connections that the thread has not seen.

The monitor also reports each failed handshake: no key, a wrong or replayed key, bytes that are not ZeroMQ, silence.
That event does not name the connection, but the disconnect event of the same connection follows it. The thread
remembers the peer of each descriptor from the accept event, unless libzmq closed the connection before it looked.
(zap.py refuses unknown keys and users, and reports them itself.)
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import socket as sockets
import struct
from collections import Counter

import structlog
import zmq
from zmq.backend.cython import _zmq

from transferd.errors import NoThreads
from transferd.runtime.threads import start_thread

log = structlog.get_logger(__name__)

_EVENT = struct.Struct("=Hi")  # libzmq's monitor frame: event, value
_HANDSHAKE_FAILED = (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_WATCHED = (
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_MONITOR_STOPPED
)
_GONE = "unknown, it was closed at once"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_numbers = itertools.count()


class ConnectionLimit:
    """Watches one socket; create it before the socket listens. Owns a thread until `close`. Raises NoThreads.

    first_refused: connections whose descriptor has this number or a higher one are refused.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], first_refused: int) -> None:
        self.refused = Counter[str](too_many_connections=0, handshake_failed=0)
        self._peers: dict[int, str] = {}  # descriptor → peer, without connections that we ended ourselves
        self._failed = False  # the next connection that ends has failed its handshake
        self._first_refused = first_refused
        self._socket = socket
        self._listening: set[object] = set()
        address = f"inproc://transferd.connection-limit.{next(_numbers)}"
        socket.monitor(address, _WATCHED)
        self._events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._events.setsockopt(zmq.RCVHWM, 1)  # the monitor's own end holds 1,000 more, a fixed limit
        self._events.connect(address)
        try:
            self._thread = start_thread("transferd.connection-limit", self._watch)
        except NoThreads:
            disable_monitor(socket)
            self._events.close(0)
            raise

    def close(self) -> None:
        """Stop watching. Call it before the socket is closed. Idempotent."""
        if self._thread.is_alive():
            disable_monitor(self._socket)
            self._thread.join()

    def _watch(self) -> None:
        with self._events as events:
            while True:
                frame, _endpoint = events.recv_multipart()
                event, descriptor = _EVENT.unpack(frame)
                if event == zmq.EVENT_MONITOR_STOPPED:
                    return
                if event in _HANDSHAKE_FAILED:
                    self._failed = True
                elif event == zmq.EVENT_DISCONNECTED:
                    self._ended(descriptor)
                elif event == zmq.EVENT_LISTENING:
                    with contextlib.suppress(OSError), _duplicate(descriptor) as there:
                        self._listening.add(_name(there))
                else:
                    self._begun(descriptor)

    def _begun(self, descriptor: int) -> None:
        try:
            with _duplicate(descriptor) as there:
                if descriptor >= self._first_refused:
                    self._refuse(there)
                else:
                    self._peers[descriptor] = _peer(there)
        except OSError:  # libzmq has closed it already; its disconnect event follows
            self._peers[descriptor] = _GONE

    def _ended(self, descriptor: int) -> None:
        peer, failed, self._failed = self._peers.pop(descriptor, ""), self._failed, False
        if failed and peer:
            self._refused("handshake_failed", peer)

    def _refuse(self, connection: sockets.socket) -> None:
        if self._is_client(connection):
            peer = _peer(connection)
            connection.shutdown(sockets.SHUT_RDWR)
            self._refused("too_many_connections", peer)

    def _refused(self, reason: str, peer: str) -> None:
        self.refused[reason] += 1
        log.warning("connection refused", reason=reason, peer=peer)

    def _is_client(self, connection: sockets.socket) -> bool:
        """Whether this is still a client's connection; it may have been closed, and its number reused."""
        is_listener = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_ACCEPTCONN)
        return not is_listener and _name(connection) in self._listening

    def end_tcp(self) -> int:
        """End every tcp connection; return how many. Clients reconnect by themselves. Thread-safe."""
        ended = 0
        for descriptor in list(self._peers):
            with contextlib.suppress(OSError), _duplicate(descriptor) as there:
                if there.family != sockets.AF_UNIX and self._is_client(there):
                    there.shutdown(sockets.SHUT_RDWR)
                    ended += 1
        return ended


def disable_monitor(socket: zmq.Socket[bytes]) -> None:
    """Like `socket.disable_monitor`, but without the GIL.

    If the monitor is full, libzmq waits here until our thread reads from it, and for that the thread needs the GIL.
    """
    libzmq = ctypes.CDLL(_zmq.__file__)
    libzmq.zmq_socket_monitor(ctypes.c_void_p(socket.underlying), None, 0)


def _duplicate(descriptor: int) -> sockets.socket:
    """The connection behind one of libzmq's descriptors. Raises OSError if it was closed, or is no longer a socket."""
    duplicate = os.dup(descriptor)
    try:
        return sockets.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise


def _peer(connection: sockets.socket) -> str:
    """Describe the peer, for a log."""
    if connection.family == sockets.AF_UNIX:
        credentials = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _gid = _CREDENTIALS.unpack(credentials)
        return f"uid {uid}, pid {pid}"
    host, port = connection.getpeername()[:2]
    return f"{host}:{port}"


def _name(socket: sockets.socket) -> object:
    """The part of the address that a listener and its connections share: the path, or the port."""
    name = socket.getsockname()
    return name if socket.family == sockets.AF_UNIX else name[1]
