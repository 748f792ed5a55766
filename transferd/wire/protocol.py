"""What is on the wire: one version byte, then msgpack. (docs/protocol.md tells it for other languages.)

Lifecycle
    A client says Hello and is answered Welcome: who the daemon is (boot_id), whether it is ready, what
    its limits are, and the number of the session that has begun. It says Hello again about once a
    second: that is the heartbeat of both sides. It says Bye when it leaves. Requests may be sent at any
    time, any number of them without waiting.

Happy path
    Request(seq, ack, task)        → [Accepted, if ack is set] → Result
    Request(seq, …, control)       → Value
    `seq` is the client's own number; every reply carries the seq of its request. Replies come in the
    order in which things end.

Abort path
    A request that cannot be understood is answered with a code, under its seq if that could still be
    read (else 0): a task whose task_id could be read by a `rejected` Result, anything else by Refused.
    The connection stays. A client that is silent has gone, and its tasks are taken back. A daemon that
    is silent, or comes back with another boot_id, is lost, and a client fails what it waits for.

Sessions
    A session is a stretch of conversation in which nothing was lost: it ends when the connection
    breaks, when the client was given up as gone, and when an answer could not be handed to it. A request
    names the session it was made in; one of another session is answered Refused(stale_session) and
    nothing is touched. So what was on its way to a daemon that died is never done by its successor,
    which a client has long reported as lost. A client that sees another session of the same boot asks
    everything again that it still waits for: a task that is known is joined or its result repeated.
    Session 0 stands for whatever session there is, for peers that do not care. A Bye counts in every session
    that its own connection has had.

Format
    byte 0: PROTOCOL_VERSION. Then one msgpack array: [seq, ack, body, session = 0] from clients,
    [seq, body] from the daemon. A body is a map with its type in "type". token_ids are a bin: one byte
    "4" or "8" (the item size), then little-endian integers.

Versioning
    A new optional field in a body, or at the end of an array, is no new version: what is unknown is
    ignored. Anything else is. A daemon answers another version with Refused(unsupported_version) in its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
import numpy as np

from transferd.errors import OutOfMemory, ProtocolError
from transferd.tasks import (
    TASK_TYPES,
    ErrorInfo,
    ReadStorageTask,
    ReceiveTask,
    SendTask,
    SwapInTask,
    SwapOutTask,
    TaskResult,
    TokenIds,
    WriteStorageTask,
)

PROTOCOL_VERSION = 1
ANY_SESSION = 0
STALE_SESSION = "stale_session"  # the one code that a client acts on
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
    """Value: how many leading keys every rank can load; or, with token_ids, blocks of that path from `start` on."""

    keys: list[str] = []
    token_ids: TokenIds | None = None
    start: int = 0


class Locate(_Message, frozen=True, tag="locate"):
    """Value: {node: {medium: leading blocks of this path, …, "any": in any medium}}; token-indexed storage only."""

    token_ids: TokenIds


Holder = Annotated[str, msgspec.Meta(max_length=128)]  # of a pause: a name that a client has over all its connections


class Pause(_Message, frozen=True, tag="pause"):
    """Value comes once no rank touches any block. Held until the holder's Resume, or until its connection ends.

    holder: the connection itself if empty.
    """

    holder: Holder = ""


class Resume(_Message, frozen=True, tag="resume"):
    """Ends the holder's pauses and drains; everybody's, if it holds none."""

    holder: Holder = ""


class Drain(_Message, frozen=True, tag="drain"):
    """Value comes once everything admitted is answered. Held as a pause is."""

    holder: Holder = ""


class SetGeneration(_Message, frozen=True, tag="set_generation"):
    generation: str


class Stats(_Message, frozen=True, tag="stats"):
    pass


class Explain(_Message, frozen=True, tag="explain"):
    """Value: the life of one task, as story.py tells it. Refused with `unknown_task`."""

    task_id: str


Which = Literal["recent", "running", "slow", "failed"]
Limit = Annotated[int, msgspec.Meta(ge=1, le=1000)]  # rows of one answer


class Tasks(_Message, frozen=True, tag="tasks"):
    """Value: at most `limit` tasks, a map each, as daemon/listing.py tells them."""

    which: Which = "recent"
    limit: Limit = 100


class Clients(_Message, frozen=True, tag="clients"):
    """Value: at most `limit` clients that are connected, a map each, who came first first."""

    limit: Limit = 100


class Attach(_Message, frozen=True, tag="attach"):
    """Value: the device handle of a rank, {kind, data}, and which memory it names, {boot_id, epoch}.

    The client counts as having it mapped until it says Detach. epoch: of the memory that it has mapped already and
    says so again in a new session; refused with `stale_epoch` if that is no more. 0: it maps what is there now.
    """

    rank: int
    epoch: int = 0


class Detach(_Message, frozen=True, tag="detach"):
    """The client has unmapped a rank's memory."""

    rank: int


class Offer(_Message, frozen=True, tag="offer"):
    """A handle to memory that the engine made for a rank. Value: nil, once the daemon has mapped it.

    data: a map, left as bytes until its size is known to be modest. epoch: of the newest Welcome.
    """

    rank: int
    kind: str
    data: msgspec.Raw
    epoch: int


class ClearCache(_Message, frozen=True, tag="clear_cache"):
    """Value: the new epoch, once every admitted task is answered and the memory is freed."""


class RestoreCache(_Message, frozen=True, tag="restore_cache"):
    """Value: the epoch, once the memory is there again, or waits to be offered.

    generation: nil leaves it to the daemon: what storage.version_file says now, else the one that was set meanwhile.
    same_weights: it may be one that a clear has closed, because the engine serves the very weights of then.
    """

    generation: str | None = None
    same_weights: bool = False


Control = (
    Hello | Bye | Cancel | Match | Locate | Pause | Resume | Drain | SetGeneration | Stats | Explain
    | Tasks | Clients | Attach | Detach | Offer | ClearCache | RestoreCache
)  # fmt: skip
Body = WriteStorageTask | ReadStorageTask | SwapOutTask | SwapInTask | SendTask | ReceiveTask | Control


class Request(msgspec.Struct, frozen=True, array_like=True):
    """seq: the client's own number. ack: the pusher of a task wants to hear at once that it was admitted."""

    seq: int
    ack: bool
    body: Body
    session: int = ANY_SESSION


# --- from the daemon ------------------------------------------------------------------------------


class Welcome(_Message, frozen=True, tag="welcome"):
    """Who answers. A new boot_id is a new daemon, which knows nothing of earlier requests.

    block_size: tokens of a block, for whoever computes block keys. pd_mode: "storage" or "direct", see handover.py;
    pd_address: where other daemons reach this one in direct mode, "" otherwise.
    """

    boot_id: str
    ready: bool
    version: str
    generation: str
    max_message: int
    session: int = ANY_SESSION
    block_size: int = 0
    pd_mode: str = "storage"
    pd_address: str = ""
    missing: list[int] = []  # ranks without memory
    why: str = ""  # why it is not ready
    epoch: int = 0  # grows when the cache is cleared


class Accepted(_Message, frozen=True, tag="accepted"):
    """The task was admitted; its result follows under the same seq."""


class Value(_Message, frozen=True, tag="value"):
    value: Any = None


class Refused(_Message, frozen=True, tag="refused"):
    """A control request failed, or a message could not be understood.

    permanent: the request itself is wrong; sending it again changes nothing.
    """

    error: ErrorInfo
    permanent: bool = False


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
    if isinstance(value, np.ndarray | np.generic):  # block ids as an engine's block manager holds them
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no form on the wire")


def _decode_hook(kind: type, value: Any) -> Any:
    if kind is TokenIds:
        if not isinstance(value, bytes):
            raise ValueError(f"Expected `bytes`, got `{type(value).__name__}`")
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


def encode_request(seq: int, body: Body, *, ack: bool = False, session: int = ANY_SESSION) -> bytes:
    """Raises ValueError, TypeError or OverflowError for a body that msgpack cannot say."""
    return _VERSION_BYTE + _encoder.encode(Request(seq, ack, body, session))


def encode_reply(seq: int, body: ReplyBody) -> bytes:
    """Raises ValueError, TypeError or OverflowError for a Value that msgpack cannot say."""
    return _VERSION_BYTE + _encoder.encode(Reply(seq, body))


def decode_request(data: bytes | memoryview, max_message: int | None = None) -> Request:
    """Raises Malformed for anything that is not a request of this version and at most `max_message` bytes."""
    _check_version(data)
    content = memoryview(data)[1:]
    if max_message is not None and len(data) > max_message:
        raise _as_malformed(content, f"a message of {len(data)} bytes, {max_message} are allowed", "too_large")
    try:
        if len(content) > CAREFUL_BYTES:
            _token_ids_decoder.decode(content)
        return _request_decoder.decode(content)
    except msgspec.ValidationError as error:
        raise _as_malformed(content, str(error), "bad_value") from None
    except MemoryError:
        problem = f"no memory to read a message of {len(data)} bytes; try again later"
        raise _as_malformed(content, problem, OutOfMemory.code) from None
    except UNREADABLE as error:
        raise _as_malformed(content, f"not msgpack: {error}", "malformed") from None


def decode_reply(data: bytes | memoryview) -> Reply:
    """Raises Malformed for anything that is not a reply of this version."""
    _check_version(data)
    try:
        return _reply_decoder.decode(memoryview(data)[1:])
    except UNREADABLE as error:
        raise Malformed(str(error), code="malformed") from None


# What msgspec raises for bytes that are no msgpack of the wanted shape. ValueError: among others, text
# that is no UTF-8. RecursionError: nesting without end. MemoryError: there is none left.
UNREADABLE = (msgspec.DecodeError, ValueError, OverflowError, RecursionError, MemoryError)


def _check_version(data: bytes | memoryview) -> None:
    if not data:
        raise Malformed("an empty message, or one of several frames", code="malformed")
    if data[0] != PROTOCOL_VERSION:
        raise Malformed(f"protocol version {data[0]}, this end speaks {PROTOCOL_VERSION}", code="unsupported_version")


def offer(rank: int, kind: str, data: dict[str, Any], epoch: int) -> Offer:
    """Raises TypeError, ValueError or OverflowError for data that msgpack cannot say."""
    return Offer(rank, kind, msgspec.Raw(_encoder.encode(data)), epoch)


MAX_HANDLE = 1024**2  # bytes of an offer's data; 61 layers of 5 arrays take 40 KiB


def handle_data(offer: Offer) -> dict[str, Any]:
    """The data of an offer, as it was sent. Raises ProtocolError."""
    if len(memoryview(offer.data)) > MAX_HANDLE:
        raise ProtocolError(f"the handle has more than {MAX_HANDLE} bytes", code="too_large")
    try:
        return _handle_decoder.decode(offer.data)
    except UNREADABLE as error:
        raise ProtocolError(f"the handle's data is no map: {error}", code="bad_value") from None


_handle_decoder = msgspec.msgpack.Decoder(dict[str, Any])


# --- reading what is not a request ----------------------------------------------------------------
#
# None of this builds objects from the message: parts that are not looked at are skipped as bytes, so
# that a message of empty lists cannot make 60 times its own size out of the daemon's memory.


class _LooseRequest(msgspec.Struct, array_like=True):
    seq: msgspec.Raw
    ack: msgspec.Raw
    body: msgspec.Raw


class _LooseBody(msgspec.Struct):
    type: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    task_id: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _TokenIdsBody(msgspec.Struct):
    token_ids: memoryview | None = None


class _TokenIdsRequest(msgspec.Struct, array_like=True):
    seq: msgspec.Raw
    ack: msgspec.Raw
    body: _TokenIdsBody


# msgspec hands the value of a type it does not know (TokenIds) to the hook as the objects it is made of.
# Past this size, they are asked first whether they are bytes.
CAREFUL_BYTES = 64 * 1024
_token_ids_decoder = msgspec.msgpack.Decoder(_TokenIdsRequest)
_loose_decoder = msgspec.msgpack.Decoder(_LooseRequest)
_loose_body_decoder = msgspec.msgpack.Decoder(_LooseBody)
_int_decoder = msgspec.msgpack.Decoder(int)
_text_decoder = msgspec.msgpack.Decoder(str)

_TASK_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in TASK_TYPES)
_KNOWN_TAGS = _TASK_TAGS | {str(kind.__struct_config__.tag) for kind in get_args(Control)}
T = TypeVar("T")


def _as_malformed(content: memoryview, problem: str, code: str) -> Malformed:
    """Say what is wrong, and whose message it was if that much can be read."""
    try:
        loose = _loose_decoder.decode(content)
    except UNREADABLE:
        return Malformed(problem, code=_code_of_no_request(code))
    seq = _read(_int_decoder, loose.seq)
    seq = seq if seq is not None and 0 <= seq < 2**63 else 0
    try:
        body = _loose_body_decoder.decode(loose.body)
    except UNREADABLE:
        return Malformed(problem, code=_code_of_no_request(code), seq=seq)
    kind, task_id = _read(_text_decoder, body.type), _read(_text_decoder, body.task_id)
    if kind not in _KNOWN_TAGS:
        if code == "bad_value":
            shown = "missing" if body.type is msgspec.UNSET else repr(kind[:80]) if kind is not None else "not text"
            return Malformed(f"unknown type: {shown}", code="unknown_type", seq=seq, task_id=task_id)
        return Malformed(problem, code=code, seq=seq, task_id=task_id)
    # msgspec's path starts at the envelope; what is wrong is wrong in the task.
    problem = problem.replace("`$[2]", "`$")
    return Malformed(problem, code=code, seq=seq, task_id=task_id if kind in _TASK_TAGS else None)


def _code_of_no_request(code: str) -> str:
    return code if code in ("too_large", OutOfMemory.code) else "malformed"


def _read(decoder: msgspec.msgpack.Decoder[T], raw: msgspec.Raw | msgspec.UnsetType) -> T | None:
    """The value, if it is of the decoder's type."""
    if raw is msgspec.UNSET:
        return None
    try:
        return decoder.decode(raw)
    except UNREADABLE:
        return None
