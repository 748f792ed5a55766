"""Which way a copy goes: the model agrees with what an H100 did (docs/adr/0100), and chooses as its figures would."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from transferd.blocks.layout import build_layout
from transferd.blocks.layout.base import Arena, Geometry
from transferd.config import CacheSection
from transferd.tiers.cuda.costs import CopyPath, Costs
from transferd.tiers.cuda.driver import DeviceInfo
from transferd.tiers.cuda.submitter import PackedOrder, plan_order
from transferd.tiers.cuda.tuning import SLOT_BYTES, Tuning, tuning_for

KIB, PIECES, DMA_MOST = 1024, 160, 4 << 20  # of 80 layers, keys and values
# GB/s beside a busy neighbour without MPS: gathered, in rows, and in batches of DMAs.
H100 = {8: (37, 37, 8), 16: (40, 42, 15), 32: (41, 43, 27), 64: (41, 43, 35), 128: (41, 43, 43)}


@pytest.mark.parametrize("size", H100)
def test_predicted_speeds_are_those_of_an_h100(size: int) -> None:
    costs, nbytes = Costs(), PIECES * size * KIB
    copies = -(-PIECES // (DMA_MOST // (size * KIB)))
    gather, rows, straight = H100[size]
    assert nbytes / costs.gathered(nbytes) / 1e9 == pytest.approx(gather, rel=0.11)
    assert nbytes / costs.rows([PIECES // copies] * copies, nbytes) / 1e9 == pytest.approx(rows, rel=0.1)
    pieces = np.full(PIECES, size * KIB)
    assert nbytes / costs.straight(pieces, outward=True, dma_most=DMA_MOST) / 1e9 == pytest.approx(straight, rel=0.16)


def plan(
    cache: dict[str, object],
    *,
    apart: bool = False,
    mps: bool = False,
    capability: tuple[int, int] = (9, 0),
    pair_s: float | None = None,
) -> PackedOrder:
    """apart: each layer is an allocation of its own. pair_s: see Costs."""
    layout = build_layout(CacheSection(**cache, device_blocks=4))  # type: ignore[arg-type]
    geometry, origin = layout.device, 1 << 40
    ends = [*sorted(geometry.offsets.tolist())[1:], geometry.extent]
    allocations = [(origin, geometry.extent)]
    if apart:
        starts = sorted(geometry.offsets.tolist())
        allocations = [(origin + start, end - start) for start, end in zip(starts, ends, strict=True)]
    info = DeviceInfo(0, "a GPU", "0" * 32, "0000:17:00.0", capability)
    order = np.arange(len(layout.segments))
    tuning = tuning_for(info, mps=mps)
    tuning = replace(tuning, costs=replace(tuning.costs, pair_s=pair_s))
    return plan_order(Arena(geometry, origin), order, SLOT_BYTES, allocations, tuning, pairs=True)[0]


def gqa(kv_heads: int, **others: object) -> dict[str, object]:
    """80 layers of `kv_heads` x 8 KiB."""
    return {"layers": 80, "kv_heads": kv_heads, "head_dim": 64, "block_size": 64} | others


MLA: dict[str, object] = {"attention": "mla", "layers": 61, "block_size": 64}


@pytest.mark.parametrize(
    ("cache", "apart", "mps", "out", "into"),
    [
        (gqa(2), False, False, "rows", "rows"),
        (gqa(1), False, False, "rows", "rows"),
        (MLA, False, False, "rows", "rows"),
        (gqa(2, dtype="block_wise_fp8"), False, False, "gather", "gather"),
        (gqa(2), True, False, "gather", "gather"),  # FastDeploy's tensors: 16 KiB, a copy over two is refused
        (gqa(4), True, False, "straight", "straight"),
        (gqa(4), True, True, "gather", "gather"),  # under MPS a kernel of ours costs the engine little
        (gqa(16), True, False, "straight", "straight"),
        (MLA, True, False, "straight", "straight"),
    ],
)
def test_an_h100_copies_each_layout_as_its_figures_say(
    cache: dict[str, object], apart: bool, mps: bool, out: CopyPath, into: CopyPath
) -> None:
    ways = plan(cache, apart=apart, mps=mps).ways
    assert (ways[True, True], ways[False, True]) == (out, into)


@pytest.mark.parametrize(("pair_s", "way"), [(None, "gather"), (0.35e-6, "pairs"), (3e-6, "gather")])
def test_tensors_of_a_layer_each_go_in_pairs_once_a_gpu_has_said_that_it_is_quick(
    pair_s: float | None, way: CopyPath
) -> None:
    """FastDeploy's tensors, 16 KiB of a block in each: at 0.35 us a copy of two rows, 30 GB/s and no kernel."""
    planned = plan(gqa(2), apart=True, pair_s=pair_s)
    assert planned.usual_ways == {way}
    assert "pairs" not in {planned.ways[outward, False] for outward in (True, False)}, "batches need registered memory"


@pytest.mark.parametrize("name", ["NVIDIA H800", "NVIDIA H20", "NVIDIA H200", "NVIDIA GH200 480GB"])
def test_a_gpu_of_the_same_chip_has_the_same_figures_whatever_its_name(name: str) -> None:
    known = tuning_for(DeviceInfo(0, "NVIDIA H100 80GB HBM3", "", "", (9, 0)), mps=False)
    assert tuning_for(DeviceInfo(0, name, "", "", (9, 0), multiprocessors=78), mps=False) == known


def test_a_slower_bus_makes_less_of_what_each_copy_adds() -> None:
    """On PCIe 4, pieces of 16 KiB in tensors of their own go straight out: their DMAs are half hidden by the bus."""
    assert plan(gqa(3), apart=True, capability=(8, 0)).ways[True, True] == "straight"
    assert plan(gqa(3), apart=True, capability=(9, 0)).ways[True, True] == "gather"


@pytest.mark.parametrize("slot", [SLOT_BYTES, 1 << 20])
def test_a_block_in_one_piece_is_one_dma_and_needs_no_kernel(slot: int) -> None:
    """All layers of a block lie together (vLLM's BLHNC). A slot must hold the longest piece of what is gathered."""
    layout = build_layout(CacheSection(**gqa(1), device_blocks=4))  # type: ignore[arg-type]
    nbytes = layout.device.nbytes
    whole = Geometry(
        np.cumsum([0, *nbytes[:-1]]), np.full(len(nbytes), layout.block_bytes), nbytes, 4, 4 * layout.block_bytes
    )
    arena, order = Arena(whole, 1 << 40), np.arange(len(nbytes))
    planned, table = plan_order(arena, order, slot, [(1 << 40, whole.extent)], Tuning(grid=4))
    joined = slot >= layout.block_bytes
    assert (len(planned.cutter.offsets) == 1) == joined
    assert len(table) == 32 * len(planned.cutter.offsets)
    if joined:
        assert planned.usual_ways == {"straight"}
