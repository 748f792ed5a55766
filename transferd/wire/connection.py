"""Accepted connections, each from its handshake to its end, and when it reads and writes among the others.

All connections together handle frames in the loop's turns (runtime/loop_turns.py): each that is ready reads once, works
and answers once.
"""

from __future__ import annotations

import asyncio
import itertools
import select
import socket as sockets
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from transferd.runtime.aio import Timer
from transferd.runtime.loop_turns import FRAMES, Spent, loop_turns, now
from transferd.wire.credentials import Credentials
from transferd.wire.passing import MARK, TOKEN_BYTES, Descriptors, Passed
from transferd.wire.shares import MOST_RECEIVED, UNBUDGETED, Places, Room, User
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

if TYPE_CHECKING:
    from transferd.wire.curve_server import CurveCipher, CurveServer

log = structlog.get_logger(__name__)

# Why a connection was refused or broken off; each is counted.
REFUSALS = (
    "unknown_key", "unknown_user", "handshake_failed", "too_many_connections", "protocol_error", "unread_answers",
    "stalled_message", "out_of_memory",
)  # fmt: skip
READY_AT_ONCE = 256  # sockets that one call tells of; the next call begins with the others
COSTLIER_S = 0.001  # whoever has cost so much more than those before is worked for after their answers have left
CHUNK = 16 * 1024  # bytes read at a time: about as much as a turn handles, and the most that waits for a turn
MOST_UNREAD = 64 * 1024**2  # bytes of answers that one peer has not read; a single one may be larger
MOST_UNREAD_OF_ALL = 256 * 1024**2
HANDSHAKE_S = 5.0  # how long a connection without a complete handshake may hold a descriptor
JOINED = 64 * 1024  # bytes: less output than this is copied into one buffer, so that one call sends all
MOST_PIECES = 64  # buffers per call for more output
MOST_PONG = 16  # bytes of a PING's context
OBSERVER_MESSAGE = 64 * 1024  # bytes: an observer's requests are much smaller
IN, OUT = select.EPOLLIN, select.EPOLLOUT


@dataclass(frozen=True, slots=True)
class Door:
    """An endpoint's type of socket, limits, and permitted peers."""

    socket_type: bytes
    permitted: frozenset[bytes]  # the peers' types
    limit: int  # the most bytes of a frame; an observer's has OBSERVER_MESSAGE at most
    # called with each frame, and each command that is not about the connection
    received: Callable[[ZmtpConnection, int, bytes | memoryview], None]
    refusal: Callable[[Credentials | None], str] = lambda _: ""  # why a user may not enter, "" if he may
    observes: Callable[[Credentials | None], bool] = lambda _: False  # whether a user who enters here is an observer
    curve: Callable[[], CurveServer] | None = None  # makes the handshake of an endpoint that needs keys
    passes: bool = False  # whether peers of a unix socket may pass descriptors instead of a handshake
    unread: int = MOST_UNREAD  # the most bytes that may wait for one peer; a single message may be larger


def one_frame(
    on_message: Callable[[bytes, bytes | memoryview], None],
) -> Callable[[ZmtpConnection, int, bytes | memoryview], None]:
    """A Door's `received` that hands on messages of one frame, with the peer's name; others arrive as an empty one."""

    def received(connection: ZmtpConnection, flags: int, body: bytes | memoryview) -> None:
        if flags:
            if flags & COMMAND:  # a ROUTER has no use for commands
                return
            connection.parts = True
        elif connection.parts:
            connection.parts = False
            on_message(connection.peer, b"")
        else:
            on_message(connection.peer, body)

    return received


class Connections:
    """All connections of one acceptor, and what they share: places, memory, turns of the loop, and when output leaves.

    All messages of one turn of the loop leave together, at its end.

    connections: the open ones, by name.
    refused: connections refused or broken off, by reason.
    unread: bytes that were sent and are not read yet, of all of them.
    """

    def __init__(
        self, largest: int, ended: Callable[[ZmtpConnection], None], drained: Callable[[ZmtpConnection], None]
    ) -> None:
        """Have none yet.

        largest: the most bytes of a message.
        ended: called after a connection has ended.
        drained: called when a peer that had fallen behind has read all.
        """
        self._ended = ended
        self.drained = drained
        self._loop = asyncio.get_running_loop()
        self._shaking: dict[ZmtpConnection, float] = {}  # since when; their handshake has not ended; oldest first
        self.connections: dict[bytes, ZmtpConnection] = {}
        self.refused = Counter[str](dict.fromkeys(REFUSALS, 0))
        self._places = Places()
        self.turns = loop_turns()
        self.room: Room[ZmtpConnection] = Room(
            max(MOST_RECEIVED, largest), lambda connection: connection.break_off("stalled_message")
        )
        self.passed = Passed()
        self.unread, self.most_unread = 0, MOST_UNREAD_OF_ALL
        self._new: list[ZmtpConnection] = []  # connections with output that no call has tried to write
        self._turn = False  # whether one is under way, which calls `flush` at its end
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
        watched, turns, until = self._watched, self.turns, self.turns.begin()
        more = self._turn = True
        while more:
            ready = [(watched[descriptor], events) for descriptor, events in self._epoll.poll(0, READY_AT_ONCE)]
            if len(ready) > 1:
                ready.sort(key=lambda one: one[0].spent.at)
            more = len(ready) == READY_AT_ONCE
            cost = ready[0][0].spent.at if ready else 0.0
            turns.reached(cost)
            for connection, events in ready:
                if connection.spent.at > cost + COSTLIER_S:
                    self.flush()
                cost = connection.spent.at
                connection.ready(events)
                if now() >= until:
                    more = False
                    break
            self.flush()
        self._turn = False

    def flush_soon(self, connection: ZmtpConnection) -> None:
        """Write what this connection sends at the end of the turn."""
        self._new.append(connection)
        if len(self._new) == 1 and not self._turn:
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        new, self._new = self._new, []
        for connection in new:
            connection.flush()

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
        while self.unread and self.unread + size > self.most_unread:
            most = max(self.connections.values(), key=lambda other: other.unread)
            if most is connection or not most.unread:
                return False
            most.break_off("unread_answers")
        return not connection.closed


class ZmtpConnection:
    """A connection on an accepted socket, which it owns until `end`.

    closed: nothing is received or sent any more.
    unread: bytes that were sent and have not left yet.
    peer: an opaque name for the peer, never used again.
    """

    __slots__ = (
        "_acceptor", "_cipher", "_events", "_frames", "_greeted", "_loop", "_mechanism", "_new", "_out", "_patience",
        "_sock", "closed", "credentials", "door", "observer", "open", "parts", "peer", "spent", "unread", "where",
    )  # fmt: skip

    def __init__(
        self,
        acceptor: Connections,
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
        self.spent = Spent()
        self.credentials = credentials
        self.where = where
        self.observer = door.observes(credentials)
        self.closed = self.open = False
        self.parts = False  # for the door: a message of several frames is arriving
        self.unread = 0
        self._frames = Frames()
        self._greeted = False
        self._cipher: CurveCipher | None = None
        refusal = door.refusal(credentials)
        self._mechanism: Null | CurveServer = (
            Null(door.socket_type, door.permitted, refusal) if door.curve is None else door.curve()
        )
        self._out: deque[bytes | memoryview] = deque()
        self._new = False  # a flush will come
        self._events = 0  # IN while it reads; OUT while it waits until the socket can take more
        self._patience = Timer()
        self._patience.set(HANDSHAKE_S, self.break_off, "handshake_failed", f"no handshake within {HANDSHAKE_S:g} s")
        self._watch(IN)
        self._put(greeting(self._mechanism.name, as_server=True))

    @property
    def descriptor(self) -> int:
        return self._sock.fileno()

    @property
    def user(self) -> User:
        return None if self.credentials is None else self.credentials.uid

    async def passed(self, token: bytes) -> Descriptors:
        """The descriptors that this peer's user has passed with this token. Raises TierError."""
        return await self._acceptor.passed.take(self.user, token)

    @property
    def key(self) -> bytes:
        """The public key of the peer, 32 bytes; b"" without CURVE, or before the handshake has ended."""
        return self._mechanism.key

    # --- in -----------------------------------------------------------------------------------------

    def ready(self, events: int) -> None:
        """Do what the socket is ready for: write what waits; read once, and handle that."""
        if events & ~IN and self._events & OUT:
            self.flush()
        if not events & ~OUT or not self._events & IN:
            return
        frames = self._frames
        space, data = frames.space, b""
        try:
            if not self._greeted and self.door.passes:
                count = len(data := self._first())
                if self.closed:
                    return
            else:
                count = len(data := self._sock.recv(CHUNK)) if space is None else self._sock.recv_into(space)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            count = 0
        if not count:
            # Not a failed handshake: a client without keys reads our CURVE greeting and may leave at once.
            if not self.open and (self._greeted or frames.pending or self.door.curve is not None):
                self.break_off("handshake_failed", "the peer left before the handshake had ended")
            self.end()
            return
        if space is None:
            frames.feed(data)
        else:
            frames.filled(count)
            self._acceptor.flush()  # a large message may cost much, so others' answers leave before
        self.work(FRAMES)

    def _first(self) -> bytes:
        """The first bytes of a peer of a unix socket. A peer that passes descriptors has done all that it came for."""
        passed = self._acceptor.passed
        data, ancillary, _, _ = self._sock.recvmsg(CHUNK, passed.room(self.user), sockets.MSG_CMSG_CLOEXEC)
        if ancillary or data.startswith(MARK):
            descriptors, refusal = passed.received(self.user, ancillary), self.door.refusal(self.credentials)
            if refusal or self.observer or not descriptors.numbers or len(data) != len(MARK) + TOKEN_BYTES:
                self.break_off(refusal or "protocol_error", "it may not pass descriptors, or not in this way")
            else:
                passed.arrived(self.user, data[len(MARK) :], descriptors)
                self.end()
        return data

    def work(self, most: int) -> None:
        """Handle at most `most` frames, while the turn lasts. If there are more, wait, and read nothing before."""
        turns = self._acceptor.turns
        until, began = turns.until, now()
        at, more = began, True
        for _ in range(most):
            try:
                more = self._next() if self.open else self._shake()
            except ZmtpError as error:
                self.break_off("protocol_error" if self.open else "handshake_failed", str(error))
            except NotAllowed as refused:
                self._refuse(refused.args[0])
            except MemoryError:
                self.break_off("out_of_memory", "there is no memory for what arrived")
            at = now()
            if not more or self.closed or at >= until:
                break
        turns.took(self, at - began)
        if self.closed:
            return
        if more:  # other peers' turns come first
            self._read(False)
            turns.wait(self)
        elif wanted := self._frames.wanted:
            self._receive_large(wanted)
        elif not self._events & IN:
            self._read(True)

    def _next(self) -> bool:
        """Handle the next frame, if it is complete. Returns whether there may be another."""
        frames = self._frames
        frame = frames.next()
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
        except (ZmtpError, MemoryError):  # these end the connection (`work`)
            raise
        except Exception as error:  # noqa: BLE001 - it concerns this message alone; the next ones are handled
            what = "unhandled exception while handling a message"
            self._loop.call_exception_handler({"message": what, "exception": error})
        finally:
            if large:
                self._acceptor.room.give_back(self)
        return frames.more

    def _receive_large(self, size: int) -> None:
        if size > UNBUDGETED and not self._acceptor.room.take(self, size):
            self._read(False)  # until `room_found`, so that large messages of all peers stay within the budget
        else:
            self.room_found()

    def room_found(self) -> None:
        """Receive a large message, now that there is memory for it."""
        try:
            self._frames.begin()
        except MemoryError:
            self.break_off("out_of_memory", "there is no memory for what arrives")
        self._read(True)

    def _read(self, wanted: bool) -> None:
        self._watch(self._events | IN if wanted else self._events & ~IN)

    def _watch(self, events: int) -> None:
        if events != self._events and not self.closed:  # each change costs a system call
            self._acceptor.watch(self, self._events, events)
            self._events = events

    # --- the handshake ------------------------------------------------------------------------------

    def _shake(self) -> bool:
        """Take one step of the handshake. Returns whether there may be bytes for another."""
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
        limit = min(self.door.limit, OBSERVER_MESSAGE) if self.observer else self.door.limit
        self._frames.limit = limit if self._cipher is None else limit + self._cipher.overhead
        self.open = True
        self._patience.cancel()
        self._acceptor.opened(self)

    def _refuse(self, reason: str) -> None:
        """Answer that the peer may not connect, in a form that libzmq's clients recognise."""
        self._put(header(COMMAND, len(ERROR_400)) + ERROR_400)
        self.flush()
        self.break_off(reason)

    def _command(self, body: bytes) -> None:
        name, data = parse_command(body)
        if name == b"PING":
            if self.unread < JOINED:  # else the peer does not read, so no sign of life would reach it
                self._send(COMMAND, command(b"PONG", data[2 : 2 + MOST_PONG]))
        elif name == b"ERROR":
            self.end()
        elif name != b"PONG":
            self.door.received(self, COMMAND, body)

    # --- out ----------------------------------------------------------------------------------------

    def send(self, *frames: bytes) -> bool:
        """Send one message. Returns False if it was not accepted: the peer has gone, or reads too little."""
        if self.closed:
            return False
        size = len(frames[0]) if len(frames) == 1 else sum(map(len, frames))
        acceptor, unread = self._acceptor, self.unread + size
        scarce = unread > self.door.unread or acceptor.unread + size > acceptor.most_unread
        if scarce and not acceptor.has_room(self, size):
            return False
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
        else:  # a large body is not copied
            self._put(header(flags, size))
            self._put(body)

    def _put(self, data: bytes) -> None:
        self._out.append(data)
        size = len(data)
        self.unread += size
        acceptor = self._acceptor
        acceptor.unread += size
        if not (self._new or self._events & OUT):  # else a flush will come anyway
            self._new = True
            acceptor.flush_soon(self)

    def flush(self) -> None:
        """Write as much as the socket takes. The loop calls again when it takes more."""
        self._new = False
        try:
            while self._out:
                self._write()
        except (BlockingIOError, InterruptedError):
            self._watch(self._events | OUT)
            return
        except OSError:
            if self.open:
                self.end()
            self._forget_unsent()  # during a handshake keep reading: it fails on what the peer sent before it left
            return
        if self._events & OUT:
            self._watch(self._events & ~OUT)
            self._acceptor.drained(self)

    def _write(self) -> None:
        """Make one call that writes."""
        out = self._out
        if len(out) > 1 and self.unread <= JOINED:  # copying so few bytes costs less than a gathering call
            joined = b"".join(out)
            out.clear()
            out.append(joined)
        if len(out) == 1:
            count = self._sock.send(out[0])
        else:
            count = self._sock.sendmsg(list(itertools.islice(out, MOST_PIECES)))
        self.unread -= count
        self._acceptor.unread -= count
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
        self._watch(0)  # so nothing is read or written from here on
        self.closed = True
        self._patience.cancel()
        self._forget_unsent()
        self._sock.close()
        self._acceptor.ended(self)

    def _forget_unsent(self) -> None:
        self._acceptor.unread -= self.unread
        self.unread = 0
        self._out.clear()
