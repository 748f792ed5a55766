"""One rank as the daemon builds it, over fakes whose every step can be held."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.simulation.device import SimDevice
from tests.support.simulation.memory import MemoryWatch
from tests.support.simulation.storage import SimStorage
from tests.support.simulation.threads import SimThreads
from transferd.blocks.formats import FOOTER_BYTES, ObjectNamer, check
from transferd.blocks.layout import build_layout
from transferd.blocks.layout.base import BlockLayout, Geometry, align
from transferd.config import CacheSection, Config, from_tree
from transferd.daemon.daemon import Daemon
from transferd.runtime.compat import timeout, wait_for
from transferd.runtime.threads import Threads
from transferd.storage.base import Storage
from transferd.storage.peer.carrier import Carrier
from transferd.tasks import RankOutcome, ReadStorageTask, SwapInTask, SwapOutTask, Task, WriteStorageTask
from transferd.tiers.pinned import HostPool
from transferd.tiers.staging import SLOT_ALIGNMENT
from transferd.workers.context import INLINE_CHECK_BYTES
from transferd.workers.job import Job

MODEL = "m"
GENERATION = "g"
CACHE = {"layers": 2, "kv_heads": 1, "head_dim": 8, "block_size": 4, "device_blocks": 16, "host_blocks": 16, "ranks": 2}


def layout_of(**cache: Any) -> BlockLayout:
    """As CACHE says, unless `cache` says otherwise."""
    return build_layout(CacheSection(**CACHE | cache))


LAYOUT = layout_of()

# Six blocks are stored from here, and loaded there.
KEYS = [f"k{i}" for i in range(6)]
SOURCE = [0, 1, 2, 3, 4, 5]
TARGET = [8, 15, 10, 9, 14, 12]
ASIDE = [number for number in range(16) if number not in TARGET]


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Let the loop turn until it is so; a bounded number of turns."""
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError(f"never came: {what or condition}")


async def turns(count: int = 50) -> None:
    """Let everything happen that can happen without somebody's help."""
    for _ in range(count):
        await asyncio.sleep(0)


def block(memory: npt.NDArray[np.uint8], geometry: Geometry, number: int) -> bytes:
    """One block's bytes in layout order."""
    starts = geometry.offsets + geometry.strides * number
    return b"".join(
        memory[start : start + nbytes].tobytes() for start, nbytes in zip(starts, geometry.nbytes, strict=True)
    )


def config(slots: int, *, direct: bool, **cache: Any) -> Config:
    """A daemon's. slots: of staging. cache: as for `layout_of`."""
    staging = slots * align(layout_of(**cache).block_bytes + FOOTER_BYTES, SLOT_ALIGNMENT)
    return from_tree(
        {
            "server": {"endpoint": "ipc:///nowhere"},
            "cache": CACHE | cache | {"device": "tests.support.simulation.device:SimDevice"},
            "host": {"staging": staging},
            "storage": {"backend": "none", "model": MODEL},  # the backend is replaced
            "pd": {"mode": "direct" if direct else "storage", "staging": staging},
        }
    )


class Rig:
    """One rank of a daemon, its storage, threads and device simulated. arrived, died: what it reported, in order.

    slots: of staging; half of them for reads, half for writes, and a chunk is half of a half.
    carrier: to the rigs of other daemons, with as many slots of its own. Open the daemon's `peers` first.
    cache: as for `layout_of`.
    """

    def __init__(
        self,
        *,
        slots: int = 8,
        rank: int = 0,
        storage: Storage | None = None,
        threads: Threads | None = None,
        inline_check_bytes: int = INLINE_CHECK_BYTES,
        carrier: Carrier | None = None,
        **cache: Any,
    ) -> None:
        watch = MemoryWatch()
        self.threads = threads or SimThreads()
        self.storage = storage or SimStorage(watch=watch)
        self.daemon = daemon = Daemon(
            config(slots, direct=carrier is not None, **cache),
            threads=self.threads,
            storage=self.storage,
            inline_check_bytes=inline_check_bytes,
        )
        self.worker = daemon.default.workers[rank]
        self.context = context = self.worker.context
        self.layout, self.device, self.format = context.layout, context.device, context.format
        self.staging, self.peer, self.background = context.staging, context.peer, context.background
        self.slot = self.staging.nbytes // slots  # bytes of staging that a block takes
        self.sim_device.watch = watch
        if self.peer is not None and carrier is not None:
            self.peer.transport.carrier = carrier
        self.arrived: list[tuple[Job, RankOutcome]] = []
        self.came = asyncio.Event()  # something has arrived
        self.died: list[tuple[int, str]] = []

    @property
    def host(self) -> HostPool:
        assert self.context.host is not None
        return self.context.host

    @property
    def sim_device(self) -> SimDevice:
        assert isinstance(self.device, SimDevice)
        return self.device

    @property
    def sim_storage(self) -> SimStorage:
        assert isinstance(self.storage, SimStorage)
        return self.storage

    async def open(self) -> Rig:
        await self.storage.open()
        await self.worker.open()
        await self.worker.open_device()
        self.memory[:] = np.random.default_rng(7).integers(0, 256, len(self.memory), dtype=np.uint8)
        return self

    async def close(self) -> None:
        """What the daemon does, and what must be true then."""
        assert self.staging.statistics()["used"] == 0 or self.background or self.worker._jobs
        await self.worker.close()
        await self.storage.close()
        self.threads.close()
        if isinstance(self.storage, SimStorage):
            assert self.storage.watch.conflicts == []

    # --- memory -------------------------------------------------------------------------------------

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """All device bytes."""
        arena = self.device.arena
        at = ctypes.cast(arena.origin, ctypes.POINTER(ctypes.c_uint8))
        return np.ctypeslib.as_array(at, shape=(arena.geometry.extent,))

    def block(self, number: int) -> bytes:
        return block(self.memory, self.layout.device, number)

    def host_block(self, number: int) -> bytes:
        return block(np.frombuffer(self.host.memory.view, dtype=np.uint8).copy(), self.layout.host, number)

    @property
    def slots_used(self) -> int:
        used = self.staging.statistics()["used"]
        assert isinstance(used, int)
        return used // self.slot

    def name(self, key: str) -> str:
        return self.format.names(GENERATION, self.format.ids([key]), self.worker.rank)[0]

    def stored(self, key: str) -> bytes:
        """The payload of a stored object, whose footer says that it is this key's."""
        slot = bytearray(self.sim_storage.objects[self.name(key)])
        namer = ObjectNamer(MODEL, self.layout.fingerprint)
        (stamp,) = namer.stamps(GENERATION, namer.ids([key]), self.worker.rank)
        nbytes = self.layout.block_bytes
        assert check(memoryview(slot), nbytes, stamp) is None
        assert len(slot) == nbytes + FOOTER_BYTES
        return bytes(slot[:nbytes])

    async def begin(self, task: Task) -> Job:
        """Start, and let the question what is stored be answered; every put or get after it waits at the gate."""
        gate = self.sim_storage.gate
        gate.hold()
        before = gate.held
        job = self.start(task)
        await until(lambda: gate.held > before, "the question")
        gate.release()
        gate.hold()
        return job

    # --- work ---------------------------------------------------------------------------------------

    def start(self, task: Task) -> Job:
        job = Job(task, task.blocks, GENERATION, admitted_at=1.0, started_at=3.0, queue_s=2.0)
        self.worker.start(job, self._arrive, lambda *death: self.died.append(death))
        return job

    def _arrive(self, job: Job, outcome: RankOutcome) -> None:
        self.arrived.append((job, outcome))
        self.came.set()

    def outcome(self, job: Job) -> RankOutcome | None:
        """None while it has not arrived. It arrives once."""
        mine = [outcome for other, outcome in self.arrived if other is job]
        assert len(mine) <= 1, mine
        return mine[0] if mine else None

    async def ended(self, job: Job) -> RankOutcome:
        """Its outcome, once its task on the loop has ended altogether."""
        await asyncio.sleep(0)  # then it has begun, with or without a task of the loop
        if self.worker._jobs:
            await wait_for(asyncio.wait([*self.worker._jobs]), 60)
        outcome = self.outcome(job)
        assert outcome is not None
        return outcome

    async def ended_alone(self, job: Job) -> RankOutcome:
        """Its outcome, while others are still at work, in threads as well."""
        async with timeout(60):
            while (outcome := self.outcome(job)) is None:
                self.came.clear()
                await self.came.wait()
        return outcome

    async def stopped(self, job: Job) -> RankOutcome:
        """Its outcome, while others may still be at work."""
        await until(lambda: self.outcome(job) is not None)
        outcome = self.outcome(job)
        assert outcome is not None
        return outcome

    async def run(self, task: Task) -> RankOutcome:
        return await self.ended(self.start(task))


def blocks(rig: Rig, numbers: Sequence[int]) -> list[bytes]:
    return [rig.block(number) for number in numbers]


def check_that_k1_is_lost(rig: Rig, outcome: RankOutcome, *, prefix: bool) -> None:
    """A read of KEYS to TARGET: k1 was damaged, is not reported, and counts; what is reported is right."""
    assert outcome.error is None
    assert 1 not in outcome.moved
    assert set(outcome.moved) >= ({0} if prefix else {0, 2, 3, 4, 5})
    assert [rig.block(TARGET[i]) for i in outcome.moved] == [rig.block(SOURCE[i]) for i in outcome.moved]
    assert rig.worker.corrupt == 1


def write(keys: Sequence[str], ids: Sequence[int], task_id: str = "w") -> WriteStorageTask:
    return WriteStorageTask(task_id=task_id, keys=list(keys), gpu_block_ids=list(ids))


def read(keys: Sequence[str], ids: Sequence[int], task_id: str = "r", *, prefix: bool = True) -> ReadStorageTask:
    return ReadStorageTask(task_id=task_id, keys=list(keys), gpu_block_ids=list(ids), prefix=prefix)


def swap_out(gpu: Sequence[int], cpu: Sequence[int], task_id: str = "o") -> SwapOutTask:
    return SwapOutTask(task_id=task_id, gpu_block_ids=list(gpu), cpu_block_ids=list(cpu))


def swap_in(cpu: Sequence[int], gpu: Sequence[int], task_id: str = "i") -> SwapInTask:
    return SwapInTask(task_id=task_id, gpu_block_ids=list(gpu), cpu_block_ids=list(cpu))
