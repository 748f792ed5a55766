"""RankBarrier against a naive model: any interleaving of many tasks, on asyncio's loop and on uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import uvloop
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from transferd.barrier import RankBarrier, Round
from transferd.errors import InvariantError
from transferd.tasks import ErrorInfo, RankOutcome, RankResult, Status, TaskResult

TASKS = st.sampled_from([f"task-{n}" for n in range(6)])
RANKS = st.integers(0, 4)
FAILURES = st.none() | st.sampled_from([ErrorInfo("tier_error", "copy"), ErrorInfo("storage_error", "disk")])


def merge(outcomes: Sequence[RankOutcome]) -> TaskResult:
    """Keeps every outcome visible in the answer, so that nothing can be swapped or lost unnoticed."""
    ranks = [RankResult(rank=o.rank, status=Status.OK, bytes=o.bytes, error=o.error) for o in outcomes]
    return TaskResult(task_id="", status=Status.OK, ranks=ranks, bytes=sum(o.bytes for o in outcomes))


@dataclass
class Meeting:
    """The model's view of one round: plain lists, no cleverness."""

    round: Round
    arrived: list[tuple[int, int, str | None]] = field(default_factory=list)  # rank, stamp, error code
    completions: int = 0
    ended: bool = False
    answer: TaskResult | None = None
    waiters: list[asyncio.Task[TaskResult]] = field(default_factory=list)
    cancelled: list[asyncio.Task[TaskResult]] = field(default_factory=list)


class BarrierMachine(RuleBasedStateMachine):
    """Each outcome carries a stamp in `bytes` that no other one has; the answer must hold exactly the right stamps."""

    new_loop: ClassVar[Callable[[], asyncio.AbstractEventLoop]] = asyncio.new_event_loop

    @initialize(parties=st.integers(1, 5))
    def start(self, parties: int) -> None:
        self.loop = type(self).new_loop()
        self.parties = parties
        self.barrier = RankBarrier(parties)
        self.open: dict[str, Meeting] = {}
        self.over: list[Meeting] = []
        self.owing: dict[str, set[int]] = {}
        self.dead: list[int] = []
        self.expired = 0
        self.late = 0
        self.stamp = 0

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for meeting in self.open.values():
                for waiter in meeting.waiters:
                    waiter.cancel()
            self.tick()
            self.loop.close()

    def tick(self) -> None:
        async def turns() -> None:
            for _ in range(3):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    # --- the model's own rules ----------------------------------------------------------------------

    def end(self, task_id: str, code: str) -> None:
        """The model ends a meeting: whoever has not arrived gets `code`."""
        meeting = self.open.pop(task_id)
        present = {rank for rank, _, _ in meeting.arrived}
        absent = [rank for rank in range(self.parties) if rank not in present]
        meeting.arrived += [(rank, 0, code) for rank in absent]
        missing = tuple(rank for rank in absent if rank not in self.dead)
        meeting.ended = True
        self.over.append(meeting)
        assert meeting.round.missing == missing
        if missing:
            self.owing[task_id] = set(missing)

    def arrived_late(self, task_id: str, rank: int) -> None:
        self.late += 1
        if task_id in self.owing:
            self.owing[task_id].discard(rank)
            if not self.owing[task_id]:
                del self.owing[task_id]

    # --- what may happen ----------------------------------------------------------------------------

    @rule(task_id=TASKS)
    def open_round(self, task_id: str) -> None:
        meeting = Meeting(round=None)  # type: ignore[arg-type]  # known two lines below

        def on_complete(round_: Round) -> None:
            meeting.completions += 1
            meeting.answer = round_.merged

        if task_id in self.open or task_id in self.owing:
            with pytest.raises(InvariantError, match=r"open already|has not left"):
                self.barrier.open(task_id, merge, on_complete)
            assert meeting.completions == 0
            return
        meeting.round = self.barrier.open(task_id, merge, on_complete)
        if self.dead:
            meeting.arrived = [(rank, 0, "rank_died") for rank in range(self.parties)]
            meeting.ended = True
            self.over.append(meeting)
        else:
            self.open[task_id] = meeting

    @rule(task_id=TASKS, rank=RANKS, error=FAILURES)
    def arrive(self, task_id: str, rank: int, error: ErrorInfo | None) -> None:
        rank %= self.parties
        self.stamp += 1
        outcome = RankOutcome(rank, bytes=self.stamp, error=error)
        meeting = self.open.get(task_id)
        if meeting is None:
            assert not self.barrier.arrive(task_id, outcome)
            self.arrived_late(task_id, rank)
        elif any(present == rank for present, _, _ in meeting.arrived):
            with pytest.raises(InvariantError, match=f"rank {rank} arrived twice"):
                self.barrier.arrive(task_id, outcome)
        else:
            arrival = self.barrier.arrive(task_id, outcome)
            meeting.arrived.append((rank, self.stamp, error.code if error else None))
            if len(meeting.arrived) == self.parties:
                assert arrival
                self.end(task_id, "nobody")
            else:
                assert arrival

    @rule(task_id=TASKS)
    def deadline(self, task_id: str) -> None:
        meeting = self.open.get(task_id)
        absent = self.barrier.missing(task_id)
        assert self.barrier.expire(task_id) == tuple(r for r in absent if r not in self.dead)
        if meeting is None:
            assert absent == ()
        else:
            self.expired += 1
            self.end(task_id, "expired")

    # Deaths are final and end the interesting part, so they come late and seldom.
    @precondition(lambda self: self.stamp > 8)
    @rule(rank=RANKS)
    def death(self, rank: int) -> None:
        rank %= self.parties
        self.barrier.rank_died(rank, "killed by the test")
        if rank in self.dead:
            return
        self.dead.append(rank)
        for task_id in list(self.owing):
            self.owing[task_id].discard(rank)
            if not self.owing[task_id]:
                del self.owing[task_id]
        for task_id, meeting in list(self.open.items()):
            if all(present != rank for present, _, _ in meeting.arrived):
                self.end(task_id, "rank_died")

    @rule(task_id=TASKS, waiters=st.integers(1, 3))
    def wait(self, task_id: str, waiters: int) -> None:
        meeting = self.open.get(task_id)
        if meeting is not None:
            meeting.waiters += [self.loop.create_task(meeting.round.wait()) for _ in range(waiters)]
            self.tick()

    @rule(task_id=TASKS, which=st.integers(0, 10), in_the_same_turn=st.booleans())
    def cancel_waiter(self, task_id: str, which: int, in_the_same_turn: bool) -> None:
        meeting = self.open.get(task_id)
        if meeting is not None and meeting.waiters:
            waiter = meeting.waiters.pop(which % len(meeting.waiters))
            waiter.cancel()
            meeting.cancelled.append(waiter)
            if not in_the_same_turn:
                self.tick()

    # --- what must hold after every step ------------------------------------------------------------

    @invariant()
    def rounds_hold_exactly_what_was_brought_to_them(self) -> None:
        self.tick()
        for task_id, meeting in self.open.items():
            assert meeting.round.merged is None
            assert meeting.completions == 0
            present = {rank for rank, _, _ in meeting.arrived}
            assert self.barrier.missing(task_id) == tuple(r for r in range(self.parties) if r not in present)
            assert not any(waiter.done() for waiter in meeting.waiters)
        for meeting in self.over:
            assert meeting.completions == 1
            assert meeting.answer is meeting.round.merged
            assert meeting.answer is not None
            brought = [(r.rank, r.bytes, r.error.code if r.error else None) for r in meeting.answer.ranks]
            assert sorted(brought, key=lambda b: b[0]) == sorted(meeting.arrived, key=lambda b: b[0])
            assert all(waiter.done() and waiter.result() is meeting.answer for waiter in meeting.waiters)
            assert all(waiter.cancelled() for waiter in meeting.cancelled)

    @invariant()
    def statistics_agree(self) -> None:
        assert self.barrier.dead.keys() == set(self.dead)
        assert self.barrier.statistics() == {
            "open": len(self.open),
            "completed": len(self.over),
            "expired": self.expired,
            "late": self.late,
            "owing": sum(map(len, self.owing.values())),
        }


class BarrierMachineOnUvloop(BarrierMachine):
    new_loop = uvloop.new_event_loop


TestBarrierOnAsyncio = BarrierMachine.TestCase
TestBarrierOnUvloop = BarrierMachineOnUvloop.TestCase
TestBarrierOnAsyncio.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestBarrierOnUvloop.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
