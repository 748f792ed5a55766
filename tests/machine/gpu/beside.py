"""What copies and an engine's work cost each other, and what submitting costs the host."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.machine.gpu.machine import LAYOUTS, Found, Machine, Rig, open_rig, within
from tests.machine.gpu.neighbour import Kind
from tests.machine.gpu.processes import LARGE, Peer, peer
from tests.machine.gpu.speeds import LEAST_GBS, NEIGHBOUR_BYTES
from transferd.config.sections import CudaSection
from transferd.config.size import Size
from transferd.tiers.cuda.costs import SHORT, Costs
from transferd.tiers.cuda.tuning import Tuning, mps_runs, tuning_for

WAYS: dict[str, dict[str, Any]] = {way: {"copy_path": way} for way in ("gather", "rows", "straight")}
SHORT_DMA = 1 << 20
PIECES = 160  # of a block of _by_piece: 80 layers, keys and values
SLOWER = 0.85  # of its own steps a second: less is a neighbour that is disturbed


def _step(machine: Machine) -> int:
    return 4096 if machine.fake else NEIGHBOUR_BYTES


def _cache(machine: Machine) -> dict[str, Any]:
    if machine.fake:
        return LAYOUTS["gqa"]
    return {"layers": 80, "kv_heads": 2, "head_dim": 64, "block_size": 64, "device_blocks": 256, "host_blocks": 256}


async def _speed(rig: Rig, *, outward: bool) -> float:
    """GB/s of copies of many random blocks, one after another for half a second."""
    count, moved = rig.layout.device_blocks // 2, 0
    seconds = 0.02 if rig.machine.fake else 0.5
    ids, slots = rig.some(rig.layout.device_blocks, count), rig.some(rig.layout.host_blocks, count)
    plan = rig.out(ids, slots) if outward else rig.into(slots, ids)
    copy = rig.tier.copy_out if outward else rig.tier.copy_in
    before = time.monotonic()
    while time.monotonic() - before < seconds:
        await within(copy(plan, rig.pool.memory), "a copy beside a neighbour")
        moved += plan.nbytes
    return moved / (time.monotonic() - before) / 1e9


async def _table(
    machine: Machine, engine: Peer, ways: dict[str, dict[str, Any]], kind: Kind = "fills"
) -> dict[str, Any]:
    """Copies by way and direction, and the neighbour's steps beside each."""
    rows: dict[str, Any] = {}
    await engine.ask("busy", step=_step(machine), kind=kind)
    await asyncio.sleep(0.02 if machine.fake else 0.5)
    rows["alone"] = await engine.ask("rest")
    for way, options in ways.items():
        async with open_rig(machine, _cache(machine), **options) as rig:
            for outward in (True, False):
                idle = await _speed(rig, outward=outward)
                await engine.ask("busy", step=_step(machine), kind=kind)
                busy = await _speed(rig, outward=outward)
                beside = await engine.ask("rest")
                rows[f"{way} {'out' if outward else 'in'}"] = {"idle_GBs": idle, "busy_GBs": busy} | beside
    return rows


async def a_busy_neighbour(machine: Machine) -> Found:
    """Another process runs short kernels without a pause: how fast are copies, and how much slower is it."""
    async with peer(machine) as engine:
        rows = await _table(machine, engine, WAYS)
    alone = rows["alone"]["steps_per_s"]
    told, good = [], True
    for name, row in rows.items():
        if name != "alone":
            share = row["steps_per_s"] / max(alone, 1e-9)
            told.append(f"{name} {row['busy_GBs']:.1f} of {row['idle_GBs']:.1f} GB/s, neighbour {share:.2f}")
            good &= row["busy_GBs"] >= LEAST_GBS and share >= SLOWER
    return Found("; ".join(told), "right" if machine.fake else "fast" if good else "slow", rows)


async def a_neighbours_small_copies(machine: Machine) -> Found:
    """4 KiB into the device and out of it, as a decode step has them: how long beside our lanes."""
    short = {"copy_path": "gather", "tuning": replace(tuning_for(machine.info, mps=mps_runs()), dma_most=SHORT_DMA)}
    async with peer(machine) as engine:
        rows = await _table(machine, engine, WAYS | {"gather, DMAs of 1 MiB": short}, "small copies")
    alone = rows["alone"]["p99_s"]
    worst = max(row["p99_s"] for name, row in rows.items() if name != "alone")
    told = "; ".join(
        f"{name} p50 {row['p50_s'] * 1e6:.0f} p99 {row['p99_s'] * 1e6:.0f} us" for name, row in rows.items()
    )
    verdict = "right" if machine.fake else "fast" if worst < alone + 500e-6 else "slow"
    return Found(told, verdict, rows)  # type: ignore[arg-type]


async def the_best_settings_beside_a_busy_neighbour(machine: Machine) -> Found:
    """Tries figures of tuning.py while another process runs short kernels without a pause; prints the best ones.

    First grid, slots and length of DMAs, for blocks that are gathered; then, with these, what each way costs by the
    length of a block's pieces (costs.py).
    """
    async with peer(machine) as engine:
        await engine.ask("busy", step=_step(machine))
        await asyncio.sleep(0.02 if machine.fake else 0.5)
        alone = (await engine.ask("rest"))["steps_per_s"]
        tried = {}
        for grid, slots, dma in _candidates(machine):
            tuning = Tuning(grid=grid, slots=slots, dma_most=dma)
            tried[tuning] = await _beside(machine, engine, _cache(machine), tuning, "gather", alone)
        best = max(tried, key=lambda tuning: _value(tried[tuning], tried.values()))
        found = {}
        for piece, cache in _by_piece(machine).items():
            for way in (*WAYS, "pairs") if machine.driver.row_batches else WAYS:
                found[piece, way] = await _beside(machine, engine, cache, best, way, alone)
    known = tuning_for(machine.info, mps=mps_runs())
    row, best = tried[best], replace(best, costs=fitted(found, PIECES, best.dma_most), host_words=known.host_words)
    note = f"{best}: out {row['out_GBs']:.1f}, in {row['in_GBs']:.1f} GB/s, neighbour {row['share']:.2f}"
    figures = {
        "measured": [f"    ({machine.info.capability}, {mps_runs()}): {best},"],
        "tried": [{"grid": s.grid, "slots": s.slots, "largest_dma": s.dma_most} | r for s, r in tried.items()],
        "pieces": [{"bytes": piece, "way": way} | one for (piece, way), one in found.items()],
    }
    return Found(note, "right", figures)


def _candidates(machine: Machine) -> list[tuple[int, int, int]]:
    """(grid, slots, bytes of a DMA)"""
    if machine.fake:
        return [(48, 2, 4 << 20), (8, 3, 1 << 20)]
    count = machine.info.multiprocessors
    return list(itertools.product((count // 3, 2 * count), (2, 4), (1 << 20, 4 << 20)))


def _by_piece(machine: Machine) -> dict[int, dict[str, Any]]:
    """Caches of 80 layers by the bytes of a block's piece."""
    if machine.fake:
        return {2048: LAYOUTS["gqa"]}
    common = {"layers": 80, "head_dim": 64, "block_size": 64}
    return {
        heads * 8192: common | {"kv_heads": heads, "device_blocks": 512 // heads, "host_blocks": 512 // heads}
        for heads in (1, 2, 4, 8, 16)
    }


async def _beside(
    machine: Machine, engine: Peer, cache: dict[str, Any], tuning: Tuning, copy_path: str, alone: float
) -> dict[str, float]:
    """GB/s both ways beside the busy neighbour, and the smaller share of its own steps that it has left."""
    found, shares = {}, []
    async with open_rig(machine, cache, tuning=tuning, copy_path=copy_path) as rig:
        for name, outward in (("out_GBs", True), ("in_GBs", False)):
            await engine.ask("busy", step=_step(machine))
            found[name] = await _speed(rig, outward=outward)
            shares.append((await engine.ask("rest"))["steps_per_s"] / max(alone, 1e-9))
    return found | {"share": min(shares)}


def _value(row: dict[str, float], rows: Iterable[dict[str, float]]) -> tuple[bool, float]:
    """The fastest among those that leave the neighbour its due, or, if none does, nearly as much as the best."""
    due = min(SLOWER, max(other["share"] for other in rows) - 0.05)
    return row["share"] >= due, row["out_GBs"] + row["in_GBs"]


def fitted(found: Mapping[tuple[int, str], Mapping[str, float]], pieces: int, dma_most: int) -> Costs:
    """The model's constants for these speeds. pieces: of a block. Keys of `found`: bytes of a piece, and the way."""
    sizes = sorted({piece for piece, _ in found})

    def seconds(way: str, some: Sequence[int], sides: Sequence[str] = ("out", "in")) -> list[float]:
        """Of a block, the mean of these directions."""
        speeds = [sum(found[piece, way][f"{side}_GBs"] for side in sides) / len(sides) for piece in some]
        return [pieces * piece / (1e9 * max(speed, 1e-9)) for piece, speed in zip(some, speeds, strict=True)]

    long = [piece for piece in sizes if piece >= SHORT] or sizes
    slope, dma_s = _line([pieces * piece for piece in long], [pieces] * len(long), seconds("straight", long))
    bus = 1 / slope if slope else Costs().bus
    few = [piece for piece in sizes if piece < SHORT]
    short = {
        side: sum(t / pieces - p / bus - dma_s for t, p in zip(seconds("straight", few, [side]), few, strict=True))
        / max(1, len(few))
        for side in ("out", "in")
    }
    copies = [-(-pieces // max(1, dma_most // piece)) for piece in sizes]
    rest = [t - pieces * p / bus for t, p in zip(seconds("rows", sizes), sizes, strict=True)]
    call_s, row_s = _line(copies, [pieces] * len(sizes), rest)
    pairs = [
        (t - pieces * p / bus) / (pieces / 2) for p in sizes if (p, "pairs") in found for t in seconds("pairs", [p])
    ]
    lost = {way: 1 - sum(found[piece, way]["share"] for piece in sizes) / len(sizes) for way in WAYS}
    return Costs(
        bus=bus,
        gather=max(pieces * piece / t for piece, t in zip(sizes, seconds("gather", sizes), strict=True)),
        dma_s=dma_s,
        short_out_s=max(0.0, short["out"]),
        short_in_s=max(0.0, short["in"]),
        row_call_s=call_s,
        row_s=row_s,
        pair_s=max(0.0, sum(pairs) / len(pairs)) if pairs else None,
        kernel_loss=max(0.0, lost["gather"]),
        copy_loss=max(0.0, lost["rows"]),
    )


def _line(first: Sequence[int], second: Sequence[int], values: Sequence[float]) -> tuple[float, float]:
    """a, b ≥ 0 so that a × first + b × second is nearest to the values."""
    table = np.array([first, second], dtype=np.float64).T
    a, b = np.linalg.lstsq(table, np.array(values), rcond=None)[0].tolist()
    if b < 0:
        a, b = float(np.mean(np.array(values) / table[:, 0])), 0.0
    if a < 0:
        a, b = 0.0, float(np.mean(np.array(values) / table[:, 1]))
    return max(0.0, a), max(0.0, b)


async def stores_keep_to_their_rate(machine: Machine) -> Found:
    """cuda.store_rate: copies out of the device at a tenth of the bus, copies into it as fast as ever."""
    rate = (1 << 40) if machine.fake else 5_000_000_000
    async with open_rig(machine, _cache(machine), settings=CudaSection(store_rate=Size(rate))) as rig:
        out, into = await _speed(rig, outward=True), await _speed(rig, outward=False)
    good = machine.fake or (0.7 * rate <= out * 1e9 <= 1.15 * rate and into > 2 * out)
    note = f"out {out:.1f} GB/s at a rate of {rate / 1e9:.0f}, in {into:.1f} GB/s"
    return Found(note, "right" if good else "wrong", {"out_GBs": out, "in_GBs": into})


async def submitting_costs_little(machine: Machine) -> Found:
    """Several lanes at once on this GPU, and one block alone: GB/s, this process's time, and latency."""
    figures: dict[str, Any] = {}
    for lanes in (1, 2) if machine.fake else (1, 4, 8):
        rigs = [open_rig(machine, _cache(machine)) for _ in range(lanes)]
        opened = [await open_one.__aenter__() for open_one in rigs]
        try:
            cpu, before = time.process_time(), time.monotonic()
            speeds = await asyncio.gather(*(_speed(rig, outward=number % 2 == 0) for number, rig in enumerate(opened)))
            took = time.monotonic() - before
            figures[f"{lanes} lanes"] = {"GBs": sum(speeds), "cores": (time.process_time() - cpu) / took}
        finally:
            for open_one in rigs:
                await open_one.__aexit__(None, None, None)
    async with open_rig(machine, LAYOUTS["mla"] if machine.fake else LARGE) as rig:
        times = []
        for _ in range(3 if machine.fake else 200):
            before = time.monotonic()
            await rig.tier.copy_out(rig.out([1], [2]), rig.pool.memory)
            times.append(time.monotonic() - before)
        figures["one block, median s"] = sorted(times)[len(times) // 2]
    told = "; ".join(
        f"{name} {row['GBs']:.1f} GB/s, {row['cores']:.2f} cores" for name, row in figures.items() if "lanes" in name
    )
    most = max(row["cores"] for name, row in figures.items() if "lanes" in name)
    note = f"{told}; one block in {figures['one block, median s'] * 1e6:.0f} us"
    return Found(note, "right" if machine.fake else "fast" if most < 1.0 else "slow", figures)


CHECKS = (
    a_busy_neighbour,
    a_neighbours_small_copies,
    the_best_settings_beside_a_busy_neighbour,
    stores_keep_to_their_rate,
    submitting_costs_little,
)
