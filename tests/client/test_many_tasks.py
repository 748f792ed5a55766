"""What thousands of tasks cost the engine's loop when all of them are cancelled, or wait for a settled result, at once.

The daemon is a recorder. Counted are the messages, and the functions that the client runs: so many for each task,
however many there are. `make bench` has the seconds.
"""

from __future__ import annotations

import asyncio
import gc
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from tests.client.test_session import Recorder, welcome
from tests.support.waits import until
from transferd import Client, Status, SwapOutTask, TaskResult
from transferd.client import heartbeat
from transferd.client.settling import SLICE
from transferd.wire import protocol as wire

FEW, MANY = 500, 4000
CALLS = 400  # of functions, for a task: twice what was counted
WITHDRAWN_CALLS = 30  # the same, until the cancels have gone out


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder answers no heartbeat, and thousands of tasks may take longer than a client waits for a daemon."""
    monkeypatch.setattr(heartbeat, "SILENCE_S", 3600.0)


class Calls:
    """How many functions ran."""

    count = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        def note(_frame: Any, event: str, _arg: Any) -> None:
            self.count += event in ("call", "c_call")

        gc.disable()  # its callbacks count as well
        sys.setprofile(note)
        try:
            yield
        finally:
            sys.setprofile(None)
            gc.enable()


def ended(task_id: str, status: Status) -> wire.Result:
    return wire.Result(TaskResult(task_id=task_id, status=status, settled=True))


def asked(daemon: Recorder, kind: type) -> list[tuple[int, list[str]]]:
    found = [(one.seq, one.body) for one in daemon.said if isinstance(one.body, kind)]
    return [(seq, [body.task_id, *body.task_ids]) for seq, body in found]  # type: ignore[union-attr]


def tasks(number: int) -> list[SwapOutTask]:
    return [SwapOutTask(task_id=f"t{i}", gpu_block_ids=[1], cpu_block_ids=[2]) for i in range(number)]


async def turns(true: Callable[[], object]) -> None:
    """Let the loop turn until it is so."""
    await until(true, look=0)


async def cancelled(number: int) -> tuple[int, int]:
    """Cancel so many tasks at once; return how many functions ran, and how many messages went out."""
    daemon, calls = Recorder(), Calls()
    async with connected(daemon) as client:
        running = [asyncio.ensure_future(client.submit(task)) for task in tasks(number)]
        await turns(lambda: len(daemon.others) == number)
        pushes = {one.body.task_id: one.seq for one in daemon.others}  # type: ignore[union-attr]
        with calls.counted():
            for call in running:
                call.cancel()
            await turns(lambda: sum(len(ids) for _, ids in asked(daemon, wire.Cancel)) == number)
            for seq, ids in asked(daemon, wire.Cancel):
                daemon.say(seq, wire.Value(True))
                for task_id in ids:
                    daemon.say(pushes[task_id], ended(task_id, Status.CANCELLED))
            await asyncio.wait(running)
        assert all(call.cancelled() for call in running)
        assert client.unsettled == []
        return calls.count, len(asked(daemon, wire.Cancel))


async def settled(number: int) -> tuple[int, int]:
    """Give so many tasks up, and wait until all are settled; return as `cancelled` does."""
    daemon, calls = Recorder(), Calls()
    async with connected(daemon) as client:
        running = [asyncio.ensure_future(client.submit(task, settled=True)) for task in tasks(number)]
        await turns(lambda: len(daemon.others) == number)
        for one in daemon.others:
            daemon.say(one.seq, wire.Result(TaskResult(task_id=one.body.task_id, status=Status.FAILED, settled=False)))  # type: ignore[union-attr]
        answered: set[int] = set()
        with calls.counted():
            while not all(call.done() for call in running):
                await asyncio.sleep(0)
                for seq, ids in asked(daemon, wire.Settled):
                    if seq not in answered:
                        answered.add(seq)
                        daemon.say(seq, wire.Value(ids[: len(ids) // 2 + 1]))  # the others are asked about again
        assert all(call.result().settled for call in running)
        assert client.unsettled == []
        return calls.count, len(answered)


class connected:  # noqa: N801 - a function to its users
    """A client of the recorder."""

    def __init__(self, daemon: Recorder) -> None:
        self._daemon, self._client = daemon, Client("ipc:///recorded", transport=daemon)

    async def __aenter__(self) -> Client:
        entering = asyncio.ensure_future(self._client.connect())
        await turns(lambda: self._daemon.hellos)
        self._daemon.welcome(max_message=2**20, many=wire.MOST_IDS)
        await entering
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()


async def test_tasks_that_are_cancelled_at_once_go_out_together_and_each_costs_the_same() -> None:
    await cancelled(FEW)  # what runs only once
    (few, _), (many, messages) = await cancelled(FEW), await cancelled(MANY)
    assert messages == math.ceil(MANY / wire.MOST_IDS)
    assert many / MANY < 1.3 * few / FEW
    assert many / MANY < CALLS


async def test_tasks_that_wait_to_be_settled_are_asked_about_together_and_each_costs_the_same() -> None:
    await settled(FEW)
    (few, _), (many, questions) = await settled(FEW), await settled(MANY)
    assert questions <= 3 * math.ceil(MANY / wire.MOST_IDS) + 10, "half of each question is answered, then half again"
    assert many / MANY < 1.3 * few / FEW
    assert many / MANY < CALLS


async def test_an_older_daemon_is_asked_about_one_task_at_a_time() -> None:
    daemon = Recorder()
    async with connected(daemon) as client:
        daemon.say(daemon.hellos[-1] + 1000, welcome(max_message=2**20))  # many = 0
        running = [asyncio.ensure_future(client.submit(task)) for task in tasks(3)]
        await turns(lambda: len(daemon.others) == 3)
        for call in running:
            call.cancel()
        await turns(lambda: len(asked(daemon, wire.Cancel)) == 3)
        for one in daemon.others[:3]:
            daemon.say(one.seq, ended(one.body.task_id, Status.CANCELLED))  # type: ignore[union-attr]
        await asyncio.wait(running)


async def test_a_cancelled_caller_is_woken_once_and_only_when_its_task_has_ended() -> None:
    """To wake all of them in one turn, only to have them wait again, takes a tenth of a second of the loop."""
    daemon, calls = Recorder(), Calls()
    async with connected(daemon) as client:
        running = [asyncio.ensure_future(client.submit(task)) for task in tasks(MANY)]
        await turns(lambda: len(daemon.others) == MANY)
        with calls.counted():
            for call in running:
                call.cancel()
            await turns(lambda: sum(len(ids) for _, ids in asked(daemon, wire.Cancel)) == MANY)
        assert calls.count / MANY < WITHDRAWN_CALLS
        running[0].cancel()  # a second time, by a caller that does not want to wait
        await turns(running[0].done)
        daemon.say(daemon.others[1].seq, ended("t1", Status.OK))
        await turns(running[1].done)
        assert [call.cancelled() for call in running[:3]] == [True, True, False]
    await asyncio.wait(running)
    assert all(call.cancelled() for call in running)


async def test_the_loss_of_a_daemon_ends_some_tasks_in_each_turn_and_all_of_them() -> None:
    daemon = Recorder()
    async with connected(daemon) as client:
        running = [asyncio.ensure_future(client.submit(task)) for task in tasks(MANY)]
        await turns(lambda: len(daemon.others) == MANY)
        asking = [asyncio.ensure_future(client.settled(f"t{i}")) for i in range(MANY)]
        await asyncio.sleep(0)
        daemon.say(daemon.hellos[-1] + 10 * MANY, welcome(boot_id="another", max_message=2**20, many=wire.MOST_IDS))
        ended_by_turn = [0]
        for _ in range(MANY):
            await asyncio.sleep(0)
            ended_by_turn.append(sum(call.done() for call in running))
            if ended_by_turn[-1] == MANY:
                break
        assert max(after - before for before, after in pairwise(ended_by_turn)) <= SLICE
        assert all(call.result().error.code == "daemon_lost" for call in running)  # type: ignore[union-attr]
        assert all(await asyncio.gather(*asking)), "a task that is about to end is still known by its id"


def test_the_end_of_asyncio_run_cancels_tasks_and_waits_for_them() -> None:
    """It cancels its tasks while its loop does not run."""

    class Cancelling(Recorder):
        def send(self, payload: bytes) -> bool:
            said = wire.decode_request(payload)
            if isinstance(said.body, wire.Cancel):
                for push in list(self.others):
                    asyncio.get_running_loop().call_soon(self.say, push.seq, ended("t0", Status.CANCELLED))
            return super().send(payload)

    daemon = Cancelling()

    async def main() -> asyncio.Task[TaskResult]:
        client = await connected(daemon).__aenter__()
        running = asyncio.ensure_future(client.submit(tasks(1)[0]))
        await turns(lambda: daemon.others)
        main.client = client  # type: ignore[attr-defined]
        return running

    running = asyncio.run(main())
    assert running.cancelled()
    assert [ids for _, ids in asked(daemon, wire.Cancel)] == [["t0"]]
    assert main.client.unsettled == []  # type: ignore[attr-defined]
    main.client._conversation.close()  # type: ignore[attr-defined]
