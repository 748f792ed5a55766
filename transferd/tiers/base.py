"""The contract of a device tier: one rank's KV cache memory, and copies between it and host memory.

Guaranteed by the caller (workers):

1. Plans come from `copyplan.plan_copy`: every run lies inside the device arena and inside the host region passed
   with the plan, targets do not overlap, and the host side is staging or the pinned pool.
2. Two running copies never touch the same device bytes if one of them writes (the dispatcher orders them). Any
   number of other copies may run at the same time, in both directions.
3. `open`, or `attach` instead of it, comes before everything else; `close` comes after every copy has returned.
   `open` or `attach` may follow again: clearing a cache closes its memory, restoring it opens new memory.

Duties of an implementation:

1. `copy_out` / `copy_in` return only after the last byte has arrived. They copy any byte count exactly and touch
   nothing outside the runs.
2. They never block the event loop for longer than a copy of INLINE_BYTES takes.
3. Cancelling the awaiting task must not leave a running copy that the caller does not know about: `copy_out` and
   `copy_in` return only when no byte moves any more. A tier that can stop a copy half-way registers a future whose
   cancellation stops the copy (`runtime.threads.noted`), and then raises CancelledError; others run a copy to its end.
4. A failed copy raises `TierError`; a device that will never work again raises `DeviceLost`.
5. `close` frees everything that `open` allocated, or unmaps what `attach` mapped, exactly once. It finishes even if
   a step fails, and raises the first error.
6. A class states what it supports besides `open`. `attaches = True`: `attach` works. `outlives_close = True`:
   another process may keep the memory mapped after `close`. `timelines = True`: `reached` works, and `with_timelines`
   if it attaches, too.
7. Memory that `open` returns contains no old data, neither of this cache before `close` nor of another process.
8. A class may report what it notices by itself. `on_lost`: an attribute that the daemon sets to a function; the tier
   calls it on the loop, with the cause, when it finds that the device is lost, even while idle. `waiting_s`: for how
   many seconds the current call to the device has not returned.
9. `addressable = True`, on a class or an instance: while the tier is open, `arena.origin` is an address in this
   process, and the CPU may read and write the blocks there (workers/in_place.py). The first step of `copy_out` and
   `copy_in` may run outside an asyncio task (workers/rank.py), where `asyncio.current_task()` is None and
   `asyncio.timeout` raises.
10. A class with `attaches` also has `extents() -> list[Extent]`: which bytes of which memory `attach` has mapped
   (extents.py), so that no two ranks get the same byte (claims.py). It may have `resolved(handle) -> DeviceHandle`: the
   handle with what identifies the memory to which it leads now (offered.INODE), if its text does not. Blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from transferd.blocks.copyplan import CopyPlan
from transferd.blocks.layout.base import Arena

# A copy of up to this many bytes costs less on the loop than a trip to a thread and back.
INLINE_BYTES = 256 * 1024


class HostMemory(Protocol):
    """A page-aligned range of host memory (staging or the pinned pool). Its maker owns it."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def view(self) -> memoryview:
        """All of it, writable, format 'B'."""
        ...

    @property
    def pinned(self) -> bool:
        """False if the memory could not be pinned; copies still work, more slowly."""
        ...

    @property
    def urgent(self) -> bool:
        """Whether copies from and to this memory are exempt from bandwidth limits, because an engine waits for them."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """What another process needs to map this memory. kind: the mechanism. data: the mechanism's own fields.

    The data of every kind includes `owner` (owner.py) and `arrays` (arrays.py).
    """

    kind: str
    data: dict[str, Any]


class DeviceTier(Protocol):
    """One rank's device memory. See the module's contract."""

    rank: int
    device: int

    @property
    def arena(self) -> Arena:
        """The location of the blocks. Valid between `open` and `close`."""
        ...

    async def open(self) -> None:
        """Allocate the memory. Raises TierError; then nothing is left behind."""
        ...

    async def attach(self, handle: DeviceHandle) -> None:
        """Map memory that an engine allocated, instead of `open`. The engine still owns it.

        The caller has checked that the handle's owner is alive. Raises RequestError (code `layout_mismatch`) if the
        memory does not fit the layout, TierError if it cannot be mapped; then nothing is left behind. Called only on
        classes with `attaches = True`.
        """
        ...

    async def copy_out(self, plan: CopyPlan, host: HostMemory) -> None:
        """Device → host. `plan` sources are relative to `arena.origin`, targets to `host.address`."""
        ...

    async def copy_in(self, plan: CopyPlan, host: HostMemory) -> None:
        """Host → device. `plan` sources are relative to `host.address`, targets to `arena.origin`."""
        ...

    async def reached(self, after: tuple[int, int]) -> None:
        """Wait until the engine has advanced this rank's timeline to the number (`client.timeline`).

        Cancelling stops the wait. Called only on classes with `timelines = True`. Raises TierError, RequestError.
        """
        ...

    def handle(self) -> DeviceHandle:
        """A handle for an engine that attaches. Raises TierError if this tier's memory cannot be shared."""
        ...

    async def close(self) -> None: ...
    def statistics(self) -> dict[str, Any]:
        """Plain data for `stats` (ranks[].tier), whether open or not. Calls no driver."""
        ...
