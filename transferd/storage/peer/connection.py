"""One control connection between two daemons: it sends and receives frames, and reports its end once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import structlog

from transferd.errors import PeerLost, TransferError
from transferd.runtime.compat import timeout
from transferd.storage.peer.messages import PeerMessage, body_length, decode, encode

log = structlog.get_logger(__name__)

CONNECT_TIMEOUT_S = 3.0
MAX_UNSENT = 64 * 1024**2  # bytes; with more unsent, the peer reads too slowly and counts as lost
# Keep-alive settings that detect a vanished host after about ten seconds.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 4), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
_USER_TIMEOUT_MS = 10_000


class PeerConnection:
    """Calls `received` for each message, and `ended` once with the reason. Owns the stream until `close`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        received: Callable[[PeerConnection, PeerMessage], None],
        ended: Callable[[PeerConnection, str], None],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._received = received
        self._ended = ended
        self.alive = True
        _watch_for_silence(writer)
        self._reading = asyncio.get_running_loop().create_task(self._read())

    def send(self, message: PeerMessage) -> None:
        """Send a message. Does nothing if the connection has ended, which `ended` reports."""
        if not self.alive or self._writer.transport.is_closing():  # uvloop raises on writes to a closed transport
            return
        self._writer.write(encode(message))
        if self._writer.transport.get_write_buffer_size() > MAX_UNSENT:
            self._writer.transport.abort()

    async def _read(self) -> None:
        why = "the connection was closed"
        try:
            while True:
                length = body_length(await self._reader.readexactly(4))
                message = decode(await self._reader.readexactly(length))
                self._received(self, message)
        except asyncio.IncompleteReadError:
            pass
        except TransferError as error:  # of the decoder, or of a handler that cannot take this message
            why = str(error)
            log.warning("closing a peer connection after a message that cannot be handled", problem=why)
        except OSError as error:
            why = str(error)
        finally:
            self.alive = False
            self._writer.transport.abort()
            self._ended(self, why)

    def finish(self) -> None:
        """Flush and close, without waiting."""
        self.alive = False
        self._writer.close()

    async def close(self) -> None:
        """Flush for at most a second, then close. `ended` has been called when this returns."""
        self.finish()
        with contextlib.suppress(OSError, TimeoutError):
            async with timeout(1.0):
                await self._writer.wait_closed()
        self._reading.cancel()
        await asyncio.wait([self._reading])


async def connect(
    host: str,
    port: int,
    received: Callable[[PeerConnection, PeerMessage], None],
    ended: Callable[[PeerConnection, str], None],
) -> PeerConnection:
    """Connect to a peer's daemon. Raises PeerLost if it does not answer."""
    try:
        async with timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
    except TimeoutError:
        raise PeerLost(f"could not connect to the daemon at {host}:{port} within {CONNECT_TIMEOUT_S:g} s") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no resolver accepts
        raise PeerLost(f"could not connect to the daemon at {host}:{port}: {error}") from None
    return PeerConnection(reader, writer, received, ended)


def _watch_for_silence(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
