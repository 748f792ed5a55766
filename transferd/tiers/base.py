"""The contract of a device tier: one rank's KV cache memory, and copies between it and host memory.

Guaranteed by the caller (workers):

1. Plans come from `copyplan.plan_copy`: every run lies inside the device arena and inside the host
   region given with it, targets do not overlap, and a plan's host side fits `host.staging` or is
   the pinned pool.
2. No two copies under way touch the same device bytes with at least one writing (dispatch orders
   them); any number of other copies may be under way at once, in both directions.
3. `open`, or `attach` in its place, is awaited before anything else, `close` after every copy has returned.
   After `close`, `open` or `attach` may come again: a cache is cleared and made anew.

Duties of an implementation:

1. `copy_out` / `copy_in` return after the last byte has arrived, and not before; they copy any byte
   count exactly and touch nothing outside the runs.
2. They never block the event loop for longer than a copy of INLINE_BYTES takes.
3. Once started, a copy runs to its end: cancelling the awaiting task must not leave a copy running
   that the caller does not know of. (Callers shield; a tier need not handle cancellation.)
4. A failed copy raises `TierError`; a device that will never work again raises `DeviceLost`.
5. `close` frees everything that `open` made, or unmaps what `attach` mapped, exactly once, and keeps the
   first error.
6. A class that can do more than create for itself says so: `attaches = True`: `attach` works;
   `outlives_close = True`: who has its memory mapped may keep it mapped over `close`.
7. Memory that `open` returns holds nothing of anyone's: what a cache held before it was closed is not in it.
8. A class with `attaches` also has `extents() -> list[Extent]`: which bytes of which memory `attach` has mapped
   (extents.py), so that no byte is given to two ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from transferd.blocks.copyplan import CopyPlan
from transferd.blocks.layout.base import Arena

# Up to this many bytes a copy on the loop costs less than handing it to a thread and back.
INLINE_BYTES = 256 * 1024


class HostMemory(Protocol):
    """A page-aligned range of host memory (staging or the pinned pool). Owned by whoever made it."""

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
        """False when locking it in memory was refused; copies still work, more slowly."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceHandle:
    """What another process needs to map this memory. `kind` names the mechanism, `data` is its own.

    All kinds have in `data` the `owner` (owner.py) and the `arrays` (arrays.py).
    """

    kind: str
    data: dict[str, Any]


class DeviceTier(Protocol):
    """One rank's device memory. See the module's contract."""

    rank: int
    device: int

    @property
    def arena(self) -> Arena:
        """Where the blocks lie. Valid between open and close."""
        ...

    async def open(self) -> None:
        """Allocate (or attach) and make ready. Raises TierError; then nothing is left behind."""
        ...

    async def attach(self, handle: DeviceHandle) -> None:
        """Map memory that the engine made, in place of `open`; the engine goes on owning it.

        The caller has checked that the handle's owner lives. Raises RequestError (code `layout_mismatch`)
        for memory that does not fit the layout, TierError when it cannot be mapped; then nothing is left
        behind. Only classes that say `attaches = True` are asked.
        """
        ...

    async def copy_out(self, plan: CopyPlan, host: HostMemory) -> None:
        """Device → host. `plan` sources are relative to `arena.origin`, targets to `host.address`."""
        ...

    async def copy_in(self, plan: CopyPlan, host: HostMemory) -> None:
        """Host → device. `plan` sources are relative to `host.address`, targets to `arena.origin`."""
        ...

    def handle(self) -> DeviceHandle:
        """For an engine that attaches. Raises TierError where this tier cannot be shared."""
        ...

    async def close(self) -> None: ...
    def statistics(self) -> dict[str, Any]: ...
