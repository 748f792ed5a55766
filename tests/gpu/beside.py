"""What copies and an engine's work cost each other, and what submitting costs the host."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from typing import Any

from tests.gpu.machine import LAYOUTS, Found, Machine, Rig, open_rig, within
from tests.gpu.processes import LARGE, Peer, peer
from transferd.tiers.cuda.submitter import CopyPath

WAYS: tuple[CopyPath, ...] = ("gather", "straight")
SLOWER = 0.85  # of its own steps a second: less is a neighbour that is disturbed
LEAST_GBS = 25.0  # beside a busy neighbour: half of PCIe 5


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


async def _table(machine: Machine, engine: Peer, step: int) -> dict[str, Any]:
    """Copies by way and direction, and the neighbour's steps beside each; step as for Peer.busy."""
    rows: dict[str, Any] = {}
    await engine.ask("busy", step=step)
    await asyncio.sleep(0.02 if machine.fake else 0.5)
    rows["alone"] = await engine.ask("rest")
    for way in WAYS:
        async with open_rig(machine, _cache(machine), copy_path=way) as rig:
            for outward in (True, False):
                idle = await _speed(rig, outward=outward)
                await engine.ask("busy", step=step)
                busy = await _speed(rig, outward=outward)
                beside = await engine.ask("rest")
                rows[f"{way} {'out' if outward else 'in'}"] = {"idle_GBs": idle, "busy_GBs": busy} | beside
    return rows


async def a_busy_neighbour(machine: Machine) -> Found:
    """Another process runs short kernels without a pause: how fast are copies, and how much slower is it."""
    async with peer(machine) as engine:
        rows = await _table(machine, engine, 4096 if machine.fake else 32 << 20)
    alone = rows["alone"]["steps_per_s"]
    told, good = [], True
    for name, row in rows.items():
        if name != "alone":
            share = row["steps_per_s"] / max(alone, 1e-9)
            told.append(f"{name} {row['busy_GBs']:.1f} of {row['idle_GBs']:.1f} GB/s, neighbour {share:.2f}")
            good &= row["busy_GBs"] >= LEAST_GBS and share >= SLOWER
    return Found("; ".join(told), "right" if machine.fake else "fast" if good else "slow", rows)


async def a_busy_neighbour_under_mps(machine: Machine) -> Found:
    """The same with NVIDIA's MPS, in a run of its own."""
    if machine.fake or shutil.which("nvidia-cuda-mps-control") is None:
        return Found("there is no nvidia-cuda-mps-control here", "skipped")
    directory = machine.work / "mps"
    directory.mkdir()
    env = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": str(directory), "CUDA_MPS_LOG_DIRECTORY": str(directory)}
    control = ["nvidia-cuda-mps-control"]
    await asyncio.to_thread(subprocess.run, [*control, "-d"], env=env, check=True, timeout=30)
    try:
        again = [sys.executable, "-m", "tests.gpu.check", "--only", "a_busy_neighbour", "--device", str(machine.index)]
        process = await asyncio.create_subprocess_exec(*again, "--no-bench", env=env, stdout=subprocess.PIPE)
        out, _ = await within(process.communicate(), "the run under MPS", 120)
    finally:
        await asyncio.to_thread(subprocess.run, control, input=b"quit\n", env=env, check=False, timeout=30)
    told = next((line for line in out.decode().splitlines() if "a busy neighbour:" in line), "it said nothing")
    return Found(told.strip(), "fast" if told.startswith("fast") else "slow")


async def a_neighbours_small_copies(machine: Machine) -> Found:
    """4 KiB into the device and out of it, as a decode step has them: how long beside our lanes."""
    async with peer(machine) as engine:
        rows = await _table(machine, engine, 0)
    alone = rows["alone"]["p99_s"]
    worst = max(row["p99_s"] for name, row in rows.items() if name != "alone")
    told = "; ".join(
        f"{name} p50 {row['p50_s'] * 1e6:.0f} p99 {row['p99_s'] * 1e6:.0f} us" for name, row in rows.items()
    )
    verdict = "right" if machine.fake else "fast" if worst < alone + 500e-6 else "slow"
    return Found(told, verdict, rows)  # type: ignore[arg-type]


async def submitting_costs_little(machine: Machine) -> Found:
    """Several lanes at once on this GPU, and one block alone: GB/s, this process's time, and latency."""
    figures: dict[str, Any] = {}
    for lanes in (1, 2) if machine.fake else (1, 4, 8):
        rigs = [open_rig(machine, _cache(machine)) for _ in range(lanes)]
        opened = [await rig.__aenter__() for rig in rigs]
        try:
            cpu, before = time.process_time(), time.monotonic()
            speeds = await asyncio.gather(*(_speed(rig, outward=number % 2 == 0) for number, rig in enumerate(opened)))
            took = time.monotonic() - before
            figures[f"{lanes} lanes"] = {"GBs": sum(speeds), "cores": (time.process_time() - cpu) / took}
        finally:
            for rig in rigs:
                await rig.__aexit__(None, None, None)
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


CHECKS = (a_busy_neighbour, a_busy_neighbour_under_mps, a_neighbours_small_copies, submitting_costs_little)
