"""The host memory of engines that register: one budget for all of them, and a quota for each.

An engine's memory is booked before a byte is allocated, and given back after it was freed. So engines that are being
created or removed count, too, and the sum never exceeds the budget.
"""

from __future__ import annotations

from collections.abc import Hashable

from transferd.errors import RequestError, TransferError
from transferd.observability.report import BudgetReport


class HostBudget:
    """Books bytes of host memory: host blocks, staging, and a device cache that the daemon makes in shared memory.

    most: for all engines together. each: for one of them. taken: booked now.
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
            told = f"{what}, but only {self.left} are left of {self.most} for all engines (engines.host_memory)"
            raise TransferError(told, code="no_room")
        self._booked[holder] = nbytes

    def give_back(self, holder: Hashable) -> None:
        """Return what this holder booked. Does nothing if it holds none."""
        self._booked.pop(holder, None)

    def statistics(self) -> BudgetReport:
        return BudgetReport(most=self.most, each=self.each, taken=self.taken, left=self.left)
