"""The wire format: one version byte, then msgpack. docs/protocol.md describes it for other languages.

Requests: [seq, ack, body, session = 0], replies: [seq, body]. A body is a map with its type in "type". token_ids are a
bin: one byte "4" or "8" (the item size), then little-endian integers. The client chooses `seq`; every reply carries the
seq of its request, and replies come in the order in which requests end.

A session is a stretch of a conversation in which no message was lost. A request of another connection's session is
answered Refused(stale_session), and nothing is touched, so a request that was in flight to a dead daemon is never run
by its successor. A request of an earlier session of its own connection is run, and Refused(stale_session) with seq 0
makes the client send Hello. If such a request is refused, it gets no answer: the client will repeat it, and the
repetition may be accepted. Session 0 means any session, for peers that do not need this.

A new optional field in a body or at the end of an array does not change the version; any other change does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import msgspec

from transferd.errors import OutOfMemory
from transferd.tasks import (
    DEFAULT_TIMEOUT_S,
    TASK_TYPES,
    ErrorInfo,
    ReadStorageTask,
    Task,
    TaskResult,
    TokenIds,
    WriteStorageTask,
)
from transferd.wire.hooks import plain, typed
from transferd.wire.malformed import CAREFUL_BYTES, UNREADABLE, Malformed, as_malformed, check_token_ids

__all__ = ["UNREADABLE", "Malformed"]  # imported names that callers may use; all names defined here are public

PROTOCOL_VERSION = 1
ANY_SESSION = 0
MOST_CLOSED = 4096  # generations of one ClosedGenerations
STALE_SESSION = "stale_session"  # the only code that a client acts on
_VERSION_BYTE = bytes([PROTOCOL_VERSION])


class _Message(msgspec.Struct, frozen=True, tag_field="type"):
    pass


# --- from clients ---------------------------------------------------------------------------------


class ControlRequest(_Message, frozen=True):
    """A request that is no task. Its base says who may make it: here, clients that belong to their engine.

    The method of daemon/requests.py that is named as the tag handles it.
    """


class OfUser(ControlRequest, frozen=True):
    """It names no block of the engine, so processes of the engine's user may make it, too (docs/adr/0068)."""


class OfAnyone(ControlRequest, frozen=True):
    """It needs no engine: that may have left. Its handler checks rights."""


class OfObserver(OfAnyone, frozen=True):
    """It moves no bytes, changes no state and waits for no event, so observers may make it."""


EngineName = Annotated[str, msgspec.Meta(max_length=64)]
# A registration's secret, chosen at random by the registering client: clients that show it belong to the engine.
Token = Annotated[str, msgspec.Meta(max_length=64)]


MOST_COUNTED = 2**31 - 1  # of each kind, in one Hello
TurnedAway = Annotated[
    dict[Annotated[str, msgspec.Meta(max_length=64)], Annotated[int, msgspec.Meta(ge=1, le=MOST_COUNTED)]],
    msgspec.Meta(max_length=32),
]


class Hello(OfObserver, frozen=True, tag="hello", omit_defaults=True):
    """Greeting and heartbeat. Answered by Welcome.

    generation: of a client that uses its engine, the generation that it has served, nil if it has served none. If it
        was served by another daemon, this one adopts it, or refuses the client with `generation_mismatch` until a
        client sets the generation.
    """

    engine: EngineName = ""  # the engine that this client speaks for; "" is "default"
    # the token of the engine's registration. A client that names a registered engine without it is refused
    # (`not_this_engine`)
    registration: Token = ""
    turned_away: TurnedAway = {}  # by code: tasks that the client has rejected itself since its last Hello with these
    generation: Annotated[str, msgspec.Meta(max_length=256)] | None = None  # that the client's engine serves
    boot_id: Annotated[str, msgspec.Meta(max_length=64)] = ""  # of the daemon that served it
    configured: str | None = None  # from that daemon's Welcome
    # blocks that its engine's adapter has not stored since then, by reason (tasks.NOT_STORED)
    not_stored: TurnedAway = {}
    returns: bool | None = None  # whether the client hears of a new daemon, and can attach its memory there


class Register(OfAnyone, frozen=True, tag="register", omit_defaults=True):
    """Register the client's engine. Value: {epoch, registered} as in the Welcome, once its ranks can offer memory."""

    # chosen by the client for this registration; a repeated one returns the engine that was registered with it
    token: Token
    ranks: int
    model: Annotated[str, msgspec.Meta(max_length=1024)]
    layout: dict[str, Any]  # keys of [cache] for a block's content, the number of blocks, and their devices
    generation: str = ""
    host_blocks: int = 0
    first_rank: int = 0
    group_ranks: int = 0  # 0 means `ranks`
    dp_rank: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    storage_share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None  # of the store; nil lets the daemon choose


class Unregister(ControlRequest, frozen=True, tag="unregister"):
    """Remove the client's engine. Value: nil, once its tasks have ended and its memory is unmapped."""


class Bye(OfObserver, frozen=True, tag="bye"):
    """The client leaves. There is no answer."""


MOST_IDS = 256  # of tasks, in one Cancel or Settled: a millisecond of the daemon's loop
MoreIds = Annotated[list[str], msgspec.Meta(max_length=MOST_IDS - 1)]


class Cancel(ControlRequest, frozen=True, tag="cancel", omit_defaults=True):
    """Cancel a task, and others. Value: whether there was any such task to cancel."""

    task_id: str
    task_ids: MoreIds = []  # further ones
    anew: bool = False  # keep no result of one that has not started, so that its id may be pushed anew


class Settled(OfAnyone, frozen=True, tag="settled", omit_defaults=True):
    """Value: true, once no rank touches a block for this task, now or later. Also if the task is not known.

    session: that of the push. If it is another connection's, the answer waits until the daemon has forgotten that
        client, because an unread push of that client could still begin.
    task_ids: further ones of this session. Then the value is a list: those of all that are settled, once some are.
    """

    task_id: str
    session: int = ANY_SESSION
    task_ids: MoreIds = []


class Match(ControlRequest, frozen=True, tag="match"):
    """Value: how many leading keys every rank can load; with token_ids, how many blocks of that path from `start`."""

    keys: list[str] = []
    token_ids: TokenIds | None = None
    start: int = 0
    salt: str = ""  # as in tasks


class Exists(ControlRequest, frozen=True, tag="exists"):
    """Value: one bool for each key: whether every rank can load its block; with `lease`, a Leased (wire/answers.py)."""

    keys: list[str]
    use: bool = True  # it counts as a use of the blocks
    lease: Annotated[float, msgspec.Meta(ge=0, le=1e8)] = 0.0  # seconds for which what is there is not evicted


class Locate(ControlRequest, frozen=True, tag="locate"):
    """Value: {node: {medium: leading blocks of this path, …, "any": in any medium}}; token-indexed storage only.

    keys: locate these instead, in other storage. Then the media are the levels of this node's storage.
    """

    token_ids: TokenIds | None = None
    salt: str = ""  # as in tasks
    keys: list[str] = []


Holder = Annotated[str, msgspec.Meta(max_length=128)]  # of a pause: a client's name, the same in all its connections
# A holder's secret, chosen at random: reports show the holder's name, so the name proves nothing.
Proof = Annotated[str, msgspec.Meta(max_length=64)]


class Pause(OfUser, frozen=True, tag="pause"):
    """Start no more tasks until the holder's Resume, or until its connection ends. Value: nil, once all ranks are idle.

    holder: "" means the connection itself. Requests with the same holder and proof are of one holder.
    """

    holder: Holder = ""
    proof: Proof = ""


class Resume(OfUser, frozen=True, tag="resume"):
    """End the holder's pauses and drains, or those of all clients if it holds none."""

    holder: Holder = ""
    proof: Proof = ""


class Drain(OfUser, frozen=True, tag="drain"):
    """Admit no more tasks, for as long as a pause would last. Value: nil, once every admitted task is answered."""

    holder: Holder = ""
    proof: Proof = ""


class SetGeneration(OfUser, frozen=True, tag="set_generation"):
    generation: str


class ClosedGenerations(ControlRequest, frozen=True, tag="closed_generations"):
    """Generations that ended with a clear of the cache by an earlier daemon. This daemon accepts none of them again."""

    generations: Annotated[list[Annotated[str, msgspec.Meta(max_length=256)]], msgspec.Meta(max_length=MOST_CLOSED)]


class Purge(OfAnyone, frozen=True, tag="purge", omit_defaults=True):
    """Remove the stored objects that fit every field that is set: of the client's engine, or as a user who may.

    Value: {objects, bytes}: what was, or would be, removed; with `detail` a whole `Purged` (wire/answers.py).
    """

    keys: list[str] | None = None  # blocks of the engine, of its present generation unless `generation` names another
    model: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    generation: Annotated[str, msgspec.Meta(max_length=256)] | None = None
    # the objects' engine; "" means all engines for the daemon's user and root, and the client's own for all others
    engine: EngineName = ""
    # objects that were neither stored nor used for so many seconds
    older_than: Annotated[float, msgspec.Meta(ge=0, le=1e10)] | None = None
    dry_run: bool = False
    detail: bool = False
    shared: bool = False  # also in a bucket or pool, for all nodes; the daemon's user and root may


class Pin(OfUser, frozen=True, tag="pin", omit_defaults=True):
    """Do not evict these blocks for `ttl` seconds. Value: how many of them are stored on every rank, and pinned now.

    detail: the value is {pinned, durable, reachable} instead (wire/answers.py).

    A further pin of a block replaces the engine's earlier one. Refused with `share_exceeded`.
    """

    keys: list[str]
    ttl: Annotated[float, msgspec.Meta(gt=0, le=1e8)]
    detail: bool = False


class Unpin(OfUser, frozen=True, tag="unpin"):
    """End the engine's pins of these blocks, or of all blocks if `keys` is nil. Value: nil."""

    keys: list[str] | None = None


LevelName = Annotated[str, msgspec.Meta(max_length=64)]


class Prefetch(ControlRequest, frozen=True, tag="prefetch", omit_defaults=True):
    """Bring these blocks up to a level of storage. Value: a result, as of a task; block_ids are positions in `keys`.

    These blocks are now in the level, or in a faster one, on every rank. A block that was brought is not evicted before
    its first use, the deadline, a Cancel of `task_id`, or the end of the client. Refused with `unknown_level`.
    """

    task_id: str
    keys: list[str]
    level: LevelName
    timeout: Annotated[float, msgspec.Meta(gt=0, le=1e8)] = DEFAULT_TIMEOUT_S


class Warm(OfAnyone, frozen=True, tag="warm", omit_defaults=True):
    """Bring up the newest stored objects, at most `newest` bytes, and no more than there is free room for.

    Value: {level, objects, bytes}.
    """

    newest: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    level: LevelName = ""  # where to; "" is the first one
    model: Annotated[str, msgspec.Meta(max_length=1024)] | None = None  # only objects of this model


class ChangeLevel(OfAnyone, frozen=True, tag="change_level"):
    """Take a level of storage out, or put it back. Value: {level, state, objects, bytes}, once that is over."""

    level: LevelName
    leaves: bool


class MakeCopies(OfAnyone, frozen=True, tag="make_copies"):
    """If `leaves`, copy objects that only this node has to other nodes of its pool. Otherwise make missing copies.

    Value: {objects, bytes, left, left_bytes, why}, once that is over.
    """

    leaves: bool


class RestartCheck(OfAnyone, frozen=True, tag="restart_check"):
    """What a restart of the daemon would lose that its report does not say. Value: an AtRestart (wire/answers.py)."""


class Record(OfAnyone, frozen=True, tag="record"):
    """Value: engines' look-ups since the one of number `after`, as a trace; observability/key_trace.py describes it."""

    after: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0


class Stats(OfObserver, frozen=True, tag="stats"):
    pass


class Explain(OfObserver, frozen=True, tag="explain"):
    """Value: the story of a task; story.py describes it. Refused with `unknown_task`.

    engine: the task's engine; "" is the client's own engine.
    """

    task_id: str
    engine: EngineName = ""


class Why(OfAnyone, frozen=True, tag="why"):
    """Value: what is known of a stored block: a map for each engine and generation; daemon/traffic.py describes it.

    For those who may purge what the engine stores; others could try keys. engine: "" means all that the client may ask.
    """

    key: str
    engine: EngineName = ""


Which = Literal["recent", "running", "slow", "failed"]
Limit = Annotated[int, msgspec.Meta(ge=1, le=1000)]  # rows of one answer


class ListTasks(OfObserver, frozen=True, tag="tasks"):
    """Value: at most `limit` tasks, one map each; daemon/listing.py describes them."""

    which: Which = "recent"
    limit: Limit = 100
    engine: EngineName = ""  # list only this engine's; "" = all


class ListClients(OfObserver, frozen=True, tag="clients"):
    """Value: at most `limit` connected clients, one map each, in the order in which they connected."""

    limit: Limit = 100
    engine: EngineName = ""  # list only clients of this engine; "" = all


class Attach(ControlRequest, frozen=True, tag="attach"):
    """Value: the device handle of a rank, {kind, data}, and which memory it names, {boot_id, epoch}.

    The daemon counts the memory as mapped by this client until Detach. epoch: 0 to map the current memory. A client
    that repeats this request in a new session sends the epoch of the memory that it has mapped; if that memory is
    gone, the daemon refuses with `stale_epoch`.
    """

    rank: int
    epoch: int = 0


class Detach(ControlRequest, frozen=True, tag="detach"):
    """The client has unmapped a rank's memory."""

    rank: int


class Offer(ControlRequest, frozen=True, tag="offer"):
    """A handle to memory that the engine created for a rank. Value: nil, once the daemon has mapped it."""

    rank: int
    kind: str
    data: msgspec.Raw  # a map, kept as bytes until its size was checked
    epoch: int  # from the newest Welcome


class ClearCache(OfUser, frozen=True, tag="clear_cache"):
    """Value: the new epoch, once every admitted task is answered and the memory is freed.

    keep_host: host memory stays allocated and pinned, without a block in it.
    """

    keep_host: bool = False


class RestoreCache(OfUser, frozen=True, tag="restore_cache"):
    """Value: the epoch, once the memory exists again or the daemon waits for offers."""

    # nil lets the daemon choose: the content of storage.version_file now, or else the current generation
    generation: str | None = None
    # also allow a generation that a clear has ended, because the engine still serves its weights
    same_weights: bool = False


class SparseRead(ReadStorageTask, frozen=True, kw_only=True, tag="read_sparse"):
    """A ReadStorageTask with `prefix` false.

    A separate type, so that daemons that read only the leading blocks reject it (`unknown_type`).
    """

    prefix: bool = False


class SaltedRead(ReadStorageTask, frozen=True, kw_only=True, tag="read_salted"):
    """A ReadStorageTask with a salt: a daemon that would ignore the salt rejects it (`unknown_type`)."""


class SaltedWrite(WriteStorageTask, frozen=True, kw_only=True, tag="write_salted"):
    """A WriteStorageTask with a salt, for the same reason."""


_BASES = (ControlRequest, OfUser, OfAnyone, OfObserver)
CONTROLS = tuple(kind for base in _BASES for kind in base.__subclasses__() if kind not in _BASES)

if TYPE_CHECKING:
    Body = Task | SparseRead | SaltedRead | SaltedWrite | ControlRequest
else:
    Body = Union[(*TASK_TYPES, SparseRead, SaltedRead, SaltedWrite, *CONTROLS)]


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A message from a client."""

    seq: int  # a number that the client chooses
    ack: bool  # send Accepted once the task is admitted
    body: Body
    session: int = ANY_SESSION


# --- from the daemon ------------------------------------------------------------------------------


class Identity(msgspec.Struct, frozen=True):
    """What an engine is: a client that has used one engine must not be served by another one of the same name.

    The generation is not in here: it may change while an engine runs, and the Welcome names it.
    """

    model: str
    fingerprint: str  # of a block's layout and of the engine's facts, as in every object's name
    first_rank: int  # of its ranks on this node, within the group
    ranks: int  # on this node
    group_ranks: int


class Welcome(_Message, frozen=True, tag="welcome"):
    """The answer to Hello. A new boot_id means a new daemon, which does not know earlier requests."""

    boot_id: str
    ready: bool
    version: str
    generation: str
    max_message: int
    session: int = ANY_SESSION
    block_size: int = 0  # tokens per block, needed to compute block keys
    pd_mode: str = "storage"  # "storage" or "direct", see handover.py
    pd_address: str = ""  # where other daemons reach this one in direct mode; "" otherwise
    missing: list[int] = []  # ranks without memory
    why: str = ""  # why the daemon is not ready
    epoch: int = 0  # grows with each clear of the cache and each registration of the engine; 0 if there is no engine
    engine: str = ""  # the client's engine; "" from a daemon of a version without engines
    registration: str = ""  # the token, for a client that has shown it; "" for all others and the engine of [cache]
    registered: int = 0  # the epoch that began with this registration
    process: dict[str, Any] = {}  # the daemon's: {boot, namespace, pid, started}, see tiers/owner.py; {} if unknown
    configured: str | None = None  # the generation that the engine's configuration or registration named
    identity: Identity | None = None  # of the client's engine; nil if there is none, and from an older daemon
    refused: ErrorInfo | None = None  # why the client does not belong to the engine that it names, if there is one
    ended: ErrorInfo | None = None  # how the registration ended whose token the client shows; nil if it has not
    many: int = 0  # the most task ids in one Cancel or Settled; 0 from a daemon that reads one
    passing: bool = False  # whether it takes descriptors of memory (passing.py)


class Accepted(_Message, frozen=True, tag="accepted"):
    """The task was admitted; its result follows under the same seq."""


class TaskProgress(_Message, frozen=True, tag="progress"):
    """Sent before the result of a task `by_parts`: the first `layers` layers of all its blocks are there.

    It may be missing: then the client learns it from the result.
    """

    layers: int


class Value(_Message, frozen=True, tag="value"):
    value: Any = None


class Refused(_Message, frozen=True, tag="refused"):
    """A control request failed, or a message was malformed.

    permanent: the request itself is wrong; a retry fails again.
    """

    error: ErrorInfo
    permanent: bool = False


class Result(_Message, frozen=True, tag="result"):
    result: TaskResult


ReplyBody = Welcome | Accepted | TaskProgress | Value | Refused | Result


class ReplyEnvelope(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    body: ReplyBody


# --- bytes ----------------------------------------------------------------------------------------


# Bytes that must stay free beside a large message, or it is refused: other messages need memory as well.
SPARE_BYTES = 2 * 1024**2

_encoder = msgspec.msgpack.Encoder(enc_hook=plain)


def encoded(value: Any) -> msgspec.Raw:
    """A value for many answers, encoded once. Raises like `encode_reply`."""
    return msgspec.Raw(_encoder.encode(value))


_request_decoder = msgspec.msgpack.Decoder(Request, dec_hook=typed)
_reply_decoder = msgspec.msgpack.Decoder(ReplyEnvelope)


def encode_request(seq: int, body: Body, *, ack: bool = False, session: int = ANY_SESSION) -> bytes:
    """One message. Raises ValueError, TypeError or OverflowError for a body that msgpack cannot encode."""
    if type(body) is ReadStorageTask and body.salt:
        body = SaltedRead(**msgspec.structs.asdict(body))
    elif type(body) is WriteStorageTask and body.salt:
        body = SaltedWrite(**msgspec.structs.asdict(body))
    elif type(body) is ReadStorageTask and not body.prefix:
        body = SparseRead(**msgspec.structs.asdict(body))
    return _VERSION_BYTE + _encoder.encode(Request(seq, ack, body, session))


def encode_reply(seq: int, body: ReplyBody) -> bytes:
    """One message. Raises ValueError, TypeError or OverflowError for a Value that msgpack cannot encode."""
    return _VERSION_BYTE + _encoder.encode(ReplyEnvelope(seq, body))


def decode_request(data: bytes | memoryview, max_message: int | None = None) -> Request:
    """The inverse of `encode_request`. Raises Malformed for other bytes, another version, or beyond `max_message`."""
    if data[:1] != _VERSION_BYTE:
        raise _other_version(data)
    content = memoryview(data)[1:]
    if max_message is not None and len(data) > max_message:
        problem = f"the message has {len(data)} bytes, the limit is {max_message} (tuning.server.max_message)"
        raise _named(content, problem, "too_large")
    try:
        if len(content) > CAREFUL_BYTES:
            import numpy as np

            np.empty(len(content) + SPARE_BYTES, np.uint8)  # raises MemoryError; takes and touches nothing
            check_token_ids(content)
        return _request_decoder.decode(content)
    except msgspec.ValidationError as error:
        raise _named(content, str(error), "bad_value") from None
    except MemoryError:
        problem = f"out of memory while reading a message of {len(data)} bytes; retry later"
        raise _named(content, problem, OutOfMemory.code) from None
    except UNREADABLE as error:
        raise _named(content, f"not msgpack: {error}", "malformed") from None


def decode_reply(data: bytes | memoryview) -> ReplyEnvelope:
    """The inverse of `encode_reply`. Raises Malformed for anything that is not a reply of this version."""
    if data[:1] != _VERSION_BYTE:
        raise _other_version(data)
    try:
        return _reply_decoder.decode(memoryview(data)[1:])
    except UNREADABLE as error:
        raise Malformed(str(error), code="malformed") from None


def _other_version(data: bytes | memoryview) -> Malformed:
    if not data:
        return Malformed("the message is empty or has several frames; send exactly one frame", code="malformed")
    problem = f"unsupported protocol version {data[0]}; this end speaks version {PROTOCOL_VERSION}"
    return Malformed(problem, code="unsupported_version")


def offer(rank: int, kind: str, data: dict[str, Any], epoch: int) -> Offer:
    """An Offer with its data encoded. Raises TypeError, ValueError or OverflowError if msgpack cannot encode it."""
    return Offer(rank, kind, msgspec.Raw(_encoder.encode(data)), epoch)


_TASK_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in (*TASK_TYPES, SparseRead, SaltedRead, SaltedWrite))
_CONTROL_TAGS = frozenset(str(kind.__struct_config__.tag) for kind in CONTROLS)


def _named(content: memoryview, problem: str, code: str) -> Malformed:
    return as_malformed(content, problem, code, tasks=_TASK_TAGS, control=_CONTROL_TAGS)
