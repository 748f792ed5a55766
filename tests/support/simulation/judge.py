"""Judge: what the contract promises an engine at the moment of a result, checked against what is known for sure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from tests.support.simulation.blocks import Blocks
from tests.support.simulation.ledger import Ledger
from tests.support.simulation.world import SimWorld
from transferd.errors import InvariantError
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, Task, TaskResult, WriteStorageTask

NOT_FROM_THE_DAEMON = ("daemon_lost", "closed")
LEFT_BEHIND = ("expired", "rank_died")  # codes of ranks that had not arrived when their task was answered
WAY_S = 0.1  # there and back, in any weather that loses nothing


class BrokenPromise(AssertionError):
    """The daemon did what it must not. Tells the task and what the flight recorder knows of it."""

    def __init__(self, task_id: str, what: str, story: str) -> None:
        super().__init__(f"{task_id}: {what}\n{story}")
        self.task_id = task_id
        self.what = what


@dataclass
class Judge:
    """Shared by all engines of a world. ledger: what storage may hold."""

    world: SimWorld
    ledger: Ledger = field(default_factory=Ledger)

    def check(self, good: bool, task: Task, what: str) -> None:
        if not good:
            story = self.world.daemon.recorder.story(task.task_id)
            raise BrokenPromise(task.task_id, what, f"{task}\nthe daemon's notes:\n{story}")

    # --- any result ---------------------------------------------------------------------------------

    def result(
        self, task: Task, result: TaskResult, pushed_at: float, stood_still: float, *, cut: bool, losing: bool = False
    ) -> None:
        """Check what holds of every result.

        pushed_at: virtual time. stood_still: seconds since then. cut: its connection broke since then. losing: it loses
        messages now, so that half a minute of repeated pushes may have brought no answer.
        """
        check, error = self.check, result.error
        check(result.task_id == task.task_id, task, f"answered as {result.task_id}")
        ours = task.task_id in self.world.effects.struck  # a bug that the simulation put in
        unheard = losing and error is not None and error.code == "no_answer"
        bug = error is not None and error.code in ("internal", "no_answer") and not ours and not unheard
        check(not bug, task, f"a bug: {error}")
        whole = len(result.block_ids) == task.blocks
        check(not task.blocks or (result.status is Status.OK) == whole, task, f"{result}")
        check(result.status is not Status.OK or error is None, task, f"ok, with an error: {result}")
        if error is not None and error.code in NOT_FROM_THE_DAEMON:
            return
        self._ranks(task, result)
        limit = task.timeout + self.world.daemon.config.server.deadline_slack + WAY_S + stood_still
        took = self.world.loop.time() - pushed_at
        check(took <= limit or cut, task, f"answered after {took:.3f} s: {result}")

    def _ranks(self, task: Task, result: TaskResult) -> None:
        """Every rank has told its share, and the sums are theirs."""
        check, ranks = self.check, result.ranks
        if not ranks:  # it never started
            check(not result.block_ids or not task.blocks, task, f"blocks that nobody moved: {result}")
            return
        everybody = list(range(len(self.world.devices)))
        check([r.rank for r in ranks] == everybody, task, f"not one result per rank: {result}")
        check(result.bytes == sum(r.bytes for r in ranks), task, f"bytes of nobody: {result}")
        check(all(r.blocks >= len(result.block_ids) for r in ranks), task, f"more than some rank has: {result}")
        if isinstance(task, SwapOutTask | SwapInTask):
            nbytes = len(result.block_ids) * self.world.daemon.default.layout.block_bytes
            check(all(r.bytes >= nbytes for r in ranks), task, f"blocks without bytes: {result}")
        elif isinstance(task, ReadStorageTask):
            nbytes = len(result.block_ids) * self.world.daemon.default.layout.block_bytes
            check(all(r.bytes >= nbytes for r in ranks), task, f"blocks without bytes: {result}")
            moved = set(result.block_ids)
            in_order = [block for block in task.block_ids[: task.blocks] if block in moved]
            check(result.block_ids == in_order, task, f"not in the task's order: {result}")
            prefix = task.block_ids[: len(moved)]
            check(not task.prefix or result.block_ids == prefix, task, f"not a prefix: {result}")

    def same(self, task: Task, one: TaskResult, other: TaskResult) -> None:
        """Two answers of the daemon to one task, the earlier first: the later one may know that it is settled."""
        later = msgspec.structs.replace(other, settled=one.settled) if not one.settled else other
        self.check(one == later, task, f"two answers: {one} and {other}")

    # --- one kind of task ---------------------------------------------------------------------------

    def read(self, task: ReadStorageTask, result: TaskResult, memory: Blocks) -> None:
        if memory.lost():
            return
        loaded = set(result.block_ids)
        for key, block in zip(task.keys, task.block_ids, strict=False):
            if block not in loaded:
                continue
            self.check(memory.holds(block, key), task, f"wrong bytes of {key} in block {block}: {result}")
            may = self.ledger.may_hold(result.generation, key)
            self.check(may, task, f"{key} was never stored in generation {result.generation!r}: {result}")

    def complete(self, task: ReadStorageTask, result: TaskResult) -> None:
        """In calm weather, with nobody else at work: a sparse read has left out only what some rank lacks."""
        claimed = set(result.block_ids)
        for key, block in zip(task.keys, task.gpu_block_ids, strict=True):
            whole = self._in_storage(result.generation, key, self.world.storage.objects)
            self.check(block in claimed or not whole, task, f"{key} is there and was not loaded: {result}")

    def _in_storage(self, generation: str, key: str, names: Container[str]) -> bool:
        """Whether every object of the key, on every rank, is among these."""
        objects = self.world.daemon.default.objects
        ids, ranks = objects.ids([key]), range(len(self.world.devices))
        blocks = [objects.names(generation, ids, rank)[0] for rank in ranks]
        return all(block + part.suffix in names for block in blocks for part in objects.parts)

    def stored(self, task: WriteStorageTask, result: TaskResult) -> None:
        """What it claims is in storage, unless storage itself let it go."""
        storage, objects = self.world.storage, self.world.daemon.default.objects
        claimed = [key for key, block in zip(task.keys, task.block_ids, strict=True) if block in result.block_ids]
        for rank in range(len(self.world.devices)):
            blocks = objects.names(result.generation, objects.ids(claimed), rank)
            for name in (block + part.suffix for block in blocks for part in objects.parts):
                there = name in storage.objects or name in storage.gone
                self.check(there, task, f"{name} was not stored: {result}")

    def untouched(self, task: Task, memory: Blocks, labels: Iterable[str], blocks: Iterable[int], what: str) -> None:
        if memory.lost():
            return
        for label, block in zip(labels, blocks, strict=True):
            self.check(memory.holds(block, label), task, f"{what}: block {block}")

    # --- whose blocks are they ----------------------------------------------------------------------

    def let_go(self, task: Task, result: TaskResult, memory: Blocks, blocks: Sequence[int]) -> None:
        """Nobody is at work on the blocks any more."""
        watch = self.world.watch
        for block in blocks:
            for rank in range(len(memory.memories)):
                starts, sizes = memory.ranges(block, rank)
                try:
                    claim = watch.enter(starts, sizes, writes=True, who=f"the engine after {task.task_id}")
                except InvariantError as conflict:
                    self.check(False, task, f"{conflict}, after {result}")
                else:
                    watch.leave(claim)


def answered_whole(result: TaskResult) -> bool:
    """Every rank has let go: the blocks are the engine's again."""
    if not from_the_daemon(result) or not result.settled:
        return False
    return not any(r.error is not None and r.error.code in LEFT_BEHIND for r in result.ranks)


def from_the_daemon(result: TaskResult) -> bool:
    return result.error is None or result.error.code not in NOT_FROM_THE_DAEMON
