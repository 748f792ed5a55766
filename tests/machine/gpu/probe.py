"""What the simulated driver only assumes, asked of a real one: speeds by size, what is taken, what waits for what."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.machine.gpu.machine import Found, Machine
from tests.machine.gpu.processes import peer
from transferd.errors import TierError
from transferd.tiers.cuda.ipc import BLOCK
from transferd.tiers.cuda.kernel import NAME, THREADS, KernelSegment, Move, source

MIB = 1 << 20
SIZES = (4096, 16384, 65536, 262144, MIB, 4 * MIB)
LET_GO_S = 3.0  # after which a call that waits for a held stream has shown it
SMALL = (1000, 4096, 65536, 300000)  # bytes of allocations that may share a block


class Host:
    """Host memory of its own, with every page there."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.array = np.frombuffer(self._map, dtype=np.uint8)
        self.array[:: mmap.PAGESIZE] = 1
        self.address = self.array.ctypes.data


class HeldStreams:
    """A word that streams wait for, which the CPU writes.

    A call that waits may have the lock of the whole context: a copy that writes the word would wait behind it for ever.
    """

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._host = None if probe.fake else probe.registered(mmap.PAGESIZE)
        self._word = (
            self._host.address if self._host else probe.allocate(BLOCK)
        )  # the simulated driver waits for its own
        self._free = probe.stream(urgent=True)
        self._number = ctypes.c_int64(0)
        self._write()

    def hold(self, stream: int) -> None:
        """Everything that follows on this stream waits for `let_go`."""
        self._probe.driver.wait_value(self._word, self._number.value + 1, stream)

    def let_go(self) -> None:
        self._number.value += 1
        self._write()

    def _write(self) -> None:
        if self._host is not None:
            self._host.array[:8] = np.frombuffer(bytes(self._number), dtype=np.uint8)
            return
        self._probe.driver.copy(self._word, ctypes.addressof(self._number), 8, self._free)
        self._probe.driver.synchronize_stream(self._free)


class Probe:
    """The driver with its context current, and what it has given, which goes back at the end."""

    def __init__(self, machine: Machine) -> None:
        self.driver = machine.driver
        self.fake = machine.fake
        self.undo: list[Callable[[], object]] = []

    def allocate(self, nbytes: int) -> int:
        address = self.driver.allocate(nbytes)
        self.undo.append(lambda: self.driver.free(address))
        return address

    def stream(self, *, urgent: bool = False) -> int:
        stream = self.driver.create_stream(urgent=urgent)
        self.undo.append(lambda: self.driver.destroy_stream(stream))
        return stream

    def _unregister(self, _host: Host, start: int) -> None:
        """The host memory lives until then."""
        self.driver.unregister_host(start)

    def registered(self, nbytes: int, pieces: int = 1) -> Host:
        host = Host(nbytes)
        for start in range(host.address, host.address + nbytes, nbytes // pieces):
            self.driver.register_host(start, nbytes // pieces)
            self.undo.append(functools.partial(self._unregister, host, start))
        return host


@contextmanager
def probing(machine: Machine) -> Iterator[Probe]:
    context, probe = machine.driver.retain(machine.index), Probe(machine)
    try:
        with machine.driver.current(context):
            try:
                yield probe
            finally:
                while probe.undo:
                    probe.undo.pop()()
    finally:
        machine.driver.release(machine.index)


def _median_s(work: Callable[[], None], runs: int) -> float:
    found = []
    for _ in range(runs + 1):  # the first is warm-up
        before = time.perf_counter()
        work()
        found.append(time.perf_counter() - before)
    return sorted(found[1:])[runs // 2]


async def the_bus_by_size(machine: Machine) -> Found:
    """GB/s of one large DMA, and of many by size, by calls and in batches; microseconds a call; registration."""
    figures = await asyncio.to_thread(_bus, machine)
    large, small = figures["one large DMA"], figures["16384 bytes"]
    told = ", ".join(f"{way} {speed:.1f}" for way, speed in large.items())
    also = ", ".join(f"{name} {value:.2f}" for name, value in small.items())
    return Found(f"one DMA, GB/s: {told}; of 16 KiB: {also}", "right", figures)


def _bus(machine: Machine) -> dict[str, Any]:
    nbytes, runs, most = (8 * MIB, 1, 8) if machine.fake else (256 * MIB, 5, 1024)
    figures: dict[str, Any] = {}
    with probing(machine) as probe:
        driver, device = probe.driver, probe.allocate(2 * nbytes)
        before = time.perf_counter()
        host = probe.registered(2 * nbytes)
        figures["registration s/GiB"] = (time.perf_counter() - before) / (2 * nbytes / 2**30)
        streams = [probe.stream() for _ in range(2)]

        def done() -> None:
            for stream in streams:
                driver.synchronize_stream(stream)

        def large(out: int, into: int) -> None:
            if out:
                driver.copy(host.address, device, nbytes, streams[0])
            if into:
                driver.copy(device + nbytes, host.address + nbytes, nbytes, streams[1])
            done()

        ways = {"out": (1, 0), "in": (0, 1), "both": (1, 1)}
        figures["one large DMA"] = {
            name: sum(way) * nbytes / _median_s(lambda way=way: large(*way), runs) / 1e9  # type: ignore[misc]
            for name, way in ways.items()
        }
        for size in SIZES:
            count = min(most, nbytes // size)
            order = np.random.default_rng(1).permutation(2 * nbytes // size)[:count].astype(np.uint64) * np.uint64(size)
            there = np.arange(count, dtype=np.uint64) * np.uint64(size)
            found = figures[f"{size} bytes"] = {}
            for way, to, at in (("out", host.address, device), ("in", device, host.address)):
                targets, sources = there + np.uint64(to), order + np.uint64(at)
                found |= _by_size(probe, targets, sources, size, streams[0], runs, way)
    return figures


def _by_size(probe: Probe, targets: Any, sources: Any, size: int, stream: int, runs: int, way: str) -> dict[str, float]:
    driver, count, calls = probe.driver, len(targets), []
    pairs, sizes = list(zip(targets.tolist(), sources.tolist(), strict=True)), np.full(count, size, dtype=np.uint64)

    def singly() -> None:
        before = time.perf_counter()
        for target, start in pairs:
            driver.copy(target, start, size, stream)
        calls.append(time.perf_counter() - before)
        driver.synchronize_stream(stream)

    def batched() -> None:
        for start in range(0, count, 256):
            part = slice(start, start + 256)
            driver.copy_batch(targets[part], sources[part], sizes[part], stream)
        driver.synchronize_stream(stream)

    found = {f"calls {way}": count * size / _median_s(singly, runs) / 1e9}
    found[f"us a call {way}"] = min(calls) / count * 1e6
    if driver.batches:
        found[f"batch {way}"] = count * size / _median_s(batched, runs) / 1e9
    return found


async def copies_across_two_registrations(machine: Machine) -> Found:
    """Whether this driver takes a DMA that crosses from one registration of host memory into the next. We make none."""
    if machine.fake:
        return Found("the simulated driver ends what makes such a copy", "skipped")
    told = await asyncio.to_thread(_across, machine)
    return Found("; ".join(f"{name}: {text}" for name, text in told.items()), "right", told)


def _across(machine: Machine) -> dict[str, str]:
    told = {}
    with probing(machine) as probe:
        driver, device, stream = probe.driver, probe.allocate(4 * MIB), probe.stream()
        host = probe.registered(4 * MIB, pieces=2)
        middle = host.address + 2 * MIB - 4096
        rows = ((middle, host.address), (device, device + 2 * MIB), (8192, 4096))
        targets, sources, sizes = (np.array(row, dtype=np.uint64) for row in rows)
        ways: tuple[tuple[str, Callable[[], None]], ...] = (
            ("cuMemcpyAsync", lambda: driver.copy(middle, device, 8192, stream)),
            ("a batch", lambda: driver.copy_batch(targets, sources, sizes, stream)),
        )
        for name, call in ways:
            try:
                call()
                driver.synchronize_stream(stream)
                told[name] = "taken"
            except TierError as error:
                told[name] = str(error)
    return told


async def small_allocations_are_told_apart(machine: Machine) -> Found:
    """Allocations of less than 2 MiB: do they share a block, has each a handle, do all open in one process."""
    with probing(machine) as probe:
        driver = probe.driver
        addresses = [probe.allocate(nbytes) for nbytes in SMALL]
        for number, address in enumerate(addresses):
            driver.fill(address, 10 + number, 1000, 0)
        driver.synchronize_stream(0)
        handles = [driver.export_memory(address).hex() for address in addresses]
        async with peer(machine) as engine:
            told = await engine.ask("first_bytes", handles=handles)
    blocks, kinds = len({address >> 21 for address in addresses}), len(set(handles))
    found = [one["byte"] if "byte" in one else one["error"] for one in told]
    apart = found == [10 + number for number in range(len(SMALL))]
    note = f"{len(SMALL)} in {blocks} blocks with {kinds} handles; opened, they hold {found}"
    note += "" if apart else ": a handle names the block, as the engine's side allows for (`into`)"
    return Found(note, "right" if apart or kinds < len(SMALL) else "wrong", {"opened": told, "handles": kinds})


async def calls_beside_a_pending_wait(machine: Machine) -> Found:
    """Which calls wait while a stream waits for a word: each may take 3 s, then the word is written."""
    seconds = await asyncio.to_thread(_beside_a_wait, machine)
    slow = [name for name, took in seconds.items() if took is None]
    note = f"these wait: {', '.join(slow)}" if slow else f"none of {len(seconds)} calls waits"
    return Found(note, "slow" if "a copy on another stream" in slow else "right", seconds)


def _beside_a_wait(machine: Machine) -> dict[str, float | None]:
    """Seconds by call; None: it ended only with the wait."""
    found: dict[str, float | None] = {}
    context = machine.driver.retain(machine.index)
    with probing(machine) as probe:
        driver = probe.driver
        image = driver.compile(source(), machine.info.capability)
        held, word = probe.stream(), HeldStreams(probe)
        for name, call in _calls(probe, image, probe.allocate(2 * MIB)).items():
            word.hold(held)
            ended = threading.Event()

            def work(call: Callable[[], Any] = call, ended: threading.Event = ended) -> None:
                with driver.current(context):
                    call()
                ended.set()

            thread, before = threading.Thread(target=work), time.monotonic()
            thread.start()
            in_time = ended.wait(0.3 if machine.fake else LET_GO_S)
            found[name] = time.monotonic() - before if in_time else None
            word.let_go()
            driver.synchronize_stream(held)
            thread.join()
    machine.driver.release(machine.index)
    return found


def _calls(probe: Probe, image: bytes, room: int) -> dict[str, Callable[[], Any]]:
    """What a daemon does while tasks wait. Each once, in an order in which one makes what a later one needs."""
    driver, kept = probe.driver, dict[str, int]()
    spare, pinned, host = driver.allocate(8 * MIB), probe.registered(8 * MIB), Host(8 * MIB)
    event, stream, other = driver.create_event(), probe.stream(), driver.create_stream()
    table = KernelSegment(spare, 4096, 4096, 0)
    driver.copy(room + MIB, ctypes.addressof(table), ctypes.sizeof(table), stream)
    driver.synchronize_stream(stream)

    def keep(name: str, made: int) -> None:
        kept[name] = made

    def copied() -> None:
        driver.copy(spare, pinned.address, MIB, stream)
        driver.synchronize_stream(stream)

    def launched() -> None:
        move = Move(segments=room + MIB, packed=spare + MIB, packed_stride=4096, segment_count=1, tiles=1, gather=1)
        move.name_blocks(np.array([0]), np.array([0]))
        driver.launch(kept["function"], 1, THREADS, move, stream)
        driver.synchronize_stream(stream)

    calls: dict[str, Callable[[], Any]] = {
        "a copy on another stream": copied,
        "cuMemAlloc": lambda: keep("memory", driver.allocate(64 * MIB)),
        "cuMemHostRegister": lambda: driver.register_host(host.address, 8 * MIB),
        "cuModuleLoadData": lambda: keep("module", driver.load(image)),
        "cuModuleGetFunction": lambda: keep("function", driver.function(kept["module"], NAME)),
        "the first launch": launched,
        "cuStreamCreate": lambda: keep("stream", driver.create_stream()),
        "cuEventCreate": lambda: keep("event", driver.create_event()),
        "cuIpcGetMemHandle": lambda: driver.export_memory(room),
        "cuEventDestroy": lambda: driver.destroy_event(event),
        "cuStreamDestroy": lambda: driver.destroy_stream(other),
    }
    ends = {
        "cuMemHostUnregister": lambda: driver.unregister_host(host.address),
        "cuMemFree": lambda: driver.free(spare),
        "cuModuleUnload": lambda: driver.unload(kept["module"]),
    }
    if not probe.fake:  # the simulated driver reports each of these beside a wait
        return calls | ends | _last(probe, kept)
    probe.undo += [*ends.values(), *_last(probe, kept).values()]
    return calls


def _last(probe: Probe, kept: dict[str, int]) -> dict[str, Callable[[], Any]]:
    driver = probe.driver
    return {
        "cuMemFree of another": lambda: driver.free(kept["memory"]),
        "cuStreamDestroy of another": lambda: driver.destroy_stream(kept["stream"]),
        "cuEventDestroy of another": lambda: driver.destroy_event(kept["event"]),
    }


CHECKS = (the_bus_by_size, copies_across_two_registrations, small_allocations_are_told_apart)
WAITS = (calls_beside_a_pending_wait,)  # it may hang in a driver that behaves in another way
