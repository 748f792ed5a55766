"""SimDevice: a device tier on plain memory whose copies take virtual time and go wrong on demand."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.simulation.faults import DeviceFaults, Dice, Gate, take
from tests.support.simulation.memory import MemoryWatch, SimMemory
from transferd.blocks.copyplan import CopyPlan
from transferd.blocks.layout.base import Arena, BlockLayout
from transferd.errors import DeviceLost, InvariantError, TierError
from transferd.runtime.threads import Direction, Threads
from transferd.tiers.base import DeviceHandle, DeviceTier, HostMemory


class SimDevice(DeviceTier):
    """A DeviceTier as a test wants it.

    A copy moves half of its runs at some moment on the way and the rest at its very end, so that
    memory taken back or changed too early shows. It runs to its end also when its waiter is
    cancelled, as a real one would. What a caller guarantees is checked: runs inside both memories,
    no two copies on the same bytes with one of them writing, no copy under way at close.

    faults: the plan, may be replaced at any time. dice: for scripts; operations "open", "copy_out" and
    "copy_in". gate: holds copies that would start now. stuck: holds those that the fault of this name
    befell, until `unstick`. begins: told of each copy before it touches a byte: its name, plan and host
    memory. The order of arguments is the registry's.
    """

    outlives_close = True  # for whoever has mapped it
    addressable = False  # a test may set it: then storage loads blocks where they lie
    timelines = True

    def __init__(
        self,
        layout: BlockLayout,
        rank: int = 0,
        device: int = 0,
        threads: Threads | None = None,
        *,
        faults: DeviceFaults | None = None,
        rng: random.Random | None = None,
        watch: MemoryWatch | None = None,
    ) -> None:
        self.rank = rank
        self.device = device
        self.faults = faults or DeviceFaults()
        self.dice = Dice(rng, f"device {rank}")
        self.watch = watch or MemoryWatch()
        self.gate = Gate()
        self.stuck = Gate()
        self.stuck.hold()
        self.begins: Callable[[str, CopyPlan, HostMemory], None] = _nobody_asks
        self.lost = False
        self.counts: Counter[str] = Counter()
        self._layout = layout
        self._threads = threads
        self._memory: SimMemory | None = None
        self._under_way: set[asyncio.Task[None]] = set()
        self._words: Counter[int] = Counter()  # how far each timeline has got
        self._advanced = asyncio.Event()  # set, and replaced, with each advance

    # --- the contract -------------------------------------------------------------------------------

    @property
    def arena(self) -> Arena:
        return Arena(self._layout.device, self._opened.address)

    async def open(self) -> None:
        if self._memory is not None:
            raise TierError(f"the device memory of rank {self.rank} is already open")
        if self.lost:  # its driver answers nothing more in this process
            raise DeviceLost(f"the device of rank {self.rank} is lost")
        if self.dice.draw("open", {}) is not None:
            raise TierError(f"rank {self.rank} has no device memory (simulated)")
        self._memory = SimMemory(self._layout.device.extent)

    async def attach(self, handle: DeviceHandle) -> None:
        raise TierError(f"simulated device memory is made here, not attached ({handle.kind})")

    async def copy_out(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy("copy_out", plan, host)

    async def copy_in(self, plan: CopyPlan, host: HostMemory) -> None:
        await self._copy("copy_in", plan, host)

    async def reached(self, after: tuple[int, int]) -> None:
        slot, number = after
        while self._words[slot] < number:
            self.counts["waits"] += 1
            await self._advanced.wait()

    def handle(self) -> DeviceHandle:
        return DeviceHandle("simulated", {"address": self._opened.address})

    async def close(self) -> None:
        if self._under_way:
            raise InvariantError(f"rank {self.rank}'s device is closed with {len(self._under_way)} copies under way")
        self._memory = None

    def statistics(self) -> dict[str, Any]:
        return {"bytes": self._layout.device.extent, "open": self._memory is not None, "copies": dict(self.counts)}

    # --- for tests ----------------------------------------------------------------------------------

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """All device bytes; offsets are relative to arena.origin. Borrowed; valid while open."""
        return self._opened.array

    def advance(self, after: tuple[int, int]) -> None:
        """The engine's process of this rank has got so far."""
        slot, number = after
        self._words[slot] = max(self._words[slot], number)
        advanced, self._advanced = self._advanced, asyncio.Event()
        advanced.set()

    def unstick(self) -> None:
        """Copies that the fault befell go on to their end, also those that have not come to the point yet."""
        self.stuck.release()
        self.stuck = Gate()
        self.stuck.hold()

    @property
    def under_way(self) -> int:
        """Copies that have not ended."""
        return len(self._under_way)

    # --- inside -------------------------------------------------------------------------------------

    @property
    def _opened(self) -> SimMemory:
        if self._memory is None:
            raise TierError(f"the device memory of rank {self.rank} is not open")
        return self._memory

    async def _copy(self, operation: str, plan: CopyPlan, host: HostMemory) -> None:
        if self.lost:
            raise DeviceLost(f"the device of rank {self.rank} is lost")
        self._check_bounds(operation, plan, host)
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def begin() -> None:
            copying = loop.create_task(self._run(operation, plan, host), name=f"{operation} of rank {self.rank}")
            self._under_way.add(copying)
            copying.add_done_callback(self._under_way.discard)
            copying.add_done_callback(lambda copied: _settle(ended, copied))

        if self._threads is None:
            begin()
        else:  # as on a GPU, a thread hands the copy over, and the device has it from then on
            direction = Direction.OUT if operation == "copy_out" else Direction.IN
            await self._threads.run(direction, lambda: loop.call_soon_threadsafe(begin))
        await ended

    async def _run(self, operation: str, plan: CopyPlan, host: HostMemory) -> None:
        self.begins(operation, plan, host)
        device, outward = self._opened, operation == "copy_out"
        runs, half = plan.runs, len(plan.runs) // 2
        source, target = (device.address, host.address) if outward else (host.address, device.address)
        who = f"{operation} of rank {self.rank}"
        reads = self.watch.enter(source + runs[:, 0], runs[:, 2], writes=False, who=who)
        try:
            writes = self.watch.enter(target + runs[:, 1], runs[:, 2], writes=True, who=who)
            try:
                await self.gate.passed()
                seconds = self.faults.latency.draw(self.dice.rng)
                middle = seconds * self.dice.rng.random() if seconds else 0.0
                fault, stuck = self.dice.draw(operation, self.faults.of_copy()), self.stuck
                await take(middle)
                self._move(runs[:half], device, host, outward)
                if fault == "stuck":
                    await stuck.passed()
                await take(seconds - middle)
                self._fail(fault, operation)
                self._move(runs[half:], device, host, outward)
                self.counts[operation] += 1
            finally:
                self.watch.leave(writes)
        finally:
            self.watch.leave(reads)

    def _fail(self, fault: str | None, operation: str) -> None:
        if fault == "lost":
            self.lost = True
        if self.lost:  # by this copy, or by another one while this one ran
            self.counts["lost"] += 1
            raise DeviceLost(f"the device of rank {self.rank} was lost during {operation} (simulated)")
        if fault == "fail":
            self.counts["failed"] += 1
            raise TierError(f"{operation} of rank {self.rank} failed (simulated)")

    @staticmethod
    def _move(runs: npt.NDArray[np.int64], device: SimMemory, host: HostMemory, outward: bool) -> None:
        source, target = (device.view, host.view) if outward else (host.view, device.view)
        for start, to, nbytes in runs.tolist():
            target[to : to + nbytes] = source[start : start + nbytes]

    def _check_bounds(self, operation: str, plan: CopyPlan, host: HostMemory) -> None:
        sizes = (self._opened.nbytes, host.nbytes) if operation == "copy_out" else (host.nbytes, self._opened.nbytes)
        for column, nbytes in zip((0, 1), sizes, strict=True):
            offsets = plan.runs[:, column]
            if len(offsets) and (offsets.min() < 0 or (offsets + plan.runs[:, 2]).max() > nbytes):
                raise InvariantError(f"a {operation} on rank {self.rank} leaves the memory it was given")


def _nobody_asks(operation: str, plan: CopyPlan, host: HostMemory) -> None:
    """Copies are watched by nobody but MemoryWatch."""


def _settle(ended: asyncio.Future[None], copied: asyncio.Task[None]) -> None:
    error = None if copied.cancelled() else copied.exception()
    if ended.done():  # its waiter was cancelled
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
