"""The state machine at the centre: it decides which task runs when and how it is answered, without one await.

Each event is a method. It changes this object's state and returns instructions (instructions.py); the coordinator
carries them out and reports what happens as further events. Nothing here knows of sockets, threads, devices or the
event loop, and every event brings the current time.
A push is admitted or answered at once. A task that can never succeed is `rejected`. One that is too much right now is
`busy`, with a hint when to retry. A push of a known task_id joins it: a running task gets one more waiter, and a
finished one is answered with its kept result.

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

Generations: a task is bound to that at its admission. A bump makes all older objects unreachable for later tasks.

Memory: nothing is admitted while a rank has no memory (gate.py). A task is refused if it names device memory that no
engine has mapped, or host blocks that hold nothing (contents.py). Results from before memory was taken away are not
repeated, because that memory no longer exists.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec

import msgspec

from transferd.control import admission
from transferd.control import instructions as do
from transferd.control.admission import KeptResult, Limits, ResultCache
from transferd.control.byte_ranges import ByteRanges, WindowGrid
from transferd.control.contents import Contents
from transferd.control.engine_bounds import Total
from transferd.control.gate import Gate
from transferd.control.order import RETRY_AFTER_S, TRANSITIONS, Alarms, Claim, HazardTable, Lanes, State, TaskState
from transferd.errors import InvariantError, RequestError
from transferd.observability.recorder import LONGEST_TEXT, Recorder
from transferd.tasks import HOST, ErrorInfo, Footprint, Lane, Status, Stop, Task, TaskResult

AT_ONCE = 256  # tasks that end in one step of the event loop, if all of a client or of a deadline do
MAX_WAITERS = 256  # pushes of one task_id that may wait for its result


class Submission(msgspec.Struct, frozen=True):
    """See `Dispatcher.submit`."""

    client: bytes
    seq: int
    task: Task
    again: bool


P = ParamSpec("P")


def event(
    method: Callable[Concatenate[Dispatcher, P], None],
) -> Callable[Concatenate[Dispatcher, float, P], list[do.Instruction]]:
    """Make a method the event that something has happened at the time `now`, which becomes its first argument.

    It returns the instructions to carry out, in order.
    """

    @functools.wraps(method)
    def happened(self: Dispatcher, now: float, /, *args: P.args, **kwargs: P.kwargs) -> list[do.Instruction]:
        self._now = now
        method(self, *args, **kwargs)
        out, self._out = self._out, []
        return out

    return happened


class Dispatcher:
    """The state machine. Only its events change it; see the module's theory of operation.

    records: all tasks that are admitted and not yet answered (queued, running, cancelling), by task_id.
    stragglers: those that are answered, and that a rank still works on.
    statuses, rejects: how many tasks were answered, by status, and refused, by code.
    hazards: the order of tasks on the same blocks. Its `notify` is for Unblock.
    alarms: deadlines. If the next one is long past, `deadline_reached` was lost.
    gate: whether it admits and starts tasks, and who holds it. Nobody else changes it.
    """

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
        self.records: dict[str, TaskState] = {}
        self.stragglers: dict[str, TaskState] = {}
        self._waits: dict[bytes, dict[str, TaskState]] = {}  # for each client, the tasks that it waits for
        self._unsettled: set[str] = set()  # answered, and a rank may still touch their blocks, even a dead one
        server = limits.server
        self.results = ResultCache(server.result_ttl, server.max_results, server.max_result_bytes)
        self.hazards = HazardTable(ranges)
        self.lanes = Lanes(server, self.hazards)
        self.gate = Gate(memory=admitting)
        self._contents = Contents(limits.ranks, limits.host_blocks, mapped=admitting)
        self._starting = False  # inside _start_ready
        self._now = 0.0  # the time of the current event
        self._out: list[do.Instruction] = []  # what it has led to so far
        self._memory_epoch = 0  # how often the cache's memory was taken away
        self.alarms: Alarms[TaskState] = Alarms(lambda record: record.state is State.DONE)
        self.statuses: Counter[str] = Counter()
        self.rejects: Counter[str] = Counter()

    # --- observers ----------------------------------------------------------------------------------

    @property
    def quiet(self) -> bool:
        """No rank touches any block on behalf of any task."""
        return not self.stragglers and not self.lanes.running

    @property
    def empty(self) -> bool:
        """Quiet, and nothing is queued."""
        return not self.records and not self.stragglers

    def waits(self, client: bytes) -> int:
        """For how many tasks a client waits."""
        return len(self._waits.get(client, ()))

    def settled(self, task_id: str) -> bool:
        """Whether no rank touches a block for this task, now or later. True for a task that is not known."""
        return not (task_id in self.records or task_id in self.stragglers or task_id in self._unsettled)

    # --- admission ----------------------------------------------------------------------------------

    @event
    def submit(self, client: bytes, seq: int, task: Task, again: bool = False) -> None:
        """A client pushed a task under its number `seq`. The task joins a known one, is refused, or admitted.

        again: the client will push it again, under the same seq. So a refusal is not answered.
        """
        push = Submission(client, seq, task, again)
        known = self.records.get(task.task_id) or self.stragglers.get(task.task_id)
        kept = self.results.recall(task.task_id, self._now)
        if known is not None or kept is not None:
            self._join(push, known, kept)
            return
        refusal = self.gate.refusal
        if refusal is not None:
            status, error = refusal
            self._refuse(push, status, error, RETRY_AFTER_S[1] if status is Status.BUSY else None)
            return
        lane, blocks = task.lane, task.blocks
        flush = self.limits.only_flush and lane is Lane.WRITE
        try:
            admission.check_task(task, self.limits)
            footprint = admission.footprint_of(task, self.limits)
            if self.hazards.grids:
                self.hazards.check_targets(footprint)
        except RequestError as error:
            self._refuse(push, Status.REJECTED, ErrorInfo(error.reason, str(error)))
            return
        record = TaskState(
            task=task,
            task_id=task.task_id,
            lane=lane,
            content=admission.content_hash(task),
            generation=self.generation,
            memory_epoch=self._memory_epoch,
            admitted_at=self._now,
            nbytes=0 if flush else blocks * self.limits.block_bytes * self.limits.ranks,
            arguments=admission.argument_bytes(task),
            flush=flush,
            waiters=[(client, seq)],
        )
        # A flush touches no block. Others need their device memory mapped, and the host blocks that they read filled.
        if not flush and (footprint.reads.get(HOST) or not self._contents.all_mapped):
            absent = self._contents.refusal(client, footprint, self.hazards)
            if absent is not None:
                self._refuse(push, Status.REJECTED, absent)
                return
        busy = self.lanes.too_much(record)
        total = self._total
        if busy is None and total is not None and len(total.engines) > 1:  # a single engine has no bounds but its own
            busy = total.refusal(self.lanes, record)
        if busy is not None:
            self._refuse(push, Status.BUSY, busy, self.lanes.hint(lane))
            return
        self._admit(client, record, blocks, footprint)

    def _join(self, push: Submission, record: TaskState | None, kept: KeptResult | None) -> None:
        """Handle a push of a known task_id: that of a record, of a kept result, or of both."""
        task_id, first = push.task.task_id, record or kept
        if first is not None and first.content != admission.content_hash(push.task):
            what = f"another task was pushed under the id {task_id[:80]!r} before"
            self._refuse(push, Status.REJECTED, ErrorInfo("task_id_conflict", what))
        elif kept is not None and kept.memory_epoch != self._memory_epoch:  # its blocks went with the memory
            what = "this task has ended, and the memory of its result is gone; push it under a new id"
            self._refuse(push, Status.REJECTED, ErrorInfo("cache_gone", what))
        elif kept is not None:
            self._recorder.aside(task_id, "repeated", push.client)
            result = kept.result
            if not result.settled and self.settled(task_id):  # its late ranks have finished since
                result = msgspec.structs.replace(result, settled=True)
            self._out.append(do.Reply(push.client, push.seq, result))
        elif record is not None and record.state is not State.DONE and len(record.waiters) < MAX_WAITERS:
            self._recorder.aside(task_id, "joined", push.client)
            record.waiters.append((push.client, push.seq))
            self._waits.setdefault(push.client, {})[task_id] = record
        else:  # a straggling rank still holds its blocks, or it has too many waiters
            self._refuse(push, Status.BUSY, ErrorInfo("task_id_busy", "this task_id is in use"), RETRY_AFTER_S[1])

    def _admit(self, client: bytes, record: TaskState, blocks: int, footprint: Footprint) -> None:
        task_id = record.task_id
        record.claim = self.hazards.enter(record, footprint, record.arguments)
        self.records[task_id] = record
        self._waits.setdefault(client, {})[task_id] = record
        self._recorder.admitted(task_id, str(record.lane), blocks, client)
        assert record.task is not None
        deadline = self._now + record.task.timeout
        if self.alarms.set(deadline, record):
            self._out.append(do.WakeAt(deadline))
        self.lanes.enter(record)
        if not record.claim.blockers:
            self.lanes.ready(record)
            self._start_ready()
        else:  # `_release` of the last blocker makes it ready
            self._recorder.note(task_id, "waits", record.claim.blockers)

    def _refuse(self, push: Submission, status: Status, error: ErrorInfo, retry_after: float | None = None) -> None:
        self.statuses[status] += 1
        self.rejects[error.code] += 1
        self._recorder.aside(push.task.task_id, status, error.code, push.client, error.message[:LONGEST_TEXT])
        if push.again:  # the resend gets the answer
            return
        result = TaskResult(
            task_id=push.task.task_id,
            status=status,
            error=error,
            retry_after=retry_after,
            generation=self.generation,
            boot_id=self.boot_id,
            # A late rank may still touch the blocks of a task that is pushed again.
            settled=error.code == "task_id_conflict" or self.settled(push.task.task_id),
        )
        self._out.append(do.Reply(push.client, push.seq, result))

    # --- running ------------------------------------------------------------------------------------

    def _start_ready(self) -> None:
        lanes = self.lanes
        if self._starting or not lanes.ready_tasks or not self.gate.starts:
            return
        self._starting = True  # a task that ends here releases others: this loop starts them, not a nested one
        try:
            while lanes.ready_tasks and (record := lanes.next_startable()) is not None:
                assert record.task is not None
                assert record.claim is not None
                sources = record.claim.footprint.reads.get(HOST)
                if sources and (hollow := self._contents.hollow(sources)) is not None:
                    self._finish_early(record, Status.FAILED, hollow)
                    continue
                self._move(record, State.RUNNING)
                self._recorder.note(record.task_id, "started")
                self._out.append(do.Start(record.task, record.generation, record.admitted_at))
        finally:
            self._starting = False

    @event
    def round_merged(self, task_id: str, merged: TaskResult, missing: tuple[int, ...], settled: bool = True) -> None:
        """A running task's round has ended.

        missing: live ranks that had not arrived: the blocks stay claimed until they have left (`rank_left`).
        settled: whether every rank, dead ones included, is done with the blocks; if not, `task_settled` follows.
        """
        record = self.records.get(task_id)
        if record is None or record.state is State.QUEUED:
            raise InvariantError(
                f"a round was merged for {task_id!r}, which is not running\n{self._recorder.story(task_id)}"
            )
        record.straggling = frozenset(missing)
        if record.claim is not None and (targets := record.claim.footprint.writes.get(HOST)):
            assert record.task is not None
            self._contents.host_written(record.task, targets, merged)
        if record.stop is Stop.CANCELLED and merged.status is Status.EXPIRED:
            # The slack of a cancel ran out: report the cancel.
            merged = msgspec.structs.replace(merged, status=Status.CANCELLED)
        if record.withdrawn is not None and merged.status is Status.CANCELLED:  # its blocks went with the memory
            merged = msgspec.structs.replace(merged, status=Status.FAILED, block_ids=[], error=record.withdrawn)
        if not settled:  # a rank is not done with the blocks yet; `task_settled` follows
            self._unsettled.add(task_id)
        self._finish(record, merged)

    @event
    def task_settled(self, task_id: str) -> None:
        """The last rank of an answered task is done with its blocks."""
        self._unsettled.discard(task_id)

    @event
    def rank_left(self, task_id: str, rank: int) -> None:
        """A rank that was missing when its round ended has finished with the task's blocks."""
        if (record := self.stragglers.get(task_id)) is not None:  # else its blocks were released already
            self._left(record, rank)

    def _left(self, record: TaskState, rank: int) -> None:
        record.straggling -= {rank}
        if not record.straggling:
            del self.stragglers[record.task_id]
            self._recorder.note(record.task_id, "straggler left", rank)
            self._release(record)

    @event
    def rank_failed(self, rank: int, cause: str) -> None:
        """A rank has died, and the whole engine with it: no task can complete any more."""
        error = ErrorInfo("rank_died", f"rank {rank} died: {cause}")
        self._recorder.aside("", "rank died", rank, cause[:LONGEST_TEXT])
        self.gate.rank_died(error)
        self._fail_queued(error)
        for record in list(self.stragglers.values()):
            self._left(record, rank)

    # --- ending early -------------------------------------------------------------------------------

    @event
    def client_gone(self, client: bytes) -> None:
        """A client vanished. Tasks that no other client waits for are cancelled; its pauses and drains end."""
        waits = self._waits.get(client, {})
        for _ in range(AT_ONCE):  # the newest first: the end of one would start those that wait for it
            if not waits:  # the end of one may also end others
                break
            _, record = waits.popitem()
            record.waiters = [waiter for waiter in record.waiters if waiter[0] != client]
            if not record.waiters:  # this was the last client that waited
                self._recorder.note(record.task_id, "no client waits", client)
                self._end(record, Stop.CANCELLED)
        if waits:
            self._out.append(do.Again(client))
            return
        self._waits.pop(client, None)
        for hold in self.gate.client_gone(client):
            self._recorder.aside("", "hold ended", hold.what, hold.holder)
        self._start_ready()

    @event
    def cancel(self, task_id: str, anew: bool = False) -> None:
        """Cancel a task. anew: if it has not started, its id may be pushed anew."""
        record = self.records.get(task_id)
        if record is not None:
            queued = record.state is State.QUEUED
            self._end(record, Stop.CANCELLED)
            if queued and anew:
                self.results.drop(task_id)

    @event
    def deadline_reached(self) -> None:
        """The time of the last WakeAt has arrived. If more tasks are due than end in one step, the next one is now."""
        for record in self.alarms.due(self._now, AT_ONCE):
            if record.state is State.CANCELLING:
                if self._now >= record.forsaken_at:  # else this alarm is the deadline of a cancelled task
                    record.forsaken_at = math.inf
                    self._recorder.note(record.task_id, "slack used up")
                    self._out.append(do.ExpireRound(record.task_id))
            else:
                self._end(record, Stop.EXPIRED)
        soonest = self.alarms.next()
        if soonest < math.inf and do.WakeAt(soonest) not in self._out:
            self._out.append(do.WakeAt(soonest))

    def _end(self, record: TaskState, reason: Stop) -> None:
        if record.state is State.QUEUED:
            waited = f"{'deadline reached' if reason is Stop.EXPIRED else 'cancelled'} while queued{self.gate.behind}"
            self._finish_early(record, Status(reason.value), ErrorInfo(str(reason), waited))
        elif record.state is State.RUNNING:
            record.stop = reason
            self._move(record, State.CANCELLING)
            self._recorder.note(record.task_id, "stopping", reason)
            self._out.append(do.StopTask(record.task_id, reason))
            record.forsaken_at = self._now + self.limits.server.deadline_slack
            if self.alarms.set(record.forsaken_at, record):
                self._out.append(do.WakeAt(record.forsaken_at))

    @event
    def abandon_queue(self) -> None:
        """Fail everything that is queued, each task with its result."""
        self._fail_queued(ErrorInfo("shutdown", "the daemon shut down before this task started"))

    def _fail_queued(self, error: ErrorInfo) -> None:
        for record in list(self.records.values()):
            if record.state is State.QUEUED:
                self._finish_early(record, Status.FAILED, error)

    # --- control ------------------------------------------------------------------------------------

    @event
    def hold(self, what: str, client: bytes = b"", holder: str = "", proof: str = "") -> None:
        """Until the holder's `resume`, or `client_gone` for `client`, its latest connection:

        pause: start nothing more; drain: admit nothing more, and finish what is admitted.
        holder: a name for people. proof: a secret of the holder's: another client may know its name.
        """
        self._recorder.aside("", what, holder)
        self.gate.hold(what, holder, client, self._now, proof)

    @event
    def resume(self, holder: str = "", proof: str = "") -> None:
        """End the holder's pauses and drains, or all of them if it holds none. A cleared cache stays cleared."""
        self._recorder.aside("", "resume", holder)
        self.gate.resume(holder, proof)
        self._start_ready()

    @event
    def withdraw_cache(self, error: ErrorInfo, end: bool) -> None:
        """Some rank has lost its memory: admit nothing until `cache_ready`. end: admitted tasks cannot finish."""
        self._recorder.aside("", "cache withdrawn", error.message[:LONGEST_TEXT])
        self.gate.memory_gone(error)
        self._memory_epoch += 1
        if end:  # else tasks may still end on the old memory
            self._fail_queued(error)
            for record in list(self.records.values()):
                if record.state is State.RUNNING:
                    record.withdrawn = error
                self._end(record, Stop.CANCELLED)

    @event
    def cache_ready(self, windows: Sequence[WindowGrid] = ()) -> None:
        """Every rank has its memory: admit again. windows: where each rank's device blocks lie, if they are windows."""
        self._recorder.aside("", "cache ready")
        self.hazards.grids = windows
        self.gate.memory_there()

    @event
    def mappings_changed(self, unmapped: Sequence[int], outdated: Mapping[bytes, Sequence[int]]) -> None:
        """These ranks' memory no client has attached or offered; these clients still have earlier memory mapped."""
        self._contents.mappings(unmapped, outdated)

    @event
    def host_emptied(self) -> None:
        """The host pool was freed. No task is admitted or running."""
        self._contents.host_emptied()

    @event
    def shut_down(self) -> None:
        """Admit nothing and start nothing more, for good."""
        self._recorder.aside("", "shutdown")
        self.gate.shut()

    @event
    def bump_generation(self, generation: str) -> None:
        """From now on, tasks use objects of this generation; older objects become unreachable."""
        self._recorder.aside("", "generation", self.generation, generation)
        self.generation = generation

    # --- ending -------------------------------------------------------------------------------------

    def _finish_early(self, record: TaskState, status: Status, error: ErrorInfo) -> None:
        """Answer a task that no rank has started."""
        self._finish(record, TaskResult(task_id=record.task_id, status=status, error=error))

    def _finish(self, record: TaskState, merged: TaskResult) -> None:
        task_id, task = record.task_id, record.task
        assert task is not None
        self._move(record, State.DONE)
        result = msgspec.structs.replace(
            merged,
            duration=self._now - record.admitted_at,
            generation=record.generation,
            boot_id=self.boot_id,
            settled=not record.straggling and task_id not in self._unsettled,
        )
        self.statuses[result.status] += 1
        self._recorder.note(task_id, "done", str(result.status), len(merged.block_ids))
        if merged.error is not None:
            self._recorder.note(task_id, "cause", merged.error.code, merged.error.message[:LONGEST_TEXT])
        for client, seq in record.waiters:
            self._out.append(do.Reply(client, seq, result))
            waits = self._waits.get(client, {})
            if waits.pop(task_id, None) is not None and not waits:
                del self._waits[client]  # one that waits twice has gone then
        self._out.append(do.Publish(task, result))
        record.task, record.waiters = None, []
        del self.records[task_id]
        self.results.keep(result, record.content, record.memory_epoch, self._now)
        if record.straggling:  # a rank that is late may still touch the blocks: they stay claimed until it arrives
            self.stragglers[task_id] = record
            self._recorder.note(task_id, "straggling", str(sorted(record.straggling)))
            self._start_ready()
        else:
            self._release(record)

    def _release(self, record: TaskState) -> None:
        """Release the task's blocks and start the tasks that waited for them."""
        claim, record.claim = record.claim, None  # break the cycle between record and claim
        assert claim is not None
        for ready in self.hazards.leave(claim):
            waiting = ready.owner
            assert isinstance(waiting, TaskState)
            if ready.table is not self.hazards:  # another engine's task, so its own dispatcher must start it
                self._out.append(do.Unblock(ready))
            elif waiting.state is State.QUEUED:
                self._recorder.note(waiting.task_id, "blocks free", record.task_id)
                self.lanes.ready(waiting)
        self._start_ready()

    @event
    def bytes_free(self, task_id: str) -> None:
        """A queued task need not wait any longer: other engines' tasks with bytes of its windows have ended."""
        record = self.records.get(task_id)
        if record is not None and record.state is State.QUEUED and record.claim is not None and record.claim.ready:
            self._recorder.note(record.task_id, "blocks free", "of another engine")
            self.lanes.ready(record)
            self._start_ready()

    def _move(self, record: TaskState, state: State) -> None:
        if state not in TRANSITIONS[record.state]:
            task_id = record.task_id
            story = self._recorder.story(task_id)
            raise InvariantError(f"{task_id!r} cannot go from {record.state} to {state}\n{story}")
        old, record.state = record.state, state
        self.lanes.moved(record, old, self._now)
