"""The machine in one line, and what a lost device does."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.machine.gpu.machine import LAYOUTS, Failed, Found, Machine, open_rig, within
from tests.machine.gpu.processes import LARGE, peer
from transferd.errors import DeviceLost, TransferError
from transferd.runtime.compat import wait_for
from transferd.tiers.cuda.bindings import bindings_version, check_packages, nvrtc_version, open_daemons_driver
from transferd.tiers.cuda.tuning import mps_runs
from transferd.tiers.pinned import node_of_pci

LOST_WITHIN_S = 10.0


SMI = (
    "driver_version",
    "compute_mode",
    "persistence_mode",
    "mig.mode.current",
    "ecc.mode.current",
    "pcie.link.gen.max",
    "clocks_throttle_reasons.active",
)


def _smi(uuid: str, fields: Sequence[str] = SMI) -> dict[str, str]:
    """What only nvidia-smi tells; empty where there is none."""
    dashed = "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))
    command = ["nvidia-smi", f"--id=GPU-{dashed}", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except OSError:
        return {}
    except subprocess.SubprocessError:  # it names no field that it does not know: a renamed one costs only itself
        found: dict[str, str] = {}
        for field in fields if len(fields) > 1 else ():
            found |= _smi(uuid, (field,))
        return found
    return dict(zip(fields, (value.strip() for value in told.split(",")), strict=False))


def environment(machine: Machine) -> dict[str, Any]:
    """What explains every figure."""
    info, driver = machine.info, machine.driver
    link = Path("/sys/bus/pci/devices") / info.pci

    def told(name: str) -> str:
        try:
            return (link / name).read_text().strip()
        except OSError:
            return "?"

    return {
        "gpu": info.name,
        "uuid": info.uuid,
        "cuda": driver.version,
        "nvrtc": ".".join(map(str, nvrtc_version() or ("none",))),
        "multiprocessors": info.multiprocessors,
        "words": info.words,
        "host memory at its own address": info.same_address,
        "exclusive": info.exclusive,
        "mps": mps_runs(),
        "link": f"{told('current_link_speed')} x{told('current_link_width')} of x{told('max_link_width')}",
        "numa node": node_of_pci(info.pci),
        "iommu": Path("/sys/kernel/iommu_groups/0").exists(),
        "bindings": bindings_version(),
    } | _smi(info.uuid)


async def the_environment(machine: Machine) -> Found:
    """Versions that fit, the bus, MPS, NUMA; a narrow link or an exclusive GPU is slow or wrong by itself."""
    facts = await asyncio.to_thread(environment, machine)
    facts |= await _under_load(machine)
    before = machine.free()
    async with peer(machine):
        facts["MiB of a process's context"] = (before - machine.free()) >> 20
    note = ", ".join(f"{name} {value}" for name, value in facts.items())
    try:
        if not machine.fake:
            check_packages(machine.driver)
    except TransferError as error:
        raise Failed(str(error)) from error
    width = facts["link"].split(" x")
    narrow = len(width) == 3 and width[1].split()[0] not in (width[2], "?")
    return Found(
        note, "slow" if narrow or not (facts["words"] and facts["host memory at its own address"]) else "right", facts
    )


async def _under_load(machine: Machine) -> dict[str, Any]:
    """The bus while it is busy: links of idle GPUs run slowly. And whether the pool is where it should be."""
    async with open_rig(machine, LAYOUTS["gqa"] if machine.fake else LARGE) as rig:
        count = min(rig.layout.device_blocks, rig.layout.host_blocks)
        plan = rig.out(rig.some(rig.layout.device_blocks, count), list(range(count)))
        for _ in range(1 if machine.fake else 20):
            await within(rig.tier.copy_out(plan, rig.pool.memory), "a copy")
        copying = asyncio.ensure_future(rig.tier.copy_out(plan, rig.pool.memory))
        link = Path("/sys/bus/pci/devices") / machine.info.pci / "current_link_speed"
        speed = await asyncio.to_thread(link.read_text) if link.exists() else "?"
        await within(copying, "a copy")
        return {"link under load": speed.strip(), "pool": rig.pool.memory.misplaced or "on the wanted node"}


async def a_lost_device_is_noticed(machine: Machine) -> Found:
    """A kernel that leaves its memory, in a process of its own: DeviceLost for each copy, and told without one."""
    run = ["-m", "tests.support.cuda.abi"] if machine.fake else ["-m"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *run, "tests.machine.gpu.environment", str(machine.index), stdout=asyncio.subprocess.PIPE
    )
    try:
        out, _ = await within(process.communicate(), "the process that loses its device")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    last = out.decode().strip().splitlines()[-1:] or ["it said nothing"]
    if not last[0].startswith("lost"):
        raise Failed(last[0])
    return Found(last[0])


async def _lose(index: int) -> None:
    driver, told = open_daemons_driver(), asyncio.Queue[str]()
    machine = Machine(driver, index, Path(), 1)
    async with open_rig(machine, LAYOUTS["gqa"], copy_path="gather") as rig:
        rig.tier.on_lost = told.put_nowait
        # A bug in the arithmetic, where only the kernel sees it: a DMA of such an address may end the process.
        place = ctypes.c_uint64(1 << 44)
        with driver.current(rig.tier.resources.context):
            driver.copy(rig.tier.resources.kernel_table.main.table, ctypes.addressof(place), 8, 0)
            driver.synchronize_stream(0)
        before = time.monotonic()
        try:
            await rig.tier.copy_out(rig.out([0, 1], [0, 1]), rig.pool.memory)
        except DeviceLost as error:
            await wait_for(told.get(), LOST_WITHIN_S)
            print(f"lost, and told after {time.monotonic() - before:.2f} s: {error}", flush=True)  # before it closes
            return
        print("a kernel that leaves its memory was not noticed", flush=True)


def main() -> None:
    with contextlib.suppress(TransferError):  # closing what was lost
        asyncio.run(_lose(int(sys.argv[1])))


CHECKS = (the_environment, a_lost_device_is_noticed)


if __name__ == "__main__":
    main()
