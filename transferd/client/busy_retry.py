"""Pushing a task again for as long as the daemon is busy, until it is taken back or the client is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from transferd.client.session import Link
from transferd.errors import Closed
from transferd.tasks import ErrorInfo, Status, Task, TaskResult

BUSY_PAUSE_S = 0.01  # before a busy daemon is asked again, if it names no time of its own
_TAKEN_BACK = ErrorInfo("cancelled", "cancelled while the daemon was busy")
_CLOSED = ErrorInfo(Closed.code, "the client was closed")


class BusyRetry:
    """Knows the tasks that wait between two pushes; the daemon does not know them."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: dict[str, asyncio.Future[ErrorInfo]] = {}  # by task_id

    async def submit(self, submit: Callable[[Task], Awaitable[TaskResult]], task: Task, give_up: float) -> TaskResult:
        """`submit` until it is not busy, or until the next push would come after `give_up`, on the link's clock."""
        while True:
            result = await submit(task)
            pause = result.retry_after or BUSY_PAUSE_S
            if result.status is not Status.BUSY or self._link.now + pause >= give_up:
                return result
            if (why := await self._pause(task.task_id, pause)) is not None:
                status = Status.CANCELLED if why is _TAKEN_BACK else Status.FAILED
                return TaskResult(task_id=task.task_id, status=status, error=why, boot_id=self._link.session.boot_id)
            task = msgspec.structs.replace(task, timeout=give_up - self._link.now)

    async def _pause(self, task_id: str, pause: float) -> ErrorInfo | None:
        """Wait before a task is pushed again. Returns why it is not, if `cancel` or `close` came meanwhile."""
        told = self._waiting[task_id] = self._link.new_future()
        try:
            await asyncio.wait({told}, timeout=pause)
        finally:
            self._waiting.pop(task_id, None)
        return told.result() if told.done() else None

    def cancel(self, task_id: str) -> bool:
        """Take a task back. False: it does not wait here."""
        told = self._waiting.pop(task_id, None)
        if told is not None:
            told.set_result(_TAKEN_BACK)
        return told is not None

    def close(self) -> None:
        while self._waiting:
            self._waiting.popitem()[1].set_result(_CLOSED)
