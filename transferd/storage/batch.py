"""The state of one store or load of an indexed store (indexed.py), and the store's statistics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from transferd.errors import StorageError, StorageFull, StorageUnavailable
from transferd.runtime.native import NativeCall
from transferd.storage.base import Fill, Item, Outcome
from transferd.storage.lru import Entry, LruIndex, Victim

# How long a write waits for running writes of its own task, so that these can make room. Two chunks of 128 MiB may be
# under way (workers/write.py), so a disk that writes 13 MB/s is slow, but does not hang.
PATIENCE_S = 20.0
RUN_BYTES = 1024**2  # that a thread writes or reads, as a run of objects, before another engine's turn; or one object
WHOLE = ("storage_read_only", "storage_gone")


class Damaged(Exception):
    """Raised by `_read`: the name holds something other than the object, or cannot be read any more.

    error: the error to report to the caller; None for a plain miss.
    """

    def __init__(self, error: StorageError | None = None) -> None:
        super().__init__(error)
        self.error = error


# How one read ended: found (True), missing (False), or why the object was not delivered.
Answer: TypeAlias = bool | Outcome | Damaged | StorageError


class Write(msgspec.Struct):
    """One object that is being written. `position` is its index in the caller's batch.

    withdrawn: `fill` did not make it.
    refused: victims that cannot be removed, and why. failing: how many the medium failed to remove so far.
    full: whether the medium had no room, though the index had.
    """

    position: int
    item: Item
    victims: list[Victim]  # objects to remove first, to make room; those that are still to be removed stay in the list
    error: StorageError | None = None
    withdrawn: bool = False
    refused: list[tuple[Victim, StorageError]] = []
    failing: int = 0
    full: bool = False

    def spare(self, reads: Callable[[str], bool]) -> Victim | None:
        """The one victim, unless it is being read: the object can be written over it."""
        victim = self.victims[0] if len(self.victims) == 1 else None
        return None if victim is None or reads(victim.name) else victim

    def refuse(self, victim: Victim, error: StorageError) -> None:
        self.error = bare(error)
        self.refused.append((victim, self.error))


class Read(msgspec.Struct, frozen=True):
    """One requested object that the index has. `position` is its index in the caller's batch."""

    position: int
    item: Item
    entry: Entry


W = TypeVar("W", Read, Write)


@dataclass(slots=True)
class NativeBatch(Generic[W]):
    """A native call that stores or loads these objects, at least one, as far as nothing about them is unusual.

    ended: called once, on the loop, when it has ended or failed: the answer for each, or None if that is left.
    """

    work: Sequence[W]
    call: NativeCall
    ended: Callable[[], Sequence[Answer | None]]


def run_length(work: Sequence[W], threads: int) -> int:
    """How many objects a thread does at a time: at least two runs for each of so many threads."""
    largest = max([one.item.nbytes for one in work], default=0) or 1
    return max(1, min(RUN_BYTES // largest, len(work) // (2 * threads)))


def runs_of(work: Sequence[W], threads: int) -> list[Sequence[W]]:
    """Cut a batch into what a thread does at a time."""
    size = run_length(work, threads)
    return [work[start : start + size] for start in range(0, len(work), size)]


@dataclass(slots=True, eq=False)
class StoreBatch:
    """The objects of one store."""

    items: Sequence[Item]
    fill: Fill | None
    # with `fill`, the slots that no thread uses now; the latest one is taken first, because it is still in the caches
    slots: list[memoryview]
    outcomes: list[Outcome] = field(default_factory=list)  # LEFT unless another one is known
    todo: Sequence[int] = ()  # positions that are not decided yet
    small: bool = False  # whether to write on the loop itself
    waits: set[asyncio.Future[None]] = field(default_factory=set)  # the effects that the undecided objects wait for
    written: asyncio.Future[None] | None = None  # completes when the latest wave has been written
    patient: bool = True  # whether to wait for running writes that should make room; False once they took too long

    async def wait(self) -> None:
        """Wait until one of `waits` has ended, but at most PATIENCE_S while the batch is patient."""
        limit = PATIENCE_S if self.patient else None
        ended, _ = await asyncio.wait(self.waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        self.patient = bool(ended)


def is_whole(error: StorageError) -> bool:
    """Whether this error is of the whole store, not of the one object whose removal raised it."""
    return isinstance(error, StorageFull | StorageUnavailable) or error.reason in WHOLE


def bare(error: StorageError) -> StorageError:
    """The error without its traceback, because the traceback's frames would keep the caller's buffers alive."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def summary_of(index: LruIndex, counts: Mapping[str, int]) -> dict[str, Any]:
    """A store's statistics: its objects now, and counts since the start. corrupt: from reads and the scrub."""
    known = ("hits", "misses", "corrupt", "wrong_length", "gone", "errors", "stored", "evictions")
    now = {"objects": len(index), "bytes": index.bytes, "in_flight_bytes": index.used - index.bytes}
    return now | {name: counts[name] for name in known} | {"evicted_for": _evicted_for(counts)}


def _evicted_for(counts: Mapping[str, int]) -> dict[str, int]:
    """Evictions by cause: for another object, the medium was full, a bound shrank, to leave room for others."""
    causes = {cause: counts[f"evicted_{cause}"] for cause in ("medium_full", "shrink", "reserve")}
    # Some objects that should have made room could not be removed; they do not count as evicted.
    return {"capacity": max(0, counts["evictions"] - sum(causes.values()))} | causes
