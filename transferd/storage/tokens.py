"""The contract of token-indexed storage: blocks are found by the tokens that lead to them, not by keys of a caller.

A *path* is the token ids of a sequence from its first token. Its block i is the KV of tokens
i·block_size … (i+1)·block_size - 1 given all tokens before; what follows changes nothing, so paths with
a common beginning share blocks. Only full blocks count. Every call names a path and the index `start` of
the first block it is about; blocks are answered as a count from `start` on, because a block is of no use
to an engine without the ones before it.

Besides bytes there is an *index*: on which nodes a block lies in device memory right now, so that others
can find it. `flush_token_index` tells it.

Guaranteed by the caller (workers):

1. `open` before anything else; then `attach` once for each rank, then `ready`, before the first transfer;
   `detach` of each rank and then `close` after every call has returned. A rank whose memory went and came
   again is detached and attached again, and `ready` is asked again before the next transfer.
2. Device blocks of a transfer belong to it until the call on it has returned.
3. A path covers every block that a call names.

Duties of an implementation:

1. `read` delivers the leading blocks from `start` that are stored for this rank, each of them whole, and
   says how many; fewer than asked for is no error. `write` stores from `start` on; what it says is
   stored can be read.
2. Errors are part of the outcome, never swallowed and never an exception that hides what was done.
3. Bytes move only while the call runs: after it returned, no device block is touched.
4. A transfer that is told to stop ends after the call that is under way, which is bounded in time.
5. `flush_token_index` moves no bytes and waits for no transfer.
6. Nothing blocks the event loop.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from transferd.blocks.paths import PathKeys
from transferd.config import Config
from transferd.errors import TransferError
from transferd.storage.base import Storage
from transferd.tasks import RankOutcome, TokenIds
from transferd.tiers.base import DeviceTier


class RankPort(Protocol):
    """One rank, as token-indexed storage reaches it."""

    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> DeviceTier: ...

    async def match(self, generation: str, keys: Sequence[str]) -> int:
        """How many leading keys the rank could load from keyed storage. Raises StorageError."""
        ...


class Transfer(Protocol):
    """One rank's share of one task: blocks between its device and the store. Borrowed for one call.

    blocks[i] is the device block of the path's block start + i.
    """

    rank: int
    task_id: str
    path: TokenIds
    start: int
    blocks: Sequence[int]

    @property
    def remaining_s(self) -> float:
        """Seconds until the task's deadline; may be negative."""
        ...

    @property
    def stopped(self) -> bool:
        """The task was told to end early."""
        ...

    async def race(self, future: asyncio.Future[Any]) -> bool:
        """Wait until `future` is done (True) or the task is told to end (False). Never cancels `future`."""
        ...

    async def by_keys(self, keys: Sequence[str]) -> RankOutcome:
        """Move the blocks through keyed storage, keys[i] naming blocks[i]: checksummed, pipelined, on staging alone."""
        ...

    def ended(self, moved: int, error: TransferError | None, storage_s: float) -> RankOutcome:
        """The outcome of having moved the first `moved` blocks."""
        ...


class TokenStorage(abc.ABC):
    """Token-indexed storage. See the module's contract.

    keyed: the storage that holds the bytes, where there is one; its life belongs to this object.
    paths: the keys under which blocks of a path are announced to others.
    """

    backend: str
    paths: PathKeys
    keyed: Storage | None = None

    @abc.abstractmethod
    async def open(self) -> None:
        """Make ready, as far as that needs no rank. Raises StorageError or ConfigError."""

    @abc.abstractmethod
    async def attach(self, port: RankPort) -> None:
        """A rank is ready: its device memory is there. Raises StorageError or ConfigError."""

    async def ready(self) -> None:
        """Every rank is attached: return when transfers can begin. Raises StorageError."""

    def detach(self, rank: int) -> None:
        """A rank's device memory is about to be freed."""

    def reconfigure(self, config: Config) -> None:
        """Take over what may change while running; called on SIGHUP, on the event loop."""

    def check_generation(self, generation: str) -> None:
        """Raise RequestError where blocks of another generation could not be kept apart."""

    @abc.abstractmethod
    async def match(self, path: TokenIds, start: int, generation: str) -> int:
        """How many blocks from `start` on every rank could read now. Raises StorageError."""

    @abc.abstractmethod
    async def read(self, transfer: Transfer) -> RankOutcome:
        """Store → device."""

    @abc.abstractmethod
    async def write(self, transfer: Transfer) -> RankOutcome:
        """Device → store."""

    @abc.abstractmethod
    async def flush_token_index(self, path: TokenIds, start: int, *, resident: bool) -> None:
        """The path's blocks from `start` to its end are in this node's device memory, or are not any more.

        For the whole node: called once, not once for each rank. Raises StorageError.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Release everything. Idempotent."""

    @abc.abstractmethod
    def statistics(self) -> dict[str, Any]:
        """At least objects and bytes (None where that cannot be known cheaply), hits, misses, errors."""
