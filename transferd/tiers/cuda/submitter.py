"""Submits copies of one direction to the device, chunk by chunk: its streams, its staging and the calls per chunk.

Out of the device (into it is the mirror image), cut into chunks that fit a slot:

    kernels   wait slot free · gather → slot · record ready  |  wait … · gather → slot' …
    copies                       wait ready · DMA slot → host · record free  |  wait …

That is the "gather" path: while the DMA engine empties one slot, a kernel fills another. Events order everything on the
device, and the launch carries the block ids, so there is nothing to keep alive or to free per copy.

The "rows" path has no stages either: the copy engine finds a block's segments by itself, where they lie equally far
apart (rows.py). It needs no kernel, so it takes no turns with the engine's kernels.

The "pairs" path makes rows of two blocks' pieces of a segment, where layers lie apart.

The "straight" path issues one DMA per run, directly between cache and host memory. It serves runs so long
that the DMA engine's cost per run does not matter, and copies that cannot be gathered: plans made only of
runs, and host memory in which a block is not one dense range.

costs.py chooses the path by predicted time, once for each order of segments and direction.

DMAs and copies of rows are submitted in batches (cuMemcpyBatchAsync, cuMemcpy3DBatchAsync) where the driver supports
it. Batches are short, and the submitter stops using them for good once the driver has refused one: drivers of 2025 and
2026 refused valid batches and hung on very long ones (vLLM #49276, #40259). It then submits the refused copies again
one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import structlog

from transferd.blocks.copyplan import CopyPlan, Moves, joined_segments
from transferd.blocks.layout.base import Arena, Geometry
from transferd.errors import DeviceLost, TierError
from transferd.tiers.base import HostMemory
from transferd.tiers.cuda.batches import row_table
from transferd.tiers.cuda.costs import CopyPath
from transferd.tiers.cuda.driver import Driver, RowTable
from transferd.tiers.cuda.kernel import (
    MAX_BLOCKS,
    ROW,
    THREADS,
    CopyChunk,
    Cutter,
    Move,
    SlotDmas,
    cut,
    packed_order,
    segment_table,
    shortened,
)
from transferd.tiers.cuda.owned import Owned
from transferd.tiers.cuda.pinning import boundaries, is_registered
from transferd.tiers.cuda.rows import HEIGHT, WIDTH, PairCopies, RowCopies, block_rows
from transferd.tiers.cuda.tuning import DEFAULT, Tuning

BATCH_MOST = 256  # DMAs in one batch
# Segment tables that have room from the start. To allocate during a copy may wait for a wait of another task.
MORE_ORDERS = 2
STEP_BYTES = 32 * 1024**2  # about as many as are submitted at a time
LOT = 1024  # copies of rows that are written down for the driver at a time: they stay in the processor's cache

Ids = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]
Pieces = tuple[Addresses, Addresses, Addresses]  # targets, sources, bytes

log = structlog.get_logger(__name__)


class Submitted(NamedTuple):
    """What one step of a copy put on the device's queues."""

    nbytes: int
    dmas: int


@dataclass(frozen=True, slots=True)
class PackedOrder:
    """How blocks with their segments in a certain order pass through a slot, and the best way to copy them."""

    table: int  # the kernel's, in device memory; 0 if nothing is gathered
    cutter: Cutter
    rows: RowCopies  # all segments of such a block; without any if they cannot be copied as rows
    pairs: PairCopies
    # by whether the copy goes out of the device, and whether the host memory is registered
    ways: Mapping[tuple[bool, bool], CopyPath]

    @property
    def usual_ways(self) -> set[CopyPath]:
        """Those of copies with registered host memory."""
        return {way for (_, registered), way in self.ways.items() if registered}


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The kernel, the cache it works on and the size of a slot: all copies of a tier use them.

    Batches use host memory at the host's own address, which does not work on every machine (SGLang #40232).
    """

    cache: Arena
    function: int  # the kernel; 0 if nothing is gathered, so that there is no staging either
    main: PackedOrder  # the order in which the layout lists segments
    slot_bytes: int
    batches: bool = True  # whether DMAs may go in batches
    row_batches: bool = False  # whether copies of rows may go in batches
    tuning: Tuning = DEFAULT  # see tuning.py
    allocations: Sequence[tuple[int, int]] = ()  # address and bytes of those that the cache lies in


def plan_order(
    cache: Arena,
    order: Ids,
    slot_bytes: int,
    allocations: Sequence[tuple[int, int]],
    tuning: Tuning,
    *,
    gathers: bool = True,
    pairs: bool = False,
) -> tuple[PackedOrder, bytes]:
    """How blocks with their segments in this order are copied, and the kernel's table, which is not uploaded yet.

    gathers: whether there are a kernel and staging. pairs: whether copies of rows go in batches, as pairs must.
    allocations: as in KernelTable.
    """
    cache, offsets = _joined(cache, order, slot_bytes)
    order = np.argsort(offsets, kind="stable")
    cutter = Cutter(cache.geometry.nbytes[order], slot_bytes)
    rows = RowCopies(block_rows(cache, offsets, allocations), tuning.dma_most)
    heights = rows.heights if rows.widest <= tuning.dma_most else []  # a row is one DMA at least
    ways = {
        (outward, registered): tuning.costs.best(
            cache.geometry.nbytes,
            heights if registered else [],
            outward=outward,
            dma_most=tuning.dma_most,
            gathers=gathers,
            pairs=pairs and registered and 2 * int(cache.geometry.nbytes.max()) <= tuning.dma_most,
        )
        for outward in (True, False)
        for registered in (True, False)
    }
    return PackedOrder(0, cutter, rows, PairCopies(cache, offsets), ways), segment_table(cache, cutter.offsets, order)


def _joined(cache: Arena, order: Ids, slot_bytes: int) -> tuple[Arena, Ids]:
    """The cache with segments joined that touch there and in a packed block, and the offsets of those in the block."""
    geometry = cache.geometry
    offsets = np.empty_like(geometry.offsets)
    offsets[order] = np.cumsum(geometry.nbytes[order]) - geometry.nbytes[order]
    packed = Geometry(offsets, np.zeros_like(offsets), geometry.nbytes, 1, int(geometry.nbytes.sum()))
    first, nbytes = joined_segments(geometry, packed)
    if len(first) == len(offsets) or int(nbytes.max()) > slot_bytes:
        return cache, offsets
    joined = Geometry(geometry.offsets[first], geometry.strides[first], nbytes, geometry.blocks, geometry.extent)
    return Arena(joined, cache.origin), offsets[first]


def upload_table(driver: Driver, table: bytes, stream: int, owned: Owned, room: int = 0) -> int:
    """Write the kernel's table to device memory and return its address. Blocks.

    room: where the table goes; with 0, to new memory that `owned` frees.
    """
    address = room
    if not address:
        address = driver.allocate(len(table))
        owned.add(lambda: driver.free(address))
    text = ctypes.create_string_buffer(table, len(table))
    driver.copy(address, ctypes.addressof(text), len(table), stream)
    driver.synchronize_stream(stream)
    return address


def _steps(sizes: npt.NDArray[Any]) -> list[tuple[slice, int]]:
    """Copies of these bytes, in order, by what is submitted at a time: which, and how many bytes they have."""
    if not len(sizes):
        return []
    step = max(1, min(BATCH_MOST, STEP_BYTES * len(sizes) // max(1, int(sizes.sum()))))
    starts = np.arange(0, len(sizes), step)
    moved = np.add.reduceat(sizes, starts).tolist()
    return [(slice(start, start + step), nbytes) for start, nbytes in zip(starts.tolist(), moved, strict=True)]


@dataclass(frozen=True, slots=True)
class _StagingSlot:
    address: int
    ready: int  # event: the first stage has filled it
    free: int  # event: the second stage has emptied it


class Submitter:
    """One direction. Owns two streams, staging slots and their events until `release`.

    outward: device → host.
    preferred: use this path whenever it is possible (for measurements and tests); None chooses by predicted time.
    batching, row_batching: try batches; a refused one sets it to False.
    counts: copies by path.
    unregistered: the number of copies from or to host memory that is not registered with CUDA.

    Every method requires the context to be current, and one thread to call it. Raises TierError.
    """

    def __init__(
        self, driver: Driver, kernel_table: KernelTable, *, outward: bool, copy_path: CopyPath | None = None
    ) -> None:
        self.outward = outward
        self.preferred = copy_path
        self.batching = kernel_table.batches
        self.row_batching = kernel_table.row_batches
        self.counts: dict[str, int] = dict.fromkeys(get_args(CopyPath), 0)
        self.unregistered = 0
        self._driver = driver
        self._kernel_table = kernel_table
        self._grid = kernel_table.tuning.grid
        self._turn = 0
        self._owned = Owned()
        self._orders: dict[bytes, PackedOrder] = {}
        self._slots: list[_StagingSlot] = []
        self._move = Move(gather=outward)
        self._cache_ids = np.frombuffer(self._move.cache_ids, dtype=np.int32)
        np.frombuffer(self._move.packed_ids, dtype=np.int32)[:] = np.arange(MAX_BLOCKS)  # back to back in a slot
        try:
            self._kernels = self._stream(urgent=True)
            self._copies = self._stream(urgent=False)
            self._tables: list[int] = []
            if kernel_table.function:
                for _ in range(kernel_table.tuning.slots):
                    self._slots.append(self._slot())
                size = len(kernel_table.cache.geometry.nbytes) * ROW
                room = self._allocate(MORE_ORDERS * size)
                self._tables = list(range(room, room + MORE_ORDERS * size, size))
        except BaseException:
            self._owned.release()
            raise
        self.tail = self._copies

    def _stream(self, *, urgent: bool) -> int:
        stream = self._driver.create_stream(urgent=urgent)
        self._owned.add(lambda: self._driver.destroy_stream(stream))
        return stream

    def event(self) -> int:
        """A new event, destroyed by `release`."""
        event = self._driver.create_event()
        self._owned.add(lambda: self._driver.destroy_event(event))
        return event

    def _slot(self) -> _StagingSlot:
        return _StagingSlot(self._allocate(self._kernel_table.slot_bytes), self.event(), self.event())

    def _allocate(self, nbytes: int) -> int:
        address = self._driver.allocate(nbytes)
        self._owned.add(lambda: self._driver.free(address))
        return address

    def release(self) -> None:
        """Free everything. Idempotent. Raises the first TierError, after the rest."""
        self._owned.release()

    def quiesce(self) -> None:
        """Wait until no submitted copy still moves bytes."""
        for stream in (self._kernels, self._copies):
            self._driver.synchronize_stream(stream)

    # --- a copy, step by step -----------------------------------------------------------------------

    def steps(self, plan: CopyPlan, host: HostMemory) -> Iterator[Submitted]:
        """Each `next` submits one chunk. `tail` is the stream that finishes a chunk last."""
        self.unregistered += not is_registered(host.address)
        moves = plan.moves
        order = None if moves is None else self._order(moves)
        path = (
            "straight" if moves is None or order is None else self._path(order, registered=is_registered(host.address))
        )
        self.counts[path] += 1
        if moves is None or order is None or path == "straight":
            pieces = None if moves is None or order is None else self._pieces(moves, order, host)
            yield from self._straight(*(pieces or self._runs(plan, host)), registered=is_registered(host.address))
        elif path != "gather":
            yield from self._rows(moves, order.rows if path == "rows" else order.pairs, host)
        else:
            yield from self._blocks(moves, order, host)

    def _order(self, moves: Moves) -> PackedOrder | None:
        """How these blocks pass through a slot; None if the kernel cannot move them."""
        cache, packed = (moves.source, moves.target) if self.outward else (moves.target, moves.source)
        table = self._kernel_table
        if cache is not table.cache.geometry:
            return None
        order = packed_order(packed)
        if order is None:
            return None
        if (order[1:] > order[:-1]).all():
            return table.main
        known = self._orders.get(order.tobytes())
        if known is None:
            gathers = bool(table.function)
            known, content = plan_order(
                table.cache,
                order,
                table.slot_bytes,
                table.allocations,
                table.tuning,
                gathers=gathers,
                pairs=table.row_batches,
            )
            if gathers:
                room = self._tables.pop() if self._tables else 0
                address = upload_table(self._driver, content, self._kernels, self._owned, room)
                known = replace(known, table=address)
            self._orders[order.tobytes()] = known
        return known

    def _path(self, order: PackedOrder, *, registered: bool) -> CopyPath:
        way = self.preferred or order.ways[self.outward, registered]
        if (way == "rows" and not (order.rows.rows and registered)) or (
            way == "pairs" and not (self.row_batching and registered)
        ):
            way = "gather"
        return "straight" if way == "gather" and not self._kernel_table.function else way

    # --- rows ---------------------------------------------------------------------------------------

    def _rows(self, moves: Moves, rows: RowCopies | PairCopies, host: HostMemory) -> Iterator[Submitted]:
        cache_ids, places, _ = self._places(moves, host)
        nbytes, origin = int(moves.source.nbytes.sum()), self._kernel_table.cache.origin
        cuts = np.array(boundaries(host.address, host.nbytes), dtype=np.int64)
        at = np.searchsorted(cuts, places, side="right")
        divided = np.append(cuts, np.iinfo(np.int64).max)[at] < places + nbytes  # they lie in two registrations
        self.tail = self._copies
        if divided.any():
            for block, place in zip(cache_ids[divided].tolist(), places[divided].tolist(), strict=True):
                yield Submitted(nbytes, self._row_by_row(rows, block, place, cuts.tolist()))
            cache_ids, places = cache_ids[~divided], places[~divided]
        found = rows.table(origin, cache_ids, places, cuts)
        for first in range(0, len(found), LOT):
            lot = found[first : first + LOT]
            table = row_table(lot, outward=self.outward)
            for part, moved in _steps(lot[:, WIDTH] * lot[:, HEIGHT]):
                self._in_rows(table[part])
                yield Submitted(moved, min(part.stop, len(lot)) - part.start)

    def _in_rows(self, table: RowTable) -> None:
        """Submit these copies, in one batch if the driver takes one."""
        if self.row_batching:
            try:
                self._driver.copy_row_table(table, self._copies, outward=self.outward, batch=True)
            except DeviceLost:
                raise
            except TierError as error:
                self.row_batching = False
                log.warning("the driver refused a batch of rows: submitting copies one by one", reason=str(error))
            else:
                return
        self._driver.copy_row_table(table, self._copies, outward=self.outward, batch=False)

    def _row_by_row(self, rows: RowCopies | PairCopies, block: int, place: int, cuts: list[int]) -> int:
        """The same for a block that lies in two registrations: a copy for each row, and none across a cut."""
        runs = cut(rows.runs(block), 1, cuts, place)
        origin = self._kernel_table.cache.origin
        for offset, packed, nbytes in runs.tolist():
            device, host = origin + offset, place + packed
            target, source = (host, device) if self.outward else (device, host)
            self._driver.copy(target, source, nbytes, self._copies)
        return len(runs)

    def _places(self, moves: Moves, host: HostMemory) -> tuple[Ids, Ids, int]:
        """The blocks' ids in the cache, where each begins in host memory, and the bytes from one to the next there."""
        cache_ids, packed, host_ids = moves.source_ids, moves.target, moves.target_ids
        if not self.outward:
            cache_ids, packed, host_ids = moves.target_ids, moves.source, moves.source_ids
        stride = int(packed.strides[0])
        return cache_ids, host.address + int(packed.offsets.min()) + host_ids * stride, stride

    # --- DMAs ---------------------------------------------------------------------------------------

    def _transfer(self, targets: Addresses, sources: Addresses, sizes: Addresses, *, registered: bool) -> None:
        """One DMA each, on the copy stream. registered: whether the host memory is, which batches require."""
        done = 0
        if self.batching and registered and len(sizes) > 1:
            done = self._batches(targets, sources, sizes)
        if done == len(sizes):
            return
        rest = zip(targets[done:].tolist(), sources[done:].tolist(), sizes[done:].tolist(), strict=True)
        for target, source, nbytes in rest:
            self._driver.copy(target, source, nbytes, self._copies)

    def _batches(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> int:
        """Submit batches. Returns how many DMAs were submitted: all of them, or those before a refused batch."""
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

    def _pieces(self, moves: Moves, order: PackedOrder, host: HostMemory) -> Pieces | None:
        """What `_runs` gives, in a tenth of the time; None if pieces may have to be divided or joined."""
        cache_ids, places, _ = self._places(moves, host)
        nbytes, cuts = order.pairs.nbytes, boundaries(host.address, host.nbytes)
        if len(nbytes) == 1 or int(nbytes.max()) > self._kernel_table.tuning.dma_most:
            return None
        at = np.searchsorted(cuts, places, side="right") if cuts else None
        if at is not None and (at != np.searchsorted(cuts, places + int(nbytes.sum()), side="left")).any():
            return None
        device, memory, sizes = order.pairs.pieces(self._kernel_table.cache.origin, cache_ids, places)
        target, source = (memory, device) if self.outward else (device, memory)
        return target.view(np.uint64), source.view(np.uint64), sizes.view(np.uint64)

    def _runs(self, plan: CopyPlan, host: HostMemory) -> Pieces:
        """Targets, sources and bytes of the plan's runs, none longer than a DMA may be or in two registrations."""
        cache = self._kernel_table.cache.origin
        source, target = (cache, host.address) if self.outward else (host.address, cache)
        whole = cut(plan.runs, 1 if self.outward else 0, boundaries(host.address, host.nbytes), host.address)
        runs = shortened(whole, self._kernel_table.tuning.dma_most).view(np.uint64)
        sources, targets = runs[:, 0] + np.uint64(source), runs[:, 1] + np.uint64(target)
        return targets, sources, np.ascontiguousarray(runs[:, 2])

    def _straight(
        self, targets: Addresses, sources: Addresses, sizes: Addresses, *, registered: bool
    ) -> Iterator[Submitted]:
        self.tail = self._copies
        for part, moved in _steps(sizes):
            self._transfer(targets[part], sources[part], sizes[part], registered=registered)
            yield Submitted(moved, min(part.stop, len(sizes)) - part.start)

    # --- blocks, through staging --------------------------------------------------------------------

    def _blocks(self, moves: Moves, order: PackedOrder, host: HostMemory) -> Iterator[Submitted]:
        """Copy blocks through staging. What all chunks share is computed once, and each chunk takes slices of it."""
        driver, cutter = self._driver, order.cutter
        filling, emptying = (self._kernels, self._copies) if self.outward else (self._copies, self._kernels)
        cache_ids, places, stride = self._places(moves, host)
        ids = cache_ids.astype(np.int32)
        most = self._kernel_table.tuning.dma_most
        dmas = SlotDmas(cutter, places, stride, boundaries(host.address, host.nbytes), most)
        in_batches = is_registered(host.address)
        self.tail = emptying
        for number, chunk in enumerate(cutter.cut(len(ids))):
            slot = self._slots[self._turn]
            self._turn = (self._turn + 1) % len(self._slots)
            part = slice(dmas.first[number], dmas.first[number + 1])
            driver.wait(filling, slot.free)
            if self.outward:
                self._launch(chunk, order, ids, slot)
                driver.record(slot.ready, filling)
                driver.wait(emptying, slot.ready)
            self._between(dmas, part, slot.address, in_batches=in_batches)
            if not self.outward:
                driver.record(slot.ready, filling)
                driver.wait(emptying, slot.ready)
                self._launch(chunk, order, ids, slot)
            driver.record(slot.free, emptying)
            yield Submitted((chunk.stop - chunk.start) * chunk.part.nbytes, part.stop - part.start)

    def _between(self, dmas: SlotDmas, part: slice, slot: int, *, in_batches: bool) -> None:
        """Submit these DMAs between the slot at this address and host memory."""
        slots, hosts = dmas.offsets[part] + np.uint64(slot), dmas.hosts[part]
        targets, sources = (hosts, slots) if self.outward else (slots, hosts)
        self._transfer(targets, sources, dmas.sizes[part], registered=in_batches)

    def _launch(self, chunk: CopyChunk, order: PackedOrder, ids: npt.NDArray[np.int32], slot: _StagingSlot) -> None:
        """Run the kernel between cache and slot. In the slot, blocks lie back to back in the copy's order."""
        part, move = chunk.part, self._move
        move.segments = order.table
        move.packed = slot.address - part.offset  # the kernel adds each segment's place in a whole block
        move.packed_stride = order.cutter.stride
        move.first_segment, move.segment_count, move.tiles = part.first_segment, part.segments, part.tiles
        move.blocks = count = chunk.stop - chunk.start
        self._cache_ids[:count] = ids[chunk.start : chunk.stop]
        grid = min(self._grid, count * part.segments * part.tiles)
        self._driver.launch(self._kernel_table.function, grid, THREADS, move, self._kernels)
