"""One control connection between two daemons: it sends and receives frames, and reports its end once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from transferd.errors import PeerLost, TransferError
from transferd.runtime.compat import timeout
from transferd.storage.peer.messages import MAX_FRAME, PeerMessage, body_length, decode, encode
from transferd.wire.shares import UNBUDGETED, Room

log = structlog.get_logger(__name__)

CONNECT_TIMEOUT_S = 3.0
MAX_UNSENT = 64 * 1024**2  # bytes; with more unsent, the peer reads too slowly and counts as lost
MAX_UNSENT_OF_ALL = 128 * 1024**2  # bytes; with more unsent to all peers, the one that has read least counts as lost
LITTLE_UNSENT = 64 * 1024  # bytes; so little does not make us look at the others
MAX_ARRIVING = 64 * 1024**2  # bytes of larger messages that are arriving, of all peers
assert MAX_ARRIVING >= MAX_FRAME
# Keep-alive settings that detect a vanished host after about ten seconds.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 4), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
_USER_TIMEOUT_MS = 10_000


class PeerConnections:
    """All connections of one daemon to others: what they hold together is bounded."""

    def __init__(self) -> None:
        self.room: Room[PeerConnection] = Room(MAX_ARRIVING, lambda connection: connection.abort())
        self.open: set[PeerConnection] = set()

    def sent(self, connection: PeerConnection) -> None:
        """Look whether the peers read what is sent to them; if not, abort a connection."""
        if connection.unsent > MAX_UNSENT:
            connection.abort()
        elif connection.unsent > LITTLE_UNSENT and sum(one.unsent for one in self.open) > MAX_UNSENT_OF_ALL:
            max(self.open, key=lambda one: one.unsent).abort()


@dataclass(eq=False)
class PeerConnection:
    """Calls `received` for each message, and `ended` once with the reason. Owns the stream until `close`."""

    user = None  # peers have none

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _received: Callable[[PeerConnection, PeerMessage], None]
    _ended: Callable[[PeerConnection, str], None]
    _all: PeerConnections
    closed: bool = field(init=False, default=False)
    _room_found: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._all.open.add(self)
        _watch_for_silence(self._writer)
        self._reading = asyncio.get_running_loop().create_task(self._read())

    def send(self, message: PeerMessage) -> None:
        """Send a message. Does nothing if the connection has ended, which `ended` reports."""
        if self.closed or self._writer.transport.is_closing():  # uvloop raises on writes to a closed transport
            return
        self._writer.write(encode(message))
        self._all.sent(self)

    @property
    def unsent(self) -> int:
        """Bytes that wait until the peer reads."""
        return self._writer.transport.get_write_buffer_size()

    def abort(self) -> None:
        """End the connection at once. `ended` is called soon."""
        self._writer.transport.abort()

    def room_found(self) -> None:
        self._room_found.set()

    async def _read(self) -> None:
        why = "the connection was closed"
        try:
            while True:
                length = body_length(await self._reader.readexactly(4))
                if length > UNBUDGETED and not self._all.room.take(self, length):
                    self._room_found.clear()
                    await self._room_found.wait()
                self._take(await self._reader.readexactly(length))
        except asyncio.IncompleteReadError:
            pass
        except TransferError as error:  # of the decoder, or of a handler that cannot take this message
            why = str(error)
            log.warning("closing a peer connection after a message that cannot be handled", problem=why)
        except OSError as error:
            why = str(error)
            error.__traceback__ = None  # the stream keeps the error, and our frame with its traceback
        finally:
            self.closed = True
            self._all.open.discard(self)
            self._all.room.give_back(self)
            self._writer.transport.abort()
            self._ended(self, why)

    def _take(self, body: bytes) -> None:
        message = decode(body)
        self._all.room.give_back(self)
        self._received(self, message)

    def finish(self) -> None:
        """Flush and close, without waiting."""
        self.closed = True
        self._writer.close()

    async def close(self) -> None:
        """Flush for at most a second, then close. `ended` has been called when this returns."""
        self.finish()
        with contextlib.suppress(OSError, TimeoutError):
            async with timeout(1.0):
                await self._writer.wait_closed()
        self._reading.cancel()
        await asyncio.wait([self._reading])


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a peer's daemon at host:port. Raises PeerLost if it does not answer."""
    host, _, port = address.rpartition(":")
    try:
        async with timeout(CONNECT_TIMEOUT_S):
            return await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        raise PeerLost(f"could not connect to the daemon at {address} within {CONNECT_TIMEOUT_S:g} s") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no resolver accepts
        raise PeerLost(f"could not connect to the daemon at {address}: {error}") from None


def _watch_for_silence(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
