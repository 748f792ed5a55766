"""Accepts the connections to one or more endpoints, and bounds what all of them may hold together.

Refuses connections beyond the limit at once; the limit is lower if the process may have few descriptors.
Counts and logs every connection that it refuses or breaks off, with the peer.

A peer is its connection: its name is ours and never reused, and its user is known only while the connection lasts. The
identity that a ZMTP peer may announce is ignored. The sockets are read and written on the event loop, which watches one
epoll for all of them: a turn over many costs one call, and a socket that must wait for the next turn costs none.
"""

from __future__ import annotations

import errno
import itertools
import select
import socket as sockets
import time
from collections.abc import Callable

import structlog

from transferd.runtime.aio import Timer
from transferd.runtime.descriptors import most_connections
from transferd.wire.connection import Connections, Door, ZmtpConnection
from transferd.wire.credentials import credentials_of
from transferd.wire.endpoint import EndpointLock
from transferd.wire.shares import User

log = structlog.get_logger(__name__)

ACCEPTED_AT_ONCE = 64
SHAKES_S = 0.25  # a handshake that takes longer gives its place to a newcomer, once all are taken
PAUSE_S = 0.5  # after the process ran out of descriptors
LINGER_S = 0.25  # how long `close` waits for peers that do not read
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor(Connections):
    """Owns the listening sockets, their locks and all connections, from the first `listen` to `close`."""

    def __init__(
        self,
        most: int,
        largest: int,
        ended: Callable[[ZmtpConnection], None] = lambda _: None,
        drained: Callable[[ZmtpConnection], None] = lambda _: None,
    ) -> None:
        """Listen at nothing yet. most: connections at once. The others are of `Connections`."""
        super().__init__(largest, ended, drained)
        self._most = most_connections(most)
        self._listening: list[tuple[sockets.socket, Door]] = []
        self._locks: list[EndpointLock] = []
        self._names = itertools.count(1)
        self._resume = Timer()

    def listen(self, endpoint: str, key: str, door: Door, mode: int, gid: int = -1) -> str:
        """Listen; return the endpoint, with a wildcard filled in. Raises ConfigError naming `key`."""
        lock = EndpointLock(endpoint, key)
        self._locks.append(lock)
        listening = lock.listen(mode, gid)
        self._listening.append((listening, door))
        self._loop.add_reader(listening.fileno(), self._accept, listening, door)
        return lock.endpoint

    def _accept(self, listening: sockets.socket, door: Door) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    log.error("cannot accept connections", problem=error.strerror)
                    self._loop.remove_reader(listening.fileno())
                    self._resume.set(PAUSE_S, self._listen_again)
                    return
                continue  # this one has gone already
            self._enter(accepted, address, door)

    def _listen_again(self) -> None:
        for listening, door in self._listening:
            self._loop.add_reader(listening.fileno(), self._accept, listening, door)

    def _enter(self, accepted: sockets.socket, address: object, door: Door) -> None:
        accepted.setblocking(False)
        try:
            credentials = credentials_of(accepted)
        except OSError:
            accepted.close()
            return
        where = str(credentials) if credentials is not None else "{}:{}".format(*address[:2])  # type: ignore[index]
        count = len(self.connections) + len(self._shaking)
        user = None if credentials is None else credentials.uid
        if count >= self._most:
            unfinished = next(iter(self._shaking), None)
            if unfinished is not None and self._loop.time() - self._shaking[unfinished] > SHAKES_S:
                unfinished.break_off("too_many_connections", "its handshake takes long, and others wait")
            elif crowd := self._places.taken_by_another(user):
                self._newest_of(crowd[0]).break_off("too_many_connections", "another user has fewer")
            else:
                accepted.close()
                self.count("too_many_connections", where)
                return
        peer = b"%d" % next(self._names)
        self._places.enter(user)
        self._shaking[ZmtpConnection(self, door, accepted, peer, credentials, where)] = self._loop.time()

    def _newest_of(self, user: User) -> ZmtpConnection:
        return next(one for one in [*self._shaking, *reversed(self.connections.values())] if one.user == user)

    def close(self) -> None:
        """Send what was accepted (for at most LINGER_S), close everything, remove the socket files. Idempotent."""
        self._resume.cancel()
        for listening, _ in self._listening:
            if not self._loop.is_closed():
                self._loop.remove_reader(listening.fileno())
            listening.close()
        self._listening.clear()
        self.room.close()
        self._linger()
        for connection in [*self._shaking, *self.connections.values()]:
            connection.end()
        self.passed.close()
        for lock in self._locks:
            lock.release()
        self._locks.clear()
        if not self._loop.is_closed() and not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _linger(self) -> None:
        until = time.monotonic() + LINGER_S
        waiting = list(self.connections.values())
        while waiting and not self._loop.is_closed():
            for connection in waiting:
                connection.flush()
            waiting = [connection for connection in waiting if connection.unread]
            left = until - time.monotonic()
            if not waiting or left <= 0:
                return
            poll = select.poll()
            for connection in waiting:
                poll.register(connection.descriptor, select.POLLOUT)
            poll.poll(left * 1000)
