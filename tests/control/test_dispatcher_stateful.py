"""The dispatcher against everything at once: random pushes, endings, deaths and time, checked at every step.

The model knows only what an engine could know: what it pushed, what was started, what was answered.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.dispatch import check_dispatcher, limits, state_of
from transferd.control import instructions as do
from transferd.control.admission import ID_BYTES, KEY_BYTES, RESULT_BYTES, TASK_BYTES, argument_bytes
from transferd.control.dispatcher import Dispatcher
from transferd.control.order import State
from transferd.tasks import (
    ErrorInfo,
    RankOutcome,
    ReadStorageTask,
    Status,
    Stop,
    SwapInTask,
    SwapOutTask,
    Task,
    TaskResult,
    WriteStorageTask,
)

RANKS = 2
LIMITS = limits(
    ranks=RANKS,
    device_blocks=6,
    host_blocks=6,
    block_bytes=10,
    max_queued_tasks=6,
    max_queued_bytes=3 * TASK_BYTES + 8 * (KEY_BYTES + ID_BYTES),  # three to five tasks
    max_inflight_bytes=400,
    lane_depth=2,
    deadline_slack=1.0,
    result_ttl=30.0,
    max_results=9,
    max_result_bytes=6 * (RESULT_BYTES + 150),
)
blocks = st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True)
clients = st.sampled_from([b"a", b"b", b"c"])


def touches(task: Task) -> tuple[set[tuple[str, int]], set[tuple[str, int]]]:
    """(reads, writes) as plain sets; storage reads before writes need no order, so they are left out of reads."""
    f = task.footprint()
    reads, writes = (
        {(place, i) for place in ("device", "host") for i in dict(uses).get(place, ())} for uses in (f.reads, f.writes)
    )
    return reads, writes


@dataclass(eq=False)
class Held:
    """The memory of one admitted task's arguments.

    It is held until the task was answered, no rank holds its blocks, and whatever it was ordered behind has gone
    (later tasks were ordered behind it in turn).
    """

    task: Task
    nbytes: int
    behind: list[Held]
    answered: bool = False
    gone: bool = False


def ordered_behind(task: Task, other: Task) -> bool:
    (reads, writes), (other_reads, other_writes) = touches(task), touches(other)
    a, b = task.footprint(), other.footprint()
    stored = {*a.reads.get("storage", ()), *a.writes.get("storage", ())} & {*b.writes.get("storage", ())}
    return bool(writes & (other_reads | other_writes) or reads & other_writes or stored)


class DispatcherMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Held] = {}  # the latest of an id
        self.all_held: list[Held] = []
        self.kept: list[tuple[str, int, float]] = []  # results: id, bytes, until when
        self.replies: dict[int, TaskResult] = {}
        self.dispatcher = Dispatcher(LIMITS, boot_id="boot", generation="0")
        self.now = 0.0
        self.number = 0
        self.order: dict[str, int] = {}  # admitted tasks by submission
        self.tasks: dict[str, Task] = {}
        self.deadline: dict[str, float] = {}
        self.started: set[str] = set()
        self.holding: dict[str, set[int]] = {}  # started tasks and the ranks that may touch their blocks
        self.told: dict[str, Stop] = {}
        self.waiting: dict[int, tuple[bytes, str]] = {}
        self.answered: Counter[int] = Counter()
        self.generation_of: dict[str, str] = {}
        self.wake_at: float | None = None
        self.dead = False
        self.holds: set[tuple[bytes, str]] = set()
        self.unmapped: tuple[int, ...] = ()
        self.outdated: dict[bytes, tuple[int, ...]] = {}
        self.filled: set[int] = set()  # host blocks

    # --- carrying out instructions, checking each --------------------------------------------------

    def hear(self, instructions: list[do.Instruction]) -> list[do.Instruction]:
        for instruction in instructions:  # before any of them is carried out, which may make the dispatcher hear more
            if isinstance(instruction, do.Publish):
                self.held[instruction.task.task_id].answered = True
                self.keep(instruction.result)
        for instruction in instructions:
            if isinstance(instruction, do.Start):
                self.check_start(instruction)
            elif isinstance(instruction, do.StopTask):
                assert instruction.task_id in self.holding
                assert instruction.task_id not in self.told, "told to end once"
                self.told[instruction.task_id] = instruction.reason
            elif isinstance(instruction, do.ExpireRound):
                self.expire_round(instruction.task_id)
            elif isinstance(instruction, do.Reply):
                self.check_reply(instruction)
            elif isinstance(instruction, do.WakeAt):
                self.wake_at = instruction.when
        self.let_go()
        return instructions

    def keep(self, result: TaskResult) -> None:
        nbytes = RESULT_BYTES + len(msgspec.msgpack.encode(result))
        self.kept.append((result.task_id, nbytes, self.now + LIMITS.server.result_ttl))
        self.forget()

    def forget(self) -> None:
        while self.kept and (
            self.kept[0][2] <= self.now
            or len(self.kept) > LIMITS.server.max_results
            or sum(nbytes for _, nbytes, _ in self.kept) > LIMITS.server.max_result_bytes
        ):
            self.kept.pop(0)

    def let_go(self) -> None:
        """Earlier ones first, so once through is enough."""
        for held in self.all_held:
            touched = self.held[held.task.task_id] is held and held.task.task_id in self.holding
            held.gone = held.answered and not touched and all(other.gone for other in held.behind)
        self.all_held = [held for held in self.all_held if not held.gone]

    @property
    def held_bytes(self) -> int:
        return sum(held.nbytes for held in self.all_held)

    def check_start(self, start: do.Start) -> None:
        task_id = start.task.task_id
        assert task_id not in self.started, "started once"
        assert not self.dead
        reads, writes = touches(start.task)
        for other in self.holding:
            other_reads, other_writes = touches(self.tasks[other])
            assert not writes & (other_reads | other_writes), (task_id, other)
            assert not reads & other_writes, (task_id, other)
        assert start.generation == self.generation_of[task_id]
        if isinstance(start.task, SwapInTask):
            assert set(start.task.cpu_block_ids) <= self.filled, "it would claim host blocks that hold nothing"
        self.started.add(task_id)
        self.holding[task_id] = set(range(RANKS))

    def check_reply(self, reply: do.Reply) -> None:
        assert self.answered[reply.seq] == 0, "one terminal result per push"
        self.answered[reply.seq] += 1
        self.replies[reply.seq] = reply.result
        client, task_id = self.waiting.pop(reply.seq, (reply.client, reply.result.task_id))
        assert (client, task_id) == (reply.client, reply.result.task_id)
        assert reply.result.boot_id == "boot"
        self.check_honest(reply.result)

    def check_honest(self, result: TaskResult) -> None:
        if result.status in (Status.REJECTED, Status.BUSY, Status.EXPIRED, Status.FAILED, Status.MISS):
            assert result.block_ids == []
        assert (result.status is Status.BUSY) == (result.retry_after is not None)
        if result.status in (Status.REJECTED, Status.BUSY, Status.FAILED, Status.EXPIRED):
            assert result.error is not None

    def expire_round(self, task_id: str) -> None:
        task = self.tasks[task_id]
        missing = tuple(sorted(self.holding[task_id]))
        late = ErrorInfo("expired", "late")
        outcomes = [RankOutcome(r, error=late, stop=Stop.EXPIRED) for r in range(RANKS)]
        self.round_merged(task, outcomes, missing)

    # --- what engines do ---------------------------------------------------------------------------

    def submit(self, client: bytes, task: Task) -> None:
        self.number += 1
        seq = self.number
        self.dispatcher.results.forget(self.now)  # it forgets lazily: at the next push, which is this one
        self.forget()
        known = state_of(self.dispatcher, task.task_id)
        self.waiting[seq] = (client, task.task_id)
        if known is None:
            self.tasks[task.task_id] = task
            self.order[task.task_id] = seq
            self.generation_of[task.task_id] = self.dispatcher.generation
            self.deadline[task.task_id] = self.now + task.timeout
            self.started.discard(task.task_id)
            self.told.pop(task.task_id, None)
        before, nbytes = self.held_bytes, argument_bytes(task)
        fresh = Held(task, nbytes, [held for held in self.all_held if ordered_behind(task, held.task)])
        if known is None:
            last = self.held.get(task.task_id)
            self.held[task.task_id] = fresh
            self.all_held.append(fresh)
        self.hear(self.dispatcher.submit(self.now, client, seq, task))
        if known is None and (self.unmapped or client in self.outdated):
            assert state_of(self.dispatcher, task.task_id) is None, "it names memory that its engine does not see"
        if known is not None:
            return
        refused = self.replies.get(seq)
        if refused is not None and not fresh.answered:
            self.all_held.remove(fresh)
            if last is None:
                del self.held[task.task_id]
            else:
                self.held[task.task_id] = last
            assert refused.error is not None
            if "admitted tasks hold" in refused.error.message:
                assert before
                assert before + nbytes > LIMITS.server.max_queued_bytes
        else:
            assert not before or before + nbytes <= LIMITS.server.max_queued_bytes

    @initialize()
    def begin(self) -> None:
        self.hear(self.dispatcher.resume(self.now))

    @rule(
        client=clients, gpu=blocks, kind=st.sampled_from(["write", "read"]), timeout=st.sampled_from([1.0, 5.0, 60.0])
    )
    def push_storage_task(self, client: bytes, gpu: list[int], kind: str, timeout: float) -> None:
        make = WriteStorageTask if kind == "write" else ReadStorageTask
        keys = [f"k{i}" for i in gpu]
        self.submit(client, make(task_id=f"t{self.number}", keys=keys, gpu_block_ids=gpu, timeout=timeout))

    @rule(client=clients, pairs=blocks, out=st.booleans(), timeout=st.sampled_from([1.0, 60.0]))
    def push_swap(self, client: bytes, pairs: list[int], out: bool, timeout: float) -> None:
        make = SwapOutTask if out else SwapInTask
        cpu = [5 - i for i in pairs]
        self.submit(client, make(task_id=f"t{self.number}", gpu_block_ids=pairs, cpu_block_ids=cpu, timeout=timeout))

    @precondition(lambda self: self.tasks)
    @rule(client=clients, data=st.data())
    def push_again(self, client: bytes, data: st.DataObject) -> None:
        self.submit(client, self.tasks[data.draw(st.sampled_from(sorted(self.tasks)))])

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.hear(self.dispatcher.cancel(self.now, data.draw(st.sampled_from(sorted(self.tasks)))))

    @rule(client=clients)
    def client_vanishes(self, client: bytes) -> None:
        self.waiting = {seq: who for seq, who in self.waiting.items() if who[0] != client}
        self.holds = {hold for hold in self.holds if hold[0] != client}
        self.hear(self.dispatcher.client_gone(self.now, client))

    # --- what ranks and time do --------------------------------------------------------------------

    def running(self) -> list[str]:
        states = (State.RUNNING, State.CANCELLING)
        return sorted(t for t in self.holding if state_of(self.dispatcher, t) in states)

    @precondition(lambda self: self.running())
    @rule(data=st.data(), share=st.integers(0, 3), broken=st.booleans())
    def round_ends(self, data: st.DataObject, share: int, broken: bool) -> None:
        task_id = data.draw(st.sampled_from(self.running()))
        task = self.tasks[task_id]
        moved = range(task.blocks if share == 3 else min(share, task.blocks))
        short = len(moved) < task.blocks
        stop = self.told.get(task_id) if short else None
        # Only a read may come back short for no reason: it missed.
        unexplained = short and stop is None and not isinstance(task, ReadStorageTask)
        error = ErrorInfo("tier_error", "boom") if short and (broken or unexplained) else None
        outcomes = [RankOutcome(r, moved, len(moved), error=error, stop=stop) for r in range(RANKS)]
        del self.holding[task_id]
        self.round_merged(task, outcomes, ())

    def round_merged(self, task: Task, outcomes: list[RankOutcome], missing: tuple[int, ...]) -> None:
        merged = task.merge(outcomes)
        if isinstance(task, SwapOutTask):
            self.filled.difference_update(task.cpu_block_ids)
            if len(merged.block_ids) == task.blocks:
                self.filled.update(task.cpu_block_ids)
        self.hear(self.dispatcher.round_merged(self.now, task.task_id, merged, missing))

    @precondition(lambda self: self.stragglers())
    @rule(data=st.data())
    def straggler_leaves(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(self.stragglers()))
        ranks = self.holding[task_id]
        rank = data.draw(st.sampled_from(sorted(ranks)))
        ranks.discard(rank)
        if not ranks:
            del self.holding[task_id]
        self.hear(self.dispatcher.rank_left(self.now, task_id, rank))

    def stragglers(self) -> list[str]:
        return sorted(t for t in self.holding if state_of(self.dispatcher, t) is State.DONE)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.wake_at is not None and self.wake_at <= until:
            self.now, self.wake_at = max(self.now, self.wake_at), None
            self.hear(self.dispatcher.deadline_reached(self.now))
        self.now = until

    @rule(client=clients, what=st.sampled_from(["pause", "drain"]))
    def hold(self, client: bytes, what: str) -> None:
        self.hear(self.dispatcher.hold(self.now, what, client, client.hex()))
        self.holds.add((client, what))

    @rule(client=clients)
    def resume(self, client: bytes) -> None:
        others = {hold for hold in self.holds if hold[0] != client}
        self.holds = others if others != self.holds else set()
        self.hear(self.dispatcher.resume(self.now, client.hex()))

    @rule(end=st.booleans())
    def memory_goes(self, end: bool) -> None:
        self.hear(self.dispatcher.withdraw_cache(self.now, ErrorInfo("cleared", "no memory"), end))
        assert self.dispatcher.gate.refusal is not None

    @rule(unmapped=st.sets(st.integers(0, RANKS - 1)), outdated=st.sets(clients))
    def mappings_change(self, unmapped: set[int], outdated: set[bytes]) -> None:
        self.unmapped, self.outdated = tuple(sorted(unmapped)), dict.fromkeys(outdated, (0,))
        self.hear(self.dispatcher.mappings_changed(self.now, self.unmapped, self.outdated))

    @rule()
    def engines_attach(self) -> None:
        self.unmapped, self.outdated = (), {}
        self.hear(self.dispatcher.mappings_changed(self.now, (), {}))

    @precondition(lambda self: self.dispatcher.empty)
    @rule()
    def host_is_emptied(self) -> None:
        self.filled.clear()
        self.hear(self.dispatcher.host_emptied(self.now))

    @precondition(lambda self: self.dispatcher.empty)
    @rule()
    def memory_comes(self) -> None:
        self.hear(self.dispatcher.cache_ready(self.now))

    @rule(generation=st.sampled_from(["1", "2"]))
    def bump(self, generation: str) -> None:
        self.hear(self.dispatcher.bump_generation(self.now, generation))

    # --- what must always hold ---------------------------------------------------------------------

    @invariant()
    def state_is_consistent(self) -> None:
        check_dispatcher(self.dispatcher)

    @invariant()
    def pauses_and_drains_are_the_clients_that_hold_them(self) -> None:
        gate = self.dispatcher.gate
        assert gate.paused == any(what == "pause" for _, what in self.holds)
        assert gate.draining == any(what == "drain" for _, what in self.holds)
        assert len(gate.held) == len(self.holds)

    @invariant()
    def memory_is_accounted_for(self) -> None:
        assert self.dispatcher.hazards.nbytes == self.held_bytes
        assert list(self.dispatcher.results._kept) == [task_id for task_id, _, _ in self.kept]
        assert self.dispatcher.results.nbytes == sum(nbytes for _, nbytes, _ in self.kept)

    @invariant()
    def nobody_waits_past_deadline_and_slack(self) -> None:
        for client, task_id in self.waiting.values():
            assert self.now <= self.deadline[task_id] + LIMITS.server.deadline_slack + 1e-9, (client, task_id)

    def teardown(self) -> None:
        """Faults stop; everything ends."""
        self.hear(self.dispatcher.resume(self.now, "an operator"))
        for _ in range(10_000):
            if self.running():
                task_id = self.running()[0]
                task = self.tasks[task_id]
                del self.holding[task_id]
                self.round_merged(task, [RankOutcome(r, range(task.blocks)) for r in range(RANKS)], ())
            elif self.stragglers():
                task_id = self.stragglers()[0]
                for rank in sorted(self.holding.pop(task_id)):
                    self.hear(self.dispatcher.rank_left(self.now, task_id, rank))
            else:
                break
        assert self.dispatcher.empty
        assert not self.waiting, "every push was answered"
        check_dispatcher(self.dispatcher)


DispatcherMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestDispatcher = DispatcherMachine.TestCase
