"""P → D: how a prefill engine hands the KV of one sequence to a decode engine, all of it or nothing.

Both engines pass the tokens of the sequence. This module computes the keys for both sides, from the block size in
the daemon's Welcome, so the sides cannot disagree. An incomplete last block has a key as well. The number of its tokens
is part of that key, and the footer of the stored object contains the key's digest. So an object with a different
number of tokens is never mistaken for it.

A daemon works in one of two modes (`pd.mode`), and the engines' calls are the same in both:

    storage   P's daemon stores every block; D's daemon loads every block.
    direct    D's daemon posts memory for the blocks it expects; P's daemon writes into it.

Pure: it decides which task a call becomes and whether the result counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from transferd.blocks.keys import block_keys
from transferd.errors import HandoverFailed, RequestError
from transferd.tasks import (
    ReadStorageTask,
    ReceiveTask,
    SendTask,
    Status,
    Task,
    TaskResult,
    TokenIds,
    WriteStorageTask,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    Tokens = Sequence[int] | npt.NDArray[Any] | TokenIds

ExtraKeys = Iterable[tuple[str | bytes, int, int]]


class Handover:
    """The handover of one sequence, as one of the two engines sees it. keys: of its blocks."""

    def __init__(
        self,
        request_id: str,
        task_id: str,
        token_ids: Tokens,
        gpu_block_ids: Sequence[int],
        cpu_block_ids: Sequence[int] | None,
        block_size: int,
        extra_keys: ExtraKeys | None,
        timeout: float,
    ) -> None:
        """Compute the keys.

        request_id: names the transfer, the same on both sides.
        task_id: new for each call, so that a failed one can be retried at once.
        cpu_block_ids: host blocks, instead of gpu_block_ids.

        Raises RequestError for tokens or extra keys that cannot be hashed, and without tokens.
        """
        self.keys = block_keys(token_ids, block_size, extra_keys, partial=True)
        if not self.keys:
            raise RequestError("token_ids is empty: there is nothing to hand over", code="bad_value")
        self._transfer_id = request_id
        # Those that the tasks of both sides have.
        self._fields: dict[str, Any] = {"task_id": task_id, "keys": self.keys, "timeout": timeout}
        self._fields |= {"token_ids": TokenIds(token_ids), "gpu_block_ids": [int(b) for b in gpu_block_ids]}
        if cpu_block_ids is not None:
            self._fields["cpu_block_ids"] = [int(b) for b in cpu_block_ids]

    def out(self, mode: str) -> Task:
        """The task that the prefill engine pushes."""
        if mode == "direct":
            return SendTask(**self._fields, transfer_id=self._transfer_id)
        return WriteStorageTask(**self._fields, shared=True)

    def into(self, mode: str, peer: str | None) -> Task:
        """The task that the decode engine pushes. Raises RequestError in direct mode without a peer."""
        if mode != "direct":
            return ReadStorageTask(**self._fields)
        if not peer:
            raise RequestError("direct mode needs `peer`: pass the pd_address of the prefill engine's daemon")
        return ReceiveTask(**self._fields, transfer_id=self._transfer_id, peer=peer)


def whole(result: TaskResult, wanted: int) -> TaskResult:
    """Return the result if it covers all `wanted` blocks.

    Raises RequestError if the daemon rejected the input, HandoverFailed otherwise.
    """
    if result.status is Status.OK and len(result.block_ids) == wanted:
        return result
    cause = result.error
    if result.status is Status.REJECTED and cause is not None:
        raise RequestError(cause.message, code=cause.code)
    code = cause.code if cause is not None else _CODES.get(result.status, str(result.status))
    why = cause.message if cause is not None else _WHY.get(result.status, f"the task ended as {result.status}")
    raise HandoverFailed(f"{len(result.block_ids)} of {wanted} blocks arrived: {why}", code=code, result=result)


_CODES = {Status.MISS: "blocks_missing", Status.PARTIAL: "blocks_missing", Status.OK: "blocks_missing"}
_WHY = {
    Status.MISS: "the pool has none of them",
    Status.PARTIAL: "the pool lacks the others",
    Status.BUSY: "the daemon is busy",
}
