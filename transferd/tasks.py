"""Tasks and their results, and how the outcomes of all ranks become one result.

A task is a frozen value. Field names are FastDeploy's, so an engine that switches from it keeps its
vocabulary. Each task class states as data what the rest of the package would otherwise branch on:

* `lane`: the task's queue, so that loads never wait behind stores;
* `footprint()`: the blocks that the task reads and writes in each tier, to order conflicting tasks;
* `merge`: how the outcomes of all ranks become one answer. It lists a block only if *every* rank moved it:
  - read: the longest prefix (a later block is useless to most engines without the earlier ones);
  - sparse read, write: all of them;
  - swap: all or nothing (an engine maps whole nodes between device and host).

numpy is imported where it is used: a client that only asks a daemon something does without (0.15 s of CPU).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import msgspec

from transferd.errors import RequestError
from transferd.runtime.compat import StrEnum

if TYPE_CHECKING:
    import numpy.typing as npt

TRACE_BLOCK_TOKENS = 512  # tokens for each id of a request trace (cli/replay/trace.py)
DEFAULT_TIMEOUT_S = 30.0
NOT_ADMITTED = "not_admitted"  # the code of a write if storage chose not to store its blocks; nothing failed
TIMELINE_SLOTS = 16  # timelines of a rank
# Why an engine's adapter did not store blocks: no daemon answered, too many writes at once, the write has failed, or
# storage chose not to store them.
NOT_READY, NO_ROOM, FAILED = "not_ready", "no_room", "failed"
NOT_STORED = NOT_READY, NO_ROOM, FAILED, NOT_ADMITTED


class Status(StrEnum):
    """How a task ended. Every task that was pushed gets exactly one of these, exactly once."""

    OK = "ok"  # all blocks moved
    PARTIAL = "partial"  # some blocks moved: for reads a usable prefix, unless the read is sparse; see not_admitted
    MISS = "miss"  # a read found no block, and nothing went wrong
    FAILED = "failed"  # no block moved, because of an error
    EXPIRED = "expired"  # no block moved by the deadline
    CANCELLED = "cancelled"  # the caller cancelled it; block_ids lists what had moved by then
    REJECTED = "rejected"  # bad input, or a state that a retry cannot change; nothing was touched
    BUSY = "busy"  # not admitted now; retry after `retry_after` seconds


class Lane(StrEnum):
    """One queue per kind of task, shared by all ranks. The order is that of the statistics, not of priority."""

    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    READ = "read"
    WRITE = "write"
    SEND = "send"
    RECEIVE = "receive"


class Stop(StrEnum):
    """Why a running task was stopped early."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"


_STOP_CODES = frozenset(str(stop) for stop in Stop)


class TokenIds(Sequence[int]):
    """The token ids of a sequence, held as one little-endian integer array and sent as raw bytes.

    Built from any sequence of ints or any integer numpy array; int32 where the values fit, else
    int64. Compares equal to another TokenIds or a list of the same ids.

    Raises TypeError or OverflowError for values that are not integers of at most 64 bits.
    """

    __slots__ = ("array",)

    def __init__(self, ids: Sequence[int] | npt.NDArray[Any] | TokenIds) -> None:
        import numpy as np

        source = ids.array if isinstance(ids, TokenIds) else np.asarray(ids)
        if source.size == 0:
            source = source.astype("<i4")
        if source.ndim != 1 or source.dtype.kind not in "iu":
            what = f"got dtype {source.dtype} with shape {source.shape}"
            raise TypeError(f"token_ids must be a one-dimensional sequence of integers; {what}")
        if source.dtype.kind == "u" and source.dtype.itemsize == 8 and int(source.max()) > np.iinfo(np.int64).max:
            raise OverflowError(f"token_ids contain {int(source.max())}, which does not fit a signed 64-bit integer")
        narrow = np.iinfo(np.int32)
        fits = source.size == 0 or (source.min() >= narrow.min and source.max() <= narrow.max)
        array = np.array(source, dtype="<i4" if fits else "<i8")
        array.flags.writeable = False
        self.array: npt.NDArray[Any] = array

    @classmethod
    def from_bytes(cls, data: bytes) -> TokenIds:
        """Inverse of `to_bytes`. Raises ValueError on any other bytes."""
        import numpy as np

        width = data[:1]
        if width not in (b"4", b"8") or (len(data) - 1) % int(width):
            raise ValueError("token_ids must be one byte '4' or '8' followed by whole integers of that many bytes")
        return cls(np.frombuffer(data, dtype=f"<i{width.decode()}", offset=1))

    def to_bytes(self) -> bytes:
        """One byte `4` or `8` (the item size), then the ids, little-endian."""
        return str(self.array.itemsize).encode() + self.array.tobytes()

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:
        return TokenIds(self.array[index]) if isinstance(index, slice) else int(self.array[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenIds):
            import numpy as np

            return np.array_equal(self.array, other.array)
        if isinstance(other, list):  # not a tuple: an equal tuple would have another hash
            return len(other) == len(self) and list(other) == self.array.tolist()
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.array.tobytes())

    def __repr__(self) -> str:
        return f"TokenIds(<{len(self)} ids>)"


DEVICE, HOST, STORAGE, PATHS = "device", "host", "storage", "paths"


class Footprint(msgspec.Struct, frozen=True, gc=False):
    """The blocks a task reads and writes, by where they are. STORAGE: keys; DEVICE, HOST: ids.

    PATHS: for flushes of a token index, the first block of the path: written by a flush that withdraws the rest of the
    path, read by all others.
    """

    reads: Mapping[str, Sequence[Any]] = {}
    writes: Mapping[str, Sequence[Any]] = {}


def check_ids(ids: Sequence[int], blocks: int, what: str, *, target: bool) -> None:
    """Raise RequestError that names the first id outside 0 … blocks-1 or, for targets, the first duplicate."""
    if ids and (min(ids) < 0 or max(ids) >= blocks):
        wrong = next(i for i in ids if not 0 <= i < blocks)
        raise RequestError(f"{what}: block {wrong} is out of range (0 … {blocks - 1})", code="id_out_of_range")
    if target and len(set(ids)) != len(ids):
        seen: set[int] = set()
        twice = next(i for i in ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
        raise RequestError(f"{what}: block {twice} occurs twice", code="duplicate_id")


class _Task(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The base of all tasks."""

    task_id: str
    timeout: float = DEFAULT_TIMEOUT_S  # seconds from admission
    after: tuple[int, int] | msgspec.UnsetType | None = msgspec.UNSET  # (timeline, number) that device blocks wait for
    traceparent: str | msgspec.UnsetType = msgspec.UNSET  # the W3C trace that its spans belong to

    lane: ClassVar[Lane]
    none_found: ClassVar[Status] = Status.FAILED  # if no block counts as moved, and nothing went wrong

    @property
    def kind(self) -> str:
        """The task's name on the wire and in reports, such as `write`. It equals the lane's name."""
        return str(self.lane)

    @property
    def blocks(self) -> int:
        """How many blocks the task asks to move."""
        raise NotImplementedError

    @property
    def block_ids(self) -> list[int]:
        """The ids that the result names."""
        raise NotImplementedError

    def in_common(self, outcomes: Sequence[RankOutcome]) -> Sequence[int]:
        """The positions that count as moved, ascending, if not every rank moved every block."""
        raise NotImplementedError

    def merge(self, outcomes: Sequence[RankOutcome]) -> TaskResult:
        """What all ranks together have done. outcomes: one of each rank."""
        wanted = self.blocks
        # The usual case takes no step in Python for each rank.
        complete = min(map(len, map(operator.attrgetter("moved"), outcomes)), default=-1) == wanted
        ranks = [
            RankResult(
                rank=o.rank,
                status=Status.OK
                if o.error is None and len(o.moved) == wanted
                else _status(len(o.moved), o.error, o.stop, self.none_found),
                blocks=len(o.moved),
                bytes=o.bytes,
                queue_s=o.queue_s,
                copy_s=o.copy_s,
                storage_s=o.storage_s,
                error=o.error,
            )
            for o in sorted(outcomes, key=operator.attrgetter("rank"))
        ]
        nbytes = sum(map(operator.attrgetter("bytes"), outcomes))
        if complete:  # the task succeeded, even if it was stopped afterwards
            ids = self.block_ids[:wanted]
            return TaskResult(task_id=self.task_id, status=Status.OK, block_ids=ids, ranks=ranks, bytes=nbytes)
        positions = self.in_common(outcomes)
        stop = next((o.stop for o in outcomes if o.stop is not None), None)
        error = _first_cause(outcomes, stop)
        if error is None and self.none_found is Status.FAILED:
            # Only a read may return fewer blocks without an error (they were not stored); for others it is our bug.
            short = ", ".join(str(o.rank) for o in outcomes if len(o.moved) < wanted) or "none"
            what = f"rank {short} returned fewer blocks than requested and reported no error (bug)"
            error = ErrorInfo("internal", what)
        return TaskResult(
            task_id=self.task_id,
            status=_status(len(positions), error, stop, self.none_found),
            # A flush of evicted blocks has keys but no device blocks.
            block_ids=[self.block_ids[i] for i in positions] if self.block_ids else [],
            ranks=ranks,
            error=error,
            bytes=nbytes,
            not_admitted=max([o.not_admitted for o in outcomes], default=0),
        )


class _StorageTask(_Task, frozen=True, kw_only=True):
    """keys[i] names the block at gpu_block_ids[i], root to leaf.

    cpu_block_ids: host blocks, instead of gpu_block_ids: the task then touches no device.
    chains: runs of keys that follow each other in one sequence: the position in `keys` and the index in the sequence of
        each run's first block, and the key of the block before it ("": none). Keyed storage then keeps roots and tails.
    salt: what the blocks depend on besides token_ids (a tenant, an adapter); part of the path of token-indexed storage.
    """

    keys: list[str]
    gpu_block_ids: list[int] = []
    token_ids: TokenIds | None = None
    salt: str = ""
    cpu_block_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    chains: list[tuple[int, int, str]] | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if self.token_ids is not None and not isinstance(self.token_ids, TokenIds):
            msgspec.structs.force_setattr(self, "token_ids", TokenIds(self.token_ids))

    @property
    def blocks(self) -> int:
        return len(self.keys)

    @property
    def block_ids(self) -> list[int]:
        """The ids of the task's blocks: host blocks if it names some, else device blocks."""
        return self.cpu_block_ids or self.gpu_block_ids

    @property
    def placed(self) -> dict[str, list[int]]:
        """The ids of the task's blocks, by where these are."""
        return {HOST: self.cpu_block_ids} if self.cpu_block_ids else {DEVICE: self.gpu_block_ids}

    def in_common(self, outcomes: Sequence[RankOutcome]) -> Sequence[int]:
        """The blocks that every rank moved, in task order."""
        return _common(outcomes)


class RankOutcome(msgspec.Struct, frozen=True):
    """What one rank did for one task. The barrier collects these, also from failed ranks.

    moved: ascending positions in the task's block list that this rank moved completely.
    not_admitted: blocks of a write that storage chose not to store.
    stop: why the rank was stopped early; None if it was not.
    lost: the rank's own device is lost. (The code of `error` does not say so: it may come from a peer.)
    """

    rank: int
    moved: Sequence[int] = ()
    bytes: int = 0
    error: ErrorInfo | None = None
    lost: bool = False
    stop: Stop | None = None
    queue_s: float = 0.0
    copy_s: float = 0.0
    storage_s: float = 0.0
    not_admitted: int = 0


class ErrorInfo(msgspec.Struct, frozen=True, gc=False):
    """An error as a value: a stable code and a message. Access fields as attributes or as items."""

    code: str
    message: str

    def __getitem__(self, name: str) -> str:
        if name not in self.__struct_fields__:
            raise KeyError(name)
        value: str = getattr(self, name)
        return value


class Warmed(msgspec.Struct, frozen=True):
    """What a warm-up has brought up to a level. An object is one rank's block."""

    level: str
    objects: int = 0
    bytes: int = 0


class LevelChange(msgspec.Struct, frozen=True):
    """A level of storage after it was taken out, or put back.

    state: `used`, `draining` or `drained`.
    objects, bytes: how much of its content no other level is known to have; 0 for a remote level.
    """

    level: str
    state: str
    objects: int = 0
    bytes: int = 0


class CopiesMade(msgspec.Struct, frozen=True):
    """How many objects of a pool got another copy."""

    objects: int = 0
    bytes: int = 0
    left: int = 0  # objects that still lack one
    left_bytes: int = 0
    why: str = ""  # they lack it, in words for people


class RankResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One rank's share of a TaskResult: seconds spent queued, copying and in storage calls."""

    rank: int
    status: Status
    blocks: int = 0
    bytes: int = 0
    queue_s: float = 0.0
    copy_s: float = 0.0
    storage_s: float = 0.0
    error: ErrorInfo | None = None


class TaskResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The one final answer to a task.

    block_ids: the gpu_block_ids that EVERY rank moved, in task order (a prefix, unless the read is sparse). Of a write
        or read of host blocks: the cpu_block_ids.
    ranks: one RankResult per rank; empty if the task never started.
    error: the root cause; the message names the rank.
    retry_after: seconds, set with `busy` only.
    not_admitted: blocks of a write that storage did not choose to store (`storage.admit`), on the rank with the most.
    bytes: total over all ranks.
    duration: seconds from admission to this answer.
    settled: whether no byte of the task's device and host blocks is read or written for it any more. Until then the
        blocks belong to the task: see `Client.settled`.
    """

    task_id: str
    status: Status
    block_ids: list[int] = []
    ranks: list[RankResult] = []
    error: ErrorInfo | None = None
    retry_after: float | None = None
    bytes: int = 0
    duration: float = 0.0
    generation: str = ""
    boot_id: str = ""
    settled: bool = True
    not_admitted: int = 0

    @property
    def count(self) -> int:
        """How many blocks every rank moved; for a prefetch, how many are in the level now."""
        return len(self.block_ids)

    def mask(self, task: Task) -> list[bool]:
        """For each block of the task, whether every rank moved it. Extra block ids of a read are False.

        If a sparse read or a write names one block several times and moved it only for some of its keys, all of
        its positions are False, because the result does not name the keys. Raises ValueError for another task.
        """
        if task.task_id != self.task_id:
            raise ValueError(f"this is the result of task {self.task_id!r}, not of {task.task_id!r}")
        ids, wanted = task.block_ids, task.blocks
        length = max(wanted, len(ids))
        if self.status is Status.OK:
            return [position < wanted for position in range(length)]
        if isinstance(task, ReadStorageTask) and task.prefix:
            return [position < len(self.block_ids) for position in range(length)]
        asked, moved = Counter(ids[:wanted]), Counter(self.block_ids)
        return [i < min(wanted, len(ids)) and moved[ids[i]] == asked[ids[i]] for i in range(length)]


def _first_cause(outcomes: Sequence[RankOutcome], stop: Stop | None) -> ErrorInfo | None:
    """The error that an engine should see first: a rank's own failure before the deadline that it caused.

    NOT_ADMITTED comes last, because it is no failure.
    """
    failed = [o for o in outcomes if o.error is not None]
    order = {NOT_ADMITTED: 2} | dict.fromkeys(_STOP_CODES, 1)
    for outcome in sorted(failed, key=lambda o: order.get("" if o.error is None else o.error.code, 0)):
        assert outcome.error is not None
        return ErrorInfo(outcome.error.code, f"rank {outcome.rank}: {outcome.error.message}")
    if stop is None:
        return None
    late = [str(outcome.rank) for outcome in outcomes if outcome.stop is stop]
    who = f"ranks {', '.join(late)} were" if len(late) > 1 else f"rank {', '.join(late)} was"
    what = "the deadline passed" if stop is Stop.EXPIRED else "the task was cancelled"
    return ErrorInfo(str(stop), f"{what} while {who} still working")


def _status(moved: int, error: ErrorInfo | None, stop: Stop | None, none_found: Status) -> Status:
    """The status of a rank or a task that did not end OK, most specific cause first. moved: how many blocks."""
    if stop is Stop.CANCELLED:
        return Status.CANCELLED
    if moved or (error is not None and error.code == NOT_ADMITTED):
        return Status.PARTIAL
    if error is not None and error.code not in _STOP_CODES:
        return Status.FAILED
    return Status.EXPIRED if stop is Stop.EXPIRED else none_found


def _prefix(moved: Sequence[int]) -> int:
    """Length of the prefix 0, 1, 2 … that `moved` starts with."""
    if isinstance(moved, range) and moved.start == 0 and moved.step == 1:
        return len(moved)
    return next((length for length, position in enumerate(moved) if position != length), len(moved))


def _common(outcomes: Sequence[RankOutcome]) -> list[int]:
    """The positions that every rank moved, ascending."""
    return sorted(set.intersection(*(set(o.moved) for o in outcomes))) if outcomes else []


class WriteStorageTask(_StorageTask, frozen=True, kw_only=True, tag="write"):
    """Store the device blocks `gpu_block_ids`, or the host blocks `cpu_block_ids`, under `keys` on every rank.

    A key already stored counts as written.

    start_write_block_idx: index of the first key's block in its sequence. Keyed storage reads it without `chains`.
    flush_cache_exists: flush-only mode: are the blocks still on this node? None if the request has finished: they are.
    gpu_block_ids may be empty, since evicted blocks have no ids. False with empty gpu_block_ids means that all blocks
    from start_write_block_idx to the end of token_ids are gone, however many keys there are.
    shared: with several levels of storage, answer only when a level that other nodes see has the blocks.
    """

    start_write_block_idx: int = 0
    flush_cache_exists: bool | None = None
    shared: bool | msgspec.UnsetType = msgspec.UNSET

    lane: ClassVar[Lane] = Lane.WRITE

    def footprint(self) -> Footprint:
        return Footprint(self.placed, {STORAGE: self.keys})


class ReadStorageTask(_StorageTask, frozen=True, kw_only=True, tag="read"):
    """Load the objects `keys` into the device blocks `gpu_block_ids`, up to the first missing one.

    There may be more ids than keys; the remaining blocks are not touched.

    cpu_block_ids: load into host blocks instead.
    start_read_block_idx: index of the first key's block in its sequence (for token-indexed storage).
    prefix: False makes the read *sparse*: it loads every object that is there, even after a missing one.
    by_parts: load the first layers of all blocks first, and report when they are there (`Client.submit`), if that costs
        about as much as to load whole blocks.
    """

    start_read_block_idx: int = 0
    prefix: bool = True
    by_parts: bool | msgspec.UnsetType = msgspec.UNSET

    lane: ClassVar[Lane] = Lane.READ
    none_found: ClassVar[Status] = Status.MISS

    @property
    def filled(self) -> dict[str, list[int]]:
        """What it writes: a block for each key, though it may name more."""
        return {place: ids[: len(self.keys)] for place, ids in self.placed.items()}

    def in_common(self, outcomes: Sequence[RankOutcome]) -> Sequence[int]:
        """The longest prefix that every rank loaded; of a sparse read, every block that every rank loaded."""
        if self.prefix:
            return range(min([_prefix(o.moved) for o in outcomes], default=0))
        return _common(outcomes)

    def footprint(self) -> Footprint:
        return Footprint({STORAGE: self.keys}, self.filled)


class SendTask(WriteStorageTask, frozen=True, kw_only=True, tag="send"):
    """Write these blocks, of the device or of the host, into the memory of the daemon that receives `transfer_id`.

    A block counts once that daemon has verified it and copied it to where its engine wants it.
    """

    transfer_id: str

    lane: ClassVar[Lane] = Lane.SEND

    def footprint(self) -> Footprint:
        return Footprint(self.placed)


class ReceiveTask(ReadStorageTask, frozen=True, kw_only=True, tag="receive"):
    """Receive the blocks `keys` of `transfer_id` from the daemon at `peer` (host:port), into device or host blocks."""

    transfer_id: str
    peer: str

    lane: ClassVar[Lane] = Lane.RECEIVE

    def footprint(self) -> Footprint:
        return Footprint(writes=self.filled)


class _SwapTask(_Task, frozen=True, kw_only=True):
    """gpu_block_ids[i] pairs with cpu_block_ids[i]. swap_node_ids is for the caller; transferd does not read it."""

    gpu_block_ids: list[int]
    cpu_block_ids: list[int]
    swap_node_ids: tuple[int | str, ...] = ()

    @property
    def blocks(self) -> int:
        return len(self.gpu_block_ids)

    @property
    def block_ids(self) -> list[int]:
        """The ids that the result names: the device blocks'."""
        return self.gpu_block_ids

    def in_common(self, outcomes: Sequence[RankOutcome]) -> Sequence[int]:  # noqa: ARG002
        """All blocks on all ranks, or none."""
        return ()


class SwapOutTask(_SwapTask, frozen=True, kw_only=True, tag="swap_out"):
    """Copy device blocks to host blocks, on every rank or not at all."""

    lane: ClassVar[Lane] = Lane.SWAP_OUT

    def footprint(self) -> Footprint:
        return Footprint({DEVICE: self.gpu_block_ids}, {HOST: self.cpu_block_ids})


class SwapInTask(_SwapTask, frozen=True, kw_only=True, tag="swap_in"):
    """Copy host blocks to device blocks, on every rank or not at all."""

    lane: ClassVar[Lane] = Lane.SWAP_IN

    def footprint(self) -> Footprint:
        return Footprint({HOST: self.cpu_block_ids}, {DEVICE: self.gpu_block_ids})


Task = WriteStorageTask | ReadStorageTask | SwapOutTask | SwapInTask | SendTask | ReceiveTask
TASK_TYPES: tuple[type[Task], ...] = get_args(Task)
