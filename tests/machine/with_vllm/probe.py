"""Times vLLM's scheduler, and each transfer: for benchmarks/vllm_offload.py.

A transfer lasts from the moment at which the adapter, or vLLM's own tier, is handed it until its last byte is there
and a thread of the engine's process knows. vLLM itself asks only once a step, so it learns of a store up to a step
later; that would time the model, not the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

IDLE_S = 0.001


class Probe:
    """Watches an engine whose scheduler runs in this process. steps: seconds each; loads, stores: (bytes, seconds)."""

    def __init__(self, llm: Any) -> None:
        self._new()
        core = llm.llm_engine.engine_core.engine_core
        scheduler = core.scheduler
        _step_as_a_server_does(core)
        self._time_steps(scheduler)
        connector = scheduler.connector
        if connector is not None:
            tiers = [] if hasattr(connector, "_link") else connector.connector_scheduler.manager.secondary_tiers
            watched = tiers[0] if tiers else connector
            if hasattr(watched, "_link"):
                self._watch_link(watched._link)
            elif hasattr(watched, "_pool"):  # vLLM's `obj` tier knows of a transfer's end only when it is asked
                self._watch_threads(watched)

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

    def _watch_link(self, link: Any) -> None:
        """Of TransferdTier or TransferdConnector. A block that the daemon has already counts no bytes."""
        submit = link.submit

        def timed(task: Any, done: Callable[[Any], None]) -> None:
            began = time.perf_counter()

            def ended(result: Any) -> None:
                self._ended(task.task_id.startswith("load"), result.bytes, began)
                done(result)

            submit(task, ended)

        link.submit = timed

    def _watch_threads(self, tier: Any) -> None:
        """Of vLLM's `fs` tier, which gives each job to one thread."""
        for name, is_load in (("enqueue_store", False), ("enqueue_load", True)):
            setattr(tier._pool, name, self._timed_jobs(getattr(tier._pool, name), is_load, tier))

    def _timed_jobs(self, enqueue: Callable[..., None], is_load: bool, tier: Any) -> Callable[..., None]:
        def timed(job: int, count: int, work: Sequence[Callable[[], None]]) -> None:
            began, nbytes = time.perf_counter(), tier._job_block_counts[job] * tier._block_size
            (move,) = work

            def moved() -> None:
                move()
                self._ended(is_load, nbytes, began)

            enqueue(job, count, [moved])

        return timed

    def _ended(self, is_load: bool, nbytes: int, began: float) -> None:
        if nbytes:
            self._moved[is_load].append((nbytes, time.perf_counter() - began))


def _step_as_a_server_does(core: Any) -> None:
    """Between steps without work, `vllm serve` sleeps; an engine in the caller's process spins.

    A spinning engine lets go of Python's lock every 5 ms only, so every thread that moves blocks would wait for it.
    """
    after = core.post_step

    def post_step(model_executed: bool) -> None:
        after(model_executed)
        if not model_executed and core.scheduler.has_requests():
            time.sleep(IDLE_S)

    core.post_step = post_step
