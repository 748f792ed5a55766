"""The jobs that a tier has submitted and not yet reported to vLLM."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from transferd.errors import StillRunning
from transferd.tasks import TaskResult

if TYPE_CHECKING:
    from vllm.v1.kv_offload.tiering.base import TransferJob

NAMED = 3  # of the jobs that hang


class Jobs:
    """The running jobs. vLLM's thread begins and takes them; any thread may end them."""

    def __init__(self) -> None:
        self._finished: queue.SimpleQueue[tuple[TransferJob, TaskResult]] = queue.SimpleQueue()
        self._running: dict[str, None] = {}  # task ids, the oldest first
        self._idle = threading.Condition()

    def began(self, job: TransferJob, task_id: str) -> Callable[[TaskResult], None]:
        """Note a job that may touch vLLM's pool from now on. Returns what to call with its result, once."""
        with self._idle:
            self._running[task_id] = None

        def done(result: TaskResult) -> None:
            self._finished.put((job, result))
            with self._idle:
                del self._running[task_id]
                self._idle.notify_all()

        return done

    def take(self) -> Iterable[tuple[TransferJob, TaskResult]]:
        while not self._finished.empty():
            yield self._finished.get_nowait()

    def wait_idle(self, timeout: float, endpoint: str) -> None:
        """Wait until no job touches vLLM's pool.

        timeout: seconds.
        endpoint: of the daemon that has the jobs.
        Raises StillRunning that names those which hang.
        """
        with self._idle:
            if self._idle.wait_for(lambda: not self._running, timeout):
                return
            count, oldest = len(self._running), ", ".join(list(self._running)[:NAMED])
        what = f"{count} transfers have not ended after {timeout:g} s ({oldest})"
        what += f": the daemon at {endpoint} is silent or stuck, and may still write to vLLM's host pool"
        raise StillRunning(f"{what}; resume or end that daemon, then try again")
