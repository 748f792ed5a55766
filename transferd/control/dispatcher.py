"""The state machine at the centre: it decides which task runs when and how it is answered, without one await.

`Dispatcher.handle(event)` is the only entry. It changes this object's state and returns instructions (see events.py);
the coordinator carries them out and reports what happens as further events. Nothing here knows of sockets, threads,
devices or the event loop, and every event brings the current time.
A push is admitted or answered at once. A task that can never succeed is `rejected`. A task that is too much
right now is `busy`, with a hint when to retry. A push of a known task_id joins it: a running task gets one
more waiter, and a finished one is answered with its kept result.

An admitted task is in one of four states. TRANSITIONS (order.py) lists every legal move:

    queued      waits for earlier tasks on its blocks, for a place in its lane, or for `resume`
    running     its round is open and every rank works on it
    cancelling  still running, but its ranks must end early (cancel or deadline)
    done        answered; exactly one terminal result went to every waiter

The lanes (order.py) choose which of the ready tasks run. A Start goes to all ranks together, so the order is the same
on every rank.

A deadline or a cancel answers a queued task at once. It stops the ranks of a running task, which then arrive with what
they have as soon as their current copy has ended. A rank that does not arrive within `deadline_slack` is left behind:
the task is answered without it, and its blocks stay claimed until that rank has finished (`straggling`). Its result is
not *settled*: the client asks when it is (docs/adr/0069).

Generations: a task is bound to the generation at its admission. A bump makes all older objects unreachable for later
tasks.

Memory: nothing is admitted while a rank has no memory (gate.py). A task is refused if it names device memory that no
engine has mapped, or host blocks that hold nothing (contents.py). Results from before memory was taken away are not
repeated, because that memory no longer exists.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from transferd.control import events as ev
from transferd.control.admission import Limits, Prepared, ResultCache, content_hash, prepare
from transferd.control.byte_ranges import ByteRanges
from transferd.control.contents import Contents
from transferd.control.engine_bounds import Total
from transferd.control.gate import Gate, Hold
from transferd.control.order import RETRY_AFTER_S, TRANSITIONS, Alarms, Claim, HazardTable, Lanes, State, TaskState
from transferd.errors import InvariantError, RequestError
from transferd.observability.recorder import LONGEST_TEXT, Recorder
from transferd.tasks import ErrorInfo, Lane, Merged, Status, Stop, TaskResult

AT_ONCE = 256  # tasks that end in one step of the event loop, if all of a client do
MAX_WAITERS = 256  # pushes of one task_id that may wait for its result


@dataclass(frozen=True, slots=True)
class DispatchStatistics:
    """A snapshot: answered tasks by status, refusals by code, and the tasks in progress."""

    queued: int
    running: int
    straggling: int
    argument_bytes: int  # of tasks that are admitted, or answered with blocks that are still claimed
    results_kept: int
    result_bytes: int
    tasks: dict[str, int]
    rejects: dict[str, int]
    lanes: dict[str, dict[str, int]]
    paused: bool
    draining: bool
    held: list[Hold]


class Dispatcher:
    """The state machine. Mutate only through `handle`; see the module's theory of operation."""

    def __init__(
        self,
        limits: Limits,
        *,
        boot_id: str = "",
        generation: str = "",
        recorder: Recorder | None = None,
        admitting: bool = True,
        total: Total | None = None,
        ranges: ByteRanges[Claim] | None = None,
    ) -> None:
        """Begin without tasks.

        admitting: False until the first CacheReady.
        total: the bounds of all engines together, if there are any.
        ranges: the bytes that tasks of all engines claim, where their device blocks are windows.
        """
        self.limits = limits
        self._total = total
        self.boot_id = boot_id
        self.generation = generation
        self._recorder = recorder if recorder is not None else Recorder()
        self._records: dict[str, TaskState] = {}  # queued, running, cancelling
        self._stragglers: dict[str, TaskState] = {}  # done, but a rank still works on it
        self._waits: dict[bytes, dict[str, TaskState]] = {}  # for each client, the tasks that it waits for
        self._unsettled: set[str] = set()  # answered, and a rank may still touch their blocks, even a dead one
        self._results = ResultCache(limits.result_ttl, limits.max_results, limits.max_result_bytes)
        self._hazards = HazardTable(ranges)
        self._lanes = Lanes(limits)
        self._gate = Gate(memory=admitting)
        self._contents = Contents(limits.ranks, limits.host_blocks, mapped=admitting)
        self._starting = False  # inside _start_ready
        self._now = 0.0  # the time of the current event
        self._memory_epoch = 0  # how often the cache's memory was taken away
        self._alarms: Alarms[TaskState] = Alarms(lambda record: record.state is State.DONE)
        self._wake_at = math.inf  # the last WakeAt whose DeadlineReached has not come yet
        self._statuses: Counter[str] = Counter()
        self._rejects: Counter[str] = Counter()
        self._out: list[ev.Instruction] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            ev.TaskSubmitted: self._submitted,
            ev.RoundMerged: self._merged,
            ev.TaskSettled: self._task_settled,
            ev.BytesFree: self._bytes_free,
            ev.RankLeft: self._rank_left,
            ev.RankFailed: self._rank_died,
            ev.ClientGone: self._client_gone,
            ev.CancelRequested: self._cancel_requested,
            ev.DeadlineReached: self._deadline_reached,
            ev.CacheWithdrawn: self._cache_withdrawn,
            ev.CacheReady: self._cache_ready,
            ev.MappingsChanged: lambda event: self._contents.mappings(event.unmapped, event.outdated),
            ev.HostEmptied: lambda _: self._contents.host_emptied(),
            ev.PauseRequested: self._pause_requested,
            ev.ResumeRequested: self._resume_requested,
            ev.DrainRequested: self._drain_requested,
            ev.ShutdownRequested: self._shutdown_requested,
            ev.QueueAbandoned: self._queue_abandoned,
            ev.GenerationBumped: self._generation_bumped,
        }

    def handle(self, event: ev.Event) -> list[ev.Instruction]:
        """Process one event. Returns the instructions to carry out, in order."""
        self._now = event.now
        self._handlers[type(event)](event)
        out, self._out = self._out, []
        return out

    # --- observers ----------------------------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """No rank touches any block on behalf of any task."""
        return not self._stragglers and not self._lanes.running

    @property
    def empty(self) -> bool:
        """Quiet, and nothing is queued."""
        return not self._records and not self._stragglers

    @property
    def admitting(self) -> bool:
        return self._gate.refusal is None

    def may_hold(self, what: str, holder: str, proof: str) -> bool:
        """Whether there is a place for this pause or drain (MOST_HOLDS)."""
        return self._gate.has_place(what, holder, proof)

    @property
    def alive(self) -> bool:
        """No rank has died, and no shutdown was asked for."""
        return self._gate.alive

    @property
    def next_alarm(self) -> float:
        """The time of the next deadline; math.inf if there is none. If it is long past, DeadlineReached was lost."""
        return self._alarms.next()

    @property
    def admitted(self) -> Iterable[TaskState]:
        """All tasks that are admitted and not yet answered: a live view, so read it at once and do not change it."""
        return self._records.values()

    def record(self, task_id: str) -> TaskState | None:
        """An admitted task that is not yet answered; do not change it."""
        return self._records.get(task_id)

    def waits(self, client: bytes) -> int:
        """For how many tasks a client waits."""
        return len(self._waits.get(client, ()))

    @property
    def queued(self) -> int:
        """Tasks that are admitted and not running."""
        return self._lanes.queued

    @property
    def argument_bytes(self) -> int:
        """Memory of tasks that are admitted, or answered with blocks that are still claimed."""
        return self._hazards.nbytes

    def bytes_under_way(self, lane: Lane) -> int:
        """Bytes that this lane's tasks, queued and running, move on all ranks together."""
        return self._lanes.loads[lane].nbytes

    def state_of(self, task_id: str) -> State | None:
        """A task's state; None if it was never admitted, or its result is no longer kept."""
        record = self._records.get(task_id)
        if record is not None:
            return record.state
        return State.DONE if task_id in self._results or task_id in self._stragglers else None

    def settled(self, task_id: str) -> bool:
        """Whether no rank touches a block for this task, now or later. True for a task that is not known."""
        return not (task_id in self._records or task_id in self._stragglers or task_id in self._unsettled)

    def statistics(self) -> DispatchStatistics:
        return DispatchStatistics(
            queued=self._lanes.queued,
            running=self._lanes.running,
            straggling=len(self._stragglers),
            argument_bytes=self._hazards.nbytes,
            results_kept=len(self._results),
            result_bytes=self._results.nbytes,
            tasks=dict(self._statuses),
            rejects=dict(self._rejects),
            lanes=self._lanes.statistics(),
            paused=self._gate.paused,
            draining=self._gate.draining,
            held=self._gate.held,
        )

    def __repr__(self) -> str:
        lanes = self._lanes
        return f"<Dispatcher queued={lanes.queued} running={lanes.running} straggling={len(self._stragglers)}>"

    # --- admission ----------------------------------------------------------------------------------

    def _submitted(self, event: ev.TaskSubmitted) -> None:
        """Join a known task, refuse the task, or admit it: exactly one of these.

        If the client will resend a push, its refusal is not reported, because the resend may be admitted (`_refuse`).
        """
        task = event.task
        if self._join(event):
            return
        refusal = self._gate.refusal
        if refusal is not None:
            status, error = refusal
            self._refuse(event, status, error, RETRY_AFTER_S[1] if status is Status.BUSY else None)
            return
        try:
            prepared = prepare(task, self.limits)
            self._hazards.check_targets(prepared.footprint.device_writes)
        except RequestError as error:
            self._refuse(event, Status.REJECTED, ErrorInfo(error.reason, str(error)))
            return
        # A flush touches no block. Others need their device memory mapped, and the host blocks that they read filled.
        if not prepared.flush and (prepared.footprint.host_reads or not self._contents.all_mapped):
            absent = self._contents.refusal(event.client, prepared.footprint, self._hazards)
            if absent is not None:
                self._refuse(event, Status.REJECTED, absent)
                return
        busy = self._lanes.too_much(prepared, self._hazards.nbytes)
        total = self._total
        if busy is None and total is not None and len(total.engines) > 1:  # a single engine has no bounds but its own
            beyond = total.refusal(self, prepared)
            busy = None if beyond is None else (beyond, self._lanes.hint(prepared.lane))
        if busy is not None:
            self._refuse(event, Status.BUSY, *busy)
            return
        self._admit(event, prepared)

    def _join(self, event: ev.TaskSubmitted) -> bool:
        """Handle a push of a known task_id. Returns False, and does nothing, if the id is unknown."""
        task_id = event.task.task_id
        record = self._records.get(task_id) or self._stragglers.get(task_id)
        kept = self._results.recall(task_id, event.now)
        if record is None and kept is None:
            return False
        asked_before = record.content if record is not None else kept.content if kept is not None else None
        if asked_before != content_hash(event.task):
            what = f"another task was pushed under the id {task_id[:80]!r} before"
            self._refuse(event, Status.REJECTED, ErrorInfo("task_id_conflict", what))
        elif kept is not None and kept.memory_epoch != self._memory_epoch:  # its blocks went with the memory
            what = "this task has ended, and the memory of its result is gone; push it under a new id"
            self._refuse(event, Status.REJECTED, ErrorInfo("cache_gone", what))
        elif kept is not None:
            self._recorder.aside(task_id, "repeated", event.client)
            result = kept.result
            if not result.settled and self.settled(task_id):  # its late ranks have finished since
                result = msgspec.structs.replace(result, settled=True)
            self._out.append(ev.Reply(event.client, event.seq, result))
        elif record is not None and record.state is not State.DONE and len(record.waiters) < MAX_WAITERS:
            self._recorder.aside(task_id, "joined", event.client)
            record.waiters.append((event.client, event.seq))
            self._waits.setdefault(event.client, {})[task_id] = record
        else:  # a straggling rank still holds its blocks, or it has too many waiters
            self._refuse(event, Status.BUSY, ErrorInfo("task_id_busy", "this task_id is in use"), RETRY_AFTER_S[1])
        return True

    def _admit(self, event: ev.TaskSubmitted, prepared: Prepared) -> None:
        task, now = prepared.task, event.now
        record = TaskState(
            task=task,
            task_id=task.task_id,
            lane=prepared.lane,
            content=prepared.content,
            generation=self.generation,
            memory_epoch=self._memory_epoch,
            admitted_at=now,
            deadline=now + task.timeout,
            nbytes=prepared.nbytes,
            waiters=[(event.client, event.seq)],
        )
        record.claim = self._hazards.enter(record, prepared.footprint, prepared.arguments)
        self._records[task.task_id] = record
        self._waits.setdefault(event.client, {})[task.task_id] = record
        self._recorder.admitted(task.task_id, str(prepared.lane), prepared.blocks, event.client)
        self._set_alarm(record.deadline, record)
        self._lanes.enter(record)
        if not record.claim.blockers:
            self._lanes.ready(record)
            self._start_ready()
        else:  # `_release` of the last blocker makes it ready
            self._recorder.note(task.task_id, "waits", record.claim.blockers)

    def _refuse(
        self, event: ev.TaskSubmitted, status: Status, error: ErrorInfo, retry_after: float | None = None
    ) -> None:
        self._statuses[status] += 1
        self._rejects[error.code] += 1
        self._recorder.aside(event.task.task_id, status, error.code, event.client, error.message[:LONGEST_TEXT])
        if event.again:  # the resend gets the answer
            return
        result = TaskResult(
            task_id=event.task.task_id,
            status=status,
            error=error,
            retry_after=retry_after,
            generation=self.generation,
            boot_id=self.boot_id,
            # A late rank may still touch the blocks of a task that is pushed again.
            settled=error.code == "task_id_conflict" or self.settled(event.task.task_id),
        )
        self._out.append(ev.Reply(event.client, event.seq, result))

    # --- running ------------------------------------------------------------------------------------

    def _start_ready(self) -> None:
        lanes = self._lanes
        if self._starting or not lanes.ready_tasks or not self._gate.starts:
            return
        self._starting = True  # a task that ends here releases others: this loop starts them, not a nested one
        try:
            while lanes.ready_tasks and (record := lanes.next_startable()) is not None:
                self._start(record)
        finally:
            self._starting = False

    def _start(self, record: TaskState) -> None:
        """Start a task whose turn has come, or fail one that reads host blocks that were never filled."""
        assert record.task is not None
        assert record.claim is not None
        sources = record.claim.footprint.host_reads
        if sources and (hollow := self._contents.hollow(sources)) is not None:
            self._finish_early(record, Status.FAILED, hollow, self._now)
            return
        self._move(record, State.RUNNING)
        self._recorder.note(record.task_id, "started")
        self._out.append(ev.Start(record.task, record.generation, record.admitted_at))

    def _merged(self, event: ev.RoundMerged) -> None:
        record = self._records.get(event.task_id)
        if record is None or record.state is State.QUEUED:
            raise InvariantError(
                f"a round was merged for {event.task_id!r}, which is not running\n{self._recorder.story(event.task_id)}"
            )
        self._lanes.spent(record, event.now)
        record.straggling.update(event.missing)
        merged = event.merged
        status = merged.status
        if record.claim is not None and (targets := record.claim.footprint.host_writes):
            assert record.task is not None
            self._contents.host_written(record.task, targets, merged)
        if record.stop is Stop.CANCELLED and status is Status.EXPIRED:
            status = Status.CANCELLED  # the slack of a cancel ran out: report the cancel
        if record.withdrawn is not None and status is Status.CANCELLED:  # by us, and its blocks went with the memory
            status, merged = Status.FAILED, msgspec.structs.replace(merged, block_ids=[], error=record.withdrawn)
        if not event.settled:  # a rank is not done with the blocks yet; TaskSettled follows
            self._unsettled.add(event.task_id)
        self._finish(record, status, merged, event.now)

    def _task_settled(self, event: ev.TaskSettled) -> None:
        self._unsettled.discard(event.task_id)

    def _rank_left(self, event: ev.RankLeft) -> None:
        record = self._stragglers.get(event.task_id)
        if record is None:  # its blocks were released already
            return
        record.straggling.discard(event.rank)
        if not record.straggling:
            del self._stragglers[event.task_id]
            self._recorder.note(event.task_id, "straggler left", event.rank)
            self._release(record)

    def _rank_died(self, event: ev.RankFailed) -> None:
        error = ErrorInfo("rank_died", f"rank {event.rank} died: {event.cause}")
        self._recorder.aside("", "rank died", event.rank, event.cause[:LONGEST_TEXT])
        self._gate.rank_died(error)
        self._fail_queued(error, event.now)
        for task_id, record in list(self._stragglers.items()):
            self._rank_left(ev.RankLeft(task_id, event.rank, event.now))
            assert record.state is State.DONE

    # --- ending early -------------------------------------------------------------------------------

    def _client_gone(self, event: ev.ClientGone) -> None:
        waits = self._waits.get(event.client, {})
        for _ in range(min(len(waits), AT_ONCE)):  # the newest first: the end of one would start those that wait for it
            _, record = waits.popitem()
            record.waiters = [waiter for waiter in record.waiters if waiter[0] != event.client]
            if not record.waiters:  # this was the last client that waited
                self._recorder.note(record.task_id, "no client waits", event.client)
                self._end(record, Stop.CANCELLED, event.now)
        if waits:
            self._out.append(ev.Again(event))
            return
        self._waits.pop(event.client, None)
        for hold in self._gate.client_gone(event.client):
            self._recorder.aside("", "hold ended", hold.what, hold.holder)
        self._start_ready()

    def _cancel_requested(self, event: ev.CancelRequested) -> None:
        record = self._records.get(event.task_id)
        if record is not None:
            self._end(record, Stop.CANCELLED, event.now)

    def _deadline_reached(self, event: ev.DeadlineReached) -> None:
        self._wake_at = math.inf
        for record in self._alarms.due(event.now):
            if record.state is State.CANCELLING:
                if event.now >= record.forsaken_at:  # else this alarm is the deadline of a cancelled task
                    record.forsaken_at = math.inf
                    self._recorder.note(record.task_id, "slack used up")
                    self._out.append(ev.ExpireRound(record.task_id))
            else:
                self._end(record, Stop.EXPIRED, event.now)
        self._ask_for_wake()

    def _end(self, record: TaskState, reason: Stop, now: float) -> None:
        if record.state is State.QUEUED:
            waited = f"{'deadline reached' if reason is Stop.EXPIRED else 'cancelled'} while queued{self._gate.behind}"
            self._finish_early(record, Status(reason.value), ErrorInfo(str(reason), waited), now)
        elif record.state is State.RUNNING:
            record.stop = reason
            self._move(record, State.CANCELLING)
            self._recorder.note(record.task_id, "stopping", reason)
            self._out.append(ev.StopTask(record.task_id, reason))
            record.forsaken_at = now + self.limits.deadline_slack
            self._set_alarm(record.forsaken_at, record)

    def _queue_abandoned(self, event: ev.QueueAbandoned) -> None:
        self._fail_queued(ErrorInfo("shutdown", "the daemon shut down before this task started"), event.now)

    def _fail_queued(self, error: ErrorInfo, now: float) -> None:
        for record in list(self._records.values()):
            if record.state is State.QUEUED:
                self._finish_early(record, Status.FAILED, error, now)

    # --- control ------------------------------------------------------------------------------------

    def _pause_requested(self, event: ev.PauseRequested) -> None:
        self._recorder.aside("", "pause", event.holder)
        self._gate.hold("pause", event.holder, event.client, event.now, event.proof)

    def _resume_requested(self, event: ev.ResumeRequested) -> None:
        self._recorder.aside("", "resume", event.holder)
        self._gate.resume(event.holder, event.proof)
        self._start_ready()

    def _drain_requested(self, event: ev.DrainRequested) -> None:
        self._recorder.aside("", "drain", event.holder)
        self._gate.hold("drain", event.holder, event.client, event.now, event.proof)

    def _cache_withdrawn(self, event: ev.CacheWithdrawn) -> None:
        self._recorder.aside("", "cache withdrawn", event.error.message[:LONGEST_TEXT])
        self._gate.memory_gone(event.error)
        self._memory_epoch += 1
        if event.end:  # else tasks may still end on the old memory
            self._fail_queued(event.error, event.now)
            for record in list(self._records.values()):
                if record.state is State.RUNNING:
                    record.withdrawn = event.error
                self._end(record, Stop.CANCELLED, event.now)

    def _cache_ready(self, event: ev.CacheReady) -> None:
        self._recorder.aside("", "cache ready")
        self._hazards.grids = event.windows
        self._gate.memory_there()

    def _shutdown_requested(self, _: ev.ShutdownRequested) -> None:
        self._recorder.aside("", "shutdown")
        self._gate.shut()

    def _generation_bumped(self, event: ev.GenerationBumped) -> None:
        self._recorder.aside("", "generation", self.generation, event.generation)
        self.generation = event.generation

    # --- ending -------------------------------------------------------------------------------------

    def _finish_early(self, record: TaskState, status: Status, error: ErrorInfo, now: float) -> None:
        """Answer a task that no rank has started."""
        self._finish(record, status, Merged(status, [], [], error), now)

    def _finish(self, record: TaskState, status: Status, merged: Merged, now: float) -> None:
        task_id, task = record.task_id, record.task
        assert task is not None
        self._move(record, State.DONE)
        self._lanes.leave(record)
        result = TaskResult(
            task_id=task_id,
            status=status,
            block_ids=merged.block_ids,
            ranks=merged.ranks,
            error=merged.error,
            bytes=merged.bytes,
            duration=now - record.admitted_at,
            generation=record.generation,
            boot_id=self.boot_id,
            settled=not record.straggling and task_id not in self._unsettled,
            not_admitted=merged.not_admitted,
        )
        self._statuses[status] += 1
        self._recorder.note(task_id, "done", str(status), len(merged.block_ids))
        if merged.error is not None:
            self._recorder.note(task_id, "cause", merged.error.code, merged.error.message[:LONGEST_TEXT])
        for client, seq in record.waiters:
            self._out.append(ev.Reply(client, seq, result))
            waits = self._waits.get(client, {})
            if waits.pop(task_id, None) is not None and not waits:
                del self._waits[client]  # one that waits twice has gone then
        self._out.append(ev.Publish(task, result))
        record.task, record.waiters = None, []
        del self._records[task_id]
        self._results.keep(result, record.content, record.memory_epoch, now)
        if record.straggling:  # a rank that is late may still touch the blocks: they stay claimed until it arrives
            self._stragglers[task_id] = record
            self._recorder.note(task_id, "straggling", str(sorted(record.straggling)))
            self._start_ready()
        else:
            self._release(record)

    def _release(self, record: TaskState) -> None:
        """Release the task's blocks and start the tasks that waited for them."""
        claim, record.claim = record.claim, None  # break the cycle between record and claim
        assert claim is not None
        for ready in self._hazards.leave(claim):
            waiting = ready.owner
            assert isinstance(waiting, TaskState)
            if ready.table is not self._hazards:  # another engine's task, so its own dispatcher must start it
                self._out.append(ev.Unblock(ready))
            elif waiting.state is State.QUEUED:
                self._recorder.note(waiting.task_id, "blocks free", record.task_id)
                self._lanes.ready(waiting)
        self._start_ready()

    def _bytes_free(self, event: ev.BytesFree) -> None:
        record = self._records.get(event.task_id)
        if record is not None and record.state is State.QUEUED and record.claim is not None and record.claim.ready:
            self._recorder.note(record.task_id, "blocks free", "of another engine")
            self._lanes.ready(record)
            self._start_ready()

    def notified_by(self, notify: Callable[[Claim], None]) -> None:
        """Set the function that sends this dispatcher BytesFree. Other dispatchers' users call it; see Unblock."""
        self._hazards.notify = notify

    def _move(self, record: TaskState, state: State) -> None:
        if state not in TRANSITIONS[record.state]:
            task_id = record.task_id
            story = self._recorder.story(task_id)
            raise InvariantError(f"{task_id!r} cannot go from {record.state} to {state}\n{story}")
        old, record.state = record.state, state
        self._lanes.moved(record, old)

    # --- alarms -------------------------------------------------------------------------------------

    def _set_alarm(self, when: float, record: TaskState) -> None:
        self._alarms.set(when, record)
        if when < self._wake_at:  # else a WakeAt for this time or an earlier one is pending
            self._wake_at = when
            self._out.append(ev.WakeAt(when))

    def _ask_for_wake(self) -> None:
        soonest = self._alarms.next()
        if soonest < self._wake_at:
            self._wake_at = soonest
            self._out.append(ev.WakeAt(soonest))
