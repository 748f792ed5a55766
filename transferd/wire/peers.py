"""The peers of the server's sockets: their names, which of them are observers, and where they connect from.

The first byte of a peer's name marks an observer. On the common socket the mark comes from the uid that the kernel
reports for every message, so the server stores nothing about a peer and a peer cannot forge its mark. If no observers
are configured, names are libzmq's, unmarked.

A peer's address is read only from its first message, for logs; do not base a decision on `describe`.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from transferd.wire.credentials import peer_address, peer_text, uid_of
from transferd.wire.frames import content_of, one_frame

Receive = Callable[[zmq.Socket[bytes]], None]
OnMessage = Callable[[bytes, bytes | memoryview], None]

# First byte of a peer's name. libzmq's own names begin with 0. The server marks all others: a client that
# chooses its own name chooses only the bytes after the mark.
LIBZMQ_NAMED, _SELF_NAMED, _OBSERVER_BY_UID, OBSERVER_BY_ENDPOINT = b"\0", b"c", b"l", b"o"
MOST_REMEMBERED = 16384


class Peers:
    """The peers of one server.

    marked: there are observers, so names begin with a mark. observers: uids that may only observe on the common socket.
    """

    def __init__(self, *, marked: bool, observers: frozenset[int] = frozenset()) -> None:
        self._marked = marked
        self._observers = observers
        self._addresses: dict[bytes, str] = {}  # oldest first

    def receiver(self, on_message: OnMessage) -> Receive:
        """The cheapest function that reads the common socket and finds out what we need about each peer."""
        if self._observers:
            return lambda socket: self._receive_with_uid(socket, on_message)
        mark = _self_named if self._marked else None

        def receive(socket: zmq.Socket[bytes]) -> None:
            name = socket.recv(zmq.DONTWAIT)
            peer = name if mark is None else mark(name)
            on_message(peer, one_frame(socket) if peer in self._addresses else self._first(socket, peer))

        return receive

    def observers_receiver(self, on_message: OnMessage) -> Receive:
        """The function that reads the observers' socket."""

        def receive(socket: zmq.Socket[bytes]) -> None:
            peer = OBSERVER_BY_ENDPOINT + socket.recv(zmq.DONTWAIT)
            on_message(peer, one_frame(socket) if peer in self._addresses else self._first(socket, peer))

        return receive

    def observes(self, peer: bytes) -> bool:
        return self._marked and peer[:1] in (_OBSERVER_BY_UID, OBSERVER_BY_ENDPOINT)

    def describe(self, peer: bytes) -> str:
        """The peer's user and process, or its network address; "" if we no longer remember the peer."""
        return peer_text(self._addresses.get(peer, ""))

    def _receive_with_uid(self, socket: zmq.Socket[bytes], on_message: OnMessage) -> None:
        name = socket.recv(zmq.DONTWAIT)
        message = socket.recv(zmq.DONTWAIT, copy=False)
        payload = content_of(socket, message)
        address = peer_address(message)
        uid = uid_of(address)
        peer = _OBSERVER_BY_UID + name if uid is None or uid in self._observers else _self_named(name)
        self._remember(peer, address)
        on_message(peer, payload)

    def _first(self, socket: zmq.Socket[bytes], peer: bytes) -> bytes | memoryview:
        message = socket.recv(zmq.DONTWAIT, copy=False)
        self._remember(peer, peer_address(message))
        return content_of(socket, message)

    def _remember(self, peer: bytes, address: str) -> None:
        self._addresses[peer] = address
        if len(self._addresses) > MOST_REMEMBERED:
            del self._addresses[next(iter(self._addresses))]


def _self_named(name: bytes) -> bytes:
    return name if name[:1] == LIBZMQ_NAMED else _SELF_NAMED + name
