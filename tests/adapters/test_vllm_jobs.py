"""A tier's jobs: what has ended can be taken, and a wait for the rest ends, too."""

from __future__ import annotations

from typing import Any

import pytest

from transferd.adapters.vllm.jobs import Jobs
from transferd.errors import StillRunning
from transferd.tasks import Status, TaskResult

JOB: Any = object()


def test_a_wait_for_jobs_ends_and_names_those_that_hang() -> None:
    jobs = Jobs()
    ended = {name: jobs.began(JOB, name) for name in ("store-1", "load-2", "load-3", "load-4", "load-5")}
    ended["store-1"](TaskResult(task_id="store-1", status=Status.OK))
    with pytest.raises(StillRunning) as caught:
        jobs.wait_idle(0.0, "ipc:///d")
    assert "4 transfers have not ended after 0 s (load-2, load-3, load-4): the daemon at ipc:///d" in str(caught.value)
    for name in ("load-2", "load-3", "load-4", "load-5"):
        ended[name](TaskResult(task_id=name, status=Status.FAILED))
    jobs.wait_idle(0.0, "ipc:///d")
    assert [(job, result.status) for job, result in jobs.take()] == [(JOB, Status.OK)] + [(JOB, Status.FAILED)] * 4
    assert not list(jobs.take())
