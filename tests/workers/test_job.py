"""A job: what it says of its use of storage, the plans it keeps; its stop signal; parts that a daemon may not have."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from typing import Any

import pytest

from tests.workers.rig import layout_of
from transferd.blocks.copyplan import CopyPlan
from transferd.errors import InvariantError
from transferd.runtime.threads import noted
from transferd.storage.lru import Use
from transferd.tasks import ReadStorageTask, Stop, SwapOutTask, Task, WriteStorageTask
from transferd.workers.job import MOST_PLANS, Job, StopSignal, require


class Never:
    """Awaited, it never comes back."""

    def __await__(self):  # type: ignore[no-untyped-def]
        yield


async def never() -> None:
    await Never()


def test_a_forgotten_copy_is_collected_in_any_context(recwarn: pytest.WarningsRecorder) -> None:
    """A loop that ends with copies in flight leaves them to the collector, which runs wherever it likes."""
    stop = StopSignal()
    copying = stop.copied(never())
    contextvars.copy_context().run(copying.send, None)
    others: list[object] = []
    there = noted.set(others)  # type: ignore[arg-type]
    try:
        copying.close()
        assert noted.get() is others, "what another context notes is not ours to change"
    finally:
        noted.reset(there)
    assert not stop._copies
    assert not recwarn.list


async def test_a_copy_that_comes_after_the_stop_does_not_begin() -> None:
    begun: list[str] = []

    async def copy() -> None:
        begun.append("a byte moves")

    stop, before = StopSignal(), noted.get()
    assert await stop.copied(copy())
    assert noted.get() is before
    stop.set(Stop.CANCELLED)
    assert not await stop.copied(copy())
    assert begun == ["a byte moves"]


async def test_a_cancellation_from_outside_is_not_taken_for_the_stop() -> None:
    stop = StopSignal()
    waiting = asyncio.ensure_future(stop.copied(asyncio.sleep(60)))
    await asyncio.sleep(0)
    stop.set(Stop.CANCELLED)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_copy_that_is_cancelled_without_a_stop_ends_its_task() -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    stop = StopSignal()
    with pytest.raises(asyncio.CancelledError):
        await stop.copied(cancelled())
    assert stop.reason is None


def job_of(task: Task) -> Job:
    return Job(task, task.blocks, "g", admitted_at=100.0, started_at=101.0, queue_s=1.0)


@pytest.mark.parametrize(("shared", "is_shared"), [(True, True), (False, False), (None, False)])
def test_a_write_says_which_blocks_of_its_sequence_it_stores_for_how_long_and_for_whom(
    shared: Any, is_shared: bool
) -> None:
    task = WriteStorageTask(
        task_id="w", keys=["a", "b"], gpu_block_ids=[1, 2], start_write_block_idx=5, shared=shared, timeout=7.0
    )
    use = job_of(task).use
    assert (use.start, use.stop, use.shared, use.until) == (5, 7, is_shared, 107.0)


def test_a_read_says_where_in_its_sequence_it_begins() -> None:
    task = ReadStorageTask(task_id="r", keys=["a", "b"], gpu_block_ids=[1, 2], start_read_block_idx=5, timeout=7.0)
    use, swap = job_of(task).use, job_of(SwapOutTask(task_id="s", gpu_block_ids=[1], cpu_block_ids=[2])).use
    assert (use.start, use.stop, use.until) == (5, swap.stop, 107.0), "it may go on behind the task's blocks"


class Ids:
    """An object format that only names keys."""

    def ids(self, keys: Sequence[str]) -> list[str]:
        return [f"<{key}>" for key in keys]


@pytest.mark.parametrize("write", [True, False])
def test_each_chain_of_a_task_is_a_use_that_knows_what_it_continues(write: bool) -> None:
    kind = WriteStorageTask if write else ReadStorageTask
    task = kind(task_id="t", keys=list("abcde"), gpu_block_ids=[1, 2, 3, 4, 5], chains=[(0, 7, "p"), (3, 0, "")])
    job = job_of(task)
    job.key_ids(Ids())  # type: ignore[arg-type]
    assert [at for at, _ in job.runs] == [0, 3]
    uses = [use for _, use in job.runs]
    assert uses[0] is job.use
    assert [(use.start, use.parent, use.until) for use in uses] == [(7, "<p>", 130.0), (0, "", 130.0)]
    assert [(use.stop, use.last) for use in uses] == ([(10, "<c>"), (2, "<e>")] if write else [(0, ""), (0, "")])
    asked: list[tuple[list[str], Use]] = []

    def ask(names: Sequence[str], use: Use) -> list[bool]:
        asked.append((list(names), use))
        return [name == "b" for name in names]

    assert job.by_run(list("abcde"), ask) == [False, True, False, False, False]
    assert asked == [(list("abc"), uses[0]), (list("de"), uses[1])]
    assert job.by_run(list("abcde"), lambda _, use: None if use is uses[1] else [True] * 3) is None
    assert not job.shrunk
    uses[1].end_at(0, 1)
    assert job.shrunk


def test_a_task_that_names_no_chain_is_one_and_what_it_continues_is_not_known() -> None:
    job = job_of(WriteStorageTask(task_id="w", keys=["a", "b"], gpu_block_ids=[1, 2], start_write_block_idx=5))
    job.key_ids(Ids())  # type: ignore[arg-type]
    assert [at for at, _ in job.runs] == [0]
    assert (job.use.parent, job.use.last) == (None, "")


def test_two_jobs_of_one_task_are_two() -> None:
    task = SwapOutTask(task_id="s", gpu_block_ids=[1], cpu_block_ids=[2])
    assert len({job_of(task), job_of(task)}) == 2


def test_ranks_share_the_plan_of_a_copy() -> None:
    job = job_of(SwapOutTask(task_id="s", gpu_block_ids=[1], cpu_block_ids=[2]))
    layout = layout_of(device_blocks=100, host_blocks=100)

    def plan(count: int, first: int = 0) -> CopyPlan:
        return job.copy_plan(layout.device, range(first, first + count), layout.host, range(count))

    assert plan(2) is plan(2)
    assert plan(99) is plan(99)
    assert plan(99) is not plan(99, first=1)


def test_a_job_keeps_few_plans() -> None:
    job = job_of(SwapOutTask(task_id="s", gpu_block_ids=[1], cpu_block_ids=[2]))
    layout = layout_of(device_blocks=MOST_PLANS + 1, host_blocks=2)

    def plan(number: int) -> CopyPlan:
        return job.copy_plan(layout.device, [number], layout.host, [1])

    kept = [plan(number) for number in range(MOST_PLANS)]
    assert all(plan(number) is kept[number] for number in range(MOST_PLANS)), "each was made once"
    plan(MOST_PLANS)
    assert len(job._plans) == 1, "as if it began anew"


def test_a_part_that_admission_should_have_asked_for_is_a_bug() -> None:
    assert require("") == "", "only None is no part"
    with pytest.raises(InvariantError, match="a tier this daemon does not have"):
        require(None)
