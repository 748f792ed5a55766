"""Checks of copies, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any

import numpy as np

from tests.machine.gpu.machine import (
    LAYOUTS,
    SMALL,
    Bytes,
    Failed,
    Machine,
    Rig,
    compare,
    expected_after,
    open_rig,
    raising,
    within,
)
from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.errors import TierError
from transferd.runtime.threads import ThreadPools
from transferd.tiers.cuda import CudaDeviceTier
from transferd.tiers.cuda.bindings import compile_kernel
from transferd.tiers.cuda.kernel import source

POISON = 0xA5


async def kernel_compiles(machine: Machine) -> str:
    """NVRTC compiles the kernel for this GPU, and for the architectures that CI compiles it for."""
    for capability in (machine.info.capability, (8, 0), (9, 0), (10, 0)):
        compile_kernel(source(), capability)
    return f"sm_{machine.info.capability[0]}{machine.info.capability[1]}"


async def every_layout_both_ways(machine: Machine) -> str:
    """Each layout, way and kind of host memory: random blocks in, compared; poisoned; random blocks out, compared."""
    done = 0
    every = list(itertools.product(("gather", "rows", "straight", None), (True, False), (1, 1 << 20)))
    for number, (name, cache) in enumerate(LAYOUTS.items()):
        for way, pinned, slot_bytes in every[number % len(every) :: len(every)] if machine.fake else every:
            async with open_rig(machine, cache, pinned=pinned, copy_path=way, slot_bytes=slot_bytes) as rig:
                memory = "pinned" if pinned else "pageable"
                await one_layout(rig, f"{name}, {way or 'own choice'}, {memory}, slots of {slot_bytes}")
                done += 1
    return f"{done} combinations"


async def one_layout(rig: Rig, what: str) -> None:
    """Into the device and out of it, each compared with what a CPU makes of the same plan."""
    blocks, slots = rig.layout.device_blocks, rig.layout.host_blocks
    rig.write_device(rig.fresh(rig.tier.arena.geometry.extent))
    for count in (1, blocks // 2, blocks):
        rig.host[:] = rig.fresh(rig.host.nbytes)
        device, host = rig.device(), rig.host.copy()
        plan = rig.into(rig.some(slots, count), rig.some(blocks, count))
        await within(rig.tier.copy_in(plan, rig.pool.memory), f"{what}: copy in of {count} blocks")
        compare(rig.device(), expected_after(plan, host, device), f"{what}: in, {count} blocks, the device", plan)
        compare(rig.host, host, f"{what}: in, {count} blocks, the source", plan)
        device = rig.device()
        rig.host[:] = POISON
        poisoned = rig.host.copy()
        plan = rig.out(rig.some(blocks, count), rig.some(slots, count))
        await within(rig.tier.copy_out(plan, rig.pool.memory), f"{what}: copy out of {count} blocks")
        compare(rig.host, expected_after(plan, device, poisoned), f"{what}: out, {count} blocks, the host", plan)
        compare(rig.device(), device, f"{what}: out, {count} blocks, the source", plan)


async def many_copies_both_ways_at_once(machine: Machine) -> str:
    """Disjoint copies in both directions, all under way at once, again and again."""
    blocks = 32 if machine.fake else 128
    rounds = 2 if machine.fake else 40
    cache = LAYOUTS["gqa"] | {"layers": 4, "device_blocks": blocks, "host_blocks": blocks}
    async with open_rig(machine, cache, slot_bytes=1 << 16) as rig:
        rig.write_device(rig.fresh(rig.tier.arena.geometry.extent))
        for _ in range(rounds):
            rig.host[:] = rig.fresh(rig.host.nbytes)
            device, host = rig.device(), rig.host.copy()
            ids, slots = rig.some(blocks, blocks), rig.some(blocks, blocks)
            half, step = blocks // 2, 4
            outs = [rig.out(ids[i : i + step], slots[i : i + step]) for i in range(0, half, step)]
            ins = [rig.into(slots[i : i + step], ids[i : i + step]) for i in range(half, blocks, step)]
            await within(
                asyncio.gather(
                    *(rig.tier.copy_out(plan, rig.pool.memory) for plan in outs),
                    *(rig.tier.copy_in(plan, rig.pool.memory) for plan in ins),
                ),
                "a round of copies",
            )
            expected_host, expected_device = host, device
            for plan in outs:
                expected_host = expected_after(plan, device, expected_host)
            for plan in ins:
                expected_device = expected_after(plan, host, expected_device)
            compare(rig.host, expected_host, "both ways at once, the host", outs[0])
            compare(rig.device(), expected_device, "both ways at once, the device", ins[0])
    return f"{rounds} rounds"


async def a_model_of_full_size(machine: Machine) -> str:
    """Many blocks of an 80-layer model through slots of the size that is used."""
    count = 4 if machine.fake else 200
    cache = {
        "layers": 80,
        "kv_heads": 2,
        "head_dim": 64,
        "block_size": 64,
        "device_blocks": count,
        "host_blocks": count,
    }
    async with open_rig(machine, cache) as rig:
        await one_layout(rig, "GQA 80 layers")
        return f"{count * rig.layout.block_bytes / 1e9:.2f} GB each way"


async def a_cancelled_waiter_leaves_no_copy_behind(machine: Machine) -> str:
    """A copy whose waiter is cancelled is done whole or not begun; the next one is not disturbed by it."""
    cache = LAYOUTS["gqa"] | {"layers": 20, "device_blocks": 64, "host_blocks": 64}
    rounds, whole = (3 if machine.fake else 30), 0
    async with open_rig(machine, cache, slot_bytes=1 << 18) as rig:
        rig.write_device(rig.fresh(rig.tier.arena.geometry.extent))
        device, half = rig.device(), rig.host.nbytes // 2
        for number in range(rounds):
            rig.host[:] = POISON
            nothing = rig.host.copy()
            first, second = rig.out(rig.some(64, 32), list(range(32))), rig.out(rig.some(64, 32), list(range(32, 64)))
            cancelled = asyncio.ensure_future(rig.tier.copy_out(first, rig.pool.memory))
            await asyncio.sleep(0.0001 * (number % 5))
            cancelled.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await cancelled
            await within(rig.tier.copy_out(second, rig.pool.memory), "the copy after a cancelled one")
            expected = expected_after(second, device, nothing)
            compare(rig.host[half:], expected[half:], "the copy after a cancelled one", second)
            whole += await _settled(rig, expected_after(first, device, expected), expected)
    return f"{rounds} rounds, {whole} were under way"


async def _settled(rig: Rig, whole: Bytes, nothing: Bytes) -> bool:
    """Wait until the memory is one or the other, and say which."""
    for _ in range(100):
        if np.array_equal(rig.host, whole):
            return True
        await asyncio.sleep(0.005)
    compare(rig.host, nothing, "a cancelled copy is neither whole nor absent", rig.out([0], [0]))
    return False


async def device_memory_comes_back(machine: Machine) -> str:
    """Opening and closing again and again takes nothing, and what is opened holds nothing of before."""
    async with open_rig(machine, LAYOUTS["gqa"]):
        pass  # what a process takes once: context, module cache
    before = machine.free()
    for _ in range(3 if machine.fake else 20):
        async with open_rig(machine, LAYOUTS["gqa"]) as rig:
            if rig.device().any():
                raise Failed("fresh device memory is not empty")
            rig.write_device(rig.fresh(rig.tier.arena.geometry.extent))
    lost = before - machine.free()
    if lost > 4 << 20:
        raise Failed(f"{lost} bytes of device memory are gone after opening and closing")
    return "nothing lost"


async def what_cannot_be_is_one_line(machine: Machine) -> str:
    """An absent device, more memory than there is: a TierError in one line, and nothing left."""
    before = machine.free()
    threads = ThreadPools(1)

    async def opened(index: int, **cache: Any) -> None:
        layout = build_layout(CacheSection(**(SMALL | cache)))
        await CudaDeviceTier(layout, 0, index, threads).open()

    with raising(TierError, saying="there is no device 99", what="an absent device"):
        await opened(99)
    with raising(TierError, saying="has too little free memory: the cache needs", what="too large a cache"):
        await opened(machine.index, layers=1000, kv_heads=64, head_dim=256, block_size=128, device_blocks=4096)
    threads.close()
    if before - machine.free() > 4 << 20:
        raise Failed("a cache that had no room left memory behind")
    return "said and gone"


CHECKS = (
    kernel_compiles,
    every_layout_both_ways,
    many_copies_both_ways_at_once,
    a_model_of_full_size,
    a_cancelled_waiter_leaves_no_copy_behind,
    device_memory_comes_back,
    what_cannot_be_is_one_line,
)
