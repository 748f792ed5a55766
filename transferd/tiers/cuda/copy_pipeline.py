"""One direction of one device: its streams, its staging, and how a copy gets through them.

Out of the device (into it is the mirror image), cut into chunks that fit a slot:

    kernels   wait slot free · gather → slot · record ready  |  wait … · gather → slot' …
    copies                       wait ready · DMA slot → host · record free  |  wait …

That is the "gather" path. Two slots, two streams: while the DMA engine empties one slot, a kernel fills the
other. Events order everything on the device. The host submits a whole copy at once and does not wait in
between, so a busy host does not slow down a copy that runs. The launch itself carries everything else that a
copy needs on the device (block ids), so there is nothing to keep alive or to free per copy.

The "straight" path issues one DMA per run, directly between cache and host memory. It serves runs so long
that the DMA engine's cost per run does not matter, and copies that cannot be gathered: plans made only of
runs, and host memory in which a block is not one range.

DMAs are submitted in batches (cudaMemcpyBatchAsync) where that pays and the driver supports it, otherwise one
call each. Batches are short, and the pipeline stops using them for good once the driver has refused one:
drivers of 2025 and 2026 refused valid batches and hung on very long ones (vLLM #49276, #40259). It then
submits the DMAs of the refused batch again one by one, which copies the same bytes to the same places.

In both directions a copy waits for the caller's event before it touches device memory: a kernel that the
engine launched earlier may still be reading blocks that a load overwrites.

One of the daemon's copy threads submits, one copy at a time. The pipeline's own thread, asleep in
cuEventSynchronize, sees copies complete (docs/adr/0014).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import structlog

from transferd.blocks.copyplan import CopyPlan, Moves
from transferd.blocks.layout.base import Arena, Geometry
from transferd.errors import Closed, DeviceLost, TierError
from transferd.runtime.threads import start_thread
from transferd.tiers.base import HostMemory
from transferd.tiers.cuda.chunks import CopyChunk, Cutter
from transferd.tiers.cuda.driver import Driver
from transferd.tiers.cuda.kernel import THREADS, Move, is_packed
from transferd.tiers.cuda.owned import CopyHung, Owned
from transferd.tiers.cuda.pinning import is_registered

SLOTS = 2
# A DMA of this length takes about five microseconds on PCIe 5: ten times the DMA engine's cost of starting it, and
# twice the cost of a call of the bindings. Longer runs go straight; shorter DMAs go in batches.
LONG = 256 * 1024
BATCH_MOST = 1024  # DMAs in one batch
CLOSE_S = 10.0  # how long `stop` waits for a copy that hangs; all others have ended before

CopyPath = Literal["gather", "straight"]
Completed = Callable[[TierError | None], None]
Ids = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The kernel, its segment table and the cache it works on: every copy of a tier uses them.

    function: the kernel. table: address of the segment table in device memory.
    """

    cache: Arena
    function: int
    table: int
    cutter: Cutter
    slot_bytes: int


@dataclass(slots=True)
class _StagingSlot:
    address: int
    ready: int  # event: the first stage has filled it
    free: int  # event: the second stage has emptied it


class CopyPipeline:
    """One direction. Owns two streams, SLOTS slots, their events and a thread, until `close`.

    outward: device → host. caller: an event to wait for, or 0. copy_path: prefer this path whenever it is
    possible (for measurements and tests); None: choose by run length. batching: try batches; a refused one sets
    it to False.

    Every method but `submit` requires the context to be current. Raises TierError.
    """

    def __init__(
        self,
        driver: Driver,
        context: int,
        kernel_table: KernelTable,
        *,
        outward: bool,
        caller: int = 0,
        copy_path: CopyPath | None = None,
    ) -> None:
        self.outward = outward
        self._driver = driver
        self._context = context
        self._kernel_table = kernel_table
        self._caller = caller
        self.preferred = copy_path
        self._turn = 0
        self._closed = False
        self._submitting = threading.Lock()
        self._under_way: queue.SimpleQueue[tuple[int, Completed] | None] = queue.SimpleQueue()
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._slots: list[_StagingSlot] = []
        self._owned = Owned()
        self.batching = driver.batches
        self.counts = dict.fromkeys(("gather", "straight"), 0)
        try:
            self._kernels = self._stream(urgent=True)
            self._copies = self._stream(urgent=False)
            for _ in range(SLOTS):
                self._slots.append(self._slot())
            self._waiter = self._start_waiter()
        except BaseException:
            self._owned.release()
            raise

    def _stream(self, *, urgent: bool) -> int:
        stream = self._driver.create_stream(urgent=urgent)
        self._owned.add(lambda: self._driver.destroy_stream(stream))
        return stream

    def _event(self) -> int:
        event = self._driver.create_event()
        self._owned.add(lambda: self._driver.destroy_event(event))
        return event

    def _slot(self) -> _StagingSlot:
        address = self._driver.allocate(self._kernel_table.slot_bytes)
        self._owned.add(lambda: self._driver.free(address))
        return _StagingSlot(address, self._event(), self._event())

    # --- submitting ---------------------------------------------------------------------------------

    def submit(self, plan: CopyPlan, host: HostMemory, completed: Completed) -> None:
        """Submit a whole copy to the device. The pipeline's thread calls `completed` once, at its end.

        Blocks while another copy is being submitted. If it raises, every part of the copy that had begun has
        ended, and `completed` is not called.
        """
        with self._submitting, self._driver.current(self._context):
            if self._closed:
                raise Closed("the copy pipeline is closed")
            done = self._take_event()
            try:
                self._driver.record(done, self._submit(plan, host))
            except BaseException:
                self._idle.put(done)
                self._quiesce()
                raise
            self._under_way.put((done, completed))

    def _take_event(self) -> int:
        """An idle event. There are as many events as copies were ever in flight at once."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return self._event()

    def _quiesce(self) -> None:
        """After a failure: wait until nothing that had begun still moves, so that the failure can be reported."""
        for stream in (self._kernels, self._copies):
            self._driver.synchronize_stream(stream)

    def _submit(self, plan: CopyPlan, host: HostMemory) -> int:
        """Submit, and return the stream that finishes last."""
        moves = self._block_moves(plan)
        if moves is not None and self._gathers(plan, moves):
            self.counts["gather"] += 1
            return self._move_blocks(moves, host)
        self.counts["straight"] += 1
        return self._move_runs(plan, host)

    def _block_moves(self, plan: CopyPlan) -> Moves | None:
        """The plan as moves of blocks, if the kernel can do them."""
        moves = plan.moves
        if moves is None:
            return None
        cache, packed = (moves.source, moves.target) if self.outward else (moves.target, moves.source)
        return moves if cache is self._kernel_table.cache.geometry and is_packed(packed) else None

    def _gathers(self, plan: CopyPlan, moves: Moves) -> bool:
        if self.preferred:
            return self.preferred == "gather"
        return plan.nbytes < LONG * len(moves.source_ids) * len(moves.source.nbytes)

    # --- DMAs ---------------------------------------------------------------------------------------

    def _transfer(self, targets: Addresses, sources: Addresses, sizes: Addresses, *, registered: bool) -> None:
        """One DMA each, on the copy stream. registered: whether the host memory is, which batches require."""
        done = 0
        if self.batching and registered and len(sizes) > 1 and int(sizes.sum()) < LONG * len(sizes):
            done = self._batches(targets, sources, sizes)
        rest = zip(targets[done:].tolist(), sources[done:].tolist(), sizes[done:].tolist(), strict=True)
        for target, source, nbytes in rest:
            self._driver.copy(target, source, nbytes, self._copies)

    def _batches(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> int:
        """Submit batches. Returns how many DMAs: all of them, or those before a refused batch."""
        for start in range(0, len(sizes), BATCH_MOST):
            part = slice(start, start + BATCH_MOST)
            try:
                self._driver.copy_batch(targets[part], sources[part], sizes[part], self._copies)
            except DeviceLost:
                raise
            except TierError as error:
                self.batching = False
                log.warning("the driver refused a batch of copies: submitting copies one by one", reason=str(error))
                return start
        return len(sizes)

    # --- runs, straight -----------------------------------------------------------------------------

    def _move_runs(self, plan: CopyPlan, host: HostMemory) -> int:
        cache = self._kernel_table.cache.origin
        source, target = (cache, host.address) if self.outward else (host.address, cache)
        runs = plan.runs.view(np.uint64)
        sources, targets = runs[:, 0] + np.uint64(source), runs[:, 1] + np.uint64(target)
        if self._caller:
            self._driver.wait(self._copies, self._caller)
        self._transfer(targets, sources, np.ascontiguousarray(runs[:, 2]), registered=is_registered(host.address))
        return self._copies

    # --- blocks, through staging --------------------------------------------------------------------

    def _move_blocks(self, moves: Moves, host: HostMemory) -> int:
        driver = self._driver
        filling, emptying = (self._kernels, self._copies) if self.outward else (self._copies, self._kernels)
        if self._caller:
            driver.wait(self._kernels, self._caller)
        for chunk in self._kernel_table.cutter.cut(len(moves.source_ids)):
            slot = self._slots[self._turn]
            self._turn = (self._turn + 1) % SLOTS
            driver.wait(filling, slot.free)
            if self.outward:
                self._launch(chunk, moves.source_ids, slot)
            else:
                self._copy_slot(chunk, moves.source, moves.source_ids, host, slot)
            driver.record(slot.ready, filling)
            driver.wait(emptying, slot.ready)
            if self.outward:
                self._copy_slot(chunk, moves.target, moves.target_ids, host, slot)
            else:
                self._launch(chunk, moves.target_ids, slot)
            driver.record(slot.free, emptying)
        return emptying

    def _launch(self, chunk: CopyChunk, cache_ids: Ids, slot: _StagingSlot) -> None:
        """Run the kernel between cache and slot. In the slot, blocks lie back to back in the copy's order."""
        shared, part = self._kernel_table, chunk.part
        move = Move(
            segments=shared.table,
            packed=slot.address - part.offset,  # the kernel adds each segment's place in a whole block
            packed_stride=shared.cutter.stride,
            first_segment=part.first_segment,
            segment_count=part.segments,
            tiles=part.tiles,
            gather=self.outward,
        )
        ids = cache_ids[chunk.start : chunk.stop]
        move.name_blocks(ids, np.arange(len(ids)))
        self._driver.launch(shared.function, move.grid, THREADS, move, self._kernels)

    def _copy_slot(self, chunk: CopyChunk, packed: Geometry, ids: Ids, host: HostMemory, slot: _StagingSlot) -> None:
        """Copy between slot and host memory: one DMA per block."""
        part = chunk.part
        start = host.address + int(packed.offsets[0]) + part.offset
        there = (start + ids[chunk.start : chunk.stop] * int(packed.strides[0])).astype(np.uint64)
        here = (slot.address + np.arange(len(there)) * self._kernel_table.cutter.stride).astype(np.uint64)
        targets, sources = (there, here) if self.outward else (here, there)
        sizes = np.full(len(there), part.nbytes, dtype=np.uint64)
        self._transfer(targets, sources, sizes, registered=is_registered(host.address))

    # --- completion ---------------------------------------------------------------------------------

    def _start_waiter(self) -> threading.Thread:
        name = f"transferd-cuda-{'out' if self.outward else 'in'}"
        return start_thread(name, self._wait_for_copies)

    def _wait_for_copies(self) -> None:
        """The pipeline's thread: reports the ends of copies in the order in which they were submitted."""
        driver = self._driver
        while (item := self._under_way.get()) is not None:
            done, completed = item
            error: TierError | None = None
            try:
                with driver.current(self._context):
                    driver.synchronize(done)
            except TierError as raised:
                error = raised
            self._idle.put(done)
            completed(error)

    def stop(self) -> None:
        """Take no more copies and wait for those in flight. Idempotent; needs no context and frees nothing.

        Raises CopyHung if a copy does not end, for example because it waits for an engine that was killed before
        its kernels had ended.
        """
        hung = CopyHung(f"a copy {'out of' if self.outward else 'into'} the device has not ended; its memory stays")
        if not self._submitting.acquire(
            timeout=CLOSE_S
        ):  # submitting may wait for the stream if host memory is pageable
            raise hung
        try:
            if not self._closed:
                self._closed = True
                self._under_way.put(None)
        finally:
            self._submitting.release()
        self._waiter.join(CLOSE_S)
        if self._waiter.is_alive():
            raise hung

    def close(self) -> None:
        """`stop`, then free everything. Idempotent. Raises the first TierError, after the rest.

        Raises CopyHung if a copy does not end; then it frees nothing.
        """
        self.stop()
        self._owned.release()
