"""The GPU that is checked, and what the checks do to it without the code they check."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tests.support.cuda.abi import SERVED
from transferd.blocks.copyplan import CopyPlan, plan_copy
from transferd.blocks.layout import BlockLayout, build_layout
from transferd.config import CacheSection
from transferd.runtime.compat import wait_for
from transferd.runtime.threads import ThreadPools
from transferd.tiers.base import DeviceHandle
from transferd.tiers.cuda import CudaDeviceTier
from transferd.tiers.cuda.driver import DeviceInfo, Driver
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.hostcopy import copy_runs
from transferd.tiers.pinned import MEMORY_LOCK, HostPool

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
DEADLINE_S = 60.0  # of anything that is waited for

SMALL = {"device_blocks": 24, "host_blocks": 40, "block_size": 16}
FAKE = SERVED in os.environ
LAYOUTS: dict[str, dict[str, Any]] = {
    "gqa": SMALL | {"layers": 3, "kv_heads": 2, "head_dim": 64},
    "gqa, odd": SMALL | {"layers": 3, "kv_heads": 1, "head_dim": 5, "block_size": 3},
    "mha float16": SMALL | {"layers": 2, "kv_heads": 16, "head_dim": 64, "dtype": "float16"},
    "fp8 with scales": SMALL | {"layers": 3, "kv_heads": 2, "head_dim": 128, "dtype": "block_wise_fp8"},
    "fp8, float32 scales, odd": SMALL
    | {"layers": 2, "kv_heads": 3, "head_dim": 7, "block_size": 5, "dtype": "block_wise_fp8", "scale_dtype": "float32"},
    # 512 + 64, as DeepSeek V3
    "mla": {"attention": "mla", "layers": 5 if FAKE else 61, "block_size": 64, "device_blocks": 8, "host_blocks": 12},
    "dsa with indexer": SMALL | {"attention": "dsa", "layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "dsa, odd": SMALL | {"attention": "dsa", "layers": 3, "kv_lora_rank": 128, "qk_rope_head_dim": 3, "block_size": 7},
    "mtp": SMALL | {"layers": 2, "kv_heads": 1, "head_dim": 9, "block_size": 4, "mtp_layers": 2, "mtp_blocks": 31},
    "large segments": SMALL | {"layers": 2, "kv_heads": 8, "head_dim": 128, "block_size": 64},
}  # fmt: skip


Verdict = Literal["right", "fast", "slow", "wrong", "skipped"]


@dataclass(frozen=True)
class Found:
    """What a check that measures found. figures: for the JSON."""

    note: str
    verdict: Verdict = "right"
    figures: dict[str, Any] = field(default_factory=dict)


class Failed(Exception):
    """A check found something wrong; the message says what, in one or a few lines."""


@dataclass
class Machine:
    """fake: on the double, where speed means nothing and sizes are small. work: a directory that goes with the run."""

    driver: Driver
    index: int
    work: Path
    seed: int
    measured: Callable[[list[dict[str, Any]]], None] = lambda _: None  # hears of rows of the benchmark
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count())

    def begin(self, row: str) -> None:
        """A row draws the same random numbers in each run with this seed, whatever ran before it."""
        self.numbers = itertools.count(zlib.crc32(row.encode()))

    @property
    def fake(self) -> bool:
        return FAKE

    @property
    def info(self) -> DeviceInfo:
        return self.driver.describe(self.index)

    def rng(self) -> np.random.Generator:
        """Fresh random numbers for each check, the same in each run with this seed."""
        return np.random.default_rng([self.seed, next(self.numbers)])

    def free(self) -> int:
        """Bytes of device memory that nobody has."""
        context = self.driver.retain(self.index)
        with self.driver.current(context):
            free, _ = self.driver.memory_info()
        self.driver.release(self.index)
        return free


class Rig:
    """A tier under check, its host pool, and plain copies of all of its memory."""

    def __init__(self, machine: Machine, tier: CudaDeviceTier, layout: BlockLayout, pool: HostPool | None) -> None:
        self.machine = machine
        self.tier = tier
        self.layout = layout
        self.rng = machine.rng()
        self._pool = pool

    @property
    def pool(self) -> HostPool:
        assert self._pool is not None
        return self._pool

    @property
    def host(self) -> Bytes:
        """All of the host pool."""
        return np.frombuffer(self.pool.memory.view, dtype=np.uint8)

    def device(self) -> Bytes:
        """All of the device's cache, brought here by one plain copy."""
        content = np.empty(self.tier.arena.geometry.extent, dtype=np.uint8)
        self._plainly(content.ctypes.data, self.tier.arena.origin, content.nbytes)
        return content

    def write_device(self, content: Bytes) -> None:
        self._plainly(self.tier.arena.origin, content.ctypes.data, content.nbytes)

    def _plainly(self, target: int, source: int, nbytes: int) -> None:
        driver = self.machine.driver
        with driver.current(self.tier.resources.context):
            driver.copy(target, source, nbytes, 0)
            driver.synchronize_stream(0)

    def fresh(self, nbytes: int) -> Bytes:
        return self.rng.integers(0, 256, nbytes, dtype=np.uint8)

    def some(self, blocks: int, count: int) -> list[int]:
        chosen: list[int] = self.rng.permutation(blocks)[:count].tolist()
        return chosen

    def out(self, device: list[int], host: list[int]) -> CopyPlan:
        return plan_copy(self.tier.arena.geometry, device, self.layout.host, host)

    def into(self, host: list[int], device: list[int]) -> CopyPlan:
        return plan_copy(self.layout.host, host, self.tier.arena.geometry, device)


@asynccontextmanager
async def open_rig(
    machine: Machine, cache: dict[str, Any], *, pinned: bool = True, handle: DeviceHandle | None = None, **options: Any
) -> AsyncIterator[Rig]:
    """A tier and a pool, closed at the end. handle: map the engine's memory instead of allocating."""
    layout = build_layout(CacheSection(**cache))
    threads = ThreadPools(2)
    tier = CudaDeviceTier(layout, 0, machine.index, threads, **options)
    try:
        await (tier.open() if handle is None else tier.attach(handle))
        pool = HostPool(layout, CudaPinning(machine.index) if pinned else MEMORY_LOCK)
        try:
            if pinned and not pool.memory.pinned:
                raise Failed(f"host memory cannot be pinned: {pool.memory.degraded}")
            yield Rig(machine, tier, layout, pool)
        finally:
            await tier.close()
            pool.close()
    finally:
        threads.close()


def expected_after(plan: CopyPlan, source: Bytes, target: Bytes) -> Bytes:
    """What the target must hold: its bytes before, with the plan's runs copied over by the CPU."""
    after = target.copy()
    copy_runs(source.ctypes.data, after.ctypes.data, plan.runs)
    return after


def compare(found: Bytes, expected: Bytes, what: str, plan: CopyPlan) -> None:
    """Raise Failed with the first wrong byte and where it belongs."""
    if np.array_equal(found, expected):
        return
    wrong = np.flatnonzero(found != expected)
    first = int(wrong[0])
    inside = [(index, run) for index, run in enumerate(plan.runs.tolist()) if run[1] <= first < run[1] + run[2]]
    place = (
        f"byte {first - inside[0][1][1]} of run {inside[0][0]} {inside[0][1]} (source, target, bytes)"
        if inside
        else "outside of what the plan writes"
    )
    raise Failed(
        f"{what}: {len(wrong)} of {len(found)} bytes are wrong; the first is at {first}, {place}: "
        f"{found[first]:#04x} instead of {expected[first]:#04x}"
    )


async def within(work: Awaitable[Any], what: str, seconds: float = DEADLINE_S) -> Any:
    """Wait for something, but not for ever."""
    try:
        return await wait_for(work, seconds)
    except TimeoutError:
        raise Failed(f"{what} did not end within {seconds:.0f} s") from None


@contextmanager
def raising(kind: type[Exception], *, saying: str, what: str) -> Iterator[None]:
    """The block has to raise `kind` with this in its one line."""
    try:
        yield
    except kind as error:
        if saying not in str(error) or "\n" in str(error):
            raise Failed(f"{what}: the error should say {saying!r} in one line, it says {str(error)!r}") from error
    else:
        raise Failed(f"{what}: nothing was raised")
