"""What the client knows of tasks that ended without the daemon's word; the daemon is the test."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from tests.support.waits import until
from transferd.client import settling
from transferd.client.pending import after_waiting
from transferd.client.settling import Settling
from transferd.errors import DaemonLost
from transferd.tasks import Status, TaskResult
from transferd.wire import protocol as wire


class Asked:
    """A conversation. asked: the questions; the newest one of a task is answered by `answer`."""

    endpoint = "ipc:///d"
    session = wire.Welcome("b1", ready=True, version="", generation="", max_message=1, many=1)

    def __init__(self) -> None:
        self.present = "b1"
        self.asked: list[tuple[str, int]] = []
        self.questions: dict[str, asyncio.Future[Any]] = {}

    @property
    def now(self) -> float:
        return time.monotonic()

    async def request(self, body: Any, timeout: float) -> Any:
        self.asked.append((body.task_id, body.session))
        self.questions[body.task_id] = asyncio.get_running_loop().create_future()
        return await self.questions[body.task_id]


def welcome(boot_id: str, session: int = 1) -> wire.Welcome:
    return wire.Welcome(boot_id, ready=True, version="", generation="", max_message=1, session=session)


def lost(*task_ids: str) -> tuple[Asked, Settling]:
    """A conversation that has given these tasks up, pushed in session 1."""
    daemon = Asked()
    known = Settling(daemon)
    known.welcomed(welcome("b1"))
    assert known.push is not None
    for task_id in task_ids:
        known.gave_up(task_id, known.push)
    return daemon, known


async def test_the_daemon_is_asked_for_the_session_of_the_push_and_its_word_counts() -> None:
    daemon, known = lost("t")
    known.welcomed(welcome("b1", session=2))
    waiting = asyncio.ensure_future(known.settled("t", 60))
    again = asyncio.ensure_future(known.settled("t", 60))
    await until(lambda: daemon.asked)
    assert not await known.settled("t", 0)
    daemon.questions["t"].set_result(True)
    assert await waiting
    assert await again
    assert daemon.asked == [("t", 1)], "one question, however many wait"
    assert known.task_ids == []
    assert await known.settled("another", 0), "it was never given up"


async def test_a_silent_daemon_is_asked_when_it_is_back_and_again_when_it_is_lost_meanwhile() -> None:
    daemon, known = lost("t")
    daemon.present = ""
    waiting = asyncio.ensure_future(known.settled("t", 60))
    await asyncio.sleep(0)
    assert daemon.asked == []
    daemon.present = "b1"
    known.welcomed(welcome("b1"))
    await until(lambda: daemon.asked)
    daemon.questions["t"].set_exception(DaemonLost("gone"))
    await until(lambda: len(daemon.asked) == 2)
    daemon.questions["t"].set_result(True)
    assert await waiting


async def test_the_answer_about_an_earlier_push_says_nothing_of_a_later_one() -> None:
    daemon, known = lost("t")
    waiting = asyncio.ensure_future(known.settled("t", 60))
    await until(lambda: daemon.asked)
    assert known.push is not None
    known.gave_up("t", known.push)  # it was pushed again after the question, and given up again
    daemon.questions["t"].set_result(True)
    await until(lambda: len(daemon.asked) == 2)
    assert not waiting.done()
    daemon.questions["t"].set_result(True)
    assert await waiting


async def test_tasks_beyond_the_kept_ones_are_never_claimed_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "MOST_TASKS", 3)
    daemon, known = lost("a", "b", "c", "d")
    assert known.task_ids == ["b", "c", "d"]
    assert not await known.settled("a", 0.05)
    assert daemon.asked == []
    daemon.present = "b2"
    known.welcomed(welcome("b2"))
    assert await known.settled("a", 0)
    assert known.task_ids == []


async def test_a_kept_task_is_settled_once_confirmed_though_others_were_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(settling, "MOST_TASKS", 1)
    daemon, known = lost("forgotten", "t")
    waiting = asyncio.ensure_future(known.settled("t", math.inf))
    await until(lambda: daemon.asked)
    daemon.questions["t"].set_result(True)
    assert await waiting
    assert not await known.settled("forgotten", 0)


def test_a_result_that_was_waited_for_without_limit_says_that_it_is_unsettled() -> None:
    given = after_waiting(TaskResult(task_id="t", status=Status.OK, settled=False), "ipc:///d", None, settled=False)
    assert given.error is not None
    assert (given.status, given.error.code) == (Status.FAILED, "unsettled")


async def test_questions_are_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "MOST_ASKED", 2)
    names = [f"t{i}" for i in range(5)]
    daemon, known = lost(*names)
    waiting = [asyncio.ensure_future(known.settled(name, 60)) for name in names]
    for _ in names:
        await until(lambda: any(not question.done() for question in daemon.questions.values()))
        open_ones = [name for name, question in daemon.questions.items() if not question.done()]
        assert len(open_ones) <= 2
        daemon.questions[open_ones[0]].set_result(True)
        await asyncio.sleep(0)
    assert all(await asyncio.gather(*waiting))
