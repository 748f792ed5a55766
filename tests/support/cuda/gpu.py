"""FakeGpu: the driver seam of the CUDA tier, on plain memory.

Device memory is POSIX shared memory, so that another process can map it. Work on streams is done late:
when somebody waits for it, in an order drawn from a seed among all that the events allow, so that what
nobody waited for shows. What a program must not do is either refused, as CUDA refuses it, or written down
in `problems`: races (order.py), memory that is freed or gone while work on it is not over, work outside of
memory, pageable host memory where a DMA engine would fault.

`calls` is every call in order. `refuse` scripts failures. `leaks` says what was made and not given back.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.support.cuda.calls import Calls
from tests.support.cuda.memory import Allocation, Handles, Memory
from tests.support.cuda.order import NOTHING, Order, Spans
from tests.support.cuda.shim import ShimKernel, compile_shim
from tests.support.cuda.signal import Signal
from transferd.errors import InvariantError, TierError
from transferd.tiers.cuda.batches import rows_in
from transferd.tiers.cuda.driver import MAX_PITCH, RowCopy, RowTable
from transferd.tiers.cuda.kernel import KernelSegment, Move

Addresses = npt.NDArray[np.uint64]
# CUDA may synchronise the context to load a kernel (lazy loading) and to allocate (its guide).
WAITING = frozenset({"load", "function", "allocate"})
CANONICAL = 1 << 47  # the first address that no process has


@dataclass(slots=True)
class _Step:
    """What a stream does next: work, or passing a signal on, or waiting for one."""

    run: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    foreign: bool = False  # it may wait for another process


def _give_back(memory: Memory, events: dict[int, Signal]) -> None:
    """The shared memory of a fake GPU goes with it, as a real one's goes with its process."""
    leftovers: list[Allocation | Signal] = [*memory.owned.values(), *memory.opened.values(), *events.values()]
    for leftover in leftovers:
        with contextlib.suppress(TierError):  # somebody still looks at it; its name is gone all the same
            leftover.close()


class FakeGpu(Calls):
    """Driver of a machine with `devices` GPUs of `capacity` bytes each, seen from one process. See the module.

    seed: of the order in which streams run. batches: cuMemcpyBatchAsync is there. row_batches:
    cuMemcpy3DBatchAsync is. shares: IPC is.
    words: streams can write and wait for words. handles: see Memory. waiting: the calls that end only when no stream
    of the context waits for another process.
    """

    def __init__(
        self,
        *,
        devices: int = 1,
        capacity: int = 1 << 30,
        seed: int = 0,
        batches: bool = True,
        row_batches: bool = False,
        shares: bool = True,
        pins: bool = True,
        words: bool = True,
        version: int = 13000,
        handles: Handles = "blocks",
        waiting: frozenset[str] = WAITING,
    ) -> None:
        super().__init__(devices)
        self.version = version
        self.batches = batches
        self.row_batches = row_batches
        self.memory = Memory(capacity, handles)
        self._waiting = waiting
        self.unshareable: set[int] = set()  # allocations as from cuMemCreate or a pool
        self._shares = shares
        self._pins = pins
        self._words = words
        self._random = random.Random(seed)
        self._order = Order()
        self._streams: dict[int, deque[_Step]] = {0: deque()}
        self._events: dict[int, Signal] = {}
        self._modules: dict[int, ShimKernel] = {}
        self._functions: dict[int, ShimKernel] = {}
        weakref.finalize(self, _give_back, self.memory, self._events)  # also of a GPU that was lost or left dirty

    # --- for tests ----------------------------------------------------------------------------------

    def leaks(self) -> list[str]:
        """What was made and not given back."""
        found = self.memory.leaks()
        found += [f"stream {stream:#x}" for stream in self._streams if stream]
        found += [f"event {event:#x}" for event in self._events]
        found += [f"module {module:#x}" for module in self._modules]
        found += [f"context of device {index}, {count} times" for index, count in self._contexts.items() if count]
        return found

    def wrong(self) -> list[str]:
        """What a program has done that it must not, so far."""
        return [*self.problems, *self._order.races]

    # --- memory -------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        with self._call("allocate"):
            self._waits_beside("allocate")
            allocation = self.memory.allocate(nbytes)
            if allocation is None:
                self._refuse("allocate", "CUDA_ERROR_OUT_OF_MEMORY")
            return allocation.start

    def free(self, address: int) -> None:
        with self._call("free"):
            self._waits_for_all("free")
            allocation = self._own(address, "free")
            self._check_unused(allocation, "freed")
            self.memory.free(allocation)

    def _own(self, address: int, call: str) -> Allocation:
        allocation = self.memory.owned.get(address)
        if allocation is None:
            self._refuse(call, "CUDA_ERROR_INVALID_VALUE")
        return allocation

    def _check_unused(self, allocation: Allocation, what: str) -> None:
        for work in self._order.unseen(Spans.one(allocation.start, allocation.nbytes)):
            self.problems.append(f"{allocation} is {what}, and nobody has waited for {work.what}")

    def memory_info(self) -> tuple[int, int]:
        with self._call("memory_info"):
            return self.memory.capacity - self.memory.used, self.memory.capacity

    def address_range(self, address: int) -> tuple[int, int]:
        with self._call("address_range"):
            allocation = self.memory.find(address, 1)
            if allocation is None or allocation.kind == "host":
                self._refuse("address_range", "CUDA_ERROR_NOT_FOUND")
            return allocation.start, allocation.nbytes

    def register_host(self, address: int, nbytes: int) -> None:
        with self._call("register_host"):
            if not self._pins:
                self._refuse("register_host", "CUDA_ERROR_NOT_PERMITTED")
            if not self.memory.register(address, nbytes):
                self._refuse("register_host", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")

    def unregister_host(self, address: int) -> None:
        with self._call("unregister_host"):
            self._waits_for_all("unregister_host")
            allocation = self.memory.registered.get(address)
            if allocation is None:
                self._refuse("unregister_host", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")
            self._check_unused(allocation, "unregistered")
            del self.memory.registered[address]

    # --- streams and events -------------------------------------------------------------------------

    def create_stream(self, *, urgent: bool = False) -> int:
        with self._call("create_stream"):
            stream = self._new() + urgent
            self._streams[stream] = deque()
            return stream

    def destroy_stream(self, stream: int) -> None:
        with self._call("destroy_stream"):
            if self._queue(stream):
                self.problems.append(f"stream {stream:#x} is destroyed with work on it")
            del self._streams[stream]

    def _queue(self, stream: int) -> deque[_Step]:
        if stream not in self._streams:
            self._refuse("a call on a stream", "CUDA_ERROR_INVALID_HANDLE")
        return self._streams[stream]

    def _signal(self, event: int) -> Signal:
        if event not in self._events:
            self._refuse("a call on an event", "CUDA_ERROR_INVALID_HANDLE")
        return self._events[event]

    def synchronize_stream(self, stream: int) -> None:
        with self._call("synchronize_stream"):
            queue = self._queue(stream)
            self._run_until(lambda: not queue)
            self._order.host_saw_stream(stream)

    def create_event(self, *, shared: bool = False) -> int:
        with self._call("create_event"):
            event = self._new()
            self._events[event] = Signal(shared=shared)
            return event

    def destroy_event(self, event: int) -> None:
        with self._call("destroy_event"):
            self._signal(event).close()
            del self._events[event]

    def record(self, event: int, stream: int) -> None:
        with self._call("record"):
            signal, queue = self._signal(event), self._queue(stream)
            number = signal.next()
            queue.append(_Step(lambda: signal.reach(number)))
            self._order.record(event, stream)

    def wait(self, stream: int, event: int) -> None:
        with self._call("wait"):
            signal, queue = self._signal(event), self._queue(stream)
            number = signal.recorded
            queue.append(_Step(lambda: None, lambda: signal.reached >= number))
            self._order.wait(stream, event)

    def synchronize(self, event: int) -> None:
        with self._call("synchronize"):
            signal = self._signal(event)
            number = signal.recorded
            self._run_until(lambda: signal.reached >= number)
            self._order.host_saw_event(event)

    def passed(self, event: int) -> bool:
        with self._call("passed"):
            signal = self._signal(event)
            able = [queue for queue in self._streams.values() if queue and queue[0].ready()]
            if able and signal.reached < signal.recorded:  # time goes by
                self._random.choice(able).popleft().run()
            passed = signal.reached >= signal.recorded
            if passed:
                self._order.host_saw_event(event)
            return passed

    def write_value(self, address: int, value: int, stream: int) -> None:
        with self._call("write_value"):
            place = self._word(address, "write_value")
            what = f"write of {value} to the word at {address:#x}"
            content = ctypes.c_int64(value)
            self._queue(stream).append(
                _Step(lambda: self._move(address, bytes(content), 8, what, place))  # no race: a word is for this
            )

    def wait_value(self, address: int, value: int, stream: int) -> None:
        with self._call("wait_value"):
            place = self._word(address, "wait_value")

            def reached() -> bool:
                if not self.memory.lives(place):
                    self.problems.append(f"{place} is gone while a stream waits for a word in it")
                    return True
                return ctypes.c_int64.from_address(address).value >= value

            self._queue(stream).append(_Step(lambda: None, reached, foreign=True))

    def _word(self, address: int, call: str) -> Allocation:
        place = self.memory.find(address, 8)
        if place is None or address % 8 or not self._words:
            self._refuse(call, "CUDA_ERROR_NOT_SUPPORTED" if not self._words else "CUDA_ERROR_INVALID_VALUE")
        return place

    # --- running ------------------------------------------------------------------------------------

    def _run_until(self, done: Callable[[], bool]) -> None:
        """Do one step after another, of whichever stream chance picks, until `done`."""
        while not done():
            able = [queue for queue in self._streams.values() if queue and queue[0].ready()]
            if able:
                self._random.choice(able).popleft().run()
                if self._lost:
                    self._refuse("synchronize", self._lost)
            elif any(queue and queue[0].foreign for queue in self._streams.values()) or any(
                signal.foreign for signal in self._events.values()
            ):
                self._changed.wait(0.001)  # for another process, or another fake in this one
            else:
                raise InvariantError("the streams wait for each other, or for what nobody does")

    def _held(self) -> bool:
        """Whether a stream waits for another process."""
        return any(queue and queue[0].foreign and not queue[0].ready() for queue in self._streams.values())

    def _waits_beside(self, call: str) -> None:
        """What some calls do while a stream waits for another process: they wait, too. Other threads' calls go on."""
        while call in self._waiting and self._held():
            self._changed.wait(0.001)

    def _waits_for_all(self, call: str) -> None:
        """A call in which CUDA waits for all that is under way in the context, with the context's lock.

        While a stream waits for another process, that stops every other call (an H100 with driver 580 does so).
        """
        if self._held():
            self.problems.append(f"{call} waits for another process, and every call of the context with it")

    def _do(self, what: str, stream: int, reads: Spans, writes: Spans, work: Callable[[], None]) -> None:
        queue = self._queue(stream)
        self._order.begin(what, stream, reads, writes)
        queue.append(_Step(work))

    # --- work ---------------------------------------------------------------------------------------

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        with self._call("copy"):
            what = f"copy of {nbytes} bytes {source:#x} → {target:#x}"
            to, at = self._place(target, nbytes, what), self._place(source, nbytes, what)
            reads, writes = Spans.one(source, nbytes), Spans.one(target, nbytes)
            if at is None:  # pageable: read before the call returns
                content = ctypes.string_at(source, nbytes)
                self._do(what, stream, NOTHING, writes, lambda: self._move(target, content, nbytes, what, to))
                return
            self._do(what, stream, reads, writes, lambda: self._move(target, source, nbytes, what, to, at))
            if to is None:  # pageable: written before the call returns
                queue = self._queue(stream)
                self._run_until(lambda: not queue)
                self._order.host_saw_stream(stream)

    def copy_rows(self, rows: RowCopy, stream: int) -> None:
        with self._call("copy_rows"):
            self._copy_rows("copy_rows", rows, stream)

    def _copy_rows(self, call: str, rows: RowCopy, stream: int) -> None:
        what = f"copy of {rows.height} rows of {rows.width} bytes"
        number = np.arange(rows.height, dtype=np.int64)
        sides = []
        for start, pitch in ((rows.device, rows.device_pitch), (rows.host, rows.host_pitch)):
            if not rows.width <= pitch <= MAX_PITCH or rows.height < 1:
                self._refuse(call, "CUDA_ERROR_INVALID_VALUE")
            place = self._place(start, (rows.height - 1) * pitch + rows.width, what)
            if place is None:
                self.problems.append(f"a {what} touches pageable memory")
            sides.append((place, start + number * pitch, np.full(rows.height, rows.width, dtype=np.int64)))
        (to, targets, sizes), (at, sources, _) = reversed(sides) if rows.outward else sides

        def work() -> None:
            for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                self._move(target, source, rows.width, what, to, at)

        self._do(what, stream, Spans(sources, sizes), Spans(targets, sizes), work)

    def copy_row_table(self, table: RowTable, stream: int, *, outward: bool, batch: bool) -> None:
        if not batch:
            for row in rows_in(table, outward=outward).tolist():
                self.copy_rows(RowCopy._make([*row, outward]), stream)
            return
        with self._call("copy_row_batch"):
            if not len(table) or not self.row_batches:
                self._refuse("copy_row_batch", "CUDA_ERROR_INVALID_VALUE")
            rows = rows_in(table, outward=outward).tolist()
            for row in self._random.sample(rows, len(rows)):  # there is no order among them
                self._copy_rows("copy_row_batch", RowCopy._make([*row, outward]), stream)

    def copy_batch(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> None:
        with self._call("copy_batch"):
            if stream == 0 or not len(sizes) or not self.batches:
                self._refuse("copy_batch", "CUDA_ERROR_INVALID_VALUE")
            what = f"batch of {len(sizes)} copies"
            runs = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
            places = {id(place): place for run in runs for place in self._places(run, what)}
            signed = [array.astype(np.int64) for array in (targets, sources, sizes)]

            def work() -> None:
                self._random.shuffle(runs)  # there is no order among them
                for target, source, nbytes in runs:
                    self._move(target, source, nbytes, what, *places.values())

            self._do(what, stream, Spans(signed[1], signed[2]), Spans(signed[0], signed[2]), work)

    def _places(self, run: tuple[int, int, int], what: str) -> list[Allocation]:
        target, source, nbytes = run
        places = [self._place(side, nbytes, what) for side in (target, source)]
        if None in places:
            self.problems.append(f"a {what} touches pageable memory")
        return [place for place in places if place is not None]

    def fill(self, address: int, value: int, nbytes: int, stream: int) -> None:
        with self._call("fill"):
            what = f"fill of {nbytes} bytes at {address:#x}"
            place, content = self._place(address, nbytes, what), bytes([value]) * nbytes
            writes = Spans.one(address, nbytes)
            self._do(what, stream, NOTHING, writes, lambda: self._move(address, content, nbytes, what, place))

    def _place(self, address: int, nbytes: int, what: str) -> Allocation | None:
        """Where a range lies; None: in pageable host memory. Half outside of an allocation is refused."""
        if not 0 < address <= CANONICAL - nbytes:  # drivers have been seen to end the process
            print(f"a {what} names an address that no process has", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        found = self.memory.find(address, nbytes)
        if found is None and self.memory.touches(address, nbytes):
            self.problems.append(f"a {what} leaves the memory it began in")
            self._refuse("copy", "CUDA_ERROR_INVALID_VALUE")
        return found

    def _move(self, target: int, source: int | bytes, nbytes: int, what: str, *places: Allocation | None) -> None:
        """What a copy or fill does when its turn comes. places: what it was submitted to work on."""
        for place in places:
            if place is not None and not self.memory.lives(place):
                self.problems.append(f"{place} is gone when a {what} runs")
                return
        ctypes.memmove(target, source, nbytes)

    def compile(self, source: bytes, capability: tuple[int, int]) -> bytes:
        self.calls.append("compile")
        return source

    def load(self, image: bytes) -> int:
        with self._call("load"):
            self._waits_beside("load")
            module = self._new()
            self._modules[module] = compile_shim(image)
            return module

    def unload(self, module: int) -> None:
        with self._call("unload"):
            self._waits_for_all("unload")
            del self._modules[module]

    def function(self, module: int, name: str) -> int:
        with self._call("function"):
            self._waits_beside("function")
            if name != "move_blocks":
                self._refuse("function", "CUDA_ERROR_NOT_FOUND")
            function = self._new()
            self._functions[function] = self._modules[module]
            return function

    def launch(self, function: int, grid: int, block: int, argument: ctypes.Structure, stream: int) -> None:
        with self._call("launch"):
            if not 1 <= block <= 1024 or grid < 1:
                self._refuse("launch", "CUDA_ERROR_INVALID_VALUE")
            kernel, move = self._functions[function], Move.from_buffer_copy(argument)
            cache, packed = self._touched(move)
            reads, writes = (cache, packed) if move.gather else (packed, cache)
            what = f"{'gather' if move.gather else 'scatter'} of {move.blocks} blocks"
            self._do(what, stream, reads, writes, lambda: self._run_kernel(kernel, grid, block, move, what))

    def _touched(self, move: Move) -> tuple[Spans, Spans]:
        """What a launch touches on its cache side and on its packed side, said a second time and in another way."""
        first, count = move.first_segment, move.segment_count
        table = (KernelSegment * (first + count)).from_address(move.segments)
        cache: list[tuple[int, int]] = []
        packed: list[tuple[int, int]] = []
        for segment in table[first : first + count]:
            for i in range(move.blocks):
                cache.append((segment.address + move.cache_ids[i] * segment.stride, segment.nbytes))
                where = move.packed + move.packed_ids[i] * move.packed_stride + segment.offset
                packed.append((where, segment.nbytes))
        return tuple(Spans(*np.array(side, dtype=np.int64).T) for side in (cache, packed))  # type: ignore[return-value]

    def _run_kernel(self, kernel: ShimKernel, grid: int, block: int, move: Move, what: str) -> None:
        wrong, _ = kernel.launch(grid, block, move, self.memory.ranges())
        if wrong:
            self.problems.append(f"a {what} makes {wrong}")
            self._lost = "CUDA_ERROR_ILLEGAL_ADDRESS"

    # --- other processes ----------------------------------------------------------------------------

    def exportable(self, address: int) -> bool:
        with self._call("exportable"):
            place = self.memory.find(address, 1)
            if place is None:
                self._refuse("exportable", "CUDA_ERROR_INVALID_VALUE")
            return place.start not in self.unshareable

    def export_memory(self, address: int) -> bytes:
        with self._call("export_memory"):
            if not self._shares:
                self._refuse("export_memory", "CUDA_ERROR_NOT_SUPPORTED")
            if address in self.unshareable:
                self._refuse("export_memory", "CUDA_ERROR_INVALID_VALUE")
            return self._own(address, "export_memory").handle.encode().ljust(64, b"\0")

    def open_memory(self, handle: bytes) -> int:
        with self._call("open_memory"):
            try:
                return self.memory.open(handle.rstrip(b"\0").decode(errors="replace")).start
            except (TierError, ValueError, OSError):  # there is none, it is spoilt, or this user may not read it
                self._refuse("open_memory", "CUDA_ERROR_INVALID_VALUE")
                raise

    def close_memory(self, address: int) -> None:
        with self._call("close_memory"):
            self._waits_for_all("close_memory")
            allocation = self.memory.opened.get(address)
            if allocation is None:
                self._refuse("close_memory", "CUDA_ERROR_INVALID_VALUE")
            self._check_unused(allocation, "unmapped")
            self.memory.close(allocation)

    def export_event(self, event: int) -> bytes:
        with self._call("export_event"):
            signal = self._signal(event)
            if not self._shares:
                self._refuse("export_event", "CUDA_ERROR_NOT_SUPPORTED")
            if not signal.name:
                self._refuse("export_event", "CUDA_ERROR_INVALID_VALUE")
            return signal.name.encode().ljust(64, b"\0")

    def open_event(self, handle: bytes) -> int:
        with self._call("open_event"):
            event = self._new()
            try:
                self._events[event] = Signal(shared=True, name=handle.rstrip(b"\0").decode(errors="replace"))
            except (TierError, ValueError, OSError):
                self._refuse("open_event", "CUDA_ERROR_INVALID_VALUE")
            return event
