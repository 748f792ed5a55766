"""How ranks agree: a barrier that resets itself because there is nothing to reset.

Theory of operation
-------------------
A *round* is the meeting of all ranks on one task, and it is a separate object. Each rank does its share of the
task and arrives with an outcome; the last arrival merges all outcomes, once, and ends the round. A round that
has ended stays ended, and the next task gets a new round. So there is no state to restore, no moment at which
a rank still in the old round could be mistaken for one in the new round, and no `reset()` to get wrong.

A round is open or ended, and three things end it:

    the last live rank arrives      merged from what the ranks brought
    expire()                        ranks that had not arrived get an outcome of code `expired`
    rank_died()                     ranks that had not arrived get an outcome of code `rank_died`;
                                    each names the dead rank, which is the root cause

Once a rank is dead, a round that it has not reached can never be complete, and waiting for the live ranks would
only delay the answer. So its death ends every open round that it had not reached, at once, and `open` itself
ends every later round. Rounds that it had reached go on.

A round may end before some rank has arrived. That rank may still touch the task's blocks. It *owes* an arrival
until it arrives (late) or dies; until then its task id cannot be opened again, or the old outcome would be
mistaken for one of the new round.

Everything happens inside the calls, on one thread: an arrival costs a dict lookup, the last one also the merge.
The barrier creates no task and no timer, and a future only for each `Round.wait()` that has to wait. It never
reads the time; the owner of the deadlines calls `expire`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from transferd.errors import InvariantError, RankDied
from transferd.runtime.aio import resolve
from transferd.tasks import ErrorInfo, RankOutcome, RankResult, Status, Stop, TaskResult

Merge = Callable[[Sequence[RankOutcome]], TaskResult]


class Round(msgspec.Struct, eq=False):
    """The meeting of all ranks on one task. Each task has a new one, so there is nothing to reset.

    outcomes: rank → its outcome, in the order of arrival. Only the barrier changes it.
    merged: the merged outcome of all ranks; None while open, and never changed once set.
    missing: live ranks that had not arrived when the round ended, ascending. They may still be working on the
        task's blocks. Empty while open, and for a round that `open` ended, because no rank had started.
    waiters: those that wait for its end, in order.
    """

    task_id: str
    merge: Merge
    on_complete: Callable[[Round], None] | None
    outcomes: dict[int, RankOutcome] = {}
    merged: TaskResult | None = None
    missing: tuple[int, ...] = ()
    waiters: dict[asyncio.Future[None], None] = {}

    async def wait(self) -> TaskResult:
        """Wait until the round ends. Any number of callers may wait; cancelling one does not affect the others."""
        if self.merged is None:
            waiter = asyncio.get_running_loop().create_future()
            self.waiters[waiter] = None
            try:
                await waiter
            finally:
                del self.waiters[waiter]
        assert self.merged is not None
        return self.merged

    def __repr__(self) -> str:
        if self.merged is None:
            return f"<Round {self.task_id!r} open, arrived: {_ranks(self.outcomes)}>"
        left_behind = f", missing: {_ranks(self.missing)}" if self.missing else ""
        return f"<Round {self.task_id!r} {self.merged.status}{left_behind}>"


class RankBarrier:
    """The meeting point of ranks 0 … parties-1, once for each task.

    It has eight properties. Each has a test of its name in tests/test_barrier.py; test_barrier_stateful.py
    checks all of them against a naive model:

    1. A round completes exactly once: one merge, one `on_complete`, one value of `merged`.
    2. A second arrival of a rank in an open round is an error that names both arrivals.
    3. An arrival for a round that has ended, or never existed, is counted and dropped.
    4. A failed rank still arrives, with its failure.
    5. A deadline completes the round and names the missing ranks.
    6. A rank's death completes every open round that it had not reached, and every round opened later;
       their outcomes name the dead rank.
    7. Cancelling a waiter affects neither the round nor the other waiters.
    8. Rounds of different tasks never mix, in any interleaving.

    Not thread-safe: call it from the thread of one event loop. It stores one object for each open round, and one
    small set for each ended round while a live rank owes its arrival.
    """

    def __init__(self, parties: int) -> None:
        if parties < 1:
            raise ValueError(f"a barrier needs at least one rank, not {parties}")
        self.parties = parties
        self._rounds: dict[str, Round] = {}  # open ones, in the order of opening
        self._owing: dict[str, set[int]] = {}  # ended rounds: live ranks that have not arrived
        self.dead: dict[int, RankDied] = {}  # in the order of death
        self.counts = Counter(completed=0, expired=0, late=0)  # since the start

    # --- the life of a round ------------------------------------------------------------------------

    def open(self, task_id: str, merge: Merge, on_complete: Callable[[Round], None] | None = None) -> Round:
        """Start a round.

        merge: called once, with one outcome per rank in the order of arrival. If it raises, the round
            ends as `failed` with code `internal`; it is never lost.
        on_complete: called once, synchronously, by the call that ends the round, after `merged` is set. It may
            call back into the barrier. If it raises, the error reaches the caller of that call, and the round
            has ended all the same.

        If a rank is dead, the round has already ended when this returns, and `on_complete` has been called:
        check `merged`, and start no rank.

        Raises InvariantError if the task's round is open, or if a rank has not yet left its last one.
        """
        if task_id in self._rounds:
            raise InvariantError(f"the round of {task_id!r} is open already: {self._rounds[task_id]!r}")
        if task_id in self._owing:
            still = _ranks(self._owing[task_id])
            raise InvariantError(f"the round of {task_id!r} cannot open: rank {still} has not left its last one")
        round_ = Round(task_id, merge, on_complete)
        if self.dead:
            self._fill_after_death(round_)
            self._end(round_)
        else:
            self._rounds[task_id] = round_
        return round_

    def arrive(self, task_id: str, outcome: RankOutcome) -> bool:
        """One rank is done, whether it succeeded or failed. False if the round has ended, or never existed.

        Raises InvariantError on a second arrival of a rank in an open round (the first one counts)
        and for a rank that does not exist.
        """
        round_ = self._rounds.get(task_id)
        if round_ is None:
            self.counts["late"] += 1
            if task_id in self._owing:
                self._settle(task_id, outcome.rank)
            return False
        outcomes, rank = round_.outcomes, outcome.rank
        if rank in outcomes:
            raise InvariantError(
                f"rank {rank} arrived twice at {task_id!r}: "
                f"first with {_describe(outcomes[rank])}, then with {_describe(outcome)}"
            )
        if not 0 <= rank < self.parties:
            raise InvariantError(f"rank {rank} arrived at {task_id!r}, but ranks are 0 … {self.parties - 1}")
        outcomes[rank] = outcome
        if len(outcomes) == self.parties:
            del self._rounds[task_id]
            self._end(round_)
        return True

    def expire(self, task_id: str) -> tuple[int, ...]:
        """Complete the round now; missing ranks get an outcome with code "expired". Returns who was missing.

        Does nothing and returns () for a round that has ended or never existed.
        """
        round_ = self._rounds.pop(task_id, None)
        if round_ is None:
            return ()
        self._leave_behind(round_)
        error = ErrorInfo(str(Stop.EXPIRED), f"the deadline passed; missing ranks: {_ranks(round_.missing)}")
        for rank in round_.missing:
            round_.outcomes[rank] = RankOutcome(rank, error=error, stop=Stop.EXPIRED)
        self.counts["expired"] += 1
        self._end(round_)
        return round_.missing

    def rank_died(self, rank: int, cause: str) -> None:
        """End every open round that this rank has not reached; end every later round as soon as it opens.

        All these rounds end even if an `on_complete` raises; the first such error is raised at the end. A second
        death of the same rank changes nothing: the first cause counts.

        Raises InvariantError for a rank that does not exist.
        """
        if not 0 <= rank < self.parties:
            raise InvariantError(f"rank {rank} died, but ranks are 0 … {self.parties - 1}")
        if rank in self.dead:
            return
        self.dead[rank] = RankDied(rank, cause)
        for task_id in [task_id for task_id, ranks in self._owing.items() if rank in ranks]:
            self._settle(task_id, rank)
        first_error: Exception | None = None
        for round_ in [r for r in self._rounds.values() if rank not in r.outcomes]:
            if self._rounds.get(round_.task_id) is not round_:
                continue  # an on_complete of this very loop ended it
            del self._rounds[round_.task_id]
            self._leave_behind(round_)
            self._fill_after_death(round_)
            try:
                self._end(round_)
            except Exception as error:  # noqa: BLE001 - one listener's bug must not keep the other rounds open
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    # --- statistics ---------------------------------------------------------------------------------

    def missing(self, task_id: str) -> tuple[int, ...]:
        """Ranks that have not arrived at the task's open round, ascending; () if there is none."""
        round_ = self._rounds.get(task_id)
        return () if round_ is None else self._absent(round_)

    @property
    def rounds(self) -> Iterable[str]:
        """The ids of the open rounds: a live view."""
        return self._rounds.keys()

    def statistics(self) -> dict[str, int]:
        """The numbers of rounds now (open), and of arrivals that ranks still owe (owing).

        Since the start: completed rounds, those of them that a deadline ended (expired), and dropped arrivals (late).
        """
        return {"open": len(self._rounds), "owing": sum(map(len, self._owing.values())), **self.counts}

    # --- inside -------------------------------------------------------------------------------------

    def _end(self, round_: Round) -> None:
        """End a round that is no longer open and in which every rank has an outcome: merge, wake, call back. Once."""
        if round_.merged is not None:
            raise InvariantError(f"a round ended twice: {round_!r}")
        self.counts["completed"] += 1
        outcomes = list(round_.outcomes.values())
        try:
            round_.merged = round_.merge(outcomes)
        except Exception as error:  # noqa: BLE001 - a bug in a merge must not cost the engine its answer
            round_.merged = _unmergeable(round_.task_id, outcomes, error)
        for waiter in round_.waiters:
            resolve(waiter, None)
        if round_.on_complete is not None:
            round_.on_complete(round_)

    def _absent(self, round_: Round) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.parties) if rank not in round_.outcomes)

    def _settle(self, task_id: str, rank: int) -> None:
        """Record that this rank no longer owes the ended round an arrival: it arrived or died."""
        ranks = self._owing[task_id]
        ranks.discard(rank)
        if not ranks:
            del self._owing[task_id]

    def _leave_behind(self, round_: Round) -> None:
        """Record the live ranks that still owe the ended round an arrival."""
        round_.missing = tuple(rank for rank in self._absent(round_) if rank not in self.dead)
        if round_.missing:
            self._owing[round_.task_id] = set(round_.missing)

    def _fill_after_death(self, round_: Round) -> None:
        """Give every absent rank an outcome: first the dead ranks, which are the cause, then the live ones."""
        absent_dead = [death for rank, death in self.dead.items() if rank not in round_.outcomes]
        for death in absent_dead:
            round_.outcomes[death.rank] = RankOutcome(death.rank, error=ErrorInfo(death.reason, str(death)))
        culprit = absent_dead[0]
        for rank in self._absent(round_):
            error = ErrorInfo(culprit.reason, f"had not arrived when {culprit}")
            round_.outcomes[rank] = RankOutcome(rank, error=error)


def _unmergeable(task_id: str, outcomes: Sequence[RankOutcome], error: Exception) -> TaskResult:
    """The answer when merging itself failed: no blocks, and the bug as the error."""
    bug = InvariantError(f"the outcomes of {task_id!r} could not be merged: {type(error).__name__}: {error}")
    ranks = [
        RankResult(rank=o.rank, status=Status.FAILED, bytes=o.bytes, error=o.error)
        for o in sorted(outcomes, key=lambda o: o.rank)
    ]
    nbytes, cause = sum(o.bytes for o in outcomes), ErrorInfo(bug.reason, str(bug))
    return TaskResult(task_id=task_id, status=Status.FAILED, ranks=ranks, error=cause, bytes=nbytes)


def _describe(outcome: RankOutcome) -> str:
    """Describe one arrival, for the error that names two of them."""
    blocks = f"{len(outcome.moved)} blocks"
    return blocks if outcome.error is None else f"{blocks} and error {outcome.error.code}: {outcome.error.message}"


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks))) or "none"
