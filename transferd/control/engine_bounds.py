"""Bounds of all engines of a daemon together: on admitted tasks (Total), and on host memory (HostBudget)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from transferd.config import ServerSection
from transferd.control.order import Lanes, TaskState
from transferd.errors import RequestError, TransferError
from transferd.observability.report import BudgetReport
from transferd.tasks import ErrorInfo


@dataclass(slots=True)
class Total:
    """The bounds of [server], for all engines together. Those of an engine that registers are a part of these.

    Beyond a bound, only an engine below its equal share is admitted. So a flooding engine keeps no other engine out,
    and the total never exceeds twice the bound.

    engines: the lanes of those that exist now; the daemon keeps the list.
    """

    server: ServerSection
    engines: list[Lanes] = field(default_factory=list)

    def refusal(self, asks: Lanes, record: TaskState) -> ErrorInfo | None:
        """Why the asking engine may not admit this task now; None if it may.

        All engines are asked only for one that has its share already: others' tasks cost the same beside 1,000 engines.
        """
        engines, lane, most = self.engines, record.lane, self.server
        share = len(engines)
        if share < 2:
            return None
        if (mine := asks.queued) >= most.max_queued_tasks // share:
            queued = sum(one.queued for one in engines)
            if queued >= most.max_queued_tasks:
                return ErrorInfo("queue_full", f"the queue is full: {queued} tasks of all engines, {mine} of this one")
        if (mine := asks.hazards.nbytes) >= max(1, most.max_queued_bytes // share):
            held = sum(one.hazards.nbytes for one in engines)
            if held + record.arguments > most.max_queued_bytes:
                message = f"admitted tasks hold {held} bytes of keys, ids and token_ids, {mine} of them this engine's"
                return ErrorInfo("queue_full", message)
        if (mine := asks.loads[lane].nbytes) >= max(1, most.max_inflight_bytes // share):
            moving = sum(one.loads[lane].nbytes for one in engines)
            if moving + record.nbytes > most.max_inflight_bytes:
                message = f"all engines have {moving} bytes in flight in this lane, this one has {mine}"
                return ErrorInfo("bytes_in_flight", message)
        return None


class HostBudget:
    """Books bytes of host memory: host blocks, staging, and a device cache that the daemon makes in shared memory.

    An engine's memory is booked before a byte is allocated, and given back after it was freed. So engines that are
    being created or removed count as well, and the sum never exceeds the budget.

    most: for all engines together.
    each: for one of them.
    taken: the bytes that are booked now.
    """

    def __init__(self, most: int, each: int = 0) -> None:
        """each: 0 for no quota within `most`."""
        self.most = int(most)  # a Size would print with a unit, beside plain bytes
        self.each = min(int(each or most), self.most)
        self._booked: dict[Hashable, int] = {}

    @property
    def taken(self) -> int:
        return sum(self._booked.values())

    @property
    def left(self) -> int:
        return max(0, self.most - self.taken)

    def book(self, holder: Hashable, name: str, nbytes: int) -> None:
        """Take `nbytes` for the engine called `name`, until `give_back(holder)`.

        Raises RequestError if that can never succeed, TransferError if it may succeed later, both with code `no_room`.
        """
        what = f"the engine {name!r} needs {nbytes} bytes of host memory (host_blocks, staging)"
        if nbytes > self.each:
            raise RequestError(f"{what}, but one may have {self.each} (engines.host_memory_each)", code="no_room")
        if nbytes > self.left:
            message = f"{what}, but only {self.left} are left of {self.most} for all engines (engines.host_memory)"
            raise TransferError(message, code="no_room")
        self._booked[holder] = nbytes

    def give_back(self, holder: Hashable) -> None:
        """Return what this holder booked. Does nothing if it holds none."""
        self._booked.pop(holder, None)

    def statistics(self) -> BudgetReport:
        return BudgetReport(most=self.most, each=self.each, taken=self.taken, left=self.left)
