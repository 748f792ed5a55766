"""Whether a push becomes a task: one that can never succeed is rejected before anything moves.

A repeated push gets the answer of the first one, and its task does not run again: results are kept for a while.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from transferd.config import ServerSection
from transferd.errors import RequestError
from transferd.runtime.address import host_and_port
from transferd.tasks import (
    PATHS,
    STORAGE,
    TIMELINE_SLOTS,
    Footprint,
    Lane,
    ReadStorageTask,
    ReceiveTask,
    SendTask,
    SwapInTask,
    SwapOutTask,
    Task,
    TaskResult,
    WriteStorageTask,
    check_ids,
)

MAX_TASK_ID = 1024  # characters; task ids are kept for as long as results are
MAX_SALT = 1024  # characters
MAX_TIMEOUT_S = 24 * 3600.0

# Memory of an admitted task besides its texts and token ids: for each key and each id, with its place in the hazard
# table, and for everything else. Measured; tests/control/test_bytes.py compares. A key or id of two tasks needs more
# than twice the memory of a key or id of a single task: this is half of the former.
KEY_BYTES, ID_BYTES, TASK_BYTES = 190, 150, 1850


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The bounds that admission keeps, and the shape of the cache it checks ids against.

    Only the configuration has defaults (config/sections.py).
    """

    ranks: int
    device_blocks: int
    host_blocks: int
    block_bytes: int  # bytes of one block on one rank
    storage: bool  # False when no backend is configured
    direct: bool  # True in pd.mode "direct"
    token_block: int  # tokens per block if storage is token-indexed (tasks must then give the path), else 0
    only_flush: bool  # write tasks move nothing and only update the token index
    server: ServerSection  # how much may wait and run, and for how long answers are kept
    salts: bool = False  # token-indexed storage keeps paths with other salts apart


def check_task(task: Task, limits: Limits) -> None:
    """Raise RequestError, with a code, for a task that can never succeed on this daemon."""
    if not 0 < len(task.task_id) <= MAX_TASK_ID:
        raise RequestError(
            f"task_id must have 1 to {MAX_TASK_ID} characters, not {len(task.task_id)}", code="bad_value"
        )
    if not (math.isfinite(task.timeout) and 0 < task.timeout <= MAX_TIMEOUT_S):
        what = f"timeout must be above 0 and at most {MAX_TIMEOUT_S:.0f} seconds, not {task.timeout}"
        raise RequestError(what, code="bad_value")
    if task.after:
        _check_after(*task.after)
    if isinstance(task, SwapOutTask | SwapInTask):
        _check_swap(task, limits)
    elif isinstance(task, ReadStorageTask):
        _check_read(task, limits)
    else:
        _check_write(task, limits)


def argument_bytes(task: Task) -> int:
    """Estimate the memory of an admitted task: keys, ids, token ids, and its claims in the hazard table."""
    base = TASK_BYTES + (len(task.traceparent) if task.traceparent else 0)
    if isinstance(task, SwapOutTask | SwapInTask):
        return base + ID_BYTES * (len(task.gpu_block_ids) + len(task.cpu_block_ids))
    tokens = 0 if task.token_ids is None else task.token_ids.array.nbytes
    named = KEY_BYTES * len(task.keys) + sum(map(len, task.keys)) + ID_BYTES * len(task.block_ids)
    return base + named + tokens + len(task.salt)


def footprint_of(task: Task, limits: Limits) -> Footprint:
    """The blocks by which a task is ordered among others.

    A flush touches no block. It is ordered only among flushes of the same keys. A flush that withdraws the rest of a
    path does not name all of the path's keys, so it is ordered among all flushes of paths with the same first block.
    """
    if limits.only_flush and isinstance(task, WriteStorageTask) and task.lane is Lane.WRITE:
        entries = [f"{_INDEX_ENTRY}{key}" for key in task.keys]
        first = () if task.token_ids is None else task.token_ids.array[: limits.token_block].tolist()
        tree = f"{first} {task.salt}" if task.salt else str(first)
        if withdraws_the_rest(task):
            return Footprint(writes={STORAGE: entries, PATHS: [tree]})
        return Footprint({PATHS: [tree]}, {STORAGE: entries})
    return task.footprint()


_INDEX_ENTRY = "index entry of "  # prefix of a key: the entry in the index is not the object of that key


def withdraws_the_rest(flush: WriteStorageTask) -> bool:
    """Whether the flush reports that this node has none of its token_ids' blocks from start_write_block_idx on."""
    return flush.flush_cache_exists is False and not flush.gpu_block_ids


def _check_after(slot: int, number: int) -> None:
    if not 0 <= slot < TIMELINE_SLOTS:
        raise RequestError(f"after names timeline {slot}; a rank has 0 to {TIMELINE_SLOTS - 1}", code="bad_value")
    if not 0 < number < 2**63 - 1:
        raise RequestError(f"after names the number {number}, which is not from 1 to 2^63 - 2", code="bad_value")


def _check_swap(task: SwapOutTask | SwapInTask, limits: Limits) -> None:
    if not limits.host_blocks:
        raise RequestError("this daemon has no host tier (cache.host_blocks = 0)", code="no_host_tier")
    device, host = len(task.gpu_block_ids), len(task.cpu_block_ids)
    if device != host:
        raise RequestError(f"gpu_block_ids has {device} ids, cpu_block_ids {host}", code="length_mismatch")
    out = isinstance(task, SwapOutTask)
    check_ids(task.gpu_block_ids, limits.device_blocks, "gpu_block_ids", target=not out)
    check_ids(task.cpu_block_ids, limits.host_blocks, "cpu_block_ids", target=out)


def _check_read(task: ReadStorageTask, limits: Limits) -> None:
    keys, field, most = _check_storage(task, task.start_read_block_idx, limits)
    if len(task.block_ids) < keys:
        what = f"keys has {keys} entries, {field} only {len(task.block_ids)}"
        raise RequestError(what, code="length_mismatch")
    check_ids(task.block_ids, most, field, target=True)
    if not task.prefix and (limits.token_block or task.lane is not Lane.READ):
        why = "token-indexed storage finds" if task.lane is Lane.READ else "a direct transfer moves"
        raise RequestError(f"prefix = false is impossible here: {why} leading blocks only", code="prefix_only")


def _check_write(task: WriteStorageTask, limits: Limits) -> None:
    keys, field, most = _check_storage(task, task.start_write_block_idx, limits)
    flush, ids = limits.only_flush and task.lane is Lane.WRITE, task.block_ids
    if len(ids) != keys and not (flush and not ids):  # evicted blocks have no ids
        raise RequestError(f"keys has {keys} entries, {field} {len(ids)}", code="length_mismatch")
    if keys > most and not flush:  # so many would name some block twice
        where = "host pool" if task.cpu_block_ids else "device"
        raise RequestError(f"{keys} blocks, but the {where} has only {most}", code="too_many_blocks")
    check_ids(ids, most, field, target=False)
    if len(set(task.keys)) != keys:
        twice = next(key for key, times in Counter(task.keys).items() if times > 1)
        raise RequestError(f"keys names one block twice: {twice[:80]!r}", code="duplicate_key")


def _check_storage(task: ReadStorageTask | WriteStorageTask, start: int, limits: Limits) -> tuple[int, str, int]:
    """The checks that reads and writes share.

    Returns how many keys there are, the field that names the blocks, and how many blocks its tier has.
    """
    if isinstance(task, SendTask | ReceiveTask):
        _check_direct(task, limits)
    elif not limits.storage:
        raise RequestError('this daemon has no storage tier (storage.backend = "none")', code="no_storage_tier")
    if start < 0:
        raise RequestError(f"start_{task.kind}_block_idx must not be negative, is {start}", code="bad_value")
    if task.chains:
        _check_chains(task.chains, len(task.keys))
    if task.salt:
        by_path = limits.token_block and task.lane in (Lane.READ, Lane.WRITE)  # elsewhere, keys cover everything
        check_salt(task.salt, salts=limits.salts or not by_path)
    if limits.token_block and task.lane in (Lane.READ, Lane.WRITE):
        _check_path(task, start, limits.token_block)
    if not task.cpu_block_ids:
        return len(task.keys), "gpu_block_ids", limits.device_blocks
    _check_host(task, limits)
    return len(task.keys), "cpu_block_ids", limits.host_blocks


def _check_chains(chains: Sequence[tuple[int, int, str]], keys: int) -> None:
    ends = [*(at for at, _, _ in chains[1:]), keys]
    if chains[0][0] == 0 and all(at < end and depth >= 0 for (at, depth, _), end in zip(chains, ends, strict=True)):
        return
    what = "chains must begin at ascending positions of keys, the first at 0, each with an index that is not negative"
    raise RequestError(f"{what}, is {str(chains)[:80]}", code="bad_value")


def _check_host(task: ReadStorageTask | WriteStorageTask, limits: Limits) -> None:
    """Check a task that names host blocks."""
    if not limits.host_blocks:
        raise RequestError("this daemon has no host tier (cache.host_blocks = 0)", code="no_host_tier")
    problem = ""
    if task.gpu_block_ids:
        problem = "a task moves blocks of one tier: set gpu_block_ids or cpu_block_ids, not both"
    elif limits.token_block:
        problem = "cpu_block_ids is impossible here: token-indexed storage moves device blocks"
    elif task.after:
        problem = "after is a point of the device's work, and a task with cpu_block_ids does not touch the device"
    if problem:
        raise RequestError(problem, code="bad_value")


def check_salt(salt: str, *, salts: bool) -> None:
    """Check a path's salt. salts: whether storage can keep salts apart. Raises RequestError."""
    if not salts:
        what = 'this storage cannot keep paths with other salts apart: set storage.attention_store.driver = "open"'
        raise RequestError(what, code="no_salts")
    if len(salt) > MAX_SALT:
        raise RequestError(f"salt has {len(salt)} characters, at most {MAX_SALT} are possible", code="bad_value")


def _check_direct(task: SendTask | ReceiveTask, limits: Limits) -> None:
    if not limits.direct:
        raise RequestError('this daemon makes no direct transfers (pd.mode = "storage")', code="no_direct_mode")
    if not 0 < len(task.transfer_id) <= MAX_TASK_ID:
        raise RequestError(f"transfer_id must have 1 to {MAX_TASK_ID} characters", code="bad_value")
    if isinstance(task, ReceiveTask) and host_and_port(task.peer) is None:
        raise RequestError(f"peer must be host:port, not {task.peer[:80]!r}", code="bad_value")


def _check_path(task: ReadStorageTask | WriteStorageTask, start: int, block_size: int) -> None:
    """Check that token_ids cover the path from its first token at least to the end of the last block."""
    if task.token_ids is None:
        raise RequestError("token_ids are needed: storage is token-indexed", code="token_ids_required")
    needed = (start + len(task.keys)) * block_size
    if len(task.token_ids) < needed:
        what = f"{len(task.token_ids)} token_ids, blocks {start} to {start + len(task.keys)} need {needed}"
        raise RequestError(f"{what}: give the whole path from its first token", code="token_ids_too_short")


def content_hash(task: Task) -> int:
    """Equal for equal requests within one process; the timeout may differ between pushes of one task."""
    if isinstance(task, SwapOutTask | SwapInTask):
        return hash((task.lane, tuple(task.gpu_block_ids), tuple(task.cpu_block_ids)))
    transfer = (task.transfer_id, getattr(task, "peer", "")) if isinstance(task, SendTask | ReceiveTask) else None
    if isinstance(task, WriteStorageTask):
        shared = task.shared is True  # whoever asks for more must not get the answer to less
        place: tuple[int, bool | None, bool] = task.start_write_block_idx, task.flush_cache_exists, shared
    else:
        place = task.start_read_block_idx, task.prefix, False
    ids = tuple(task.gpu_block_ids), tuple(task.cpu_block_ids or ())
    return hash((task.lane, transfer, tuple(task.keys), ids, task.token_ids, task.salt, place))


# --- results that answer a repeated push ----------------------------------------------------------

# Memory of a kept result besides its packed form. Measured; tests/control/test_bytes.py compares.
RESULT_BYTES = 550

_decoder = msgspec.msgpack.Decoder(TaskResult)


class KeptResult(msgspec.Struct, frozen=True, gc=False):
    """A result, packed: almost none is ever needed again, and objects would take ten times the memory."""

    packed: bytes
    content: int  # hash of the task that it answers
    memory_epoch: int  # of the memory that its blocks are in
    expires: float  # monotonic seconds

    @property
    def result(self) -> TaskResult:
        return _decoder.decode(self.packed)


class ResultCache:
    """Bounded by age (`ttl` seconds), by number (`most`) and by memory (`most_bytes`).

    All results live equally long, so the oldest always expires first.
    """

    def __init__(self, ttl: float, most: int, most_bytes: int) -> None:
        self._ttl = ttl
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, KeptResult] = OrderedDict()
        self.nbytes = 0

    def keep(self, result: TaskResult, content: int, memory_epoch: int, now: float) -> None:
        """Keep a task's first result. Drops one that cannot be packed or exceeds the bound by itself."""
        try:
            packed = bytes(memoryview(msgspec.msgpack.encode(result)))  # an exact copy: msgspec over-allocates
        except UnicodeEncodeError:  # a lone surrogate, as in an error about a file's name
            return
        if result.task_id in self._kept:  # an expired one
            self.drop(result.task_id)
        self._kept[result.task_id] = KeptResult(packed, content, memory_epoch, now + self._ttl)
        self.nbytes += RESULT_BYTES + len(packed)
        self.forget(now)

    def recall(self, task_id: str, now: float) -> KeptResult | None:
        """The task's kept result; None if there is none."""
        kept = self._kept.get(task_id)
        return None if kept is None or kept.expires <= now else kept

    def drop(self, task_id: str) -> None:
        if (kept := self._kept.pop(task_id, None)) is not None:
            self.nbytes -= RESULT_BYTES + len(kept.packed)

    def forget(self, now: float) -> None:
        """Drop expired results, then the oldest ones until the bounds hold."""
        while self._kept:
            task_id, kept = next(iter(self._kept.items()))
            if kept.expires > now and len(self._kept) <= self._most and self.nbytes <= self._most_bytes:
                return
            self.drop(task_id)

    def clear(self) -> None:
        self._kept.clear()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)
