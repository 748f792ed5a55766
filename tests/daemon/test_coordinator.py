"""The coordinator between a real dispatcher, a real barrier and ranks that a test plays, and effects that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.dispatch import limits
from tests.support.waits import until
from transferd.barrier import RankBarrier
from transferd.control.byte_ranges import ByteRanges, WindowGrid
from transferd.control.dispatcher import Dispatcher
from transferd.control.order import Claim
from transferd.daemon.coordinator import Coordinator
from transferd.observability.recorder import Recorder
from transferd.observability.task_log import Ran
from transferd.runtime.clock import Clock
from transferd.runtime.compat import wait_for
from transferd.tasks import ErrorInfo, RankOutcome, ReadStorageTask, Status, Stop, Task, TaskResult, WriteStorageTask
from transferd.workers.job import Job

ENGINE = b"engine"


class Rank:
    """Does what the test says. jobs: what it was given, by task. confirms: blocks that are still stored at the end."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.jobs: dict[str, Job] = {}
        self.breaks: Exception | None = None
        self.confirms: int | None = None
        self.windows: WindowGrid | None = None
        self._arrived: Callable[[Job, RankOutcome], None]

    def start(self, job: Job, arrived: Callable[[Job, RankOutcome], None], _died: object) -> None:
        if self.breaks is not None:
            raise self.breaks
        self.jobs[job.task.task_id] = job
        self._arrived = arrived

    def arrive(self, task_id: str, moved: int, **more: Any) -> None:
        self._arrived(self.jobs[task_id], RankOutcome(self.rank, range(moved), moved * 10, **more))

    def confirmed(self, _: Job, outcome: RankOutcome) -> RankOutcome:
        return outcome if self.confirms is None else RankOutcome(self.rank, range(self.confirms), 0)


class World:
    """A coordinator of two ranks, and everything that it tells."""

    def __init__(self, ranges: ByteRanges[Claim] | None = None) -> None:
        self.now = 100.0
        self.answers: dict[int, TaskResult] = {}
        self.ended: list[tuple[str, Status]] = []
        self.said: list[str] = []
        self.ran: dict[str, Ran] = {}
        self.undeliverable: set[int] = set()
        self.ranks = [Rank(0), Rank(1)]
        self.dispatcher = Dispatcher(limits(deadline_slack=0.5), boot_id="boot", generation="g1", ranges=ranges)
        self.barrier = RankBarrier(2)
        self.seq = 0
        workers: Any = self.ranks
        self.coordinator = Coordinator(
            self.dispatcher,
            self.barrier,
            workers,
            self._deliver,
            lambda client, seq, layers: self.said.append(f"{client.decode()} {seq}: {layers} layers"),
            self._ended,
            clock=Clock(monotonic=lambda: self.now),
            recorder=Recorder(),
        )

    def _ended(self, task: Task, result: TaskResult, ran: Ran | None) -> None:
        self.ended.append((task.task_id, result.status))
        if ran is not None:
            self.ran[task.task_id] = ran

    def _deliver(self, client: bytes, seq: int, result: TaskResult) -> None:
        assert client == ENGINE
        if seq in self.undeliverable:
            raise OSError("the message cannot be sent")
        assert seq not in self.answers, "answered once"
        self.answers[seq] = result

    def push(
        self, task_id: str, *ids: int, kind: type[ReadStorageTask | WriteStorageTask] = WriteStorageTask, **more: Any
    ) -> int:
        self.seq += 1
        task: Task = kind(task_id=task_id, keys=[f"{task_id}-{i}" for i in ids], gpu_block_ids=list(ids), **more)
        self.coordinator.submit(ENGINE, self.seq, task)
        return self.seq

    def code(self, seq: int) -> str:
        error = self.answers[seq].error
        return "" if error is None else error.code


@pytest.fixture
async def world() -> World:
    return World()


async def test_a_task_runs_on_every_rank_and_is_answered_once_by_the_last(world: World) -> None:
    seq = world.push("w", 3, 4, 5)
    world.now = 101.0
    world.ranks[0].arrive("w", 3)
    assert world.answers == {}
    world.now = 103.5
    world.ranks[1].arrive("w", 2)
    assert world.answers[seq].block_ids == [3, 4]
    assert world.ended == [("w", world.answers[seq].status)]
    assert world.coordinator.skew_s == [0.0, 2.5]
    assert world.ran["w"].arrivals == [(0, 101.0), (1, 103.5)]
    assert world.dispatcher.empty


async def test_blocks_that_were_evicted_before_the_last_rank_stored_them_are_not_claimed(world: World) -> None:
    seq = world.push("w", 3, 4, 5)
    world.ranks[0].jobs["w"].use.shrunk = True
    world.ranks[0].confirms = 1
    for rank in world.ranks:
        rank.arrive("w", 3)
    assert world.answers[seq].block_ids == [3]


async def test_a_rank_that_cannot_even_start_arrives_with_the_bug(world: World) -> None:
    world.ranks[1].breaks = ZeroDivisionError("in start")
    with capture_logs() as logs:
        seq = world.push("w", 3)
        world.ranks[0].arrive("w", 1)
    assert (world.answers[seq].status, world.code(seq)) == (Status.FAILED, "internal")
    assert world.coordinator.effects_failed == {"Start": 1}
    assert [line["effect"] for line in logs if line["event"] == "an effect raised"] == ["Start"]
    assert world.dispatcher.empty


async def test_a_task_without_a_round_fails_and_keeps_no_other_from_running(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch, capture_logs():
        patch.setattr(world.barrier, "open", broken)
        seq = world.push("w", 3)
    assert world.answers[seq].status is Status.FAILED
    assert world.ranks[0].jobs == {}
    again = world.push("next", 3)
    for rank in world.ranks:
        rank.arrive("next", 1)
    assert world.answers[again].status is Status.OK


async def test_an_answer_that_cannot_be_sent_costs_its_waiter_alone(world: World) -> None:
    first = world.push("w", 3)
    second = world.push("w", 3)
    world.undeliverable.add(first)
    with capture_logs():
        for rank in world.ranks:
            rank.arrive("w", 1)
    assert world.answers.keys() == {second}
    assert world.coordinator.effects_failed == {"Reply": 1}
    assert world.ended == [("w", Status.OK)]


async def test_a_stop_that_raises_is_tried_again_until_it_works(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.push("w", 3)
    job, tries, stop = world.ranks[0].jobs["w"], [0], world.coordinator._stop

    def fails_twice(instruction: Any) -> None:
        tries[0] += 1
        if tries[0] < 3:
            raise RuntimeError("not now")
        stop(instruction)

    monkeypatch.setitem(world.coordinator._apply, type(_stop_of(world)), fails_twice)
    with capture_logs():
        world.coordinator.cancel("w")
        await until(lambda: job.stop.reason is not None)
    assert (job.stop.reason, world.coordinator.effects_failed) == (Stop.CANCELLED, {"StopTask": 2})


def _stop_of(world: World) -> Any:
    return next(kind for kind in world.coordinator._apply if kind.__name__ == "StopTask")("w", Stop.CANCELLED)


async def test_a_rank_left_behind_at_the_deadline_is_named_and_its_blocks_stay_unsettled(world: World) -> None:
    seq = world.push("w", 3, timeout=1.0)
    world.ranks[0].arrive("w", 1)
    with capture_logs() as logs:
        for later in (101.1, 101.6, 110.0):
            world.now = later
            world.coordinator.hear(world.dispatcher.deadline_reached)
    assert (world.answers[seq].status, world.code(seq)) == (Status.EXPIRED, "expired")
    assert [line["ranks"] for line in logs if line["event"] == "ranks left behind at the deadline"] == [[1]]
    settled = asyncio.ensure_future(world.coordinator.settled("w"))
    quiet = asyncio.ensure_future(world.coordinator.quiet())
    await asyncio.sleep(0)
    assert not settled.done()
    assert not quiet.done()
    world.ranks[1].arrive("w", 0)
    await wait_for(asyncio.gather(settled, quiet), 10)
    assert world.barrier.statistics()["late"] == 1


async def test_a_dead_rank_fails_what_runs_and_what_comes_and_ends_readiness(world: World) -> None:
    world.coordinator.announce_ready()
    running = world.push("w", 3)
    with capture_logs():
        world.coordinator.rank_died(1, "fallen off the bus")
        later = world.push("later", 4)
    for seq in (running, later):
        assert world.code(seq) == "rank_died"
        error = world.answers[seq].error
        assert error is not None
        assert "1" in error.message
    assert not world.coordinator.ready
    assert world.ranks[0].jobs["w"].stop.reason is Stop.EXPIRED, "copies that wait for a thread never begin"


async def test_memory_that_its_engine_withdrew_is_no_death(world: World) -> None:
    world.coordinator.announce_ready()
    world.coordinator.withdraws = lambda rank, cause: (rank, cause) == (1, "gone")
    world.coordinator.rank_died(1, "gone")
    assert world.coordinator.ready
    assert world.barrier.dead == {}


async def test_a_pause_waits_for_what_runs_and_a_drain_for_what_was_admitted(world: World) -> None:
    first = world.push("w", 3)
    paused = asyncio.ensure_future(world.coordinator.pause(ENGINE, "me"))
    second = world.push("v", 4)
    drained = asyncio.ensure_future(world.coordinator.drain(ENGINE, "you"))
    refused = world.push("late", 5)
    assert world.code(refused) == "draining"
    for rank in world.ranks:
        rank.arrive("w", 1)
    await wait_for(paused, 10)
    assert first in world.answers
    assert second not in world.answers
    assert "v" not in world.ranks[0].jobs
    assert not drained.done()
    world.coordinator.resume("me")
    for rank in world.ranks:
        rank.arrive("v", 1)
    await wait_for(drained, 10)
    assert world.answers[second].status is Status.OK


async def test_a_withdrawal_ends_every_task_with_its_reason(world: World) -> None:
    seq = world.push("w", 3)
    world.coordinator.withdraw(ErrorInfo("cleared", "the cache is being cleared"), end=True)
    for rank in world.ranks:
        assert rank.jobs["w"].stop.reason is not None
        rank.arrive("w", 0, stop=rank.jobs["w"].stop.reason)
    await wait_for(world.coordinator.empty(), 10)
    assert (world.answers[seq].status, world.code(seq)) == (Status.FAILED, "cleared"), "nobody has cancelled it"
    assert world.code(world.push("later", 3)) == "cleared", "what it refuses is said with the reason"
    assert world.coordinator.cancel_running() == 0
    assert not world.coordinator.cancel("w")


async def test_a_waiter_that_gives_up_is_forgotten(world: World) -> None:
    world.push("w", 3)
    waiting = asyncio.ensure_future(world.coordinator.empty())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert world.coordinator._waiting == {}
    world.coordinator.close()


@pytest.fixture
async def neighbours() -> tuple[World, World]:
    """Two engines with windows over one arena: of 8 and of 2 bytes, a byte apart; and a task of the first one."""
    ranges: ByteRanges[Claim] = ByteRanges()
    one, other = World(ranges), World(ranges)
    for world, nbytes in ((one, 8), (other, 2)):
        for rank in world.ranks:
            rank.windows = WindowGrid(("arena", rank.rank), 0, 1, nbytes)
        world.coordinator.announce_ready()
    one.push("load", 3, kind=ReadStorageTask)
    return one, other


async def test_a_task_starts_once_another_engines_on_its_bytes_has_ended(neighbours: tuple[World, World]) -> None:
    one, other = neighbours
    waits, _ = other.push("waits", 10), other.push("beside", 11)
    assert list(other.ranks[0].jobs) == ["beside"]
    one.ranks[0].arrive("load", 1)
    assert list(other.ranks[0].jobs) == ["beside"], "rank 1 has not"
    one.ranks[1].arrive("load", 1)
    assert list(other.ranks[0].jobs) == ["beside", "waits"]
    for rank in other.ranks:
        rank.arrive("waits", 1)
    assert other.answers[waits].status is Status.OK


async def test_a_rank_that_is_late_holds_up_other_engines_on_its_bytes(neighbours: tuple[World, World]) -> None:
    one, other = neighbours
    other.push("waits", 10)
    one.ranks[0].arrive("load", 1)
    one.coordinator.cancel("load")
    one.barrier.expire("load")
    assert one.dispatcher.stragglers
    assert not other.ranks[0].jobs
    one.ranks[1].arrive("load", 1)
    assert list(other.ranks[0].jobs) == ["waits"]


async def test_another_engine_is_let_in_soon_if_that_raises_at_first(neighbours: tuple[World, World]) -> None:
    one, other = neighbours
    other.push("waits", 10)
    other.dispatcher.bytes_free = broken_once(other.dispatcher.bytes_free)  # type: ignore[method-assign]
    for rank in one.ranks:
        rank.arrive("load", 1)
    assert one.coordinator.effects_failed == {"Unblock": 1}
    assert not other.ranks[0].jobs
    await until(lambda: other.ranks[0].jobs, "it was never let in")


def broken_once(works: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[Any] = []

    def event(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise OSError("once")
        return works(*args)

    return event
