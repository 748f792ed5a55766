"""The contract of token-indexed storage, which finds blocks by the tokens that lead to them, not by a caller's keys.

A *path* is the token ids of a sequence from its first token, and a salt: what its KV depends on besides the tokens
("" if nothing). Its block i is the KV of tokens i·block_size … (i+1)·block_size - 1 given all tokens before. Later
tokens do not change it, so paths with a common prefix and the same salt share blocks. Only full blocks count. Every
call names a path and the index `start` of its first block, and answers with a number of blocks from `start` on,
because a block is useless to an engine without the blocks before it.

Besides bytes there is an *index* of the nodes that have a block in device memory right now, so that other nodes
can find the block. `flush_token_index` updates the index.

Guaranteed by the caller (workers):

1. `attach` comes first, once for each rank, then `ready`, then transfers. After every call has returned come `detach`
   for each rank, and then `close`. If a rank's memory is cleared and restored, the rank is detached and attached again,
   and `ready` is called again before the next transfer. The storage behind it, if there is one, is open meanwhile.
2. The device blocks of a transfer belong to it until its call has returned.
3. A path covers every block that a call names.

Duties of an implementation:

1. `read` delivers the leading blocks from `start` that are stored for this rank, each complete, and returns how
   many. Fewer than requested is no error. `write` stores blocks from `start` on; every block that it reports as
   stored can be read.
2. Errors are part of the outcome. They are never swallowed, and never raised as an exception, which would hide what
   was done.
3. Bytes move only while the call runs: after its return, no device block is touched.
4. A transfer that is stopped ends after its current call to the store, which is bounded in time.
5. `flush_token_index` moves no bytes and waits for no transfer.
6. Nothing blocks the event loop.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from transferd.errors import TransferError
from transferd.tasks import RankOutcome, TokenIds
from transferd.tiers.base import DeviceTier


class RankPort(Protocol):
    """The part of one rank that token-indexed storage needs."""

    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> DeviceTier: ...

    async def match(self, generation: str, keys: Sequence[str]) -> int:
        """How many leading keys the rank could load from keyed storage. Raises StorageError."""


class Transfer(Protocol):
    """One rank's share of one task: blocks between its device and the store. Borrowed for one call.

    blocks[i] is the device block of the path's block start + i.
    """

    rank: int
    task_id: str
    path: TokenIds
    salt: str
    start: int
    blocks: Sequence[int]

    @property
    def remaining_s(self) -> float:
        """Seconds until the task's deadline; may be negative."""

    @property
    def stopped(self) -> bool:
        """Whether the task has been stopped."""

    async def race(self, future: asyncio.Future[Any]) -> bool:
        """Wait until `future` is done (True) or the task is stopped (False). Never cancels `future`."""

    async def by_keys(self, keys: Sequence[str]) -> RankOutcome:
        """Move the blocks through keyed storage, with checksums, pipelined, in staging. keys[i] names blocks[i]."""

    def ended(self, moved: int, error: TransferError | None, storage_s: float) -> RankOutcome:
        """The outcome after the first `moved` blocks were moved."""


class TokenStorage(abc.ABC):
    """Token-indexed storage. See the module's contract."""

    backend: str
    salts: bool = False  # whether the store keeps paths with other salts apart; if not, no call has one
    block_size: int  # tokens; KV events announce a path's blocks under its `path_keys`

    @abc.abstractmethod
    async def attach(self, port: RankPort) -> None:
        """Begin to use a rank: its device memory is open now. Raises StorageError or ConfigError."""

    async def ready(self) -> None:
        """Wait until transfers can begin. Called when every rank is attached. Raises StorageError."""

    def detach(self, rank: int) -> None:
        """Stop using a rank: its device memory is about to be freed."""

    def check_generation(self, generation: str) -> None:
        """Raise RequestError if the store cannot keep blocks of this generation apart from others."""

    @abc.abstractmethod
    async def match(self, path: TokenIds, start: int, generation: str, salt: str = "") -> int:
        """How many blocks from `start` on every rank could read now. Raises StorageError."""

    @abc.abstractmethod
    async def read(self, transfer: Transfer) -> RankOutcome:
        """Load blocks from the store into the device."""

    @abc.abstractmethod
    async def write(self, transfer: Transfer) -> RankOutcome:
        """Store blocks of the device."""

    @abc.abstractmethod
    async def flush_token_index(self, path: TokenIds, start: int, *, resident: bool, salt: str = "") -> None:
        """Record whether the path's blocks from `start` to its end are now in this node's device memory.

        For the whole node: called once, not once for each rank. Raises StorageError.
        """

    async def close(self) -> None:
        """Release everything. Idempotent. Raises StillRunning."""

    @abc.abstractmethod
    def statistics(self) -> dict[str, Any]:
        """At least objects and bytes (None if they cannot be known cheaply), hits, misses, errors."""
