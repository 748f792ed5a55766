"""A ZMTP peer on a plain socket that says what it likes. Written from RFC 37 and RFC 26, and nothing of ours."""

from __future__ import annotations

import contextlib
import os
import socket

from nacl import bindings

from transferd.runtime.compat import Self

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
LONG, COMMAND = 2, 4
WAIT_S = 30


def connect(endpoint: str) -> socket.socket:
    scheme, _, address = endpoint.partition("://")
    raw = socket.socket(socket.AF_UNIX if scheme == "ipc" else socket.AF_INET)
    raw.settimeout(WAIT_S)
    host, _, port = address.rpartition(":")
    raw.connect(address if scheme == "ipc" else (host, int(port)))
    return raw


def frame(body: bytes, flags: int = 0) -> bytes:
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | LONG,)) + len(body).to_bytes(8, "big") + body


def command(name: bytes, data: bytes) -> bytes:
    return frame(bytes((len(name),)) + name + data, COMMAND)


def metadata(kind: bytes, identity: bytes) -> bytes:
    found = ((b"Socket-Type", kind), (b"Identity", identity))
    return b"".join(bytes((len(n),)) + n + len(value).to_bytes(4, "big") + value for n, value in found)


class Raw:
    """A connection after a NULL handshake, with an identity of its choice."""

    def __init__(self, endpoint: str, kind: bytes = b"DEALER", identity: bytes = b"") -> None:
        self.socket = connect(endpoint)
        self.socket.sendall(GREETING + command(b"READY", metadata(kind, identity)))
        self.read(64)
        self.welcome = self.frame()

    def read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            more = self.socket.recv(count - len(found))
            if not more:
                raise EOFError
            found += more
        return found

    def frame(self) -> tuple[int, bytes]:
        """The next frame: (flags, body)."""
        flags, size = self.read(2)
        if flags & LONG:
            size = int.from_bytes(bytes((size,)) + self.read(7), "big")
        return flags, self.read(size)

    def send(self, body: bytes) -> None:
        self.socket.sendall(frame(body))

    def push(self, data: bytes) -> int:
        """Send what the daemon takes without waiting for it; how much that was."""
        self.socket.settimeout(0.2)
        sent = 0
        with contextlib.suppress(TimeoutError, ConnectionError):
            while sent < len(data):
                sent += self.socket.send(data[sent : sent + 262144])
        self.socket.settimeout(WAIT_S)
        return sent

    def ends(self) -> bool:
        """Whether the daemon closes the connection."""
        try:
            while self.socket.recv(65536):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            return True
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


class RawCurve(Raw):
    """A connection after a CURVE handshake. Keys are 32 bytes."""

    def __init__(self, endpoint: str, server: bytes, public: bytes, secret: bytes, identity: bytes = b"") -> None:
        self.shake(connect(endpoint), server, public, secret, identity)

    def shake(self, raw: socket.socket, server: bytes, public: bytes, secret: bytes, identity: bytes = b"") -> Self:
        """The handshake on a connection of somebody else's."""
        self.socket = raw
        self.socket.sendall(GREETING.replace(b"NULL\0", b"CURVE"))
        self.read(64)
        short, short_secret = bindings.crypto_box_keypair()
        nonce = bytes(7) + b"\1"
        box = bindings.crypto_box(bytes(64), b"CurveZMQHELLO---" + nonce, server, short_secret)
        self.socket.sendall(command(b"HELLO", b"\x01\x00" + bytes(72) + short + nonce + box))
        _, welcome = self.frame()
        opened = bindings.crypto_box_open(welcome[24:], b"WELCOME-" + welcome[8:24], server, short_secret)
        theirs, cookie = opened[:32], opened[32:]
        vouch_nonce = os.urandom(16)
        vouch = bindings.crypto_box(short + server, b"VOUCH---" + vouch_nonce, theirs, secret)
        plain = public + vouch_nonce + vouch + metadata(b"DEALER", identity)
        nonce = bytes(7) + b"\2"
        box = bindings.crypto_box(plain, b"CurveZMQINITIATE" + nonce, theirs, short_secret)
        self.initiate = command(b"INITIATE", cookie + nonce + box)
        self.socket.sendall(self.initiate)
        self._shared = bindings.crypto_box_beforenm(theirs, short_secret)
        self._count = 2
        self.welcome = self.frame()
        return self

    def opened(self, body: bytes) -> bytes:
        """What a MESSAGE of the daemon says."""
        nonce, box = body[8:16], body[16:]
        return bindings.crypto_box_open_afternm(box, b"CurveZMQMESSAGES" + nonce, self._shared)[1:]

    def sealed(self, body: bytes, flags: int = 0) -> bytes:
        self._count += 1
        nonce = self._count.to_bytes(8, "big")
        box = bindings.crypto_box_afternm(bytes((flags,)) + body, b"CurveZMQMESSAGEC" + nonce, self._shared)
        return frame(b"\x07MESSAGE" + nonce + box)

    def send(self, body: bytes) -> None:
        self.socket.sendall(self.sealed(body))
