"""Host memory: every byte registered, made beside a live loop; and FastDeploy's order of objects."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import time
from pathlib import Path

import numpy as np

from tests.machine.gpu.machine import LAYOUTS, Failed, Found, Machine, compare, expected_after, open_rig, within
from transferd.blocks.copyplan import plan_copy
from transferd.blocks.formats import RawPlanes
from transferd.errors import TierError
from transferd.tiers.cuda.pinning import CudaPinning
from transferd.tiers.pinned import HostRegion
from transferd.tiers.staging import Staging

GAP_S = 0.5
HUGE = 520 * 1024**3
MOST = 8 * 1024**3  # of memory that is locked: some machines have what they grow to, not what they say
CGROUP = Path("/sys/fs/cgroup")


def _free() -> int:
    """Bytes that this process may have: of the machine's, and of its control group's."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):  # there is no limit, or no version 2 of them
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return max(free, 0)


async def objects_of_fastdeploy_are_gathered(machine: Machine) -> str:
    """Blocks in FastDeploy's order, both ways, each layout: the right bytes, and no DMA for each segment."""
    for name, cache in LAYOUTS.items():
        async with open_rig(machine, cache, copy_path="gather") as rig:
            objects = RawPlanes(rig.layout)
            size = objects.slot_bytes + 4096
            staging = Staging(
                rig.layout, 8 * size, objects.slot_bytes, objects.offsets, pinning=CudaPinning(machine.index)
            )
            host = np.frombuffer(staging.memory.view, dtype=np.uint8)
            host[:] = rig.fresh(len(host))
            ids = rig.some(rig.layout.device_blocks, 4)
            device, before = rig.device(), host.copy()
            plan = plan_copy(staging.packed, [3, 0, 2, 1], rig.tier.arena.geometry, ids)
            await within(rig.tier.copy_in(plan, staging.memory), f"{name}: in")
            compare(rig.device(), expected_after(plan, before, device), f"{name}, FastDeploy's order: in", plan)
            device = rig.device()
            back = plan_copy(rig.tier.arena.geometry, ids, staging.packed, [3, 0, 2, 1])
            await within(rig.tier.copy_out(back, staging.memory), f"{name}: out")
            compare(host, expected_after(back, device, before), f"{name}, FastDeploy's order: out", back)
            statistics = rig.tier.statistics()
            if any(counts["straight"] for counts in statistics["copies"].values()):
                raise Failed(f"{name}: a copy of FastDeploy's objects was not gathered")
            if statistics["unregistered"]:
                raise Failed(
                    f"{name}: {statistics['unregistered']} copies were from or to memory that is not registered"
                )
            del host
            staging.close()
    return f"{len(LAYOUTS)} layouts"


async def the_loop_lives_while_memory_is_made(machine: Machine) -> Found:
    """Up to 8 GiB: populated and registered, then freed, with the loop's longest gap."""
    nbytes = (16 << 20) if machine.fake else min(MOST, _free() // 4)
    region = HostRegion(nbytes, CudaPinning(machine.index), later=True)
    longest, figures = 0.0, {}
    for name, work in (("made", region.allocate), ("freed", region.close)):
        before = last = time.monotonic()
        running = asyncio.ensure_future(asyncio.to_thread(work))
        while not running.done():
            await asyncio.wait({running}, timeout=0.002)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        await running
        figures[f"{name} s/GB"] = (time.monotonic() - before) / (nbytes / 1e9)
        if name == "made" and not region.pinned:
            raise Failed(f"not registered: {region.degraded}")
    told = f"{nbytes / 1e9:.1f} GB, {figures['made s/GB']:.2f} s/GB, longest gap {longest:.3f} s, "
    told += region.misplaced or "well placed"
    good = longest < GAP_S and not region.misplaced
    return Found(told, "right" if machine.fake else "fast" if good else "slow", figures | {"gap_s": longest})


async def one_registration_of_512_gib(machine: Machine) -> Found:
    """Whether this driver refuses one; we make them of 1 GiB."""
    if machine.fake or _free() < HUGE * 1.1:
        return Found(f"there is no room for {HUGE >> 30} GiB", "skipped")
    memory = mmap.mmap(-1, HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    context = machine.driver.retain(machine.index)
    try:
        with machine.driver.current(context):
            machine.driver.register_host(address, HUGE)
            machine.driver.unregister_host(address)
    except TierError as error:
        return Found(f"refused, as seen elsewhere: {error}")
    finally:
        machine.driver.release(machine.index)
    return Found("taken")


CHECKS = (objects_of_fastdeploy_are_gathered,)
# What takes much memory, alone and late.
LARGE = (the_loop_lives_while_memory_is_made, one_registration_of_512_gib)
