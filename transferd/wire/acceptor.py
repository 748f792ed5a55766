"""Accepts the connections to one or more endpoints, and bounds what all of them may hold together.

Refuses at once what is too much: connections beyond the limit, and those of a process that is short of descriptors.
Counts and logs every connection that it refuses or breaks off, with the peer.

A peer is its connection: it has no name that another could take, and what the kernel said about its user ends with it.
The identity that a ZMTP peer may announce is ignored. The sockets are read and written on the event loop.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import select
import socket as sockets
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from transferd.runtime.descriptors import first_refused
from transferd.wire.credentials import Credentials, credentials_of
from transferd.wire.endpoint import EndpointLock
from transferd.wire.shares import CHUNK, MOST_RECEIVED, MOST_UNREAD, UNBUDGETED, LoopTurns, Outbox, Places, Room, User
from transferd.wire.zmtp import (
    COMMAND,
    ERROR_400,
    MORE,
    Frames,
    NotAllowed,
    Null,
    ZmtpError,
    command,
    greeting,
    header,
    parse_command,
)

log = structlog.get_logger(__name__)

# Why a connection was refused or broken off; each is counted.
REFUSALS = (
    "unknown_key", "unknown_user", "handshake_failed", "too_many_connections", "protocol_error", "unread_answers",
    "stalled_message", "out_of_memory",
)  # fmt: skip
ACCEPTED_AT_ONCE = 64
PAUSE_S = 0.5  # after the process ran out of descriptors
LINGER_S = 0.25  # how long `close` waits for peers that do not read
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Owns the listening sockets, their locks and all connections, from the first `listen` to `close`.

    connections: the open ones, by name. refused: connections refused or broken off, by reason.
    """

    def __init__(
        self,
        most: int,
        largest: int,
        ended: Callable[[ZmtpConnection], None] = lambda _: None,
        drained: Callable[[ZmtpConnection], None] = lambda _: None,
    ) -> None:
        """most: connections at once. largest: the most bytes of a message.

        ended: called after a connection has ended. drained: called when a peer that had fallen behind has read all.
        """
        self.drained = drained
        self._loop = asyncio.get_running_loop()
        self._most = most
        self._first_refused = first_refused(most)
        self._ended = ended
        self._listening: list[tuple[sockets.socket, Door]] = []
        self._locks: list[EndpointLock] = []
        self._names = itertools.count(1)
        self._resume: asyncio.TimerHandle | None = None
        self._shaking: set[ZmtpConnection] = set()  # their handshake has not ended
        self.connections: dict[bytes, ZmtpConnection] = {}
        self.refused = Counter[str](dict.fromkeys(REFUSALS, 0))
        self._places = Places()
        self.chunk = memoryview(bytearray(CHUNK))
        self.turns = LoopTurns()
        self.room: Room[ZmtpConnection] = Room(
            max(MOST_RECEIVED, largest), lambda connection: connection.break_off("stalled_message")
        )
        self.outbox = Outbox()

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
                    self._resume = self._loop.call_later(PAUSE_S, self._listen_again)
                    return
                continue  # this one has gone already
            self._enter(accepted, address, door)

    def _listen_again(self) -> None:
        self._resume = None
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
        if count >= self._most or accepted.fileno() >= self._first_refused:
            crowd = self._places.taken_by_another(user)
            if not crowd:
                accepted.close()
                self.count("too_many_connections", where)
                return
            self._newest_of(crowd[0]).break_off("too_many_connections", "another user has fewer")
        peer = b"%d" % next(self._names)
        self._places.enter(user)
        self._shaking.add(ZmtpConnection(self, door, accepted, peer, credentials, where))

    def _newest_of(self, user: User) -> ZmtpConnection:
        return next(one for one in [*self._shaking, *reversed(self.connections.values())] if one.user == user)

    def opened(self, connection: ZmtpConnection) -> None:
        self._shaking.discard(connection)
        self.connections[connection.peer] = connection

    def ended(self, connection: ZmtpConnection) -> None:
        self._shaking.discard(connection)
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
        if self._resume is not None:
            self._resume.cancel()
        for listening, _ in self._listening:
            if not self._loop.is_closed():
                self._loop.remove_reader(listening.fileno())
            listening.close()
        self._listening.clear()
        self.turns.close()
        self.room.close()
        self._linger()
        for connection in [*self._shaking, *self.connections.values()]:
            connection.end()
        for lock in self._locks:
            lock.release()
        self._locks.clear()

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


HANDSHAKE_S = 5.0  # how long a connection without a complete handshake may hold a descriptor
JOINED = 64 * 1024  # bytes: what is smaller is copied together, so that it leaves with one call
MOST_PIECES = 64  # buffers per call otherwise
MOST_PONG = 16  # bytes of a PING's context


class Mechanism(Protocol):
    """The server's side of a handshake. done: it has ended well. key: the peer's public key, if it has one."""

    name: bytes
    done: bool
    key: bytes

    @property
    def cipher(self) -> Cipher | None:
        """Once `done`; None: frames are as they are."""
        ...

    def receive(self, body: bytes) -> bytes:
        """The answer to a command of the peer. Raises ZmtpError, NotAllowed."""
        ...


class Cipher(Protocol):
    """What a mechanism does to every frame after the handshake."""

    overhead: int  # bytes that it adds to a frame

    def encode(self, flags: int, body: bytes) -> bytes: ...

    def decode(self, flags: int, body: bytes | memoryview) -> tuple[int, bytes]:
        """Raises ZmtpError."""
        ...


@dataclass(frozen=True, slots=True)
class Door:
    """What one endpoint speaks, and with whom.

    limit: the most bytes of a frame. refusal: why a user may not enter, "" if he may. curve: makes the handshake of an
    endpoint that needs keys. received: called with each frame, and each command that is not about the connection.
    observes: whether a user who enters here is an observer. unread: the most bytes that may wait for one peer; a single
    message may be larger.
    """

    socket_type: bytes
    permitted: frozenset[bytes]  # the peers' types
    limit: int
    received: Callable[[ZmtpConnection, int, bytes | memoryview], None]
    refusal: Callable[[Credentials | None], str] = lambda _: ""
    observes: Callable[[Credentials | None], bool] = lambda _: False
    curve: Callable[[], Mechanism] | None = None
    observer_limit: int = 0  # the most bytes of an observer's frame
    unread: int = MOST_UNREAD


class ZmtpConnection:
    """Made for an accepted socket, which it owns until `end`. closed: nothing is received or sent any more.

    unread: bytes that were sent and have not left yet. peer: an opaque name for it, never used again.
    """

    __slots__ = (
        "_acceptor", "_blocked", "_cipher", "_frames", "_greeted", "_loop", "_mechanism", "_new", "_out", "_patience",
        "_reading", "_sock", "closed", "credentials", "door", "observer", "open", "parts", "peer", "unread", "where",
    )  # fmt: skip

    def __init__(
        self,
        acceptor: Acceptor,
        door: Door,
        sock: sockets.socket,
        peer: bytes,
        credentials: Credentials | None,
        where: str,
    ) -> None:
        self._acceptor = acceptor
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self.door = door
        self.peer = peer
        self.credentials = credentials
        self.where = where
        self.observer = door.observes(credentials)
        self.closed = self.open = False
        self.parts = False  # for the door: a message of several frames is arriving
        self.unread = 0
        self._frames = Frames()
        self._greeted = False
        self._cipher: Cipher | None = None
        refusal = door.refusal(credentials)
        self._mechanism: Mechanism = (
            Null(door.socket_type, door.permitted, refusal) if door.curve is None else door.curve()
        )
        self._out: deque[bytes | memoryview] = deque()
        self._new = False  # in the outbox's list
        self._blocked = False  # waits until the socket can take more
        self._reading = True
        self._patience: asyncio.TimerHandle | None = self._loop.call_later(HANDSHAKE_S, self._slow)
        self._loop.add_reader(sock.fileno(), self._readable)
        self._put(greeting(self._mechanism.name, as_server=True))

    @property
    def descriptor(self) -> int:
        return self._sock.fileno()

    @property
    def user(self) -> User:
        return None if self.credentials is None else self.credentials.uid

    @property
    def key(self) -> bytes:
        """The public key of the peer, 32 bytes; b"" without CURVE, or before the handshake has ended."""
        return self._mechanism.key

    # --- in -----------------------------------------------------------------------------------------

    def _readable(self) -> None:
        frames, shares = self._frames, self._acceptor
        space = frames.space
        try:
            count = self._sock.recv_into(shares.chunk if space is None else space)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if not count:
            # A client without keys sees our greeting, and may leave before it has sent its own.
            if not self.open and (self._greeted or frames.pending or self.door.curve is not None):
                self.break_off("handshake_failed", "the peer left before the handshake had ended")
            self.end()
            return
        if space is None:
            frames.feed(bytes(shares.chunk[:count]))
        else:
            frames.filled(count)
        if shares.turns.left > 0 and not shares.turns.waiting:
            self.work(shares.turns.left)
        else:
            self._read(False)
            shares.turns.wait(self)

    def work(self, most: int) -> None:
        """Handle at most so many frames. If there are more, wait for another turn, and read nothing before it."""
        acceptor, handled = self._acceptor, 0
        acceptor.outbox.hold()
        while handled < most and not self.closed:
            try:
                if not (self._next() if self.open else self._shake()):
                    break
                handled += 1
            except ZmtpError as error:
                self.break_off("protocol_error" if self.open else "handshake_failed", str(error))
            except NotAllowed as refused:
                self._refuse(refused.args[0])
            except MemoryError:
                self.break_off("out_of_memory", "there is no memory for what arrived")
        acceptor.turns.take(handled)
        acceptor.outbox.flush()
        if not self.closed:
            self._go_on(more=handled >= most)

    def _next(self) -> bool:
        """Handle the next frame, if it is complete."""
        frame = self._frames.next()
        if frame is None:
            return False
        flags, body = frame
        large = body.__class__ is memoryview
        try:
            if self._cipher is not None:
                flags, body = self._cipher.decode(flags, body)
            if flags & COMMAND:
                self._command(bytes(body))
            else:
                self.door.received(self, flags, body)
        except (ZmtpError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - it concerns this message alone; the next ones are handled
            what = "unhandled exception while handling a message"
            self._loop.call_exception_handler({"message": what, "exception": error})
        finally:
            if large:
                self._acceptor.room.give_back(self)
        return True

    def _go_on(self, *, more: bool) -> None:
        frames = self._frames
        if more and frames.pending:
            self._read(False)
            self._acceptor.turns.wait(self)
        elif frames.wanted and frames.wanted > UNBUDGETED and not self._acceptor.room.take(self, frames.wanted):
            self._read(False)
        elif frames.wanted:
            self.room_found()
        else:
            self._read(True)

    def room_found(self) -> None:
        """Receive the message that was too large before."""
        try:
            self._frames.begin()
        except MemoryError:
            self.break_off("out_of_memory", "there is no memory for what arrives")
        self._read(True)

    def _read(self, wanted: bool) -> None:
        if wanted is not self._reading and not self.closed:
            self._reading = wanted
            if wanted:
                self._loop.add_reader(self._sock.fileno(), self._readable)
            else:
                self._loop.remove_reader(self._sock.fileno())

    # --- the handshake ------------------------------------------------------------------------------

    def _shake(self) -> bool:
        """Take one step of the handshake, if what it needs has arrived."""
        mechanism, frames = self._mechanism, self._frames
        if not self._greeted:
            self._greeted = frames.greeting(mechanism.name)
            return self._greeted
        frame = frames.next()
        if frame is None:
            return False
        flags, body = frame
        if not flags & COMMAND:
            raise ZmtpError("a message came before the handshake had ended")
        answer = mechanism.receive(bytes(body))
        self._put(header(COMMAND, len(answer)) + answer)
        if mechanism.done:
            self._cipher = mechanism.cipher
            self._opened()
        return True

    def _opened(self) -> None:
        limit = self.door.observer_limit if self.observer else self.door.limit
        self._frames.limit = limit if self._cipher is None else limit + self._cipher.overhead
        self.open = True
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._acceptor.opened(self)

    def _slow(self) -> None:
        self.break_off("handshake_failed", f"no handshake within {HANDSHAKE_S:g} s")

    def _refuse(self, reason: str) -> None:
        """Tell the peer that it may not connect. (libzmq's clients recognise this answer.)"""
        self._put(header(COMMAND, len(ERROR_400)) + ERROR_400)
        self.flush()
        self.break_off(reason)

    def _command(self, body: bytes) -> None:
        name, data = parse_command(body)
        if name == b"PING":
            if self.unread < JOINED:  # else it does not read, and needs no sign of life
                self._send(COMMAND, command(b"PONG", data[2 : 2 + MOST_PONG]))
        elif name == b"ERROR":
            self.end()
        elif name != b"PONG":
            self.door.received(self, COMMAND, body)

    # --- out ----------------------------------------------------------------------------------------

    def send(self, *frames: bytes) -> bool:
        """Send one message. False: it was not accepted, because the peer has gone, or reads too little."""
        if self.closed:
            return False
        size = len(frames[0]) if len(frames) == 1 else sum(map(len, frames))
        outbox, unread = self._acceptor.outbox, self.unread + size
        scarce = unread > self.door.unread or outbox.unread + size > outbox.most
        if scarce and not self._acceptor.has_room(self, size):
            return False
        if len(frames) > 1 and size < JOINED and self._cipher is None:
            last = len(frames) - 1
            self._put(b"".join([header(MORE * (n < last), len(f)) + f for n, f in enumerate(frames)]))
            return True
        for frame in frames[:-1]:
            self._send(MORE, frame)
        self._send(0, frames[-1])
        return True

    def _send(self, flags: int, body: bytes) -> None:
        if self._cipher is not None:
            flags, body = 0, self._cipher.encode(flags, body)
        size = len(body)
        if size < JOINED:
            self._put(header(flags, size) + body)
        else:
            self._put(header(flags, size))
            self._put(body)

    def _put(self, data: bytes) -> None:
        self._out.append(data)
        size = len(data)
        self.unread += size
        outbox = self._acceptor.outbox
        outbox.unread += size
        if not (self._new or self._blocked):
            self._new = True
            outbox.add(self)

    def flush(self) -> None:
        """Write as much as the socket takes. The loop calls again when it takes more."""
        self._new = False
        out = self._out
        try:
            while out:
                self._sent(self._write())
        except (BlockingIOError, InterruptedError):
            if not self._blocked:
                self._blocked = True
                self._loop.add_writer(self._sock.fileno(), self.flush)
            return
        except OSError:
            if self.open:
                self.end()
            self._forget_unsent()  # a handshake may have said more before its end, and fails when that is read
            return
        if self._blocked:
            self._blocked = False
            self._loop.remove_writer(self._sock.fileno())
            self._acceptor.drained(self)

    def _write(self) -> int:
        out = self._out
        if len(out) == 1:
            return self._sock.send(out[0])
        if self.unread <= JOINED:
            joined = b"".join(out)
            out.clear()
            out.append(joined)
            return self._sock.send(joined)
        return self._sock.sendmsg(list(itertools.islice(out, MOST_PIECES)))

    def _sent(self, count: int) -> None:
        out = self._out
        self.unread -= count
        self._acceptor.outbox.unread -= count
        while count:
            size = len(out[0])
            if size > count:
                out[0] = memoryview(out[0])[count:]
                return
            count -= size
            out.popleft()

    # --- the end ------------------------------------------------------------------------------------

    def break_off(self, reason: str, problem: str = "") -> None:
        """End the connection for a reason that is counted and logged."""
        if not self.closed:
            self._acceptor.count(reason, self.where, problem)
            self.end()

    def end(self) -> None:
        """Close the connection; what has not been sent is lost. Idempotent."""
        if self.closed:
            return
        self.closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        self._blocked = False
        if self._patience is not None:
            self._patience.cancel()
        self._forget_unsent()
        self._sock.close()
        self._acceptor.ended(self)

    def _forget_unsent(self) -> None:
        self._acceptor.outbox.unread -= self.unread
        self.unread = 0
        self._out.clear()
