"""Loads that overlap with the step that needs them: a layer waits for its part of the blocks (docs/adr/0092).

The scheduler then begins no load itself: the step carries the task, and the worker pushes it when the step begins, so
that the worker is notified of each part. A failed load also ends with the step: vLLM then takes the step back for the
requests that have a bad block, and computes them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from transferd.tasks import ReadStorageTask, Status, TaskResult

log = logging.getLogger("vllm.transferd")

Submit = Callable[[ReadStorageTask, Callable[[TaskResult], None], Callable[[int], None]], None]


def unused(result: TaskResult) -> TaskResult:
    """The result of a load after which all blocks must be computed."""
    return msgspec.structs.replace(result, status=Status.FAILED, block_ids=[])


class LayerLoads:
    """One worker's loads of the present step. Results arrive in another thread.

    submit: `Link.submit`.
    ends: for each layer by vLLM's name, how many leading layers of a block are there once it is.
    """

    def __init__(self, submit: Submit, ends: Mapping[str, int]) -> None:
        self._submit, self._ends = submit, ends
        self._changed = threading.Condition()
        self._tasks: Sequence[ReadStorageTask] = ()
        self._there: dict[str, int] = {}  # by task: layers of all of its blocks
        self._results: dict[str, TaskResult] = {}
        self._waited: set[str] = set()

    def start(self, tasks: Sequence[ReadStorageTask]) -> None:
        """Begin a step, and its loads."""
        with self._changed:
            self._tasks, self._there, self._results, self._waited = tasks, {}, {}, set()
        for task in tasks:
            self._there[task.task_id] = 0
            self._submit(
                task,
                lambda result: self._note(self._results, result.task_id, result),
                lambda layers, name=task.task_id: self._note(self._there, name, layers),  # type: ignore[misc]
            )

    def wait(self, layer: str) -> None:
        """Wait until a layer may be read: all loads of this step have it, or have ended."""
        if self._tasks:
            self._waited.add(layer)
            needed = self._ends.get(layer)
            self._until(lambda name: needed is not None and self._there[name] >= needed)

    def results(self) -> dict[str, TaskResult]:
        """Wait for the results of the step's loads, by task. Call it once all layers were computed."""
        self._until(lambda _: False)
        missed = self._ends.keys() - self._waited
        if self._tasks and missed:  # they may have been read too early
            log.warning("transferd: vLLM did not wait for the layer %s, so what was loaded is computed", min(missed))
            return {name: unused(result) for name, result in self._results.items()}
        return self._results

    def _until(self, there: Callable[[str], bool]) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: all(task.task_id in self._results or there(task.task_id) for task in self._tasks)
            )

    def _note(self, where: dict[str, Any], name: str, value: Any) -> None:
        with self._changed:
            where[name] = value
            self._changed.notify_all()
