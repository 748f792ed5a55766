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
6. A class overrides the capabilities that it has; `DeviceTier` has none of them, and documents each.
7. Memory that `open` returns contains no old data, neither of this cache before `close` nor of another process.
8. Where `addressable` is True, the first step of `copy_out` and `copy_in` may run outside an asyncio task
   (workers/rank.py): `asyncio.current_task()` is None there, and `asyncio.timeout` raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from transferd.blocks.copyplan import CopyPlan
from transferd.blocks.layout.base import Arena, BlockLayout
from transferd.config import Config
from transferd.errors import InvariantError
from transferd.runtime.threads import Threads
from transferd.tiers.extents import Extents
from transferd.tiers.pinned import MEMORY_LOCK, Pinning

# A copy of up to this many bytes costs less on the loop than a trip to a thread and back.
INLINE_BYTES = 256 * 1024


class HostMemory(Protocol):
    """A page-aligned range of host memory (staging or the pinned pool). Its maker owns it; others change nothing.

    view: all of it, writable, format 'B'.
    pinned: False if the memory could not be pinned; copies still work, more slowly.
    urgent: whether copies from and to this memory are exempt from bandwidth limits, because an engine waits for them.
    rank: the rank of the tensor-parallel group that it serves; 0 if it serves all.
    lender: whose part it is where each rank lends to a pool: the same for one rank's engines. None: nobody's.
    """

    nbytes: int
    view: memoryview
    pinned: bool
    urgent: bool
    rank: int

    @property
    def address(self) -> int: ...

    @property
    def lender(self) -> Hashable: ...


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """What another process needs to map this memory.

    kind: the mechanism.
    data: the mechanism's own fields.

    The data of every kind includes `owner` (owner.py) and `arrays` (arrays.py).
    """

    kind: str
    data: dict[str, Any]


class DeviceTier(ABC):
    """One rank's device memory; see the module's contract. Classes of other packages also subclass it.

    rank: the number of the rank.
    device: the index of its device.
    on_lost: the daemon sets it. The tier calls it on the loop, with the cause, when it finds that the device is lost,
        even while no copy runs.
    """

    rank: int
    device: int | str
    on_lost: Callable[[str], None] | None = None

    attaches: ClassVar[bool] = False
    """Whether `attach` works. Such a class also implements `extents`."""

    timelines: ClassVar[bool] = False
    """Whether `reached` works. Such a class that attaches also implements `with_timelines`."""

    windows: ClassVar[bool] = False
    """Whether blocks may share bytes (`cache.windows`). Such a class attaches, and is addressable."""

    outlives_close: ClassVar[bool] = False
    """Whether another process may keep the memory mapped after `close`."""

    addressable: bool = False
    """Whether, while the tier is open, `arena.origin` is an address in this process, and the CPU may read and write
    the blocks there (workers/cpu_blocks.py)."""

    @classmethod
    def configured(
        cls,
        config: Config,  # noqa: ARG003
        layout: BlockLayout,
        rank: int,
        device: int | str,
        threads: Threads,
    ) -> DeviceTier:
        """The tier for a rank of a daemon with this configuration."""
        make: Callable[..., DeviceTier] = cls  # the constructors differ in their further arguments
        return make(layout, rank, device, threads)

    @staticmethod
    def pinning(device: int | str) -> Pinning:  # noqa: ARG004
        """How to pin the host memory of this device's rank. Raises ConfigError, or TierError without the device.

        The daemon calls this first for each rank, so these errors appear before any memory is allocated.
        """
        return MEMORY_LOCK

    @property
    def waiting_s(self) -> float:
        """For how many seconds the current call to the device has not returned."""
        return 0.0

    @property
    @abstractmethod
    def arena(self) -> Arena:
        """The location of the blocks. Valid between `open` and `close`."""

    @abstractmethod
    async def open(self) -> None:
        """Allocate the memory. Raises TierError; then nothing is left behind."""

    async def attach(self, handle: DeviceHandle) -> None:
        """Map memory that an engine allocated, instead of `open`. The engine still owns it.

        The caller has checked that the handle's owner is alive. Raises RequestError (code `layout_mismatch`) if the
        memory does not fit the layout, TierError if it cannot be mapped; then nothing is left behind. Called only on
        classes with `attaches = True`.
        """
        raise InvariantError(f"{type(self).__name__} cannot attach to memory ({handle.kind})")

    @abstractmethod
    async def copy_out(self, plan: CopyPlan, host: HostMemory) -> None:
        """Device → host. `plan` sources are relative to `arena.origin`, targets to `host.address`."""

    @abstractmethod
    async def copy_in(self, plan: CopyPlan, host: HostMemory) -> None:
        """Host → device. `plan` sources are relative to `host.address`, targets to `arena.origin`."""

    async def reached(self, after: tuple[int, int]) -> None:
        """Wait until the engine has advanced this rank's timeline to the number (`client.timeline`).

        Cancelling stops the wait. Called only on classes with `timelines = True`. Raises TierError, RequestError.
        """
        raise InvariantError(f"{type(self).__name__} has no timelines ({after})")

    def extents(self) -> Extents:
        """The bytes that `attach` has mapped, by memory, so that no two ranks get the same byte."""
        return Extents()

    def resolved(self, handle: DeviceHandle) -> DeviceHandle:
        """The handle with the identity of the memory to which it leads now (offered.INODE). In a thread: may block.

        For a tier with names as handles: a name may lead to other memory later. Raises TierError, RequestError.
        """
        return handle

    def with_timelines(self, handle: DeviceHandle) -> DeviceHandle:
        """The handle that an engine offered, extended by the timelines, which the daemon allocated."""
        return handle

    @abstractmethod
    def handle(self) -> DeviceHandle:
        """A handle for an engine that attaches. Raises TierError if this tier's memory cannot be shared."""

    @abstractmethod
    async def close(self) -> None:
        """Free what `open` allocated, or unmap what `attach` mapped."""

    @abstractmethod
    def statistics(self) -> dict[str, Any]:
        """Plain data for `stats` (ranks[].tier), whether open or not. Calls no driver."""
