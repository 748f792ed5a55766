"""P → D: how a prefill engine hands the KV of one sequence to a decode engine, all of it or not at all.

Both engines call with the tokens of the sequence. The keys are computed here, for both, from the block
size that the daemon names in its Welcome, so the two sides cannot drift; a last incomplete block is named
too, and its number of tokens is part of its key, which the footer of the stored object carries. So an
object that holds another number of tokens is never taken for this one.

A daemon works in one of two modes (`pd.mode`), and the engines' calls are the same in both:

    storage   P's daemon stores every block; D's daemon loads every block.
    direct    D's daemon posts memory for the blocks it expects; P's daemon writes into it.

Pure: which task a call becomes, and what its result is worth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

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

Tokens = Sequence[int] | npt.NDArray[Any] | TokenIds
ExtraKeys = Iterable[tuple[str | bytes, int, int]]


@dataclass(frozen=True, slots=True)
class Handover:
    """One sequence on its way, as one of the two engines sees it.

    request_id: the same on both sides. attempt: fresh for each call, so one that failed may be made again at once.
    gpu_block_ids: this engine's blocks, the last one for the incomplete block if there is one.
    """

    request_id: str
    attempt: str
    token_ids: TokenIds
    keys: list[str]
    gpu_block_ids: list[int]
    timeout: float

    @property
    def task_id(self) -> str:
        return f"{self.request_id}/{self.attempt}"

    def out(self, mode: str) -> Task:
        """What the prefill engine pushes."""
        if mode == "direct":
            return SendTask(**self._common(), transfer_id=self.request_id)
        return WriteStorageTask(**self._common())

    def into(self, mode: str, peer: str | None) -> Task:
        """What the decode engine pushes. Raises RequestError in direct mode without a peer."""
        if mode != "direct":
            return ReadStorageTask(**self._common())
        if not peer:
            raise RequestError("in direct mode a decode engine says which daemon it expects the blocks from (peer)")
        return ReceiveTask(**self._common(), transfer_id=self.request_id, peer=peer)

    def _common(self) -> dict[str, Any]:
        return {
            "task_id": self.task_id,
            "keys": self.keys,
            "gpu_block_ids": self.gpu_block_ids,
            "token_ids": self.token_ids,
            "timeout": self.timeout,
        }


def plan_handover(
    request_id: str,
    attempt: str,
    token_ids: Tokens,
    gpu_block_ids: Sequence[int],
    *,
    block_size: int,
    extra_keys: ExtraKeys | None,
    timeout: float,
) -> Handover:
    """Raises RequestError for tokens or extra keys that cannot be hashed, and for no tokens at all."""
    keys = block_keys(token_ids, block_size, extra_keys, partial=True)
    if not keys:
        raise RequestError("a sequence without tokens has nothing to hand over", code="bad_value")
    return Handover(request_id, attempt, TokenIds(token_ids), keys, [int(block) for block in gpu_block_ids], timeout)


def whole(result: TaskResult, wanted: int) -> TaskResult:
    """The result, if it covers all `wanted` blocks.

    Raises RequestError when the daemon rejected the input, HandoverFailed for everything else.
    """
    if result.status is Status.OK and len(result.block_ids) == wanted:
        return result
    cause = result.error
    if result.status is Status.REJECTED and cause is not None:
        raise RequestError(cause.message, code=cause.code)
    code = cause.code if cause is not None else _CODES.get(result.status, str(result.status))
    told = cause.message if cause is not None else _WHY.get(result.status, f"it ended as {result.status}")
    raise HandoverFailed(f"{len(result.block_ids)} of {wanted} blocks arrived: {told}", code=code, result=result)


_CODES = {Status.MISS: "blocks_missing", Status.PARTIAL: "blocks_missing", Status.OK: "blocks_missing"}
_WHY = {
    Status.MISS: "the pool has none of them",
    Status.PARTIAL: "the pool lacks the others",
    Status.BUSY: "the daemon is busy",
}
