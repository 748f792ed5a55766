"""A peer that speaks ZMTP 3.0 on a plain socket, so that it can say what no ZeroMQ library would say.

On a unix socket, on tcp, and on tcp with the keys of CURVE (raw_zmtp.py).
"""

from __future__ import annotations

import contextlib
import struct

from nacl.exceptions import CryptoError

from tests.machine.hostile.raw_zmtp import RawCurve, connect
from transferd.runtime.compat import Self
from transferd.wire import protocol as wire

Keys = tuple[bytes, bytes, bytes]  # the server's public one, and a client's public and secret ones

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MORE, LONG, COMMAND = 1, 2, 4
WAIT_S = 20.0  # for a daemon that is slow, or stands still for some seconds


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | LONG]) + struct.pack(">Q", len(body)) + body


def ready(kind: bytes, identity: bytes) -> bytes:
    """The READY command. identity: any bytes, also those that libzmq gives to nameless peers."""
    named = b"".join(
        bytes([len(key)]) + key + struct.pack(">I", len(value)) + value
        for key, value in ((b"Socket-Type", kind), (b"Identity", identity))
    )
    return frame(b"\x05READY" + named, COMMAND)


class RawPeer:
    """One connection."""

    def __init__(self, endpoint: str, keys: Keys | None = None) -> None:
        self.socket = connect(endpoint)
        self.socket.settimeout(WAIT_S)
        self._keys = keys
        self._curve: RawCurve | None = None
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def greet(self, identity: bytes = b"", kind: bytes = b"DEALER") -> None:
        """The whole handshake. Raises OSError if the daemon hangs up or does not answer."""
        if self._keys is not None:
            try:
                self._curve = RawCurve.__new__(RawCurve).shake(self.socket, *self._keys, identity)
            except (EOFError, IndexError, ValueError, CryptoError) as error:
                raise ConnectionResetError("the daemon has refused the handshake") from error
            return
        self.socket.sendall(GREETING)
        self._exactly(len(GREETING))
        self.socket.sendall(ready(kind, identity))
        self._frame()

    def send(self, body: bytes, flags: int = 0) -> None:
        self.socket.sendall(frame(body, flags) if self._curve is None else self._curve.sealed(body, flags))

    def ask(self, body: wire.Body, seq: int = 1) -> wire.ReplyBody | None:
        """Say Hello's, Stats' and the like; None if no answer comes to this connection."""
        with contextlib.suppress(OSError):
            self.send(wire.encode_request(seq, body))
            while True:
                said = self._frame()
                reply = wire.decode_reply(said if self._curve is None else self._curve.opened(said))
                if reply.seq == seq:
                    return reply.body
        return None

    def _frame(self) -> bytes:
        flags = self._exactly(1)[0]
        size = struct.unpack(">Q", self._exactly(8))[0] if flags & LONG else self._exactly(1)[0]
        return self._exactly(size)

    def _exactly(self, count: int) -> bytes:
        while len(self._unread) < count:
            if not (more := self.socket.recv(65536)):
                raise ConnectionResetError("the daemon has hung up")
            self._unread += more
        found, self._unread = self._unread[:count], self._unread[count:]
        return found
