"""Tracks the memory that tasks name: which ranks engines have mapped, and which host blocks are filled.

After a restart or a clear, the daemon has new and empty memory, while an engine may still use the old one. So a task is
refused unless a client has reported, in this epoch of this daemon, that it has each rank's memory mapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transferd.control.hazards import HazardTable
from transferd.control.lanes import State, TaskState
from transferd.tasks import ErrorInfo, Merged, SwapInTask, SwapOutTask, Task


class Contents:
    """Only the dispatcher changes it, on events. The check costs most tasks one comparison, and swaps one per block.

    all_mapped: every rank's memory is mapped, and no client maps earlier memory. Then only swap-ins need `refusal`.
    """

    def __init__(self, ranks: int, host_blocks: int, *, mapped: bool) -> None:
        """mapped: False while the daemon starts: no client has any rank's memory mapped."""
        self._unmapped: Sequence[int] = () if mapped else range(ranks)
        self.all_mapped = mapped
        self._outdated: Mapping[bytes, Sequence[int]] = {}  # clients that still have earlier memory mapped: ranks
        self._filled = bytearray(host_blocks)  # 1: a swap-out has filled it

    def mappings(self, unmapped: Sequence[int], outdated: Mapping[bytes, Sequence[int]]) -> None:
        self._unmapped, self._outdated = unmapped, outdated
        self.all_mapped = not (unmapped or outdated)

    def host_emptied(self) -> None:
        """The host pool was freed; the next one is empty."""
        self._filled = bytearray(len(self._filled))

    def swapped_out(self, task: SwapOutTask, merged: Merged) -> None:
        """A swap-out has run. If it failed, it may have partly overwritten each block on some ranks."""
        whole = len(merged.block_ids) == task.blocks
        for block in task.cpu_block_ids:
            self._filled[block] = whole

    def refusal(self, client: bytes, task: Task, hazards: HazardTable) -> ErrorInfo | None:
        """Why an otherwise valid task is refused because of the memory that it names; None if it is not.

        A block that an earlier swap-out will still fill counts as filled: `hollow` checks again before the start.
        """
        if task.gpu_block_ids and (self._unmapped or self._outdated):
            info = self._not_attached(client)
            if info is not None:
                return info
        if isinstance(task, SwapInTask) and not self._all_filled(task):
            for block in task.cpu_block_ids:
                if not self._filled[block] and not _will_be_filled(block, hazards):
                    return _empty(block)
        return None

    def hollow(self, task: Task) -> ErrorInfo | None:
        """Why a swap-in whose turn has come must not run: an earlier swap-out did not fill its host blocks."""
        if not isinstance(task, SwapInTask) or self._all_filled(task):
            return None
        return _empty(next(block for block in task.cpu_block_ids if not self._filled[block]))

    def _all_filled(self, task: SwapInTask) -> bool:
        return all(map(self._filled.__getitem__, task.cpu_block_ids))

    def _not_attached(self, client: bytes) -> ErrorInfo | None:
        if self._unmapped:
            what = f"rank {self._unmapped[0]}: no client has attached or offered its device memory since "
            return ErrorInfo("not_attached", what + "the daemon started or the cache was cleared; attach first")
        ranks = self._outdated.get(client)
        if ranks:
            what = f"rank {ranks[0]}: this client still has device memory mapped that is gone; attach again first"
            return ErrorInfo("not_attached", what)
        return None


def _will_be_filled(block: int, hazards: HazardTable) -> bool:
    """Whether a swap-out that was submitted earlier and has not ended writes this block."""
    claim = hazards.host_writer(block)
    if claim is None:
        return False
    assert isinstance(claim.owner, TaskState)
    # A cancelled task's claim stays while earlier tasks run, and some of these may be swap-outs.
    return claim.abandoned or claim.owner.state is not State.DONE


def _empty(block: int) -> ErrorInfo:
    what = f"host block {block} holds nothing: no swap-out has filled it since the host pool was made"
    return ErrorInfo("empty_block", f"{what}, or the last one failed")
