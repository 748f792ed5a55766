"""One direction of one device: its streams, its staging, and how a copy gets through them.

Out of the device (into it is the mirror image), cut into chunks that fit a slot:

    kernels   wait slot free · gather → slot · record ready  |  wait … · gather → slot' …
    copies                       wait ready · DMA slot → host · record free  |  wait …

Two slots, two streams: while the DMA engine empties one slot a kernel fills the other. Everything is
ordered by events on the device; the host submits a whole copy at once and waits for nothing in between,
so how busy the host is does not show in the middle of a copy. What a copy needs on the device besides
the slots is in the launch itself (block ids), so nothing has to be kept alive or given back per copy.

The other way, for runs long enough that the DMA engine's cost per run does not show, or for what the
first cannot do (a plan made of runs alone, host memory in which a block is not one range): one DMA a run,
straight between cache and host memory.

DMAs are submitted in batches (cudaMemcpyBatchAsync) where that pays and the driver has it, else with a
call for each. Batches are kept short, and are given up for good after the driver has refused one: drivers of
2025 and 2026 were seen to refuse valid ones, and to hang on very long ones (vLLM #49276, #40259). The DMAs
of a batch that was refused are submitted again one by one, which copies the same bytes to the same places.

A caller's event is waited for before device memory is touched in either direction: a kernel of the engine
that was begun before may still read the blocks that a load overwrites.

Submission happens in one of the daemon's copy threads, one copy at a time; completion is found by a thread of the
lane's own, asleep in cuEventSynchronize (docs/adr/0014).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import structlog

from transferd.blocks.copyplan import CopyPlan, Moves
from transferd.blocks.layout.base import Arena, Geometry
from transferd.errors import Closed, DeviceLost, TierError
from transferd.runtime.threads import start_thread
from transferd.tiers.base import HostMemory
from transferd.tiers.cuda.chunks import Chunk, Cutter
from transferd.tiers.cuda.driver import Driver
from transferd.tiers.cuda.kernel import THREADS, Move, is_packed
from transferd.tiers.cuda.owned import Owned, Stuck
from transferd.tiers.cuda.pinning import is_registered

SLOTS = 2
# A DMA of this length takes about five microseconds on PCIe 5, ten times what the DMA engine pays for starting
# it and twice what a call of the bindings takes. Longer runs go straight; shorter DMAs go in batches.
LONG = 256 * 1024
BATCH_MOST = 1024  # DMAs in one
CLOSE_S = 10.0  # copies have ended before a lane is closed; this is for those that never will

Completed = Callable[[TierError | None], None]
Ids = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Program:
    """What every copy of a tier shares: cache and kernel. table: the kernel's segments, in device memory."""

    cache: Arena
    function: int
    table: int
    cutter: Cutter
    slot_bytes: int


@dataclass(slots=True)
class _Slot:
    address: int
    ready: int  # event: filled by the first of the two stages
    free: int  # event: emptied by the second


class Lane:
    """One direction. Owns two streams, SLOTS slots, their events and a thread, until `close`.

    outward: device → host. caller: an event to wait for, or 0. way: "gather" or "straight" to prefer one
    whenever it is possible, for measurements and tests. batching: try batches; set to False by a refusal.

    Everything but `submit` wants the context to be current. Raises TierError.
    """

    def __init__(
        self, driver: Driver, context: int, program: Program, *, outward: bool, caller: int = 0, way: str = ""
    ) -> None:
        self.outward = outward
        self._driver = driver
        self._context = context
        self._program = program
        self._caller = caller
        self.preferred = way
        self._turn = 0
        self._closed = False
        self._submitting = threading.Lock()
        self._under_way: queue.SimpleQueue[tuple[int, Completed] | None] = queue.SimpleQueue()
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._slots: list[_Slot] = []
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

    def _slot(self) -> _Slot:
        address = self._driver.allocate(self._program.slot_bytes)
        self._owned.add(lambda: self._driver.free(address))
        return _Slot(address, self._event(), self._event())

    # --- submitting ---------------------------------------------------------------------------------

    def submit(self, plan: CopyPlan, host: HostMemory, completed: Completed) -> None:
        """Hand a whole copy to the device; `completed` is called once, from the lane's thread.

        Blocks while another copy is handed over. Raises what kept it from being handed over; then
        whatever part of it had begun has ended, and `completed` is not called.
        """
        with self._submitting, self._driver.current(self._context):
            if self._closed:
                raise Closed("this copy lane is closed")
            done = self._take_event()
            try:
                self._driver.record(done, self._submit(plan, host))
            except BaseException:
                self._idle.put(done)
                self._quiesce()
                raise
            self._under_way.put((done, completed))

    def _take_event(self) -> int:
        """An event nobody uses; as many are made as copies were ever under way at once."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            return self._event()

    def _quiesce(self) -> None:
        """After a failure: nothing that was begun may still move when the failure is reported."""
        for stream in (self._kernels, self._copies):
            self._driver.synchronize_stream(stream)

    def _submit(self, plan: CopyPlan, host: HostMemory) -> int:
        """Returns the stream whose end is the copy's end."""
        moves = self._block_moves(plan)
        if moves is not None and self._gathers(plan, moves):
            self.counts["gather"] += 1
            return self._move_blocks(moves, host)
        self.counts["straight"] += 1
        return self._move_runs(plan, host)

    def _block_moves(self, plan: CopyPlan) -> Moves | None:
        """The plan as moves of blocks, if the kernel can carry them out."""
        moves = plan.moves
        if moves is None:
            return None
        cache, packed = (moves.source, moves.target) if self.outward else (moves.target, moves.source)
        return moves if cache is self._program.cache.geometry and is_packed(packed) else None

    def _gathers(self, plan: CopyPlan, moves: Moves) -> bool:
        if self.preferred:
            return self.preferred == "gather"
        return plan.nbytes < LONG * len(moves.source_ids) * len(moves.source.nbytes)

    # --- DMAs ---------------------------------------------------------------------------------------

    def _transfer(self, targets: Addresses, sources: Addresses, sizes: Addresses, *, registered: bool) -> None:
        """One DMA each, on the copy stream. registered: of the host side, which batches need."""
        done = 0
        if self.batching and registered and len(sizes) > 1 and int(sizes.sum()) < LONG * len(sizes):
            done = self._batches(targets, sources, sizes)
        rest = zip(targets[done:].tolist(), sources[done:].tolist(), sizes[done:].tolist(), strict=True)
        for target, source, nbytes in rest:
            self._driver.copy(target, source, nbytes, self._copies)

    def _batches(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> int:
        """Returns how many were submitted: all of them, or those before a batch that was refused."""
        for start in range(0, len(sizes), BATCH_MOST):
            part = slice(start, start + BATCH_MOST)
            try:
                self._driver.copy_batch(targets[part], sources[part], sizes[part], self._copies)
            except DeviceLost:
                raise
            except TierError as error:
                self.batching = False
                log.warning("the driver refused a batch of copies; from now on they go one by one", reason=str(error))
                return start
        return len(sizes)

    # --- runs, straight -----------------------------------------------------------------------------

    def _move_runs(self, plan: CopyPlan, host: HostMemory) -> int:
        cache = self._program.cache.origin
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
        for chunk in self._program.cutter.cut(len(moves.source_ids)):
            slot = self._slots[self._turn]
            self._turn = (self._turn + 1) % SLOTS
            driver.wait(filling, slot.free)
            if self.outward:
                self._launch(chunk, moves.source_ids, slot)
            else:
                self._between(chunk, moves.source, moves.source_ids, host, slot)
            driver.record(slot.ready, filling)
            driver.wait(emptying, slot.ready)
            if self.outward:
                self._between(chunk, moves.target, moves.target_ids, host, slot)
            else:
                self._launch(chunk, moves.target_ids, slot)
            driver.record(slot.free, emptying)
        return emptying

    def _launch(self, chunk: Chunk, cache_ids: Ids, slot: _Slot) -> None:
        """Between cache and slot. Blocks lie in the slot one after the other, in the copy's order."""
        program, part = self._program, chunk.part
        move = Move(
            segments=program.table,
            packed=slot.address - part.offset,  # the kernel adds each segment's place in a whole block
            packed_stride=program.cutter.stride,
            first_segment=part.first_segment,
            segment_count=part.segments,
            tiles=part.tiles,
            gather=self.outward,
        )
        ids = cache_ids[chunk.start : chunk.stop]
        move.name_blocks(ids, np.arange(len(ids)))
        self._driver.launch(program.function, move.grid, THREADS, move, self._kernels)

    def _between(self, chunk: Chunk, packed: Geometry, ids: Ids, host: HostMemory, slot: _Slot) -> None:
        """Between slot and host memory: one DMA a block."""
        part = chunk.part
        start = host.address + int(packed.offsets[0]) + part.offset
        there = (start + ids[chunk.start : chunk.stop] * int(packed.strides[0])).astype(np.uint64)
        here = (slot.address + np.arange(len(there)) * self._program.cutter.stride).astype(np.uint64)
        targets, sources = (there, here) if self.outward else (here, there)
        sizes = np.full(len(there), part.nbytes, dtype=np.uint64)
        self._transfer(targets, sources, sizes, registered=is_registered(host.address))

    # --- completion ---------------------------------------------------------------------------------

    def _start_waiter(self) -> threading.Thread:
        name = f"transferd-cuda-{'out' if self.outward else 'in'}"
        return start_thread(name, self._wait_for_copies)

    def _wait_for_copies(self) -> None:
        """The lane's thread: the ends of copies are told in the order in which they were handed over."""
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
        """Take no more copies, and wait for those under way. Idempotent; needs no context, frees nothing.

        Raises Stuck when a copy does not end: one that waits for an engine which was killed before its kernels
        had ended, say.
        """
        stuck = Stuck(f"a copy {'out of' if self.outward else 'into'} the device has not ended; its memory stays")
        if not self._submitting.acquire(timeout=CLOSE_S):  # handing over waits for the stream with pageable memory
            raise stuck
        try:
            if not self._closed:
                self._closed = True
                self._under_way.put(None)
        finally:
            self._submitting.release()
        self._waiter.join(CLOSE_S)
        if self._waiter.is_alive():
            raise stuck

    def close(self) -> None:
        """`stop`, and free everything. Idempotent. Raises the first TierError, after the rest; after Stuck no rest."""
        self.stop()
        self._owned.release()
