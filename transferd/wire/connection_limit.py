"""Bounds the connections of a listening socket: one too many is shown the door as soon as it is accepted.

libzmq accepts whoever comes, and each connection costs memory and a descriptor. It tells of each one
through the socket's monitor, with the descriptor's number. A thread of its own listens to that, because
what matters is to be quicker than a crowd, also while the event loop has other work. It ends a connection
by shutdown(2): libzmq reads the end of it and closes it like any other. A client that is turned away
connects again by itself, ever more slowly, and gets in when there is room.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket as sockets
import struct
import threading

import structlog
import zmq

log = structlog.get_logger(__name__)

_EVENT = struct.Struct("=Hi")  # libzmq's monitor frame: event, value
_numbers = itertools.count()


class Doorman:
    """Watches one socket that is going to listen. Owns a thread from `__init__` to `close`.

    first_refused: the descriptor number from which on connections are refused.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], first_refused: int) -> None:
        self.refused = 0
        self._first_refused = first_refused
        self._socket = socket
        self._listening: set[object] = set()
        address = f"inproc://transferd.doorman.{next(_numbers)}"
        socket.monitor(address, zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_MONITOR_STOPPED)
        self._events: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self._events.connect(address)
        self._thread = threading.Thread(target=self._watch, name="transferd-doorman", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Call it before the socket is closed. Idempotent."""
        if self._thread.is_alive():
            self._socket.disable_monitor()
            self._thread.join()

    def _watch(self) -> None:
        with self._events as events:
            while True:
                frame, _endpoint = events.recv_multipart()
                event, descriptor = _EVENT.unpack(frame)
                if event == zmq.EVENT_MONITOR_STOPPED:
                    return
                with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(descriptor)) as there:
                    if event == zmq.EVENT_LISTENING:
                        self._listening.add(_name(there))
                    elif descriptor >= self._first_refused:
                        self._refuse(there, descriptor)

    def _refuse(self, connection: sockets.socket, descriptor: int) -> None:
        # It may have been closed meanwhile, and its number be another's: only clients' connections are shut down.
        is_listener = connection.getsockopt(sockets.SOL_SOCKET, sockets.SO_ACCEPTCONN)
        if is_listener or _name(connection) not in self._listening:
            return
        connection.shutdown(sockets.SHUT_RDWR)
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # 1, 2, 4, 8 …: a crowd must not fill the log, too
            log.warning("too many connections: refused", refused=self.refused, descriptor=descriptor)


def _name(socket: sockets.socket) -> object:
    """What a listener and its connections have in common: the path, or the port."""
    name = socket.getsockname()
    return name if socket.family == sockets.AF_UNIX else name[1]
