"""Pages: segments that lie as an engine says, in memory with a name, with a descriptor, or on a GPU; bytes compared."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cuda.gpu import FakeGpu
from tests.support.cuda.shim import compiler
from tests.support.cuda.tier import as_numpy
from tests.support.descriptors import open_memory_and_files
from transferd.blocks.copyplan import plan_copy
from transferd.blocks.layout import BlockLayout, build_layout
from transferd.client.pages import Pages
from transferd.config import CacheSection
from transferd.errors import ConfigError, RequestError, TierError, TransferError
from transferd.runtime.descriptors import seals_of
from transferd.runtime.threads import ThreadPools
from transferd.tiers.arrays import Region, locate_offered
from transferd.tiers.base import DeviceHandle, DeviceTier
from transferd.tiers.cuda import CudaDeviceTier, engine
from transferd.tiers.extents import overlap
from transferd.tiers.offered import DIRECTORY, PASSED, PEER
from transferd.tiers.page_handles import cuda_pages, shm_pages
from transferd.tiers.pinned import HostPool
from transferd.tiers.segment import attach_arrays
from transferd.tiers.shm import ShmDeviceTier

SIZES = [24, 7, 100]
BLOCKS = 6
PAGES = Pages(layers=3, page_bytes=SIZES, blocks=BLOCKS, identity="test")
ROW = sum(SIZES) + 5  # bytes from block to block where a block's layers lie together
BLOCK_MAJOR = [(11, ROW), (11 + 24, ROW), (11 + 31, ROW)]
LAYER_MAJOR = [(0, 24), (24 * BLOCKS + 3, 9), (24 * BLOCKS + 3 + 9 * BLOCKS, 128)]
NBYTES = 4096


def layout_of(pages: Pages, **more: Any) -> BlockLayout:
    return build_layout(CacheSection(**pages.as_cache(), host_blocks=BLOCKS, **more))


LAYOUT = layout_of(PAGES)


@pytest.fixture
def threads() -> Iterator[ThreadPools]:
    made = ThreadPools(2)
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[HostPool]:
    made = HostPool(LAYOUT)
    yield made
    made.close()


@pytest.fixture
def memory() -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Shared memory that the engine made: its name, and its bytes."""
    name = f"test.{os.getpid()}.pages"
    fd = os.open(DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, NBYTES)
    mapped = mmap.mmap(fd, NBYTES)
    os.close(fd)
    yield name, np.frombuffer(mapped, dtype=np.uint8)
    os.unlink(DIRECTORY / name)


def memfd(nbytes: int = NBYTES, flags: int = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) -> int:
    fd = os.memfd_create("pages", flags)
    os.ftruncate(fd, nbytes)
    return fd


def from_me(handle: DeviceHandle, uid: int | None = None, pid: int | None = None) -> DeviceHandle:
    """As the daemon's server passes it on: with the process that the kernel named."""
    peer = (os.getuid() if uid is None else uid, os.getpid() if pid is None else pid)
    return DeviceHandle(handle.kind, handle.data | {PEER: peer})


async def moves_blocks(tier: DeviceTier, pool: HostPool, raw: np.ndarray[Any, Any], segments: Any) -> None:
    """Random bytes everywhere; blocks out, and in again elsewhere; every byte of the memory compared."""
    raw[:] = np.random.default_rng(5).integers(0, 256, raw.shape, dtype=np.uint8)
    before = raw.copy()
    where = tier.arena.geometry
    await tier.copy_out(plan_copy(where, [4, 1, 2], LAYOUT.host, [0, 5, 3]), pool.memory)
    await tier.copy_in(plan_copy(LAYOUT.host, [0, 5, 3], where, [0, 5, 3]), pool.memory)
    expected = before.copy()
    for (offset, stride, *_), nbytes in zip(segments, SIZES, strict=True):
        for source, target in ((4, 0), (1, 5), (2, 3)):
            page = before[offset + source * stride :][:nbytes]
            expected[offset + target * stride :][:nbytes] = page
    assert np.array_equal(raw, expected)


# --- the layout -----------------------------------------------------------------------------------


def test_engines_that_say_the_same_have_one_fingerprint_and_others_never() -> None:
    same = layout_of(Pages(layers=3, page_bytes=tuple(SIZES), blocks=99, identity="test"))
    assert same.fingerprint == LAYOUT.fingerprint, "the number of blocks is not part of what a block is"
    others = [
        layout_of(Pages(layers=3, page_bytes=SIZES, blocks=BLOCKS, identity="test2")),
        layout_of(Pages(layers=3, page_bytes=[24, 8, 100], blocks=BLOCKS, identity="test")),
        layout_of(Pages(layers=3, page_bytes=[7, 24, 100], blocks=BLOCKS, identity="test")),
        layout_of(Pages(layers=2, page_bytes=24, blocks=BLOCKS, identity="test")),
        layout_of(PAGES, ranks=1),
        build_layout(CacheSection(attention="mla", dtype="uint8", layers=3)),
    ]
    assert len({other.fingerprint for other in others} | {LAYOUT.fingerprint}) == len(others) + 1


def test_no_identity_can_be_written_so_that_it_means_another_layout() -> None:
    one = layout_of(Pages(layers=1, page_bytes=24, blocks=1, identity='x", [24]] tp=2'))
    two = layout_of(Pages(layers=1, page_bytes=24, blocks=1, identity="x"))
    assert one.identity != two.identity
    assert one.fingerprint != two.fingerprint


def test_one_size_stands_for_every_layer() -> None:
    assert (
        layout_of(Pages(layers=3, page_bytes=8, blocks=2, identity="i")).fingerprint
        == layout_of(Pages(layers=3, page_bytes=[8, 8, 8], blocks=2, identity="i")).fingerprint
    )


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"identity": ""}, "cache.identity"),
        ({"page_bytes": None}, "cache.page_bytes"),
        ({"page_bytes": [1, 2]}, "cache.page_bytes"),
        ({"mtp_layers": 1}, "cache.mtp_layers"),
    ],
)
def test_a_layout_of_pages_that_says_too_little_is_refused(wrong: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_layout(CacheSection(**PAGES.as_cache() | wrong))
    assert refusal.value.key == key


# --- where pages lie ------------------------------------------------------------------------------

places = st.tuples(st.integers(0, 60), st.integers(1, 40))


@given(
    st.lists(places, min_size=2, max_size=2), st.integers(1, 6), st.lists(st.integers(1, 12), min_size=2, max_size=2)
)
def test_segments_are_taken_exactly_if_every_byte_belongs_to_one_page(
    segments: list[tuple[int, int]], blocks: int, sizes: list[int]
) -> None:
    layout = build_layout(
        CacheSection(attention="pages", layers=2, page_bytes=sizes, device_blocks=blocks, identity="i")
    )
    used = [
        offset + block * stride + i
        for (offset, stride), nbytes in zip(segments, sizes, strict=True)
        for block in range(blocks)
        for i in range(nbytes)
    ]
    fits = len(set(used)) == len(used) and max(used) < 200
    fits = fits and all(stride >= nbytes for (_, stride), nbytes in zip(segments, sizes, strict=True))
    offered = {"segments": segments}, [Region(1000, 200)]
    if not fits:
        with pytest.raises(RequestError) as refusal:
            locate_offered(layout, *offered)
        assert refusal.value.reason == "layout_mismatch"
        return
    arena = locate_offered(layout, *offered)
    geometry = arena.geometry
    for layer, (offset, stride) in enumerate(segments):
        start = arena.origin + int(geometry.offsets[layer])
        assert (start, int(geometry.strides[layer]), int(geometry.nbytes[layer])) == (
            1000 + offset,
            stride,
            sizes[layer],
        )
    assert arena.origin + geometry.extent == 1000 + max(used) + 1


@pytest.mark.parametrize(
    ("segments", "said"),
    [
        (None, "malformed"),
        (7, "malformed"),
        ([[0, 24], [0]], "malformed"),
        ([["0", 24]] * 3, "malformed"),
        ([[0, 24, 0, 0]] * 3, "malformed"),
        (LAYER_MAJOR[:2], "has 2 segments; the layout needs 3"),
        ([(-1, 24), *LAYER_MAJOR[1:]], "layer 0 starts at byte -1"),
        ([(2**63 - 1, 24), *LAYER_MAJOR[1:]], "layer 0 starts at byte"),
        ([(0, 2**62 + 1), *LAYER_MAJOR[1:]], "with a stride of"),
        ([(0, 0), *LAYER_MAJOR[1:]], "stride of 0 bytes, less than its 24"),
        ([(0, -24), *LAYER_MAJOR[1:]], "with a stride of -24"),
        ([(0, 23), *LAYER_MAJOR[1:]], "stride of 23 bytes, less than its 24 bytes per block"),
        (
            [*LAYER_MAJOR[:2], (NBYTES - 99 - 5 * 128, 128)],
            "layer 2 ends at byte 4097 with 6 blocks; its region has 4096",
        ),
        ([(0, 24, 1), *LAYER_MAJOR[1:]], "layer 0 names region 1; the handle has 1"),
        ([LAYER_MAJOR[0], (24 * BLOCKS - 1, 9), LAYER_MAJOR[2]], "layer 0 and the pages of layer 1 overlap"),
        ([BLOCK_MAJOR[0], (11 + 23, ROW), BLOCK_MAJOR[2]], "layer 0 and the pages of layer 1 overlap"),
    ],
)
def test_segments_that_cannot_be_are_refused_by_what_is_wrong(segments: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said) as refusal:
        locate_offered(LAYOUT, {"segments": segments}, [Region(4096, NBYTES)])
    assert refusal.value.reason == "layout_mismatch"


def test_a_large_cache_is_checked_in_no_time_whatever_its_shape() -> None:
    """100,000 blocks of 61 layers, the layers of a block together: six million pages."""
    cache = CacheSection(attention="pages", layers=61, page_bytes=64, device_blocks=100_000, identity="i")
    segments = [(layer * 64, 61 * 64) for layer in range(61)]
    arena = locate_offered(build_layout(cache), {"segments": segments}, [Region(0, 61 * 64 * 100_000)])
    assert arena.geometry.extent == 61 * 64 * 100_000


# --- shared memory with a name --------------------------------------------------------------------


@pytest.mark.parametrize("segments", [BLOCK_MAJOR, LAYER_MAJOR], ids=["block-major", "layer-major"])
async def test_blocks_go_between_host_memory_and_an_engines_pages(
    segments: Any, memory: tuple[str, Any], threads: ThreadPools, pool: HostPool
) -> None:
    name, raw = memory
    tier = ShmDeviceTier(LAYOUT, 0, 0, threads)
    await tier.attach(from_me(shm_pages(name, segments)))
    await moves_blocks(tier, pool, raw, segments)
    await tier.close()


async def test_ranks_may_interleave_in_one_memory_and_never_share_a_byte(
    memory: tuple[str, Any], threads: ThreadPools
) -> None:
    """Rows of [rank 0 | rank 1], as vLLM's offloading connector lays out its mapping."""
    name, _ = memory
    wide = 2 * ROW
    tiers = [ShmDeviceTier(LAYOUT, rank, 0, threads) for rank in range(3)]
    for tier, shift in zip(tiers, (0, ROW, ROW - 20), strict=True):
        await tier.attach(from_me(shm_pages(name, [(offset + shift, wide) for offset, _ in BLOCK_MAJOR])))
    zero, one, two = (tier.extents() for tier in tiers)
    assert not overlap(zero, one)
    assert overlap(one, two)
    assert overlap(zero, two)
    for tier in tiers:
        await tier.close()


def test_views_are_the_engines_own_pages(memory: tuple[str, Any]) -> None:
    _, raw = memory
    raw[:] = np.arange(NBYTES, dtype=np.uint8)
    views = PAGES.views(raw, BLOCK_MAJOR)["page"]
    assert [view.shape for view in views] == [(BLOCKS, nbytes) for nbytes in SIZES]
    assert views[1][4].tobytes() == raw[35 + 4 * ROW :][:7].tobytes()
    views[2][5] = 9
    assert (raw[42 + 5 * ROW :][:100] == 9).all()
    with pytest.raises(RequestError, match="layer 2 does not fit"):
        PAGES.views(raw[: 42 + 5 * ROW + 99], BLOCK_MAJOR)


async def test_a_daemon_may_make_pages_itself(threads: ThreadPools, pool: HostPool) -> None:
    tier = ShmDeviceTier(LAYOUT, 0, 0, threads)
    await tier.open()
    arrays = attach_arrays(tier.handle().data)["page"]
    assert [array.shape for array in arrays] == [(BLOCKS, nbytes) for nbytes in SIZES]
    arrays[1][4] = np.arange(7)
    await tier.copy_out(plan_copy(tier.arena.geometry, [4], LAYOUT.host, [1]), pool.memory)
    start = int(LAYOUT.host.strides[0]) + 24
    assert bytes(pool.memory.view[start : start + 7]) == bytes(range(7))
    del arrays
    gc.collect()
    await tier.close()


def test_nobody_else_can_map_pages(memory: tuple[str, Any]) -> None:
    with pytest.raises(TierError, match="only it can map it"):
        attach_arrays(shm_pages(memory[0], BLOCK_MAJOR).data)


# --- shared memory with a descriptor --------------------------------------------------------------


async def test_a_memfd_is_offered_by_its_number_and_sealed_against_shrinking(
    threads: ThreadPools, pool: HostPool
) -> None:
    fd = memfd()
    handle = shm_pages(fd, BLOCK_MAJOR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 100)
    tier = ShmDeviceTier(LAYOUT, 0, 0, threads)
    await tier.attach(from_me(handle))
    mapped = mmap.mmap(fd, NBYTES)
    await moves_blocks(tier, pool, np.frombuffer(mapped, dtype=np.uint8), BLOCK_MAJOR)
    again = ShmDeviceTier(LAYOUT, 1, 0, threads)
    await again.attach(from_me(handle))
    assert overlap(tier.extents(), again.extents()), "the same memory, opened twice"
    await tier.close()
    await again.close()
    os.close(fd)


async def test_memory_that_cannot_be_sealed_is_taken_as_memory_with_a_name_is(threads: ThreadPools) -> None:
    fd = memfd(flags=os.MFD_CLOEXEC)
    tier = ShmDeviceTier(LAYOUT, 0, 0, threads)
    await tier.attach(from_me(shm_pages(fd, LAYER_MAJOR)))
    await tier.close()
    os.close(fd)


def spoilt(kind: str, tmp_path: Path) -> tuple[int, dict[str, Any]]:
    """A descriptor that is not to be taken, and what an offer would say of it."""
    if kind == "file":
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, NBYTES)
        if seals_of(fd) is not None:
            pytest.skip("temporary files are shared memory here (tmpfs)")
    elif kind == "pipe":
        fd = os.pipe()[0]
    else:
        fd = memfd(100 if kind == "short" else NBYTES)
        if kind == "sealed against writing":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        elif kind != "unsealed":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd, {"fd": fd, "nbytes": NBYTES, "segments": BLOCK_MAJOR, PEER: (os.getuid(), os.getpid())}


@pytest.mark.parametrize(
    ("kind", "change", "code", "said"),
    [
        ("file", {}, "not_attachable", "is not shared memory"),
        ("pipe", {}, "not_attachable", "is not shared memory"),
        ("unsealed", {}, "unsealed", "seal it with F_SEAL_SHRINK"),
        ("sealed against writing", {}, "not_attachable", "sealed against writing"),
        ("short", {}, "memory_unusable", "has only 100 bytes; 4096 are needed"),
        ("good", {PEER: None}, "not_yours", "offer it over a unix socket"),
        ("good", {PEER: (None, None)}, "not_yours", "offer it over a unix socket"),
        ("good", {PEER: (os.getuid(), 0)}, "not_attachable", "that the daemon can see"),
        ("good", {PEER: (os.getuid() + 1, os.getpid())}, "not_yours", "belongs to the user"),
        ("good", {PEER: (os.getuid(), 2**22 + 1)}, "tier_error", "cannot open the memory of descriptor"),
        ("good", {"fd": 9999}, "tier_error", "cannot open the memory of descriptor 9999"),
        ("good", {"fd": -1}, "bad_value", "fd must be the number"),
        ("good", {"fd": "../mem"}, "bad_value", "fd must be the number"),
        ("good", {"fd": True}, "bad_value", "fd must be the number"),
        ("good", {"nbytes": 0}, "bad_value", "nbytes above 0"),
        ("good", {"segments": BLOCK_MAJOR[:1]}, "layout_mismatch", "has 1 segments"),
    ],
)
async def test_a_descriptor_that_is_not_the_engines_own_memory_is_refused(
    kind: str, change: dict[str, Any], code: str, said: str, tmp_path: Path, threads: ThreadPools
) -> None:
    fd, data = spoilt(kind, tmp_path)
    before = open_memory_and_files()
    tier = ShmDeviceTier(LAYOUT, 0, 0, threads)
    with pytest.raises(TransferError, match=said) as refusal:
        await tier.attach(DeviceHandle("shm", data | change))
    assert refusal.value.reason == code
    assert open_memory_and_files() <= before, "nothing is left open"
    os.close(fd)


async def test_a_file_that_is_passed_under_the_name_of_memory_is_refused(tmp_path: Path, threads: ThreadPools) -> None:
    """Its pages may lie on a mount that hangs: a copy, on the event loop as well, would never end."""
    fd, data = spoilt("file", tmp_path)
    passed = {"name": "test.nobody.made.this", PASSED: SimpleNamespace(numbers=[data.pop("fd")])}
    with pytest.raises(RequestError, match="is not shared memory"):
        await ShmDeviceTier(LAYOUT, 0, 0, threads).attach(DeviceHandle("shm", data | passed))
    os.close(fd)


def test_memory_that_is_not_shared_is_refused_before_the_offer() -> None:
    fd, other = os.pipe()
    with pytest.raises(RequestError, match="is not shared memory"):
        shm_pages(fd, BLOCK_MAJOR)
    os.close(fd)
    os.close(other)
    with pytest.raises(TierError, match="No such file"):
        shm_pages("test.nobody.made.this", BLOCK_MAJOR)


# --- a GPU ----------------------------------------------------------------------------------------


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with")
@pytest.mark.parametrize("path", ["gather", "straight"])
@pytest.mark.parametrize("segments", [BLOCK_MAJOR, LAYER_MAJOR], ids=["block-major", "layer-major"])
async def test_blocks_go_between_host_memory_and_pages_on_a_gpu(
    segments: Any, path: Any, threads: ThreadPools, pool: HostPool
) -> None:
    elsewhere, here = FakeGpu(seed=2), FakeGpu(seed=1)
    context = elsewhere.retain(0)
    with elsewhere.current(context):
        allocation = elsewhere.allocate(NBYTES + 256)
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=here, slot_bytes=1, copy_path=path)
    handle = cuda_pages(allocation + 256, segments, device=0, driver=elsewhere)
    assert handle.data["regions"][0]["offset"] == 256
    await tier.attach(handle)
    raw = as_numpy(engine.DeviceArray(allocation + 256, (NBYTES,), "uint8", 0, None))
    await moves_blocks(tier, pool, raw, segments)
    with pytest.raises(TierError, match="only it can map it"):
        engine.attach(handle.data, elsewhere)
    await tier.close()
    with elsewhere.current(context):
        elsewhere.free(allocation)
    elsewhere.release(0)
    for gpu in (here, elsewhere):
        assert gpu.wrong() == []
        assert gpu.leaks() == []


@pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run kernels on the CPU with")
async def test_layers_on_a_gpu_may_be_allocations_of_their_own(threads: ThreadPools, pool: HostPool) -> None:
    elsewhere, here = FakeGpu(seed=2), FakeGpu(seed=1)
    context = elsewhere.retain(0)
    with elsewhere.current(context):
        allocations = [elsewhere.allocate(nbytes * BLOCKS) for nbytes in SIZES]
    segments = [(0, nbytes, layer) for layer, nbytes in enumerate(SIZES)]
    tier = CudaDeviceTier(LAYOUT, 0, 0, threads, driver=here, slot_bytes=1)
    await tier.attach(cuda_pages(allocations, segments, device=0, driver=elsewhere))
    arrays = [
        as_numpy(engine.DeviceArray(address, (BLOCKS, nbytes), "uint8", 0, None))
        for address, nbytes in zip(allocations, SIZES, strict=True)
    ]
    for layer, array in enumerate(arrays):
        array[:] = np.random.default_rng(layer).integers(0, 256, array.shape, dtype=np.uint8)
    before = [array.copy() for array in arrays]
    await tier.copy_out(plan_copy(tier.arena.geometry, [3], LAYOUT.host, [2]), pool.memory)
    await tier.copy_in(plan_copy(LAYOUT.host, [2], tier.arena.geometry, [0]), pool.memory)
    for array, was in zip(arrays, before, strict=True):
        assert array[0].tobytes() == was[3].tobytes()
        assert np.array_equal(array[1:], was[1:])
    await tier.close()
    with elsewhere.current(context):
        for address in allocations:
            elsewhere.free(address)
    elsewhere.release(0)
    assert here.leaks() == elsewhere.leaks() == []


# --- several memories -----------------------------------------------------------------------------

SEVERAL = [(40, 24, 0), (0, 9, 1), (1000, 128, 1)]


async def test_pages_may_lie_in_several_memories(threads: ThreadPools, pool: HostPool) -> None:
    named = f"test.{os.getpid()}.several"
    fds = [memfd(), os.open(DIRECTORY / named, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)]
    os.ftruncate(fds[1], NBYTES)
    mapped = [mmap.mmap(fd, NBYTES) for fd in fds]
    raws = [np.frombuffer(one, dtype=np.uint8) for one in mapped]
    for seed, raw in enumerate(raws):
        raw[:] = np.random.default_rng(seed).integers(0, 256, NBYTES, dtype=np.uint8)
    expected = [raw.copy() for raw in raws]
    for (offset, stride, which), nbytes in zip(SEVERAL, SIZES, strict=True):
        for source, target in ((4, 0), (1, 5), (2, 3)):
            page = raws[which][offset + source * stride :][:nbytes]
            expected[which][offset + target * stride :][:nbytes] = page
    tier = ShmDeviceTier(LAYOUT, 0, 0, threads)
    try:
        await tier.attach(from_me(shm_pages([fds[0], named], SEVERAL)))
        where = tier.arena.geometry
        await tier.copy_out(plan_copy(where, [4, 1, 2], LAYOUT.host, [0, 5, 3]), pool.memory)
        await tier.copy_in(plan_copy(LAYOUT.host, [0, 5, 3], where, [0, 5, 3]), pool.memory)
        assert all(np.array_equal(raw, wanted) for raw, wanted in zip(raws, expected, strict=True))
        other = ShmDeviceTier(LAYOUT, 1, 0, threads)
        await other.attach(from_me(shm_pages([named, fds[0]], [(0, 9 + 24, 0), (2000, 9, 1), (1000, 128, 1)])))
        assert overlap(tier.extents(), other.extents()), "the same bytes, though as another one's first memory"
        await other.close()
        apart = ShmDeviceTier(LAYOUT, 1, 0, threads)
        await apart.attach(from_me(shm_pages([named, fds[0]], [(2000, 24, 0), (2000, 9, 1), (3000, 128, 1)])))
        assert not overlap(tier.extents(), apart.extents())
        await apart.close()
    finally:
        await tier.close()
        os.unlink(DIRECTORY / named)
        for fd in fds:
            os.close(fd)


def several(change: Any) -> DeviceHandle:
    fds = [memfd(), memfd()]
    handle = shm_pages(fds, SEVERAL)
    change(handle.data)
    return handle


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (lambda data: data["more"].append({"fd": data["fd"], "nbytes": NBYTES}), "same memory as another one"),
        (lambda data: data["more"].clear(), "names region 1; the handle has 1"),
        (lambda data: data.update(more=data["more"] * 64), "names 65 memories, at most 64"),
        (lambda data: data.update(more="x"), "more must be a list"),
        (lambda data: data.update(more=[7]), "more must be a list"),
        (lambda data: data["more"][0].pop("fd"), "a name, or an fd"),
        (lambda data: data["more"][0].update(nbytes=0), "nbytes above 0"),
    ],
)
async def test_several_memories_are_checked_one_by_one(threads: ThreadPools, change: Any, refusal: str) -> None:
    handle = several(change)
    before = open_memory_and_files()
    tier = ShmDeviceTier(LAYOUT, 0, 0, threads)
    with pytest.raises(RequestError, match=refusal):
        await tier.attach(from_me(handle))
    assert open_memory_and_files() <= before, "nothing stays open"


async def test_every_memory_must_be_the_users_own(threads: ThreadPools) -> None:
    mine, theirs = memfd(), memfd()
    os.fchown(theirs, 4711, -1)
    handle = shm_pages([mine, theirs], SEVERAL)
    handle.data["more"][0][PEER] = [4711, os.getpid()]  # the daemon's word counts, not the client's
    tier = ShmDeviceTier(LAYOUT, 0, 0, threads)
    with pytest.raises(RequestError, match="belongs to the user 4711") as caught:
        await tier.attach(from_me(handle))
    assert caught.value.reason == "not_yours"


def test_as_many_sizes_as_memories() -> None:
    with pytest.raises(RequestError, match="2 memories with 1 sizes"):
        shm_pages([memfd(), memfd()], SEVERAL, nbytes=[NBYTES])
