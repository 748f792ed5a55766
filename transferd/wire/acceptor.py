"""Accepts the connections to one or more endpoints, and bounds what all of them may hold together.

Refuses connections beyond the limit at once; the limit is lower if the process may have few descriptors.
Counts and logs every connection that it refuses or breaks off, with the peer.

A peer is its connection: its name is ours and never reused, and its user is known only while the connection lasts. The
identity that a ZMTP peer may announce is ignored. The sockets are read and written on the event loop, which watches one
epoll for all of them: a turn over many costs one call, and a socket that must wait for the next turn costs none.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import select
import socket as sockets
import time
from collections import Counter
from collections.abc import Callable

import structlog

from transferd.runtime.aio import Timer
from transferd.runtime.descriptors import most_connections
from transferd.runtime.loop_turns import loop_turns, now
from transferd.wire.connection import Door, Outbox, ZmtpConnection
from transferd.wire.credentials import credentials_of
from transferd.wire.endpoint import EndpointLock
from transferd.wire.passing import Passed
from transferd.wire.shares import MOST_RECEIVED, Places, Room, User

log = structlog.get_logger(__name__)

# Why a connection was refused or broken off; each is counted.
REFUSALS = (
    "unknown_key", "unknown_user", "handshake_failed", "too_many_connections", "protocol_error", "unread_answers",
    "stalled_message", "out_of_memory",
)  # fmt: skip
ACCEPTED_AT_ONCE = 64
READY_AT_ONCE = 256  # sockets that one call tells of; the next call begins with the others
COSTLIER_S = 0.001  # whoever has cost so much more than those before is worked for after their answers have left
SHAKES_S = 0.25  # a handshake that takes longer gives its place to a newcomer, once all are taken
PAUSE_S = 0.5  # after the process ran out of descriptors
LINGER_S = 0.25  # how long `close` waits for peers that do not read
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Owns the listening sockets, their locks and all connections, from the first `listen` to `close`.

    connections: the open ones, by name.
    refused: connections refused or broken off, by reason.
    """

    def __init__(
        self,
        most: int,
        largest: int,
        ended: Callable[[ZmtpConnection], None] = lambda _: None,
        drained: Callable[[ZmtpConnection], None] = lambda _: None,
    ) -> None:
        """Listen at nothing yet.

        most: connections at once.
        largest: the most bytes of a message.
        ended: called after a connection has ended.
        drained: called when a peer that had fallen behind has read all.
        """
        self.drained = drained
        self._loop = asyncio.get_running_loop()
        self._most = most_connections(most)
        self._ended = ended
        self._listening: list[tuple[sockets.socket, Door]] = []
        self._locks: list[EndpointLock] = []
        self._names = itertools.count(1)
        self._resume = Timer()
        self._shaking: dict[ZmtpConnection, float] = {}  # since when; their handshake has not ended; oldest first
        self.connections: dict[bytes, ZmtpConnection] = {}
        self.refused = Counter[str](dict.fromkeys(REFUSALS, 0))
        self._places = Places()
        self.turns = loop_turns()
        self.room: Room[ZmtpConnection] = Room(
            max(MOST_RECEIVED, largest), lambda connection: connection.break_off("stalled_message")
        )
        self.outbox = Outbox()
        self.passed = Passed()
        self._watched: dict[int, ZmtpConnection] = {}  # by descriptor
        self._epoll = select.epoll()
        self._loop.add_reader(self._epoll.fileno(), self._ready)

    def watch(self, connection: ZmtpConnection, before: int, events: int) -> None:
        """Have `connection.ready` called when its socket is. before: the events that were watched; 0 for none."""
        descriptor = connection.descriptor
        if not before:
            self._watched[descriptor] = connection
            self._epoll.register(descriptor, events)
        elif events:
            self._epoll.modify(descriptor, events)
        else:
            del self._watched[descriptor]
            self._epoll.unregister(descriptor)

    def _ready(self) -> None:
        """One turn over those that are ready, first those that have cost least.

        Who is left over when the turn ends is ready in the next one, too: nothing of it has been read.
        """
        watched, turns, outbox, until = self._watched, self.turns, self.outbox, self.turns.begin()
        more = outbox.held = True
        while more:
            ready = [(watched[descriptor], events) for descriptor, events in self._epoll.poll(0, READY_AT_ONCE)]
            if len(ready) > 1:
                ready.sort(key=lambda one: one[0].spent.at)
            more = len(ready) == READY_AT_ONCE
            cost = ready[0][0].spent.at if ready else 0.0
            turns.reached(cost)
            for connection, events in ready:
                if connection.spent.at > cost + COSTLIER_S:
                    outbox.flush()
                cost = connection.spent.at
                connection.ready(events)
                if now() >= until:
                    more = False
                    break
            outbox.flush()
        outbox.held = False

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

    def opened(self, connection: ZmtpConnection) -> None:
        self._shaking.pop(connection, None)
        self.connections[connection.peer] = connection

    def ended(self, connection: ZmtpConnection) -> None:
        self._shaking.pop(connection, None)
        self._places.leave(connection.user)
        self.room.give_back(connection)
        if self.connections.pop(connection.peer, None) is not None:
            self._ended(connection)

    def count(self, reason: str, where: str, problem: str = "") -> None:
        self.refused[reason] += 1
        more = {"problem": problem} if problem else {}
        log.warning("connection refused", reason=reason, peer=where, **more)

    def has_room(self, connection: ZmtpConnection, size: int) -> bool:
        """Whether so many bytes may wait for this peer. If all have too many, the peer with most unread must go."""
        connection.flush()
        if connection.unread and connection.unread + size > connection.door.unread:
            return False
        outbox = self.outbox
        while outbox.unread and outbox.unread + size > outbox.most:
            most = max(self.connections.values(), key=lambda other: other.unread)
            if most is connection or not most.unread:
                return False
            most.break_off("unread_answers")
        return not connection.closed

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
