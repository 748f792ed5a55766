"""The external linker's pools on a simulated GPU, through a real daemon: mapped as vLLM's are, every byte compared."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup

from tests.machine.with_sglang import pools
from tests.support.cuda.gpu import FakeGpu
from tests.support.cuda.shim import compiler
from tests.support.cuda.tensor import GpuTensor
from tests.support.cuda.tier import as_numpy
from transferd.adapters.common.gpu import GpuMemory
from transferd.adapters.sglang import linker
from transferd.adapters.sglang.pools import AttachedPool
from transferd.adapters.sglang.rank import RankPools
from transferd.adapters.sglang.settings import LinkerSettings, checked
from transferd.client.launch import running
from transferd.tiers.cuda.engine import DeviceArray

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with")

DEVICE = "tests.support.cuda.tier:FakeCudaTier"
LAYERS, BLOCKS, ROW = 2, 40, 512  # ROW: bytes of a token in a tensor


class PoolTensor(GpuTensor):
    """A tensor of a pool, with what SGLang asks of it."""

    is_cuda, dtype = True, "uint8"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape)

    def stride(self, axis: int | None = None) -> Any:
        strides = super().stride()
        return strides if axis is None else strides[axis]


def test_pages_on_a_gpu_are_stored_and_loaded(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(seed=3)
    rows = BLOCKS * pools.PAGE
    with gpu.current(gpu.retain(0)):
        addresses = [gpu.allocate(rows * ROW) for _ in range(2 * LAYERS)]
    memory = [as_numpy(DeviceArray(one, (BLOCKS, pools.PAGE * ROW), "uint8", 0, None)) for one in addresses]
    for number, part in enumerate(memory):
        part[:] = np.random.default_rng(number).integers(0, 256, part.shape, dtype=np.uint8)
    entry = DevicePoolEntry(
        name=PoolName.KV,
        indices_from_pool=PoolName.KV,
        device_pool=SimpleNamespace(),
        components=[[PoolTensor(one, 0, (rows, ROW), (ROW, 1), 1) for one in addresses]],
        layer_mapping={layer: (layer, LAYERS + layer) for layer in range(LAYERS)},
        page_size=pools.PAGE,
        rows_are_pages=False,
    )
    pages = linker.DevicePages(DevicePoolGroup([entry], LAYERS, pools.PAGE), [entry])
    assert pages.ends == [2, 4]
    monkeypatch.setattr(linker, "GpuMemory", functools.partial(GpuMemory, kind=DEVICE, driver=gpu))
    sections = {"engines": {"devices": [DEVICE]}, "host": {"staging": "4MiB"}, "storage": {"backend": "file"}}
    with running(sections, place) as daemon:
        rank = RankPools(pools.config(), checked({"endpoint": daemon.endpoint, "weights": "tiny"}, LinkerSettings))
        rank.add("kv", pages)
        rank.wait_ready()
        before = [part.copy() for part in memory]
        stored, _ = rank.moved("kv", pools.KEYS, pools.indices(pools.STORED), AttachedPool.store)
        loaded, _ = rank.moved("kv", pools.KEYS, pools.indices(pools.LOADED), AttachedPool.load)
        assert all(stored)
        assert all(loaded)
        for part, old in zip(memory, before, strict=True):
            old[pools.LOADED] = old[pools.STORED]
            assert np.array_equal(part, old)
        rank.close()
    assert gpu.wrong() == []
