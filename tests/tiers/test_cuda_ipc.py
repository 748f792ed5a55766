"""GPU memory across processes, two fakes standing for two processes: who maps what, once, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.support.cuda.gpu import FakeGpu
from tests.support.cuda.shim import compiler
from tests.support.cuda.tier import as_numpy
from tests.workers.rig import Rig
from transferd.adapters.fastdeploy.memory import handle_of
from transferd.blocks.copyplan import plan_copy
from transferd.blocks.layout import build_layout
from transferd.client.offers import laid
from transferd.config import CacheSection
from transferd.errors import DeviceLost, RequestError, TierError
from transferd.runtime.threads import ThreadPools
from transferd.tiers.base import DeviceHandle
from transferd.tiers.cuda import CudaDeviceTier, engine
from transferd.tiers.cuda.engine import rows
from transferd.tiers.cuda.ipc import KIND
from transferd.tiers.extents import overlap
from transferd.tiers.fastdeploy import segment_name
from transferd.tiers.owner import this_process
from transferd.tiers.pinned import HostPool
from transferd.wire.canary import taken_from
from transferd.workers.canary import check_canary

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with")

SHAPE: dict[str, Any] = {
    "layers": 2, "mtp_layers": 1, "block_size": 5, "kv_heads": 3, "head_dim": 7, "dtype": "block_wise_fp8",
    "scale_dtype": "float32", "device_blocks": 6, "mtp_blocks": 9, "host_blocks": 6,
}  # fmt: skip
LAYOUT = build_layout(CacheSection(**SHAPE))


@pytest.fixture
def threads() -> Iterator[ThreadPools]:
    threads = ThreadPools(2)
    yield threads
    threads.close()


@pytest.fixture
async def daemon(threads: ThreadPools) -> AsyncIterator[CudaDeviceTier]:
    """A tier that is not open; what is wrong on its GPU, or left there, fails the test."""
    gpu = FakeGpu(seed=1)
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=gpu, slot_bytes=1)
    yield tier
    await tier.close()
    assert gpu.wrong() == []
    assert gpu.leaks() == []


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool(LAYOUT)
    yield made
    made.close()


class Elsewhere:
    """The engine: another process's GPU, with the arrays that it allocates itself."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.context = gpu.retain(0)
        self.allocations: list[int] = []

    def allocate(self, nbytes: int) -> int:
        with self.gpu.current(self.context):
            self.allocations.append(self.gpu.allocate(nbytes))
        return self.allocations[-1]

    def arrays(self, *, per_array: bool) -> dict[str, list[engine.DeviceArray]]:
        """Arrays as the layout wants them: each an allocation, or all in one large one, at odd places."""
        sizes = [LAYOUT.device_blocks_of(part.layer) * part.nbytes for part in LAYOUT.segments]
        start = 0 if per_array else self.allocate(sum(nbytes + 256 for nbytes in sizes)) + 128
        caches: dict[str, list[engine.DeviceArray]] = {}
        for part, nbytes in zip(LAYOUT.segments, sizes, strict=True):
            address = self.allocate(nbytes) if per_array else start
            start += -(-nbytes // 128) * 128 + 128
            shape = (LAYOUT.device_blocks_of(part.layer), *part.plane.shape)
            array = engine.DeviceArray(address, shape, part.plane.numpy_dtype.name, 0, None)
            caches.setdefault(part.plane.name, []).append(array)
        return caches

    def close(self) -> None:
        with self.gpu.current(self.context):
            for address in self.allocations:
                self.gpu.free(address)
        self.gpu.release(0)
        gc.collect()  # arrays that a test has dropped
        assert self.gpu.wrong() == []
        assert self.gpu.leaks() == []


@pytest.fixture
def other() -> Iterator[Elsewhere]:
    made = Elsewhere(FakeGpu(seed=2))
    yield made
    made.close()


def seen(array: engine.DeviceArray) -> np.ndarray[Any, Any]:
    """The bytes of an array on a fake GPU, [blocks, bytes]."""
    return as_numpy(array).reshape(array.shape[0], -1).view(np.uint8)


async def moves_blocks(tier: CudaDeviceTier, pool: HostPool, caches: dict[str, list[engine.DeviceArray]]) -> None:
    """Random bytes in the arrays; blocks out, and in again elsewhere; every byte of the arrays compared."""
    rng = np.random.default_rng(5)
    for arrays in caches.values():
        for array in arrays:
            seen(array)[...] = rng.integers(0, 256, seen(array).shape, dtype=np.uint8)
    before = {plane: [seen(array).copy() for array in arrays] for plane, arrays in caches.items()}
    where = tier.arena.geometry
    await tier.copy_out(plan_copy(where, [4, 1, 2], LAYOUT.host, [0, 5, 3]), pool.memory)
    memory = np.frombuffer(pool.memory.view, dtype=np.uint8)
    for part, offset in zip(LAYOUT.segments, LAYOUT.host.offsets, strict=True):
        start = int(offset) + 5 * int(LAYOUT.host.strides[0])
        assert memory[start : start + part.nbytes].tobytes() == before[part.plane.name][part.layer][1].tobytes()
    del memory
    await tier.copy_in(plan_copy(LAYOUT.host, [0, 5, 3], where, [0, 5, 3]), pool.memory)
    for plane, arrays in caches.items():
        for array, was in zip(arrays, before[plane], strict=True):
            expected = was.copy()
            expected[[0, 5, 3]] = was[[4, 1, 2]]
            assert np.array_equal(seen(array), expected), plane


# --- create: the daemon allocates ---------------------------------------------------------------------


async def test_an_engine_maps_the_daemons_memory_and_both_see_the_same_bytes(
    daemon: CudaDeviceTier, other: Elsewhere, pool: HostPool
) -> None:
    await daemon.open()
    handle = daemon.handle()
    assert handle.kind == KIND
    attached = engine.attach(handle.data, other.gpu)
    assert {plane: len(arrays) for plane, arrays in attached.caches.items()} == dict.fromkeys(
        ("key", "value", "key_scale", "value_scale"), 3
    )
    assert attached.caches["key"][2].shape == (9, 3, 5, 7), "MTP layers have their own count"
    await moves_blocks(daemon, pool, attached.caches)


async def test_a_mapping_lives_as_long_as_an_array_of_it(daemon: CudaDeviceTier, other: Elsewhere) -> None:
    await daemon.open()
    data = daemon.handle().data
    one = engine.attach(data, other.gpu).caches["key"][0].view("uint8")
    two = engine.attach(data, other.gpu).caches["value"][1]
    assert other.gpu.count("open_memory") == 2, "a process maps an allocation once: the cache and its timelines"
    gc.collect()
    assert other.gpu.count("close_memory") == 0
    seen(one)[0] = 7
    del one
    gc.collect()
    assert other.gpu.count("close_memory") == 0
    del two
    gc.collect()
    assert other.gpu.count("close_memory") == 2
    assert other.gpu.memory.opened == {}


async def test_a_mapping_may_be_collected_while_its_thread_makes_another(
    daemon: CudaDeviceTier, other: Elsewhere, threads: ThreadPools, monkeypatch: pytest.MonkeyPatch
) -> None:
    await daemon.open()
    held = [engine.attach(daemon.handle().data, other.gpu)]
    second = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=FakeGpu(seed=3), slot_bytes=1)
    await second.open()
    open_memory = other.gpu.open_memory

    def collects_first(handle: bytes) -> int:
        held.clear()
        gc.collect()
        return open_memory(handle)

    monkeypatch.setattr(other.gpu, "open_memory", collects_first)
    attached = engine.attach(second.handle().data, other.gpu)
    assert other.gpu.count("close_memory") == 2, "it was settled when the other was made"
    assert len(other.gpu.memory.opened) == 2
    del attached
    gc.collect()
    assert other.gpu.memory.opened == {}
    await second.close()


async def test_a_mapping_on_a_device_that_was_lost_goes_without_a_word(
    daemon: CudaDeviceTier, other: Elsewhere
) -> None:
    await daemon.open()
    lost = FakeGpu()  # a third process
    attached = engine.attach(daemon.handle().data, lost)
    assert attached.ready is not None
    lost.refuse("record", "CUDA_ERROR_ECC_UNCORRECTABLE")
    with pytest.raises(DeviceLost):
        attached.ready.record(0)
    del attached
    gc.collect()  # what a finalizer raises would be a warning, and so an error


async def test_frameworks_find_what_they_ask_an_array_for(daemon: CudaDeviceTier, other: Elsewhere) -> None:
    await daemon.open()
    array = engine.attach(daemon.handle().data, other.gpu).caches["key_scale"][0]
    interface = array.__cuda_array_interface__
    assert interface == {
        "shape": (6, 3, 5), "typestr": "<f4", "data": (array.address, False), "version": 3, "strides": None,
    }  # fmt: skip
    assert array.__dlpack_device__() == (2, 0)
    assert array.nbytes == 6 * 3 * 5 * 4
    with pytest.raises(RequestError, match="cannot view float32 as float16"):
        array.view("float16")


async def test_an_engine_says_when_its_kernels_are_done(daemon: CudaDeviceTier, other: Elsewhere) -> None:
    await daemon.open()
    attached = engine.attach(daemon.handle().data, other.gpu)
    assert attached.ready is not None
    with other.gpu.current(other.context):
        stream = other.gpu.create_stream()
    attached.ready.record(stream)
    signal = daemon.resources.driver._events[daemon.resources.event]  # type: ignore[attr-defined]
    assert signal.recorded == 1
    with other.gpu.current(other.context):
        other.gpu.synchronize_stream(stream)
        other.gpu.destroy_stream(stream)
    assert signal.reached == 1


async def test_a_gpu_that_this_process_does_not_see_is_named(daemon: CudaDeviceTier, other: Elsewhere) -> None:
    await daemon.open()
    data = daemon.handle().data | {"device": "f" * 32}
    with pytest.raises(TierError, match=f"GPU {'f' * 32} is not visible"):
        engine.attach(data, other.gpu)


# --- attach: the engine allocates ---------------------------------------------------------------------


@pytest.mark.parametrize("per_array", [True, False], ids=["an allocation each", "all in one"])
async def test_the_daemon_maps_the_engines_memory(
    daemon: CudaDeviceTier, other: Elsewhere, pool: HostPool, per_array: bool
) -> None:
    caches = other.arrays(per_array=per_array)
    data = engine.export(caches, device=0, driver=other.gpu)
    assert len(data["regions"]) == (len(LAYOUT.segments) if per_array else 1)
    if not per_array:
        assert data["arrays"][0]["offset"] == 128, "an array's place in its allocation, by address range"
    await daemon.attach(DeviceHandle(KIND, data))
    gpu = daemon._driver
    assert isinstance(gpu, FakeGpu)
    handles = len({region["handle"] for region in data["regions"]})
    assert gpu.count("open_memory") == handles, "each is opened once"
    await moves_blocks(daemon, pool, caches)
    with pytest.raises(TierError, match="an engine allocated this memory"):
        daemon.handle()
    await daemon.close()
    assert gpu.count("close_memory") == handles, "closed when the engine goes"
    await daemon.attach(DeviceHandle(KIND, data))  # and it may come again


@pytest.mark.parametrize("per_array", [True, False], ids=["an allocation each", "all in one"])
async def test_ranks_that_were_offered_the_same_memory_are_seen_to_overlap(
    threads: ThreadPools, other: Elsewhere, per_array: bool
) -> None:
    gpu = FakeGpu(seed=1)
    first, second, third = (CudaDeviceTier(LAYOUT, rank, 0, threads, driver=gpu, slot_bytes=1) for rank in range(3))
    data = engine.export(other.arrays(per_array=per_array), device=0, driver=other.gpu)
    await first.attach(DeviceHandle(KIND, data))
    await second.attach(DeviceHandle(KIND, data))
    await third.attach(DeviceHandle(KIND, engine.export(other.arrays(per_array=False), device=0, driver=other.gpu)))
    assert overlap(first.extents(), second.extents())
    assert not overlap(first.extents(), third.extents())
    for tier in (first, second, third):
        await tier.close()
    assert gpu.wrong() == []
    assert gpu.leaks() == []


@pytest.mark.parametrize("per_array", [True, False], ids=["an allocation each", "all in one"])
async def test_a_canary_tells_the_engines_arrays_from_others(
    daemon: CudaDeviceTier, other: Elsewhere, threads: ThreadPools, per_array: bool
) -> None:
    mine, wrong = other.arrays(per_array=per_array), other.arrays(per_array=per_array)
    for arrays in mine.values():
        for array in arrays:
            seen(array)[...] = 0x5A
    rig = Rig(threads=threads, **SHAPE)
    await rig.worker.open()
    context = dataclasses.replace(rig.context, device=daemon)
    for caches, found in ((mine, True), (wrong, False)):
        await daemon.attach(DeviceHandle(KIND, engine.export(caches, device=0, driver=other.gpu)))
        with laid(rows(mine, device=0, driver=other.gpu), 2) as said:
            assert not all((seen(array) == 0x5A).all() for arrays in mine.values() for array in arrays)
            _, canary = taken_from({"canary": said})
            assert canary is not None
            if found:
                await check_canary(context, canary)
            else:
                with pytest.raises(RequestError, match="block 2 of key of layer 0") as caught:
                    await check_canary(context, canary)
                assert caught.value.reason == "canary_mismatch"
        assert all((seen(array) == 0x5A).all() for arrays in mine.values() for array in arrays), "former bytes"
        await daemon.close()
    assert rig.slots_used == 0
    await rig.worker.close()


async def test_the_daemon_reads_fastdeploys_handles(
    daemon: CudaDeviceTier, other: Elsewhere, pool: HostPool, tmp_path: Path
) -> None:
    other.gpu.memory.handles = "allocations"  # FastDeploy itself, which opens the same handles, relies on it
    caches = other.arrays(per_array=True)
    for plane, arrays in caches.items():
        for layer, array in enumerate(arrays):
            with other.gpu.current(other.context):
                content = b"\1" + bytes(7) + other.gpu.export_memory(array.address)
            (tmp_path / segment_name(plane, layer, 3, 5)).write_bytes(content)
    assert (tmp_path / "key_caches_0_rank3.device5").exists()
    assert (tmp_path / "value_cache_scales_2_rank3.device5").exists()
    handle = handle_of(LAYOUT, 3, 5, f"{0:032x}", this_process(), tmp_path)
    await daemon.attach(handle)
    await moves_blocks(daemon, pool, caches)


def test_a_tensor_that_fastdeploy_has_not_published_is_named(tmp_path: Path) -> None:
    with pytest.raises(TierError, match=r"has not published key_caches_0_rank0\.device1: No such file") as caught:
        handle_of(LAYOUT, 0, 1, f"{0:032x}", this_process(), tmp_path)
    assert caught.value.reason == "engine_gone"
    (tmp_path / "key_caches_0_rank0.device1").write_bytes(bytes(40))
    with pytest.raises(TierError, match="has only 40 bytes"):
        handle_of(LAYOUT, 0, 1, f"{0:032x}", this_process(), tmp_path)


def changed(data: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> DeviceHandle:
    data = copy.deepcopy(data)
    change(data)
    return DeviceHandle(KIND, data)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda data: data.pop("regions"), "bad_value"),
        (lambda data: data["regions"][0].update(handle="zz"), "bad_value"),
        (lambda data: data["regions"][0].update(handle="00"), "bad_value"),
        (lambda data: data["regions"][0].update(nbytes=0), "bad_value"),
        (lambda data: data["regions"][0].update(offset=-1), "bad_value"),
        (lambda data: data.update(event="12"), "bad_value"),
        (lambda data: data.update(device="1" * 32), "wrong_device"),
        (lambda data: data["regions"][0].update(nbytes=1 << 40), "layout_mismatch"),
        (lambda data: data["regions"][0].update(offset=1 << 40), "layout_mismatch"),
        (lambda data: data["regions"][-1].update(nbytes=8), "layout_mismatch"),
        (lambda data: data["arrays"][0].update(offset=4096), "layout_mismatch"),
        (lambda data: data["arrays"].pop(), "layout_mismatch"),
        (lambda data: data["arrays"][1].update(region=99), "layout_mismatch"),
    ],
)
async def test_a_handle_that_does_not_fit_is_refused_whole(
    daemon: CudaDeviceTier, other: Elsewhere, change: Callable[[dict[str, Any]], Any], code: str
) -> None:
    data = engine.export(other.arrays(per_array=True), device=0, driver=other.gpu)
    with pytest.raises(RequestError) as caught:
        await daemon.attach(changed(data, change))
    assert caught.value.reason == code
    assert "\n" not in str(caught.value)
    assert (" of layer " in str(caught.value)) is (code == "layout_mismatch"), "memory of another shape (#8060)"
    gpu = daemon._driver
    assert isinstance(gpu, FakeGpu)
    assert gpu.leaks() == [], "nothing half mapped"


async def test_a_handle_of_another_kind_is_refused(daemon: CudaDeviceTier) -> None:
    with pytest.raises(RequestError, match="kind 'shm'; this daemon's device tier needs 'cuda_ipc'"):
        await daemon.attach(DeviceHandle("shm", {}))


async def test_the_handle_of_an_engine_that_has_gone_is_one_line_and_leaves_nothing(daemon: CudaDeviceTier) -> None:
    engine_gpu = FakeGpu(seed=9)
    gone = Elsewhere(engine_gpu)
    data = engine.export(gone.arrays(per_array=True), device=0, driver=engine_gpu)
    gone.close()
    with pytest.raises(TierError, match=rf"memory of process {data['owner']['pid']} cannot be mapped: .*INVALID") as e:
        await daemon.attach(DeviceHandle(KIND, data))
    assert not isinstance(e.value, RequestError)
    assert "\n" not in str(e.value)
    gpu = daemon._driver
    assert isinstance(gpu, FakeGpu)
    assert gpu.leaks() == []


class Described:
    """An array as a framework describes it."""

    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = interface


@pytest.mark.parametrize(
    ("typestr", "dtype"),
    [("<V2", "uint16"), ("<f2", "float16"), ("|u1", "uint8"), ("|V1", "uint8"), ("<f4", "float32")],
)
def test_element_types_are_read_as_frameworks_write_them(other: Elsewhere, typestr: str, dtype: str) -> None:
    address = other.allocate(1 << 12)
    array = Described(shape=(2, 3), typestr=typestr, data=(address, False), strides=None)
    assert engine.export({"key": [array]}, device=0, driver=other.gpu)["arrays"][0]["dtype"] == dtype


@pytest.mark.parametrize(
    ("change", "said"), [({"typestr": "<c8"}, "type <c8"), ({"strides": (24, 8)}, "key of layer 0 is not contiguous")]
)
def test_arrays_that_cannot_be_shared_are_refused(other: Elsewhere, change: dict[str, Any], said: str) -> None:
    address = other.allocate(1 << 12)
    array = Described(**({"shape": (2, 3), "typestr": "<f4", "data": (address, False), "strides": (12, 4)} | change))
    with pytest.raises(RequestError, match=said):
        engine.export({"key": [array]}, device=0, driver=other.gpu)


# --- DLPack -----------------------------------------------------------------------------------------------


class OnCpu:
    """A DLPack capsule of ours that a consumer without a GPU can take."""

    def __init__(self, array: np.ndarray[Any, Any], owner: object) -> None:
        self.array, self.owner = array, owner

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **_: object) -> Any:
        from transferd.tiers.cuda import dlpack

        array = self.array
        return dlpack.capsule(array.ctypes.data, array.shape, array.dtype.name, (dlpack.CPU, 0), self.owner)


class Owner:
    """Somebody whose end can be seen."""


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "float16", "float32"])
def test_a_capsule_is_the_same_memory_and_keeps_its_owner(dtype: str) -> None:
    import weakref

    source = np.arange(24, dtype=dtype).reshape(2, 3, 4)
    owner = Owner()
    watch = weakref.ref(owner)
    taken = np.from_dlpack(OnCpu(source, owner))
    assert taken.shape == source.shape
    assert taken.dtype == source.dtype
    assert np.array_equal(taken, source)
    source[1, 2, 3] = 99
    assert taken[1, 2, 3] == 99
    del owner
    gc.collect()
    assert watch() is not None
    del taken
    gc.collect()
    assert watch() is None


def test_a_capsule_that_nobody_takes_lets_its_owner_go() -> None:
    import weakref

    owner = Owner()
    watch = weakref.ref(owner)
    capsule = OnCpu(np.zeros(3), owner).__dlpack__()
    del owner
    gc.collect()
    assert watch() is not None
    del capsule
    gc.collect()
    assert watch() is None


def test_an_array_that_outlives_python_calls_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frameworks free module-level tensors when Python has ended; a call of our deleter would be a crash then."""
    import weakref

    from transferd.tiers.cuda import dlpack

    monkeypatch.setattr(dlpack, "_alive", {})
    owner = Owner()
    watch = weakref.ref(owner)
    taken = np.from_dlpack(OnCpu(np.arange(3), owner))
    dlpack._outlive()
    del owner, taken
    gc.collect()
    assert len(dlpack._alive) == 1, "the deleter was not called"
    dlpack._alive.clear()
    gc.collect()
    assert watch() is not None, "and what the tensor points to stays"


ENDS_WITH_A_TENSOR = """
import atexit
kept = []

@atexit.register  # before dlpack's own, so it runs after that
def look():
    print([one[0].deleter for one in kept])

import numpy as np
from transferd.tiers.cuda import dlpack
array = np.arange(3)

class OnCpu:
    def __dlpack__(self, **_):
        return dlpack.capsule(array.ctypes.data, (3,), "int64", (dlpack.CPU, 0), array)

    def __dlpack_device__(self):
        return (dlpack.CPU, 0)

taken = np.from_dlpack(OnCpu())
kept += dlpack._alive.values()
"""


def test_pythons_end_takes_the_deleters_from_tensors_that_are_alive() -> None:
    done = subprocess.run([sys.executable, "-c", ENDS_WITH_A_TENSOR], capture_output=True, text=True, check=True)
    assert done.stdout == "[None]\n"


@pytest.mark.parametrize(("computes_on", "warned"), [(None, 0), (0, 0), (1, 1)])
async def test_a_rank_that_computes_on_another_gpu_than_its_cache_is_warned(
    threads: ThreadPools, computes_on: int | None, warned: int
) -> None:
    owner, engines = FakeGpu(devices=2), FakeGpu(devices=2)
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=owner)
    await tier.open()
    with contextlib.ExitStack() as stack, capture_logs() as logs:
        if computes_on is not None:
            stack.enter_context(engines.current(engines.retain(computes_on)))
        attached = engine.attach(tier.handle().data, driver=engines)
    assert [entry["event"][:40] for entry in logs] == ["this thread computes on another GPU than"] * warned
    del attached
    gc.collect()
    await tier.close()
