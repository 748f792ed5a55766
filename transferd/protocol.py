"""What is on the wire: one version byte, then msgpack. (docs/protocol.md tells it for other languages.)

Lifecycle
    A client says Hello and is answered Welcome: who the daemon is (boot_id), whether it is ready, what
    its limits are. It says Hello again about once a second: that is the heartbeat of both sides. It
    says Bye when it leaves. Requests may be sent at any time, any number of them without waiting.

Happy path
    Request(seq, ack, task)        → [Accepted, if ack is set] → TaskResult
    Request(seq, …, control)       → Value
    `seq` is the client's own number; every reply carries the seq of its request. Replies come in the
    order in which things end.

Abort path
    A request that cannot be understood is answered Refused, with a code, under its seq if that could
    still be read (else 0); the connection stays. A client that is silent has gone, and its tasks are
    taken back. A daemon that is silent, or comes back with another boot_id, is lost, and a client fails
    what it waits for. Pushing a task again is safe: the daemon joins it or repeats its result.

Format
    byte 0: PROTOCOL_VERSION. Then one msgpack array: [seq, ack, body] from clients, [seq, body] from
    the daemon. A body is a map with its type in "type". token_ids are a bin: one byte "4" or "8" (the
    item size), then little-endian integers.

Versioning
    A new optional field in a body is no new version: unknown fields are ignored. Anything else is.
    A daemon answers another version with Refused(unsupported_version) in its own.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from transferd.errors import ProtocolError
from transferd.tasks import (
    TASK_TYPES,
    ErrorInfo,
    ReadStorageTask,
    SwapInTask,
    SwapOutTask,
    Task,
    TaskResult,
    TokenIds,
    WriteStorageTask,
)

PROTOCOL_VERSION = 1
_VERSION_BYTE = bytes([PROTOCOL_VERSION])


class _Message(msgspec.Struct, frozen=True, tag_field="type"):
    pass


# --- from clients ---------------------------------------------------------------------------------


class Hello(_Message, frozen=True, tag="hello"):
    """Greeting and heartbeat. Answered Welcome."""


class Bye(_Message, frozen=True, tag="bye"):
    """The client leaves. Not answered."""


class Cancel(_Message, frozen=True, tag="cancel"):
    """Take a task back. Value: whether there was anything to take back."""

    task_id: str


class Match(_Message, frozen=True, tag="match"):
    """Value: how many leading keys every rank can load."""

    keys: list[str]


class Pause(_Message, frozen=True, tag="pause"):
    """Value comes once no rank touches any block."""


class Resume(_Message, frozen=True, tag="resume"):
    pass


class Drain(_Message, frozen=True, tag="drain"):
    """Value comes once everything admitted is answered."""


class SetGeneration(_Message, frozen=True, tag="set_generation"):
    generation: str


class Stats(_Message, frozen=True, tag="stats"):
    pass


class Attach(_Message, frozen=True, tag="attach"):
    """Value: the device handle of a rank, {kind, data}."""

    rank: int


Control = Hello | Bye | Cancel | Match | Pause | Resume | Drain | SetGeneration | Stats | Attach
Body = WriteStorageTask | ReadStorageTask | SwapOutTask | SwapInTask | Control


class Request(msgspec.Struct, frozen=True, array_like=True):
    """ack: the pusher of a task wants to hear at once that it was admitted."""

    seq: int
    ack: bool
    body: Body


# --- from the daemon ------------------------------------------------------------------------------


class Welcome(_Message, frozen=True, tag="welcome"):
    """Who answers. A new boot_id is a new daemon, which knows nothing of earlier requests."""

    boot_id: str
    ready: bool
    version: str
    generation: str
    max_message: int


class Accepted(_Message, frozen=True, tag="accepted"):
    """The task was admitted; its result follows under the same seq."""


class Value(_Message, frozen=True, tag="value"):
    value: Any = None


class Refused(_Message, frozen=True, tag="refused"):
    """A control request failed, or a message could not be understood."""

    error: ErrorInfo


class Result(_Message, frozen=True, tag="result"):
    result: TaskResult


ReplyBody = Welcome | Accepted | Value | Refused | Result


class Reply(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    body: ReplyBody


# --- bytes ----------------------------------------------------------------------------------------


def _encode_hook(value: Any) -> Any:
    if isinstance(value, TokenIds):
        return value.to_bytes()
    if isinstance(value, int):  # a subclass, such as config.Size
        return int(value)
    raise NotImplementedError(type(value))


def _decode_hook(kind: type, value: Any) -> Any:
    if kind is TokenIds:
        return TokenIds.from_bytes(value)
    raise NotImplementedError(kind)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
_request_decoder = msgspec.msgpack.Decoder(Request, dec_hook=_decode_hook)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


class Malformed(ProtocolError):
    """Bytes that are no request. seq and task_id say whose, as far as they could still be read."""

    def __init__(self, message: str, *, code: str, seq: int = 0, task_id: str | None = None) -> None:
        super().__init__(message, code=code)
        self.seq = seq
        self.task_id = task_id


def encode_request(seq: int, body: Body, *, ack: bool = False) -> bytes:
    """Raises msgspec.ValidationError or TypeError for a body that msgpack cannot say."""
    return _VERSION_BYTE + _encoder.encode(Request(seq, ack, body))


def encode_reply(seq: int, body: ReplyBody) -> bytes:
    return _VERSION_BYTE + _encoder.encode(Reply(seq, body))


def decode_request(data: bytes) -> Request:
    """Raises Malformed for anything that is not a request of this version."""
    _check_version(data)
    try:
        return _request_decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _explain(data, error) from None


def decode_reply(data: bytes) -> Reply:
    """Raises Malformed for anything that is not a reply of this version."""
    _check_version(data)
    try:
        return _reply_decoder.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Malformed(str(error), code="malformed") from None


def _check_version(data: bytes) -> None:
    if not data:
        raise Malformed("an empty message", code="malformed")
    if data[0] != PROTOCOL_VERSION:
        raise Malformed(
            f"protocol version {data[0]}, this daemon speaks {PROTOCOL_VERSION}", code="unsupported_version"
        )


_KNOWN_TYPES = frozenset(
    str(kind.__struct_config__.tag)
    for kind in (*TASK_TYPES, Hello, Bye, Cancel, Match, Pause, Resume, Drain, SetGeneration, Stats, Attach)
)
T = TypeVar("T")


def _explain(data: bytes, error: Exception) -> Malformed:
    """Say what is wrong, and whose message it was if that much can be read."""
    try:
        loose = msgspec.msgpack.decode(memoryview(data)[1:])
    except (msgspec.DecodeError, ValueError, RecursionError):
        return Malformed(f"not msgpack: {error}", code="malformed")
    seq, body = 0, None
    if isinstance(loose, list) and len(loose) >= 3:
        seq = _if(int, loose[0], 0)
        body = _if(dict, loose[2], None)
    if body is None or not 0 <= seq < 2**63:
        return Malformed(f"not a request: {error}", code="malformed", seq=seq if 0 <= seq < 2**63 else 0)
    kind = body.get("type")
    if not isinstance(kind, str) or kind not in _KNOWN_TYPES:
        return Malformed(f"unknown type {str(kind)[:80]!r}", code="unknown_type", seq=seq)
    task_id = _if(str, body.get("task_id"), "") if kind in _TASK_TAGS else None
    return Malformed(str(error), code="bad_value", seq=seq, task_id=task_id)


_TASK_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in TASK_TYPES)


def _if(kind: type[T], value: Any, otherwise: Any) -> Any:
    return value if type(value) is kind else otherwise


def is_task(body: Body) -> bool:
    return isinstance(body, Task)
