"""ZMTP 3.1 (RFC 37) as the listening side speaks it, without I/O: the greeting, frames, commands, the NULL mechanism.

    greeting   ff, 8 bytes, 7f, major, minor, mechanism (20 bytes), as-server, 31 bytes    both ends, at once
    frame      flags, size (1 or 8 bytes), body            flags: 1 another frame follows, 2 long size, 4 command
    command    length of the name, name, data

Peers of 3.0 send their subscriptions in messages, those of 3.1 in commands; nothing else differs. A peer's bytes are
never trusted: whatever breaks the protocol raises ZmtpError, as early as it can be seen.
"""

from __future__ import annotations

from collections.abc import Mapping

MORE, LONG, COMMAND = 1, 2, 4
GREETING_BYTES = 64
MOST_COMMAND = 8192  # bytes of a command, and so of everything before the handshake has ended
ASSEMBLED = 1024  # bytes: a frame larger than this is received into memory of its own, once its size is known
_SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
_VERSION = b"\x03\x01"
# The header of each short frame: what is sent most.
SHORT = tuple(bytes((0, size)) for size in range(256))


class ZmtpError(Exception):
    """The peer breaks the protocol in the way that the text describes."""


class NotAllowed(Exception):
    """The peer may not connect. Its one argument is the reason, as it is counted."""


def greeting(mechanism: bytes, *, as_server: bool) -> bytes:
    return _SIGNATURE + _VERSION + mechanism.ljust(20, b"\0") + bytes([as_server]) + bytes(31)


def check_greeting(data: bytes, mechanism: bytes) -> None:
    """Check as much of a peer's greeting as has arrived. Raises ZmtpError."""
    if data[:1] not in (b"", b"\xff") or data[9:10] not in (b"", b"\x7f"):
        raise ZmtpError("this is not ZMTP")
    if len(data) > 10 and data[10] < 3:
        raise ZmtpError(f"ZMTP {data[10]} is too old; ZMTP 3.0 or later is needed")
    if len(data) >= 32 and data[12:32] != mechanism.ljust(20, b"\0"):
        raise ZmtpError(f"the mechanism is {data[12:32].rstrip(bytes(1))!r}; {mechanism.decode()} is needed here")


class Frames:
    """Splits what one peer sends. Holds at most one incomplete frame, and the bytes of one `feed`.

    limit: the most bytes of a frame's body.
    more: whether bytes of another frame had arrived when `next` returned the last one.
    space: where to receive the next bytes of a large frame; None if they go to `feed`.
    wanted: 0, or the size of a frame that needs memory of its own: call `begin` to allocate it; until then `next`
        returns nothing.
    """

    __slots__ = ("_at", "_data", "_flags", "limit", "more", "space", "wanted")

    def __init__(self, limit: int = MOST_COMMAND) -> None:
        self.limit = limit
        self.wanted = 0
        self._data = b""
        self._at = 0  # where the next frame begins
        self._flags = 0
        self.space: memoryview | None = None
        self.more = False

    @property
    def pending(self) -> bool:
        """Whether bytes have arrived that neither `next` has returned nor `space` has."""
        return self._at < len(self._data)

    def filled(self, count: int) -> None:
        """So many bytes were written to `space`."""
        assert self.space is not None
        self.space = self.space[count:]

    def feed(self, data: bytes) -> None:
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def greeting(self, mechanism: bytes) -> bool:
        """Whether the greeting, which comes before all frames, has arrived. Raises ZmtpError."""
        check_greeting(self._data[:GREETING_BYTES], mechanism)
        if len(self._data) < GREETING_BYTES:
            return False
        self._at = GREETING_BYTES
        return True

    def next(self) -> tuple[int, bytes | memoryview] | None:
        """The next frame, if it is complete: (flags, body). Raises ZmtpError."""
        if self.space is not None:
            if self.space:
                return None
            body, self.space = memoryview(self.space.obj), None  # all of it, not only what is left
            return self._flags & ~LONG, body
        data, at = self._data, self._at
        if len(data) - at < 2:
            return None
        flags, size, begin = data[at], data[at + 1], at + 2
        if flags & LONG:
            if len(data) - at < 9:
                _check(flags, 0, self.limit)
                return None
            size, begin = int.from_bytes(data[at + 1 : at + 9], "big"), at + 9
        if flags or size > self.limit:
            _check(flags, size, self.limit)
        end = begin + size
        if end <= len(data):
            self._at, self.more = end, end < len(data)
            return flags & ~LONG, data[begin:end]
        if size > ASSEMBLED:
            self.wanted = size
        return None

    def begin(self) -> None:
        """Allocate the `wanted` frame, and move its bytes that have arrived there. Raises MemoryError."""
        import numpy as np  # not at the top: a client that only reads reports has no frame of this size

        body = np.empty(self.wanted, np.uint8).data  # touches no page before its bytes arrive
        data, at = self._data, self._at
        self._flags = data[at]
        there = data[at + (9 if data[at] & LONG else 2) :]
        body[: len(there)] = there
        self.space, self.wanted, self.more = body[len(there) :], 0, False
        self._data, self._at = b"", 0


def _check(flags: int, size: int, limit: int) -> None:
    if flags & ~(MORE | LONG | COMMAND) or flags & (MORE | COMMAND) == MORE | COMMAND:
        raise ZmtpError(f"a frame has the flags {flags:#04x}")
    if flags & COMMAND and size > MOST_COMMAND:
        raise ZmtpError(f"a command has {size} bytes, the limit is {MOST_COMMAND}")
    if size > limit:
        raise ZmtpError(f"a frame has {size} bytes, the limit is {limit}")


def header(flags: int, size: int) -> bytes:
    """What precedes the body of a frame. flags: without LONG."""
    if size < 256:
        return bytes((flags, size)) if flags else SHORT[size]
    return bytes((flags | LONG,)) + size.to_bytes(8, "big")


def command(name: bytes, data: bytes) -> bytes:
    """The body of a command."""
    return bytes((len(name),)) + name + data


def parse_command(body: bytes) -> tuple[bytes, bytes]:
    """(name, data). Raises ZmtpError."""
    size = body[0] if body else 0
    if not 0 < size < len(body):
        raise ZmtpError("a command has no name")
    return body[1 : 1 + size], body[1 + size :]


def properties(values: Mapping[bytes, bytes]) -> bytes:
    """Metadata of a READY command."""
    parts = []
    for name, value in values.items():
        parts += [bytes((len(name),)), name, len(value).to_bytes(4, "big"), value]
    return b"".join(parts)


def parse_properties(data: bytes) -> dict[bytes, bytes]:
    """The inverse of `properties`; names in lower case. Raises ZmtpError."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        begin = at + 1 + data[at] + 4
        end = begin + int.from_bytes(data[begin - 4 : begin], "big")
        if not data[at] or begin > len(data) or end > len(data):
            raise ZmtpError("a property is cut off or has no name")
        found[data[at + 1 : begin - 4].lower()] = data[begin:end]
        at = end
    return found


def check_socket_type(metadata: bytes, permitted: frozenset[bytes]) -> None:
    """Raise ZmtpError unless the peer's socket has a permitted type. Its other properties are ignored."""
    kind = parse_properties(metadata).get(b"socket-type")
    if kind not in permitted:
        raise ZmtpError(f"the peer's socket is {kind!r}, which does not fit")


ERROR_400 = command(b"ERROR", b"\x03400")  # libzmq's clients recognise it: not allowed


class Null:
    """The server's side of a NULL handshake: the peer's READY is answered with ours. done: it may send messages."""

    name = b"NULL"

    def __init__(self, socket_type: bytes, permitted: frozenset[bytes], refusal: str) -> None:
        """refusal: why this peer may not connect, "" if it may."""
        self.done = False
        self.key = b""
        self.cipher: None = None
        self._ready = command(b"READY", properties({b"Socket-Type": socket_type, b"Identity": b""}))
        self._permitted = permitted
        self._refusal = refusal

    def receive(self, body: bytes) -> bytes:
        """The answer to a command of the peer. Raises ZmtpError, NotAllowed."""
        name, data = parse_command(body)
        if name != b"READY":
            raise ZmtpError(f"READY is expected, not {name[:16]!r}")
        check_socket_type(data, self._permitted)
        if self._refusal:
            raise NotAllowed(self._refusal)
        self.done = True
        return self._ready
