"""Blocking calls of a library, one line of them after another, each line in a thread of its own."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from transferd.errors import StorageUnavailable

T = TypeVar("T")

MOST_WAITING = 256  # in one line: tasks are far fewer, so the call at its head hangs


class Line:
    """Runs calls one at a time, in the order in which they came.

    The thread begins with the first call. It is a daemon: a call that never returns must not keep the
    process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """The call's future. Cancelling it works as long as the call has not begun.

        Raises StorageUnavailable when too many wait already, as a call that never returns would gather them.
        """
        if self._calls.qsize() >= MOST_WAITING:
            raise StorageUnavailable(f"{self._name}: {MOST_WAITING} calls are waiting already")
        future: Future[T] = Future()
        self._calls.put((future, call))  # type: ignore[arg-type] # a queue of futures of different types
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        return future

    async def run(self, call: Callable[[], T]) -> T:
        """Its result. A cancelled caller leaves a call that has begun to itself. Raises as `submit` does."""
        return await asyncio.wrap_future(self.submit(call))

    def close(self) -> None:
        """The thread ends after the calls that were submitted."""
        if self._thread is not None:
            self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - whoever waits for the call hears of it
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, call  # nothing of it is kept alive while the line waits
