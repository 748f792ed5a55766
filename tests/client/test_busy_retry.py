"""A task that waits between two pushes, on a loop that was closed without ending it: nothing can wake it any more."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import pytest

from tests.support.waits import until
from transferd.client.busy_retry import BusyRetry
from transferd.tasks import Status, Task, TaskResult, WriteStorageTask

TASK = WriteStorageTask(task_id="t", keys=["k"], gpu_block_ids=[0])


async def busy(task: Task) -> TaskResult:
    return TaskResult(task_id=task.task_id, status=Status.BUSY, retry_after=600.0)


@pytest.mark.parametrize("end", ["close", "cancel"])
def test_a_client_whose_loop_was_closed_under_a_waiting_task_can_be_closed(end: str) -> None:
    loop = asyncio.new_event_loop()
    retry = BusyRetry(SimpleNamespace(now=0.0, new_future=loop.create_future))  # type: ignore[arg-type]
    waiting = loop.create_task(retry.submit(busy, TASK, math.inf))
    while not retry._waiting:
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    waiting._log_destroy_pending = False  # type: ignore[attr-defined]
    if end == "cancel":
        assert not retry.cancel("t"), "there is nobody to tell"
    retry.close()
    assert not retry._waiting


async def test_a_task_taken_back_between_two_pushes_is_not_settled_while_a_late_rank_holds_its_blocks() -> None:
    async def unsettled(task: Task) -> TaskResult:
        return TaskResult(task_id=task.task_id, status=Status.BUSY, retry_after=600.0, settled=False)

    conversation = SimpleNamespace(
        now=0.0, new_future=asyncio.get_running_loop().create_future, session=SimpleNamespace(boot_id="b")
    )
    retry = BusyRetry(conversation)  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(retry.submit(unsettled, TASK, math.inf))
    await until(lambda: retry.cancel("t"))
    result = await waiting
    assert (result.status, result.settled) == (Status.CANCELLED, False)


async def test_a_task_cancelled_during_a_push_that_comes_back_busy_is_not_pushed_again() -> None:
    pushes: list[asyncio.Future[TaskResult]] = []
    loop = asyncio.get_running_loop()

    async def push(task: Task) -> TaskResult:
        pushes.append(loop.create_future())
        return await pushes[-1]

    conversation = SimpleNamespace(now=0.0, new_future=loop.create_future, session=SimpleNamespace(boot_id="b"))
    retry = BusyRetry(conversation)  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(retry.submit(push, TASK, math.inf))
    await until(lambda: pushes)
    assert not retry.cancel("t"), "the daemon may have it: ask there as well"
    pushes[0].set_result(TaskResult(task_id="t", status=Status.BUSY, retry_after=1e-9))
    await until(lambda: waiting.done() or len(pushes) > 1)
    assert len(pushes) == 1
    assert (await waiting).status is Status.CANCELLED
    assert "t" not in retry
