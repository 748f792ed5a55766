"""Retry a task while the daemon is busy, until the task is cancelled or the client is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from transferd.client.session import Conversation
from transferd.errors import Closed
from transferd.tasks import ErrorInfo, Status, Task, TaskResult

BUSY_PAUSE_S = 0.01  # the pause before the next retry, unless the daemon names one
_TAKEN_BACK = ErrorInfo("cancelled", "cancelled while the daemon was busy")
_CLOSED = ErrorInfo(Closed.code, "the client was closed")


class BusyRetry:
    """Holds the tasks that wait between two pushes. The daemon does not know about them."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._waiting: dict[str, asyncio.Future[ErrorInfo]] = {}  # by task_id
        self._taken_back: dict[str, bool] = {}  # every task that `submit` holds, and whether it was cancelled in a push

    def __contains__(self, task_id: str) -> bool:
        """Whether `submit` holds the task, in a pause or in a push."""
        return task_id in self._taken_back

    async def submit(self, submit: Callable[[Task], Awaitable[TaskResult]], task: Task, give_up: float) -> TaskResult:
        """Call `submit` until it is not busy, or until the next push would come after `give_up` (conversation time)."""
        task_id = task.task_id
        self._taken_back.setdefault(task_id, False)
        try:
            while (result := await submit(task)).status is Status.BUSY:
                pause = result.retry_after or BUSY_PAUSE_S
                why = _TAKEN_BACK if self._taken_back.get(task_id) else None
                if why is None and self._conversation.now + pause >= give_up:
                    break
                if (why := why or await self._pause(task_id, pause)) is not None:
                    status = Status.CANCELLED if why is _TAKEN_BACK else Status.FAILED
                    boot_id = self._conversation.session.boot_id
                    return TaskResult(
                        task_id=task_id, status=status, error=why, boot_id=boot_id, settled=result.settled
                    )
                task = msgspec.structs.replace(task, timeout=give_up - self._conversation.now)
            return result
        finally:
            self._taken_back.pop(task_id, None)

    async def _pause(self, task_id: str, pause: float) -> ErrorInfo | None:
        """Wait before the next push. If `cancel` or `close` comes meanwhile, return the reason not to push again."""
        answer = self._waiting[task_id] = self._conversation.new_future()
        try:
            await asyncio.wait({answer}, timeout=pause)
        finally:
            self._waiting.pop(task_id, None)
        return answer.result() if answer.done() else None

    def cancel(self, task_id: str) -> bool:
        """Cancel a task that waits here. Returns False if it does not; one in a push then ends if the push is busy."""
        if task_id in self._taken_back:
            self._taken_back[task_id] = True
        answer = self._waiting.pop(task_id, None)
        return answer is not None and _end(answer, _TAKEN_BACK)

    def close(self) -> None:
        while self._waiting:
            _end(self._waiting.popitem()[1], _CLOSED)


def _end(waiting: asyncio.Future[ErrorInfo], why: ErrorInfo) -> bool:
    """End a pause. Returns False if its loop is closed, where no call waits any more."""
    if waiting.get_loop().is_closed():
        return False
    waiting.set_result(why)
    return True
