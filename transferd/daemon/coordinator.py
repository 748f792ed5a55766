"""Carries out the dispatcher's decisions: the only place that connects them to workers, barrier and clients.

    Dispatcher.submit → [Start, StopTask, Reply, …] → here → workers, barrier, deliver
              ▲                                         │
              └──────── round_merged, rank_left, … ◀────┘

Everything runs on the event loop, and nothing here decides anything: an instruction causes an effect, and the
effect's outcome is an event. So the order of events is the order of callbacks on one loop, and a simulation that
controls the loop controls everything.

When the instructions arrive here, the dispatcher has already changed its state. So each one is carried out, even if
another one raises. An effect that raises is a bug. It is counted and added to its task's story, and `_effect_raised`
describes how each kind is repaired. Every task still gets its answer, and every deadline still fires.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

import structlog

from transferd.barrier import RankBarrier, Round
from transferd.control import instructions as do
from transferd.control.dispatcher import Dispatcher
from transferd.control.order import Claim, TaskState
from transferd.errors import InvariantError
from transferd.observability.recorder import Recorder
from transferd.observability.task_log import Ran
from transferd.runtime.aio import Timer
from transferd.runtime.clock import Clock
from transferd.storage.lru import Use
from transferd.tasks import ErrorInfo, RankOutcome, Status, Stop, Task, TaskResult, WriteStorageTask
from transferd.workers.job import Job
from transferd.workers.rank import RankWorker

log = structlog.get_logger(__name__)

P = ParamSpec("P")
EFFECT_RETRY_S = 0.01
MISTAKEN = frozenset({"not_attached", "empty_block"})  # refusals of an engine that missed a restart or a clear


@dataclass(eq=False, repr=False)
class Coordinator:
    """Runs tasks on all ranks, as the dispatcher decides; see the module's diagram.

    deliver: sends a terminal result to a waiting client (`Clients.deliver`).
    progressed: a task that a client waits for has so many layers there (`Clients.progressed`).
    ended: an admitted task was answered; Ran has the times of its ranks, and is None if no rank began it.
    engine: the engine's name, for log lines.
    owner: the owner of its objects in storage.
    ready: whether tasks are served.
    effects_failed: how often an effect has raised, by the kind of instruction.
    skew_s: for each rank, the total seconds by which it arrived after the first rank of its rounds.
    """

    dispatcher: Dispatcher
    barrier: RankBarrier
    workers: Sequence[RankWorker]
    deliver: Callable[[bytes, int, TaskResult], None]
    progressed: Callable[[bytes, int, int], None]
    ended: Callable[[Task, TaskResult, Ran | None], None]
    clock: Clock
    recorder: Recorder
    engine: str = "default"
    owner: Hashable = None

    def __post_init__(self) -> None:
        self.effects_failed: Counter[str] = Counter()
        self.skew_s = [0.0] * len(self.workers)
        self._todo: deque[do.Instruction] = deque()
        self._carrying_out = False
        self.ready = False
        # called when a device is lost; returns whether its memory was only withdrawn
        self.withdraws: Callable[[int, str], bool] | None = None
        self._jobs: dict[str, Job] = {}  # running tasks, and those that a straggler still holds
        self._ran: dict[str, Ran] = {}  # from the end of a task's round to its Publish
        self._alarm = Timer()
        self._waiting: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._apply: dict[type, Callable[[Any], None]] = {
            do.Start: self._start,
            do.StopTask: self._stop,
            do.ExpireRound: self._expire,
            do.Reply: self._reply,
            do.Publish: self._publish,
            do.WakeAt: self._wake_at,
            do.Unblock: self._unblock,
            do.Again: self._again,
        }
        self.dispatcher.hazards.notify = self._bytes_free

    # --- what clients ask ---------------------------------------------------------------------------

    @property
    def generation(self) -> str:
        return self.dispatcher.generation

    @property
    def overdue_s(self) -> float:
        """Seconds since a deadline that did not fire; 0 while the dispatcher progresses or is idle."""
        return max(0.0, self.clock.monotonic() - self.dispatcher.alarms.next())

    def submit(self, client: bytes, seq: int, task: Task, *, again: bool = False) -> bool:
        """Admit or answer a task. Returns whether its result follows later; if not, it was delivered in this call.

        again: the client will send it again (protocol.py), so no refusal is sent; always returns False.
        """
        instructions = self.dispatcher.submit(self.clock.monotonic(), client, seq, task, again)
        self._carry_out(instructions)
        if again:
            return False
        for instruction in instructions:
            if type(instruction) is do.Reply and instruction.seq == seq and instruction.client == client:
                return False
        return True

    def cancel(self, task_id: str, *, anew: bool = False) -> bool:
        """Cancel a task. False if there is nothing to cancel. anew: see wire.Cancel."""
        known = task_id in self.dispatcher.records
        self.hear(self.dispatcher.cancel, task_id, anew)
        return known

    def pause(self, client: bytes = b"", holder: str = "", proof: str = "") -> Coroutine[Any, Any, None]:
        """Start no more tasks from this call on; if awaited, return once no rank touches a block. Admission continues.

        The pause ends with the holder's resume, or with the client, unless the holder has reconnected by then.
        """
        self.hear(self.dispatcher.hold, "pause", client, holder, proof)
        return self.quiet()

    def resume(self, holder: str = "", proof: str = "") -> None:
        """End the holder's pauses and drains; if it has none, end all."""
        self.hear(self.dispatcher.resume, holder, proof)

    def drain(self, client: bytes = b"", holder: str = "", proof: str = "") -> Coroutine[Any, Any, None]:
        """Admit nothing more from this call on; if awaited, return once every admitted task is answered.

        A drain ends like a pause.
        """
        self.hear(self.dispatcher.hold, "drain", client, holder, proof)
        return self.empty()

    def client_gone(self, client: bytes) -> None:
        """Cancel the tasks that only this client waited for, and end its holds."""
        self.hear(self.dispatcher.client_gone, client)

    # --- what the cache asks ------------------------------------------------------------------------

    def announce_ready(self) -> None:
        """Every rank has its memory: admit, unless one of them is dead."""
        windows = [worker.windows for worker in self.workers]
        self.hear(self.dispatcher.cache_ready, tuple(grid for grid in windows if grid is not None))
        self.ready = self.dispatcher.gate.alive

    def withdraw(self, error: ErrorInfo, *, end: bool) -> None:
        """Admit nothing, because memory is about to be removed; with `end`, also end all tasks. Then await `empty`."""
        self.ready = False
        self.hear(self.dispatcher.withdraw_cache, error, end)

    def set_generation(self, generation: str) -> None:
        """Use this generation from now on; objects of older ones become unreachable."""
        self.hear(self.dispatcher.bump_generation, generation)

    # --- waiting ------------------------------------------------------------------------------------

    async def quiet(self) -> None:
        """Wait until no rank touches any block. The caller sets the time limit."""
        await self._until(lambda: self.dispatcher.quiet)

    async def settled(self, task_id: str) -> None:
        """Wait until no rank touches a block for this task, now or later. Returns at once for an unknown task."""
        await self._until(lambda: self.dispatcher.settled(task_id))

    async def empty(self) -> None:
        """Wait until everything admitted is answered and no rank touches any block."""
        await self._until(lambda: self.dispatcher.empty)

    # --- shutdown -----------------------------------------------------------------------------------

    def cancel_running(self) -> int:
        """End all running tasks now, with what they have. Returns how many there were."""
        task_ids = [record.task_id for record in self.dispatcher.records.values()]
        for task_id in task_ids:
            self.cancel(task_id)
        return len(task_ids)

    def close(self) -> None:
        self._alarm.cancel()

    # --- events and effects -------------------------------------------------------------------------

    def hear(
        self, event: Callable[Concatenate[float, P], list[do.Instruction]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """Let the dispatcher decide on an event, and carry out what it decides."""
        self._carry_out(event(self.clock.monotonic(), *args, **kwargs))

    def _carry_out(self, instructions: list[do.Instruction]) -> None:
        """Carry out every instruction, in order. Instructions that an effect causes come after those already due."""
        self._todo += instructions
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._todo:
                instruction = self._todo.popleft()
                try:
                    self._apply[type(instruction)](instruction)
                except Exception as error:  # noqa: BLE001 - whatever it is, the others were decided as well
                    self._effect_raised(instruction, error)
        finally:
            self._carrying_out = False
        if self._waiting:
            self._wake_waiters()

    def _effect_raised(self, instruction: do.Instruction, error: Exception) -> ErrorInfo:
        """Count and report the error. Never raises. How each kind of instruction is repaired:

        Start      the rank arrives with this error; if no round was opened, the task ends with it (`_start`)
        Reply      a new session begins, in which the client pushes the task again (`Clients.deliver`)
        Publish    is lost; the task is answered all the same
        others     retried soon, until it works, because the dispatcher never repeats them
        """
        kind, task_id = type(instruction).__name__, _task_id(instruction)
        self.effects_failed[kind] += 1
        problem = f"{kind} raised {type(error).__name__}: {error}"
        with contextlib.suppress(Exception):
            if not isinstance(instruction, do.Start | do.Reply | do.Publish):
                job = self._jobs.get(task_id)
                asyncio.get_running_loop().call_later(EFFECT_RETRY_S, self._once_more, instruction, job)
        with contextlib.suppress(Exception):
            self.recorder.failure(task_id, problem)
            bug = InvariantError(f"{problem}\n{self.recorder.story(task_id)}")
            names = {"engine": self.engine, "task_id": task_id or None, "effect": kind}
            log.error("an effect raised", **names, problem=str(bug), exc_info=error)
        return ErrorInfo(InvariantError.code, problem)

    def _once_more(self, instruction: do.Instruction, job: Job | None) -> None:
        if isinstance(instruction, do.WakeAt):
            self.hear(self.dispatcher.deadline_reached)  # harmless if early; leads to the next WakeAt
        elif isinstance(instruction, do.Unblock | do.Again) or (
            job is not None and self._jobs.get(job.task.task_id) is job
        ):
            self._carry_out([instruction])

    def _start(self, start: do.Start) -> None:
        task, now = start.task, self.clock.monotonic()
        job = Job(
            task=task,
            blocks=task.blocks,
            generation=start.generation,
            admitted_at=start.admitted_at,
            started_at=now,
            queue_s=now - start.admitted_at,
            use=Use(owner=self.owner),
            part_there=self._part_there,
        )
        self._jobs[task.task_id] = job
        try:
            self.barrier.open(task.task_id, task.merge, self._round_complete)
        except Exception as error:  # noqa: BLE001 - the task has no round that could answer it
            del self._jobs[task.task_id]
            cause = self._effect_raised(start, error)
            merged = TaskResult(task_id=task.task_id, status=Status.FAILED, error=cause)
            self.hear(self.dispatcher.round_merged, task.task_id, merged, ())
            return
        for worker in self.workers:
            try:
                worker.start(job, self.rank_arrived, self.rank_died)
            except Exception as error:  # noqa: BLE001 - nothing else would arrive for this rank
                self.rank_arrived(job, RankOutcome(worker.rank, error=self._effect_raised(start, error)))

    def _stop(self, stop: do.StopTask) -> None:
        job = self._jobs.get(stop.task_id)
        if job is not None:
            job.stop.set(stop.reason)

    def _expire(self, expire: do.ExpireRound) -> None:
        missing = self.barrier.expire(expire.task_id)
        if missing:
            names = {"engine": self.engine, "task_id": expire.task_id}
            log.warning("ranks left behind at the deadline", **names, ranks=list(missing))

    def _reply(self, reply: do.Reply) -> None:
        result = reply.result
        if result.status is Status.REJECTED and result.error is not None and result.error.code in MISTAKEN:
            log.warning(
                "task refused",
                engine=self.engine,
                task_id=result.task_id,
                code=result.error.code,
                problem=result.error.message,
                client=reply.client.decode(),
            )
        self.deliver(reply.client, reply.seq, result)

    def _publish(self, publish: do.Publish) -> None:
        task, result = publish.task, publish.result
        self.ended(task, result, self._ran.pop(task.task_id, None))
        if result.error is not None:
            log.warning(
                "task ended with an error",
                engine=self.engine,
                task_id=task.task_id,
                kind=task.kind,
                status=str(result.status),
                blocks=f"{len(result.block_ids)}/{task.blocks}",
                ranks=[rank.rank for rank in result.ranks if rank.error is not None],
                code=result.error.code,
                problem=result.error.message,
            )

    def _wake_at(self, wake: do.WakeAt) -> None:
        delay = max(0.0, wake.when - self.clock.monotonic())
        self._alarm.set(delay, self.hear, self.dispatcher.deadline_reached)

    def _unblock(self, unblock: do.Unblock) -> None:
        notify = unblock.claim.table.notify
        assert notify is not None
        notify(unblock.claim)

    def _again(self, again: do.Again) -> None:
        asyncio.get_running_loop().call_soon(self.client_gone, again.client)

    def _bytes_free(self, claim: Claim) -> None:
        """Another engine's task has ended, which was the last that a task of ours waited for."""
        assert isinstance(claim.owner, TaskState)
        self.hear(self.dispatcher.bytes_free, claim.owner.task_id)

    # --- what comes back from the ranks -------------------------------------------------------------

    def rank_arrived(self, job: Job, outcome: RankOutcome) -> None:
        """Report a worker's outcome for its share of a job. Called by RankWorker."""
        now = self.clock.monotonic()
        job.arrivals.append((outcome.rank, now))
        self.skew_s[outcome.rank] += now - job.arrivals[0][1]
        if len(job.arrivals) == len(self.workers) and job.task.task_id not in self._jobs:
            self.hear(self.dispatcher.task_settled, job.task.task_id)
        if not self.barrier.arrive(job.task.task_id, outcome):
            self.hear(self.dispatcher.rank_left, job.task.task_id, outcome.rank)

    def _part_there(self, job: Job, rank: int, layers: int) -> None:
        """Note that a rank has the first layers of all of a task's blocks. Report them once every rank has them."""
        job.parts.setdefault(layers, set()).add(rank)
        if len(job.parts[layers]) == len(self.workers) and self._jobs.get(job.task.task_id) is job:
            record = self.dispatcher.records.get(job.task.task_id)
            for client, seq in () if record is None else record.waiters:
                self.progressed(client, seq, layers)

    def rank_died(self, rank: int, cause: str) -> None:
        """Report that a rank's device is lost: every current and later task fails, and its error names the rank.

        If an engine's own memory has vanished, the engine can offer other memory: see `withdraws`.
        """
        if self.withdraws is not None and self.withdraws(rank, cause):
            return
        log.error("rank died", engine=self.engine, rank=rank, cause=cause)
        self.ready = False
        self.hear(self.dispatcher.rank_failed, rank, cause)
        self.barrier.rank_died(rank, cause)

    def _round_complete(self, round_: Round) -> None:
        job = self._jobs.pop(round_.task_id)
        merged = round_.merged
        assert merged is not None
        # Objects that a rank had stored may have been evicted since.
        if isinstance(job.task, WriteStorageTask) and job.shrunk and merged.block_ids:
            merged = job.task.merge([self.workers[o.rank].confirmed(job, o) for o in round_.outcomes.values()])
        self._ran[round_.task_id] = Ran(job.admitted_at, job.started_at, job.arrivals)
        missing = round_.missing
        if missing or self.barrier.dead:
            # Ranks that have not arrived must not touch blocks beyond their current copy. `missing` has live ranks
            # only, but copies of a dead rank may still wait for a thread, and must never begin.
            job.stop.set(Stop.EXPIRED)
        # A rank that died without having arrived may still be in a copy.
        settled = len(job.arrivals) == len(self.workers)
        self.hear(self.dispatcher.round_merged, round_.task_id, merged, missing, settled)

    # --- waiting for a state ------------------------------------------------------------------------

    async def _until(self, condition: Callable[[], bool]) -> None:
        if condition():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[future] = condition
        try:
            await future
        finally:
            del self._waiting[future]

    def _wake_waiters(self) -> None:
        for future, condition in self._waiting.items():
            if not future.done() and condition():
                future.set_result(None)


def _task_id(instruction: do.Instruction) -> str:
    """The id of the task that an instruction concerns; "" for none."""
    if isinstance(instruction, do.Start | do.Publish):
        return instruction.task.task_id
    if isinstance(instruction, do.Reply):
        return instruction.result.task_id
    return "" if isinstance(instruction, do.WakeAt | do.Unblock | do.Again) else instruction.task_id
