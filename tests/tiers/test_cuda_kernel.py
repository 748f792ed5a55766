"""The kernel that moves blocks: compiled for every architecture, run on the CPU, compared with copyplan."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from tests.support.cuda.shim import ShimKernel, compile_shim, compiler
from tests.support.simulation.blocks import Bytes
from transferd.blocks.copyplan import plan_copy
from transferd.blocks.layout.base import Arena, Geometry
from transferd.errors import TierError
from transferd.tiers.cuda import kernel
from transferd.tiers.cuda.bindings import compile_kernel
from transferd.tiers.cuda.kernel import MAX_BLOCKS, TILE, CopyChunk, Cutter, KernelSegment, Move, segment_table
from transferd.tiers.hostcopy import copy_runs

needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C compiler to run the kernel with")


@pytest.fixture(scope="module")
def shim() -> ShimKernel:
    return compile_shim(kernel.source())


@pytest.fixture(scope="module")
def nvrtc() -> None:
    """NVRTC, which the cuda extra brings."""
    try:
        compile_kernel(b'extern "C" __global__ void nothing() {}', (9, 0))
    except TierError as error:
        if error.reason != "no_cuda":
            raise
        pytest.skip(f"the cuda extra is not installed: {error}")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_the_kernel_compiles_to_machine_code(nvrtc: None, capability: tuple[int, int]) -> None:
    image = compile_kernel(kernel.source(), capability)
    assert image.startswith(b"\x7fELF")
    assert kernel.NAME.encode() in image, "under the name that is launched"
    assert compile_kernel(kernel.source(), capability) is image, "compiled once"


def test_a_gpu_that_nvrtc_does_not_know_yet_gets_ptx(nvrtc: None) -> None:
    image = compile_kernel(kernel.source(), (99, 0))
    assert b".entry move_blocks" in image
    assert image.endswith(b"\0")


def test_an_old_gpu_and_bad_source_raise_different_errors(nvrtc: None) -> None:
    with pytest.raises(TierError, match=r"compute capability 3\.5 is older"):
        compile_kernel(kernel.source(), (3, 5))
    with pytest.raises(TierError, match=r"does not compile for sm_90.*\n.*transferd\.cu\(1\): error"):
        compile_kernel(b"void broken( {", (9, 0))


@needs_compiler
def test_both_sides_agree_on_the_shape_of_the_parameter(shim: ShimKernel) -> None:
    fields = [getattr(Move, name).offset for name, _ in Move._fields_]
    segment = [getattr(KernelSegment, name).offset for name, _ in KernelSegment._fields_]
    python = [TILE, MAX_BLOCKS, ctypes.sizeof(KernelSegment), *segment, ctypes.sizeof(Move), *fields]
    assert shim.shape == python
    assert ctypes.sizeof(Move) < 4096, "what every CUDA version takes as parameters"


class Memories:
    """A cache of scattered segments and a packed memory, both random; and where a kernel may go."""

    def __init__(self, rng: np.random.Generator, *, aligned: bool) -> None:
        unit = 16 if aligned else 1
        count = int(rng.integers(1, 7))
        self.nbytes = unit * rng.integers(1, 5000 // unit, count)
        if rng.random() < 0.3:
            self.nbytes[0] += 2 * TILE + int(rng.integers(0, 40)) * unit
        self.blocks = int(rng.integers(1, 12))
        gaps = unit * rng.integers(0, 40, count)
        strides = self.nbytes + unit * rng.integers(0, 9, count)
        sizes = strides * self.blocks + gaps
        order = rng.permutation(count)  # segments lie in memory in any order
        starts = np.empty(count, dtype=np.int64)
        starts[order] = np.cumsum(sizes[order]) - sizes[order] + (0 if aligned else int(rng.integers(0, 16)))
        extent = int((starts + strides * (self.blocks - 1) + self.nbytes).max())
        self.cache = Geometry(starts, strides, self.nbytes, self.blocks, extent)
        offsets = np.concatenate(([0], np.cumsum(self.nbytes)[:-1]))
        self.slots = self.blocks + 2
        stride = int(self.nbytes.sum()) + unit * int(rng.integers(0, 5))
        self.packed = Geometry(offsets, np.full(count, stride), self.nbytes, self.slots, stride * self.slots)
        self.device = _random(rng, self.cache.extent + 64, aligned=aligned)
        self.host = _random(rng, self.packed.extent + 64, aligned=aligned)

    def table(self) -> Bytes:
        arena = Arena(self.cache, self.device.ctypes.data)
        return np.frombuffer(segment_table(arena, self.packed.offsets), dtype=np.uint8)


def _random(rng: np.random.Generator, nbytes: int, *, aligned: bool) -> Bytes:
    """Random bytes at an address that is a multiple of 256, or at any."""
    raw = rng.integers(0, 256, nbytes + 512, dtype=np.uint8)
    start = -raw.ctypes.data % 256 + (0 if aligned else int(rng.integers(0, 256)))
    return raw[start : start + nbytes]


def run(
    shim: ShimKernel, memories: Memories, cache_ids: list[int], packed_ids: list[int], *, gather: bool, grid: int
) -> dict[int, int]:
    table = memories.table()
    tiles = -(-int(memories.nbytes.max()) // TILE)
    move = Move(
        segments=table.ctypes.data, packed=memories.host.ctypes.data, packed_stride=int(memories.packed.strides[0]),
        first_segment=0, segment_count=len(memories.nbytes), tiles=tiles, gather=gather,
    )  # fmt: skip
    move.name_blocks(np.array(cache_ids), np.array(packed_ids))
    existing = [(int(a.ctypes.data), int(a.ctypes.data) + a.nbytes) for a in (table, memories.device, memories.host)]
    wrong, widths = shim.launch(grid, kernel.THREADS, move, existing)
    assert wrong == ""
    return widths


@needs_compiler
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "odd"])
@pytest.mark.parametrize("gather", [True, False], ids=["gather", "scatter"])
@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_does_what_the_plan_says(shim: ShimKernel, seed: int, gather: bool, aligned: bool) -> None:
    rng = np.random.default_rng(seed)
    memories = Memories(rng, aligned=aligned)
    count = int(rng.integers(1, memories.blocks + 1))
    cache_ids = rng.permutation(memories.blocks)[:count].tolist()
    packed_ids = rng.permutation(memories.slots)[:count].tolist()
    device, host = memories.device.copy(), memories.host.copy()
    if gather:
        plan = plan_copy(memories.cache, cache_ids, memories.packed, packed_ids)
        copy_runs(device.ctypes.data, host.ctypes.data, plan.runs)
    else:
        plan = plan_copy(memories.packed, packed_ids, memories.cache, cache_ids)
        copy_runs(host.ctypes.data, device.ctypes.data, plan.runs)
    widths = run(shim, memories, cache_ids, packed_ids, gather=gather, grid=int(rng.integers(1, 60)))
    assert np.array_equal(memories.device, device), "and not a byte more"
    assert np.array_equal(memories.host, host)
    if aligned:
        assert widths == {16: 2 * plan.nbytes // 16}, "every byte in vectors of 16: one load and one store each"


@needs_compiler
@pytest.mark.parametrize("nbytes", [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100])
def test_any_two_addresses_and_any_few_bytes_are_copied_exactly_and_as_wide_as_they_allow(
    shim: ShimKernel, nbytes: int
) -> None:
    rng = np.random.default_rng(nbytes)
    for at in range(16):
        for to in range(16):
            cache, packed = _random(rng, 160, aligned=True), _random(rng, 160, aligned=True)
            expected = packed.copy()
            expected[to : to + nbytes] = cache[at : at + nbytes]
            table = (KernelSegment * 1)(
                KernelSegment(address=cache.ctypes.data + at, stride=0, nbytes=nbytes, offset=0)
            )
            move = Move(
                segments=ctypes.addressof(table), packed=packed.ctypes.data + to, packed_stride=0,
                first_segment=0, segment_count=1, tiles=1, gather=1,
            )  # fmt: skip
            move.name_blocks(np.array([0]), np.array([0]))
            existing = [
                (ctypes.addressof(table), ctypes.addressof(table) + ctypes.sizeof(table)),
                (move.packed, move.packed + nbytes),
                (cache.ctypes.data + at, cache.ctypes.data + at + nbytes),
            ]
            wrong, widths = shim.launch(1, 32, move, existing)
            assert wrong == "", (at, to)
            assert np.array_equal(packed, expected), (at, to)
            apart = at ^ to
            widest = apart & -apart if apart else 16
            assert max(widths) <= widest, (at, to)
            if nbytes >= 2 * widest - 1:  # one vector fits, wherever the first boundary is
                assert max(widths) == widest, (at, to)


@needs_compiler
def test_a_wrong_address_is_seen_by_the_shim(shim: ShimKernel) -> None:
    memories = Memories(np.random.default_rng(3), aligned=True)
    table = memories.table().copy()
    move = Move(
        segments=table.ctypes.data, packed=memories.host.ctypes.data + memories.host.nbytes, packed_stride=16,
        first_segment=0, segment_count=1, tiles=1, gather=1,
    )  # fmt: skip
    move.name_blocks(np.array([0]), np.array([0]))
    existing = [(int(a.ctypes.data), int(a.ctypes.data) + a.nbytes) for a in (table, memories.device, memories.host)]
    wrong, _ = shim.launch(1, 32, move, existing)
    assert wrong.startswith("a write outside of all memory")


# --- cutting ----------------------------------------------------------------------------------------


def covered(cutter: Cutter, blocks: int) -> list[tuple[int, int]]:
    """(position, byte of a packed block) of all that the chunks move, in the order they move it."""
    found = []
    for chunk in cutter.cut(blocks):
        part = chunk.part
        for position in range(chunk.start, chunk.stop):
            found += [(position, byte) for byte in range(part.offset, part.offset + part.nbytes)]
    return found


@pytest.mark.parametrize("slot", [9, 10, 16, 30, 33, 48, 96, 1000])
def test_chunks_cover_every_byte_once_and_fit_their_slot(slot: int) -> None:
    nbytes = np.array([7, 9, 3, 1, 9, 4])
    cutter = Cutter(nbytes, slot)
    assert sorted(covered(cutter, 5)) == [(position, byte) for position in range(5) for byte in range(33)]
    for chunk in cutter.cut(5):
        count = chunk.stop - chunk.start
        assert (count - 1) * cutter.stride + chunk.part.nbytes <= slot
        assert count == 1 or chunk.part.segments == len(nbytes), "several blocks go whole"


def test_a_launch_names_no_more_blocks_than_it_can() -> None:
    cutter = Cutter(np.array([16]), 1 << 20)
    chunks: list[CopyChunk] = list(cutter.cut(1000))
    assert [chunk.stop - chunk.start for chunk in chunks] == [448, 448, 104]
