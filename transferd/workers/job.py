"""A running task: what its ranks share, and the signal that stops them."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transferd.blocks.copyplan import CopyPlan, plan_copy
from transferd.blocks.formats import ObjectFormat
from transferd.blocks.layout.base import Geometry
from transferd.runtime.compat import cancelled_from_outside
from transferd.runtime.threads import noted
from transferd.storage.lru import Use
from transferd.tasks import ReadStorageTask, Stop, Task, WriteStorageTask

MOST_PLANS = 64  # plans kept per task: its ranks are rarely further apart
SHARED_BLOCKS = 64  # beyond this many blocks, a copy costs so much more than its plan that sharing gains nothing


@dataclass(slots=True, eq=False)
class StopSignal:
    """Tells every rank of one task to end early, and wakes those that are waiting.

    Set once and never cleared. It does not abort bytes in flight: a waiter stops waiting for them, and the
    memory they use stays leased until they have ended.
    """

    reason: Stop | None = None
    _waiters: set[asyncio.Future[None]] = field(default_factory=set)
    _copies: dict[int, list[asyncio.Future[Any]]] = field(
        default_factory=dict
    )  # by the id() of the list: each copy's work

    def set(self, reason: Stop) -> None:
        if self.reason is None:
            self.reason = reason
            for waiter in self._waiters:
                _wake(waiter)
            for works in self._copies.values():
                for work in works:
                    work.cancel()  # does nothing once a thread has taken it (runtime/threads.py)

    async def copied(self, copying: Coroutine[Any, Any, None]) -> bool:
        """Await a copy. False: the signal was set before every byte had moved, and no byte moves from now on.

        So a copy that queues behind a hung one never runs after its task was answered. A copy that has begun
        runs to its end, or to where its tier can stop it.
        """
        if self.reason is not None:
            copying.close()
            return False
        works: list[asyncio.Future[Any]] = []
        before = noted.get()
        noted.set(works)
        self._copies[id(works)] = works
        try:
            await copying
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.reason is None or task is None or cancelled_from_outside(task):  # not our cancellation
                raise
            return False
        finally:
            if noted.get() is works:  # not if its task abandoned it, and it is collected in another context
                noted.set(before)
            del self._copies[id(works)]
        return True

    async def race(self, future: asyncio.Future[Any]) -> bool:
        """Wait until `future` is done (True) or the signal is set first (False). Never cancels `future`."""
        if future.done() or self.reason is not None:
            return future.done()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(_: object) -> None:
            _wake(waiter)

        future.add_done_callback(wake)
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            future.remove_done_callback(wake)
        return future.done()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


@dataclass(slots=True, eq=False)
class Job:
    """A started task, shared by all its ranks. It caches what is the same for each rank.

    started_at, admitted_at: monotonic seconds. arrivals: (rank, when it was done), in order.
    use: groups every rank's storage accesses as one use (storage/lru.py).
    queue_s: how long it waited for its start. blocks: the task's.
    ids: the part of each key that goes into its object name, in order; empty before `key_ids`, and for swaps.
    parts: by number of layers, the ranks that have said so.
    part_there: called with the job, a rank and a number of layers, when all of the task's blocks have these first
        layers there.
    """

    task: Task
    blocks: int
    generation: str
    admitted_at: float
    started_at: float
    queue_s: float
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    stop: StopSignal = field(default_factory=StopSignal)
    use: Use = field(default_factory=Use)
    ids: Sequence[str] = ()
    part_there: Callable[[Job, int, int], None] = lambda job, rank, layers: None  # noqa: ARG005
    parts: dict[int, set[int]] = field(default_factory=dict)
    _plans: dict[Hashable, CopyPlan] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.use.until = self.admitted_at + self.task.timeout
        if isinstance(self.task, WriteStorageTask):
            self.use.start = self.task.start_write_block_idx
            self.use.stop = self.use.start + self.blocks
            self.use.shared = self.task.shared is True
        elif isinstance(self.task, ReadStorageTask):
            self.use.start = self.task.start_read_block_idx

    def key_ids(self, objects: ObjectFormat) -> Sequence[str]:
        """Compute `ids`. Only the first rank needs to: all ranks use the same format for object names."""
        self.ids = objects.ids(getattr(self.task, "keys", ()))
        return self.ids

    def under(self, objects: ObjectFormat, keys: Sequence[str]) -> Job:
        """The same job with its blocks named by these keys instead of the task's."""
        return dataclasses.replace(self, ids=objects.ids(keys))

    def plan(self, key: Hashable, make: Callable[[], CopyPlan]) -> CopyPlan:
        """The plan cached under `key`, made on first use. Ranks with the same geometry share it."""
        plan = self._plans.get(key)
        if plan is None:
            plan = self._keep(key, make())
        return plan

    def copy_plan(
        self, source: Geometry, source_ids: Sequence[int], target: Geometry, target_ids: Sequence[int]
    ) -> CopyPlan:
        """See `plan_copy`. Ranks with the same geometries and the same slots share the plan of a small chunk."""
        if len(source_ids) > SHARED_BLOCKS:
            return plan_copy(source, source_ids, target, target_ids)
        key = source, tuple(source_ids), target, tuple(target_ids)
        return self._plans.get(key) or self._keep(key, plan_copy(source, source_ids, target, target_ids))

    def _keep(self, key: Hashable, plan: CopyPlan) -> CopyPlan:
        if len(self._plans) >= MOST_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return plan
