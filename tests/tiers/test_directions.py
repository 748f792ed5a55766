"""Every direction of every layout on every device, one at a time: the whole rank path, checked byte by byte.

What a block is, is said here a second time and independently of copyplan: layer by layer, the planes in
order, each the bytes of one row of its array. A write is compared with the stored object itself, a swap
with the host pool itself, so that no error of one direction is hidden by the same error of the other.

A new device is one line in VIEWS; a new layout one line in LAYOUTS.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.blobs import get, put
from tests.support.cuda.shim import compiler
from tests.support.cuda.tier import attach_arrays as attach_fake_cuda
from transferd.blocks.formats import FOOTER_BYTES, ObjectNamer, check, seal
from transferd.blocks.layout.base import PLANE_ORDER
from transferd.config import CacheSection, Config, ServerSection, Size, StorageSection
from transferd.config.sections import HostSection, MetricsSection
from transferd.daemon.daemon import Daemon
from transferd.runtime.compat import wait_for
from transferd.storage.base import Blob, Found
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, Task, TaskResult, WriteStorageTask
from transferd.tiers.base import DeviceHandle
from transferd.tiers.pinned import HostRegion
from transferd.tiers.segment import attach_arrays

FAKE_CUDA = "tests.support.cuda.tier:FakeCudaTier"
Arrays = dict[str, list[np.ndarray[Any, Any]]]

# How a test sees the memory of a device's handle, not through the tier.
VIEWS: dict[str, Callable[[DeviceHandle], Arrays]] = {
    "shm": lambda handle: attach_arrays(handle.data),
    "paddle": lambda handle: attach_arrays(handle.data),
    FAKE_CUDA: lambda handle: attach_fake_cuda(handle.data),
}
SMALL = {"device_blocks": 8, "host_blocks": 8, "block_size": 16}
LAYOUTS: dict[str, dict[str, Any]] = {
    "gqa": SMALL | {"layers": 3, "kv_heads": 2, "head_dim": 64},
    "mha": SMALL | {"layers": 2, "kv_heads": 16, "head_dim": 64, "dtype": "float16"},
    "fp8 with scales": SMALL | {"layers": 3, "kv_heads": 2, "head_dim": 128, "dtype": "block_wise_fp8"},
    "fp8, float32 scales, odd": SMALL
    | {"layers": 2, "kv_heads": 3, "head_dim": 7, "block_size": 5, "dtype": "block_wise_fp8", "scale_dtype": "float32"},
    "mla, as DeepSeek V3": {
        "attention": "mla", "layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "block_size": 64,
        "device_blocks": 4, "host_blocks": 4,
    },
    "dsa with indexer": SMALL | {"attention": "dsa", "layers": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "mtp": SMALL | {"layers": 2, "kv_heads": 2, "head_dim": 16, "mtp_layers": 2, "mtp_blocks": 11},
    "mla with mtp": SMALL
    | {"attention": "mla", "layers": 2, "kv_lora_rank": 32, "qk_rope_head_dim": 4, "mtp_layers": 1, "mtp_blocks": 9},
}  # fmt: skip
RANKS = 2
KEYS = ["first", "second", "third"]


class Rig:
    """A daemon whose tasks are pushed and answered in this process, and the memory that it moves."""

    def __init__(self, daemon: Daemon, view: Callable[[DeviceHandle], Arrays], seed: int) -> None:
        self.daemon = daemon
        self.layout = daemon.default.layout
        self.contexts = [worker.context for worker in daemon.default.coordinator.workers]
        self.device = [view(daemon.default.cache.handle(b"test", context.rank)) for context in self.contexts]
        self.random = np.random.default_rng(seed)
        self._answers: asyncio.Queue[TaskResult] = asyncio.Queue()
        daemon.default.coordinator.deliver = lambda _client, _seq, result: self._answers.put_nowait(result)

    async def run(self, task: Task) -> TaskResult:
        self.daemon.default.coordinator.submit(b"test", 1, task)
        return await wait_for(self._answers.get(), 30)

    def fill(self) -> None:
        """Fresh random bytes in every device block."""
        for caches in self.device:
            for arrays in caches.values():
                for array in arrays:
                    raw = array.view(np.uint8)
                    raw[...] = self.random.integers(0, 256, raw.shape, dtype=np.uint8)

    def block(self, rank: int, block: int) -> bytes:
        """A device block, packed as it is stored."""
        planes = sorted(self.device[rank], key=PLANE_ORDER.index)
        layers = range(self.layout.layers + self.layout.mtp_layers)
        return b"".join(self.device[rank][plane][layer][block].tobytes() for layer in layers for plane in planes)

    def blocks(self) -> list[list[bytes]]:
        return [[self.block(rank, block) for block in range(self.layout.device_blocks)] for rank in range(RANKS)]

    def beyond(self) -> list[bytes]:
        """What MTP layers have beyond the blocks that tasks can name."""
        count = self.layout.device_blocks
        return [array[count:].tobytes() for caches in self.device for arrays in caches.values() for array in arrays]

    def host(self, rank: int) -> np.ndarray[Any, Any]:
        """The rank's host pool, a row for each block."""
        pool = self.contexts[rank].host
        assert pool is not None
        stride = int(self.layout.host.strides[0])
        rows = np.frombuffer(pool.memory.view, dtype=np.uint8)[: self.layout.host_blocks * stride]
        return rows.reshape(self.layout.host_blocks, stride)[:, : self.layout.block_bytes]

    def stamp_of(self, rank: int, key: str) -> Any:
        config = self.daemon.config.storage
        namer = ObjectNamer(config.model, self.layout.fingerprint)
        return namer.stamps(config.generation, namer.ids([key]), rank)[0]

    def name_of(self, rank: int, key: str) -> str:
        objects = self.daemon.default.objects
        return objects.names(self.daemon.config.storage.generation, objects.ids([key]), rank)[0]


@pytest.fixture(params=VIEWS)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "paddle":
        pytest.importorskip("paddle", reason="the paddle extra is not installed")
    if request.param == FAKE_CUDA and compiler() is None:
        pytest.skip("there is no C compiler to run kernels on the CPU with")
    return str(request.param)


@pytest.fixture(params=LAYOUTS)
async def rig(device: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    config = Config(
        server=ServerSection(endpoint=f"ipc://{tmp_path}/t.sock"),
        cache=CacheSection(ranks=RANKS, device=device, **LAYOUTS[request.param]),
        host=HostSection(staging=Size(24 * 1024**2)),
        storage=StorageSection(backend="memory"),
        metrics=MetricsSection(listen=""),
    )
    daemon = Daemon(config)
    await daemon.open()
    seed = 20
    print(f"seed {seed}")
    made = Rig(daemon, VIEWS[device], seed)
    yield made
    made.device.clear()
    await daemon.stop(lambda: 5.0)


@pytest.fixture
def object_memory(rig: Rig) -> Iterator[memoryview]:
    """Room for one stored object."""
    region = HostRegion(rig.layout.block_bytes + FOOTER_BYTES)
    view = region.view[: rig.layout.block_bytes + FOOTER_BYTES]
    yield view
    view.release()
    region.close()


async def test_write_stores_every_plane_of_the_named_blocks(rig: Rig, object_memory: memoryview) -> None:
    rig.fill()
    before = rig.blocks()
    result = await rig.run(WriteStorageTask(task_id="w", keys=KEYS, gpu_block_ids=[3, 0, 2]))
    assert (result.status, result.block_ids) == (Status.OK, [3, 0, 2]), result.error
    storage, payload = rig.daemon.storage, rig.layout.block_bytes
    assert storage is not None
    for rank in range(RANKS):
        for key, block in zip(KEYS, [3, 0, 2], strict=True):
            [outcome] = await get(storage, [Blob(rig.name_of(rank, key), object_memory)])
            assert outcome.found is Found.FOUND
            assert bytes(object_memory[:payload]) == before[rank][block]
            assert check(object_memory, payload, rig.stamp_of(rank, key)) is None
    assert rig.blocks() == before, "a write changes nothing"


async def test_read_fills_every_plane_of_the_named_blocks_and_nothing_else(rig: Rig, object_memory: memoryview) -> None:
    rig.fill()
    expected, beyond = rig.blocks(), rig.beyond()
    storage, payload = rig.daemon.storage, rig.layout.block_bytes
    assert storage is not None
    for rank in range(RANKS):
        for key, block in zip(KEYS, [1, 3, 0], strict=True):
            object_memory[:payload] = rig.random.bytes(payload)
            expected[rank][block] = bytes(object_memory[:payload])
            seal(object_memory, payload, rig.stamp_of(rank, key))
            [outcome] = await put(storage, [Blob(rig.name_of(rank, key), object_memory)])
            assert outcome.found is Found.STORED
    result = await rig.run(ReadStorageTask(task_id="r", keys=KEYS, gpu_block_ids=[1, 3, 0]))
    assert (result.status, result.block_ids) == (Status.OK, [1, 3, 0]), result.error
    assert rig.blocks() == expected
    assert rig.beyond() == beyond


async def test_swap_out_brings_every_plane_to_the_named_host_blocks_and_nothing_else(rig: Rig) -> None:
    rig.fill()
    before = rig.blocks()
    for rank in range(RANKS):
        rig.host(rank)[:] = 0x5A
    result = await rig.run(SwapOutTask(task_id="o", gpu_block_ids=[2, 0, 3], cpu_block_ids=[0, 3, 1]))
    assert (result.status, result.block_ids) == (Status.OK, [2, 0, 3]), result.error
    for rank in range(RANKS):
        host = rig.host(rank)
        for source, target in ((2, 0), (0, 3), (3, 1)):
            assert host[target].tobytes() == before[rank][source]
        others = [block for block in range(rig.layout.host_blocks) if block not in (0, 3, 1)]
        assert (host[others] == 0x5A).all()
    assert rig.blocks() == before, "swapping out changes nothing on the device"


async def test_swap_in_fills_every_plane_of_the_named_device_blocks_and_nothing_else(rig: Rig) -> None:
    # A swap-in is refused for host blocks that no swap-out has filled; what is in them then is written over.
    await rig.run(SwapOutTask(task_id="o", gpu_block_ids=[1, 0, 2], cpu_block_ids=[3, 1, 2]))
    rig.fill()
    expected, beyond = rig.blocks(), rig.beyond()
    for rank in range(RANKS):
        host = rig.host(rank)
        host[:] = rig.random.integers(0, 256, host.shape, dtype=np.uint8)
        for source, target in ((3, 1), (1, 0), (2, 2)):
            expected[rank][target] = host[source].tobytes()
    result = await rig.run(SwapInTask(task_id="i", gpu_block_ids=[1, 0, 2], cpu_block_ids=[3, 1, 2]))
    assert (result.status, result.block_ids) == (Status.OK, [1, 0, 2]), result.error
    assert rig.blocks() == expected
    assert rig.beyond() == beyond
