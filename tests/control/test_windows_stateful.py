"""Dispatchers of three engines with windows over one arena, against pushes, endings, holds and time; checked each step.

The model is a set of bytes for each task. A task holds its place until it was answered, no rank touches its blocks and
every earlier task with bytes of its own has lost its place. A task must run exactly if no such earlier task is left.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.dispatch import check_dispatcher, is_idle, limits, state_of
from transferd.control import instructions as do
from transferd.control.byte_ranges import ByteRanges, WindowGrid
from transferd.control.dispatcher import Dispatcher
from transferd.control.order import AT_WORK, Claim, State, TaskState
from transferd.tasks import ErrorInfo, Lane, RankOutcome, ReadStorageTask, Stop, Task, WriteStorageTask

WINDOWS = 8
LIMITS = limits(
    ranks=1, device_blocks=WINDOWS, host_blocks=0, lane_depth=1000, max_queued_tasks=1000, deadline_slack=1.0
)
# Sizes below, at and above the stride; memory comes again with the other grid. The third engine has a memory more.
GRIDS: list[list[tuple[WindowGrid, ...]]] = [
    [(WindowGrid("arena", 0, 2, 7),), (WindowGrid("arena", 5, 3, 3),)],
    [(WindowGrid("arena", 1, 4, 4),), (WindowGrid("arena", 0, 1, 9),)],
    [(WindowGrid("arena", 3, 5, 2), WindowGrid("else", 0, 1, 3)), (WindowGrid("else", 0, 2, 1),)],
]
engines = st.integers(0, len(GRIDS) - 1)
numbers = st.lists(st.integers(0, WINDOWS - 1), min_size=1, max_size=3, unique=True)


def bytes_of(grids: tuple[WindowGrid, ...], windows: list[int]) -> set[tuple[object, int]]:
    places = ((grid, grid.start + window * grid.stride) for grid in grids for window in windows)
    return {(grid.memory, start + at) for grid, start in places for at in range(grid.nbytes)}


@dataclass(eq=False)
class Place:
    """One admitted task in the order of all engines."""

    engine: int
    task: Task
    bytes: set[tuple[object, int]]
    behind: list[Place]
    answered: bool = False
    touched: bool = False
    gone: bool = False

    def conflicts(self, other: Place) -> bool:
        """A load writes its windows."""
        return Lane.READ in (self.task.lane, other.task.lane) and not self.bytes.isdisjoint(other.bytes)


class WindowsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ranges: ByteRanges[Claim] = ByteRanges()
        self.dispatchers = [Dispatcher(LIMITS, ranges=self.ranges, admitting=False) for _ in GRIDS]
        for engine, dispatcher in enumerate(self.dispatchers):
            dispatcher.hazards.notify = functools.partial(self.free, engine)
        self.grids = [choices[0] for choices in GRIDS]
        self.there = [True for _ in GRIDS]
        self.paused = [False for _ in GRIDS]
        self.wake_at: list[float | None] = [None for _ in GRIDS]
        self.places: dict[str, Place] = {}
        self.todo: deque[tuple[int, do.Instruction]] = deque()
        self.now, self.count = 0.0, 0
        self.carrying_out = False

    @initialize()
    def begin(self) -> None:
        for engine in range(len(GRIDS)):
            self.hear(engine, self.dispatchers[engine].cache_ready(self.now, self.grids[engine]))
            self.hear(engine, self.dispatchers[engine].mappings_changed(self.now, (), {}))

    # --- as a coordinator does ---------------------------------------------------------------------

    def hear(self, engine: int, instructions: list[do.Instruction]) -> None:
        self.todo += [(engine, instruction) for instruction in instructions]
        if self.carrying_out:
            return
        self.carrying_out = True
        while self.todo:
            self.carry_out(*self.todo.popleft())
        self.carrying_out = False
        for place in self.places.values():  # in the order of admission: once through is enough
            place.gone = place.answered and not place.touched and all(other.gone for other in place.behind)
        self.places = {task_id: place for task_id, place in self.places.items() if not place.gone}

    def carry_out(self, engine: int, instruction: do.Instruction) -> None:
        if isinstance(instruction, do.Start):
            place = self.places[instruction.task.task_id]
            assert place.engine == engine
            for other in self.places.values():
                if other is not place and other.touched:
                    assert not place.conflicts(other), (place.task, other.task)
            place.touched = True
        elif isinstance(instruction, do.Publish):
            self.places[instruction.task.task_id].answered = True
        elif isinstance(instruction, do.ExpireRound):
            place = self.places[instruction.task_id]
            late = RankOutcome(0, error=ErrorInfo("expired", "late"), stop=Stop.EXPIRED)
            self.hear(
                engine,
                self.dispatchers[engine].round_merged(
                    self.now, instruction.task_id, place.task.merge([late]), (0,), False
                ),
            )
        elif isinstance(instruction, do.WakeAt):
            self.wake_at[engine] = instruction.when
        elif isinstance(instruction, do.Unblock):
            assert instruction.claim.table.notify is not None
            instruction.claim.table.notify(instruction.claim)

    def free(self, engine: int, claim: Claim) -> None:
        assert isinstance(claim.owner, TaskState)
        self.hear(engine, self.dispatchers[engine].bytes_free(self.now, claim.owner.task_id))

    # --- what engines do ---------------------------------------------------------------------------

    @rule(engine=engines, windows=numbers, reads=st.booleans(), timeout=st.sampled_from([1.0, 5.0, 60.0]))
    def push(self, engine: int, windows: list[int], reads: bool, timeout: float) -> None:
        self.count += 1
        task_id, keys = f"t{self.count}", [f"{self.count} {window}" for window in windows]
        kind = ReadStorageTask if reads else WriteStorageTask
        task = kind(task_id=task_id, keys=keys, gpu_block_ids=windows, timeout=timeout)
        grids = self.grids[engine]
        place = Place(engine, task, bytes_of(grids, windows), [])
        place.behind = [other for other in self.places.values() if place.conflicts(other)]
        twice = reads and any(len(bytes_of((grid,), windows)) < len(windows) * grid.nbytes for grid in grids)
        self.places[task_id] = place
        if twice or not self.there[engine]:
            self.hear_refusal(engine, task)
            del self.places[task_id]
        else:
            self.hear(engine, self.dispatchers[engine].submit(self.now, b"c", self.count, task))

    def hear_refusal(self, engine: int, task: Task) -> None:
        instructions = self.dispatchers[engine].submit(self.now, b"c", self.count, task)
        assert [type(instruction) for instruction in instructions] == [do.Reply]
        assert isinstance(instructions[0], do.Reply)
        error = instructions[0].result.error
        assert error is not None
        assert error.code == ("duplicate_id" if self.there[engine] else "cleared")

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        place = self.places[data.draw(st.sampled_from(sorted(self.places)))]
        self.hear(place.engine, self.dispatchers[place.engine].cancel(self.now, place.task.task_id))

    @rule(engine=engines)
    def pause_or_resume(self, engine: int) -> None:
        self.paused[engine] = not self.paused[engine]
        dispatcher = self.dispatchers[engine]
        paused = self.paused[engine]
        self.hear(engine, dispatcher.hold(self.now, "pause") if paused else dispatcher.resume(self.now))

    @rule(engine=engines, other=st.integers(0, 1))
    def memory_goes_and_comes(self, engine: int, other: int) -> None:
        """It goes at once, and comes when no rank touches it any more, perhaps elsewhere."""
        if self.there[engine]:
            self.there[engine] = False
            self.hear(
                engine, self.dispatchers[engine].withdraw_cache(self.now, ErrorInfo("cleared", "no memory"), True)
            )
        elif self.dispatchers[engine].empty:
            self.there[engine] = True
            self.grids[engine] = GRIDS[engine][other]
            self.hear(engine, self.dispatchers[engine].cache_ready(self.now, self.grids[engine]))

    # --- what ranks and time do --------------------------------------------------------------------

    def touched(self) -> list[str]:
        return sorted(task_id for task_id, place in self.places.items() if place.touched)

    @precondition(lambda self: self.touched())
    @rule(data=st.data())
    def rank_ends(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.touched())))

    def end(self, task_id: str) -> None:
        place = self.places[task_id]
        place.touched = False
        if place.answered:
            self.hear(place.engine, self.dispatchers[place.engine].rank_left(self.now, task_id, 0))
        else:
            merged = place.task.merge([RankOutcome(0, range(place.task.blocks))])
            self.hear(place.engine, self.dispatchers[place.engine].round_merged(self.now, task_id, merged, ()))

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [(when, engine) for engine, when in enumerate(self.wake_at) if when is not None and when <= until]:
            when, engine = min(due)
            self.now, self.wake_at[engine] = max(self.now, when), None
            self.hear(engine, self.dispatchers[engine].deadline_reached(self.now))
        self.now = until

    # --- what must always hold ---------------------------------------------------------------------

    @invariant()
    def a_task_runs_exactly_if_no_earlier_one_with_its_bytes_has_a_place(self) -> None:
        for place in self.places.values():
            state = state_of(self.dispatchers[place.engine], place.task.task_id)
            waits = any(not other.gone for other in place.behind)
            if state is State.QUEUED and not self.paused[place.engine]:
                assert waits, f"nothing is in the way of {place.task}"
            if state in AT_WORK:
                assert not waits, place.task

    @invariant()
    def the_books_agree(self) -> None:
        assert len(self.ranges._claims) == len(self.places)
        for dispatcher in self.dispatchers:
            if not dispatcher.empty:  # else a cancelled task of it may wait for another engine's
                check_dispatcher(dispatcher)

    def teardown(self) -> None:
        for engine in range(len(GRIDS)):
            self.hear(engine, self.dispatchers[engine].resume(self.now))
        while touched := self.touched():
            self.end(touched[0])
        assert not self.places, "nothing waits for ever"
        assert all(dispatcher.empty and is_idle(dispatcher.hazards) for dispatcher in self.dispatchers)
        assert not self.ranges._claims
        assert not self.ranges._tables


WindowsMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestWindows = WindowsMachine.TestCase
