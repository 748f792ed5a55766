"""Tracks the memory that tasks name: which ranks engines have mapped, and which host blocks are filled.

After a restart or a clear, the daemon has new and empty memory, while an engine may still use the old one. So a task is
refused unless some client has reported, in this epoch of this daemon, that it has each rank's memory mapped. And a
task that reads host blocks, to the device or to storage, is refused for one that no task has filled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transferd.control.order import HazardTable, State, TaskState
from transferd.tasks import DEVICE, HOST, ErrorInfo, Footprint, SwapOutTask, Task, TaskResult


class Contents:
    """Only the dispatcher changes it, on events. The check costs most tasks one comparison, others one per host block.

    all_mapped: every rank's memory is mapped, and no client maps earlier memory. Then only tasks that read host blocks
    need `refusal`.
    """

    def __init__(self, ranks: int, host_blocks: int, *, mapped: bool) -> None:
        """mapped: False while the daemon starts: no client has any rank's memory mapped."""
        self._unmapped: Sequence[int] = () if mapped else range(ranks)
        self.all_mapped = mapped
        self._outdated: Mapping[bytes, Sequence[int]] = {}  # clients that still have earlier memory mapped: ranks
        self._filled = bytearray(host_blocks)  # 1: a swap-out or a read has filled it

    def mappings(self, unmapped: Sequence[int], outdated: Mapping[bytes, Sequence[int]]) -> None:
        self._unmapped, self._outdated = unmapped, outdated
        self.all_mapped = not (unmapped or outdated)

    def host_emptied(self) -> None:
        """The host pool was freed; the next one is empty."""
        self._filled = bytearray(len(self._filled))

    def host_written(self, task: Task, targets: Sequence[int], merged: TaskResult) -> None:
        """Note that a task which writes these host blocks has run. Blocks that it did not fill may be overwritten."""
        filled: Sequence[int] = merged.block_ids
        if isinstance(task, SwapOutTask):  # its result names the device blocks
            filled = targets if len(filled) == task.blocks else ()
        for block in targets:
            self._filled[block] = 0
        for block in filled:
            self._filled[block] = 1

    def refusal(self, client: bytes, footprint: Footprint, hazards: HazardTable) -> ErrorInfo | None:
        """Why an otherwise valid task is refused because of the memory that it names; None if it is not.

        A block that an earlier task will still fill counts as filled: `hollow` checks again before the start.
        """
        if not self.all_mapped and (footprint.reads.get(DEVICE) or footprint.writes.get(DEVICE)):
            info = self._not_attached(client)
            if info is not None:
                return info
        for block in self._empty_of(footprint.reads.get(HOST, ())):
            if not _will_be_filled(block, hazards):
                return _empty(block)
        return None

    def hollow(self, blocks: Sequence[int]) -> ErrorInfo | None:
        """Why a task that reads these host blocks must not run, now that its turn has come: no task has filled them."""
        empty = self._empty_of(blocks)
        return _empty(empty[0]) if empty else None

    def _empty_of(self, blocks: Sequence[int]) -> list[int]:
        if all(map(self._filled.__getitem__, blocks)):
            return []
        return [block for block in blocks if not self._filled[block]]

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
    """Whether a task that was submitted earlier and has not ended writes this block."""
    claim = hazards.host_writer(block)
    if claim is None:
        return False
    assert isinstance(claim.owner, TaskState)
    # A cancelled task's claim stays while earlier tasks run, and some of these may fill the block.
    return claim.abandoned or claim.owner.state is not State.DONE


def _empty(block: int) -> ErrorInfo:
    what = f"host block {block} holds nothing: no swap-out or read has filled it since the host pool was made"
    return ErrorInfo("empty_block", f"{what}, or the last one failed")
