"""Times vLLM's scheduler, and each transfer as the scheduler sees it: for benchmarks/vllm_offload.py.

A transfer lasts from the moment at which the adapter, or vLLM's own tier, is handed it until the scheduler learns how
it ended. That includes the wait for the next step, which is where vLLM asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any


class Probe:
    """Watches an engine whose scheduler runs in this process. steps: seconds each; loads, stores: (bytes, seconds)."""

    def __init__(self, llm: Any) -> None:
        self._new()
        self._begun: dict[Any, tuple[bool, int, float]] = {}
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._time_steps(scheduler)
        connector = scheduler.connector
        if hasattr(connector, "_scheduling"):
            self._watch_connector(connector._scheduling)
        elif connector is not None:
            self._watch_tier(connector.connector_scheduler.manager.secondary_tiers[0])

    def _new(self) -> None:
        self._steps: list[float] = []
        self._moved: dict[bool, list[tuple[int, float]]] = {True: [], False: []}

    def take(self) -> dict[str, Any]:
        """What was seen since the last time."""
        seen = {"steps": self._steps, "loads": self._moved[True], "stores": self._moved[False]}
        self._new()
        return seen

    def _time_steps(self, scheduler: Any) -> None:
        schedule, update = scheduler.schedule, scheduler.update_from_output
        scheduling = 0.0

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            nonlocal scheduling
            before = time.perf_counter()
            output = schedule(*args, **kwargs)
            scheduling = time.perf_counter() - before
            return output

        def timed_update(output: Any, *args: Any, **kwargs: Any) -> Any:
            before = time.perf_counter()
            updated = update(output, *args, **kwargs)
            if output.total_num_scheduled_tokens:
                self._steps.append(scheduling + time.perf_counter() - before)
            return updated

        scheduler.schedule, scheduler.update_from_output = timed_schedule, timed_update

    def _watch_tier(self, tier: Any) -> None:
        for name, is_load in (("submit_store", False), ("submit_load", True)):
            setattr(tier, name, self._noting(getattr(tier, name), is_load, tier._block_size_bytes))
        finished = tier.get_finished_jobs

        def noted() -> Iterable[Any]:
            for result in finished():
                self._ended(result.job_id, good=result.success)
                yield result

        tier.get_finished_jobs = noted

    def _noting(self, submit: Callable[[Any], None], is_load: bool, chunk_bytes: int) -> Callable[[Any], None]:
        def noted(job: Any) -> None:
            self._begun[job.job_id] = (is_load, len(job.keys) * chunk_bytes, time.perf_counter())
            submit(job)

        return noted

    def _watch_connector(self, scheduling: Any) -> None:
        submit, count = scheduling._link.submit, scheduling._count

        def noted_submit(task: Any, done: Callable[[Any], None]) -> None:
            self._begun[task.task_id] = (task.task_id.startswith("load"), 0, time.perf_counter())
            submit(task, done)

        def noted_count(transfer: Any, result: Any, moved: int) -> None:
            is_load, _, began = self._begun[result.task_id]
            self._begun[result.task_id] = (is_load, result.bytes, began)
            self._ended(result.task_id, good=bool(moved))
            count(transfer, result, moved)

        scheduling._link.submit, scheduling._count = noted_submit, noted_count

    def _ended(self, name: Any, *, good: bool) -> None:
        is_load, nbytes, began = self._begun.pop(name)
        if good and nbytes:
            self._moved[is_load].append((nbytes, time.perf_counter() - began))
