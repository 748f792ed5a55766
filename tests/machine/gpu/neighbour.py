"""Work that keeps a GPU busy: what an engine does to it, in the process of peer.py.

fills           eight short kernels, and a wait for them: the GPU is idle between two steps
decode          400 kernels of some 30 us that read memory, and the next step is on the queue before one ends: no gap
prefill         two kernels of 5 ms on all multiprocessors, without a gap either
small copies    4 KiB into the device and out of it, and a wait for them
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import numpy as np

from transferd.tiers.cuda.driver import Driver
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.pinned import HostRegion

Kind = Literal["fills", "decode", "prefill", "small copies"]
AHEAD = 2  # steps on the queue of an engine: 800 launches, of the 1020 that it holds
READ_BYTES = 96 << 20  # by a kernel of a decode step: 30 us at 3.3 TB/s
READS, ROOM = 400, 8  # kernels of such a step, and how many such ranges they read in turn
SPINS, SPIN_NS = 2, 5_000_000
THREADS = 256

SOURCE = rb"""
struct Load { const uint4 *memory; unsigned long long vectors, nanoseconds; unsigned *out; };

extern "C" __global__ void read_memory(Load load)
{
    unsigned sum = 0;
    unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long first = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (unsigned long long i = first; i < load.vectors; i += step) {
        uint4 vector = __ldcs(load.memory + i);
        sum += vector.x ^ vector.y ^ vector.z ^ vector.w;
    }
    if (sum == 0x12345678u)
        *load.out = sum;
}

extern "C" __global__ void spin(Load load)
{
    unsigned long long began, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - began < load.nanoseconds);
    if (load.nanoseconds == 1)
        *load.out = 1;
}
"""


class Load(ctypes.Structure):
    """The parameter of both kernels."""

    _fields_ = tuple((name, ctypes.c_uint64) for name in ("memory", "vectors", "nanoseconds", "out"))


class Neighbour:
    """Steps of one kind, one after another, from a thread until `rest`. step: bytes that one of the fills has."""

    def __init__(self, driver: Driver, context: int, device: int, kind: Kind, step: int) -> None:
        self._driver = driver
        self._device = device
        self._resting = threading.Event()
        self._times: list[float] = []
        runs = self._copies if kind == "small copies" else lambda: self._kernels(kind, step)

        def serve() -> None:
            with driver.current(context):
                runs()

        self._thread = threading.Thread(target=serve)
        self._thread.start()

    def rest(self) -> dict[str, float]:
        """Steps a second, and the median and 99th percentile of their seconds."""
        self._resting.set()
        self._thread.join()
        times = np.array(self._times or [0.0])
        p50, p99 = (float(np.percentile(times, percent)) for percent in (50, 99))
        return {"steps_per_s": len(self._times) / max(1e-9, float(times.sum())), "p50_s": p50, "p99_s": p99}

    def _kernels(self, kind: Kind, step: int) -> None:
        driver, stream = self._driver, self._driver.create_stream()
        memory = driver.allocate(step if kind == "fills" else READ_BYTES * ROOM)
        module, ahead = 0, 0 if kind == "fills" else AHEAD
        submit: Callable[[], None]
        if kind == "fills":

            def submit() -> None:
                for _ in range(8):
                    driver.fill(memory, 1, step, stream)
        else:
            info = driver.describe(self._device)
            module = driver.load(driver.compile(SOURCE, info.capability))
            name, loads = ("read_memory", READS) if kind == "decode" else ("spin", SPINS)
            function = driver.function(module, name)

            def submit() -> None:
                for number in range(loads):
                    place = memory + number % ROOM * READ_BYTES
                    load = Load(place, READ_BYTES // 16, SPIN_NS, memory)
                    driver.launch(function, 2 * info.multiprocessors, THREADS, load, stream)

        events, idle, last = deque[int](), list[int](), time.monotonic()
        while not self._times or not self._resting.is_set():
            submit()
            events.append(idle.pop() if idle else driver.create_event())
            driver.record(events[-1], stream)
            if len(events) > ahead:
                idle.append(events.popleft())
                driver.synchronize(idle[-1])
                now = time.monotonic()
                self._times.append(now - last)
                last = now
        driver.synchronize_stream(stream)
        for event in (*events, *idle):
            driver.destroy_event(event)
        driver.destroy_stream(stream)
        if module:
            driver.unload(module)
        driver.free(memory)

    def _copies(self) -> None:
        driver, host = self._driver, HostRegion(4096, CudaPinning(self._device, self._driver))
        stream, memory = driver.create_stream(), driver.allocate(4096)
        while not self._times or not self._resting.is_set():
            before = time.monotonic()
            driver.copy(memory, host.address, 4096, stream)
            driver.copy(host.address, memory, 4096, stream)
            driver.synchronize_stream(stream)
            self._times.append(time.monotonic() - before)
        driver.destroy_stream(stream)
        driver.free(memory)
        host.close()
