"""The machine in one line, and what a lost device does."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.gpu.machine import LAYOUTS, Failed, Found, Machine, open_rig, within
from tests.gpu.processes import LARGE, peer
from transferd.errors import DeviceLost, TransferError
from transferd.tiers.cuda.bindings import check_fit
from transferd.tiers.cuda.compiler import nvrtc_major
from transferd.tiers.cuda.tuning import mps_runs
from transferd.tiers.numa import node_of_pci

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


def _smi(uuid: str) -> dict[str, str]:
    """What only nvidia-smi tells; empty where there is none."""
    dashed = "-".join((uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]))
    command = ["nvidia-smi", f"--id=GPU-{dashed}", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(SMI, (value.strip() for value in told.split(",")), strict=False))


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
        "nvrtc": nvrtc_major(),
        "multiprocessors": info.multiprocessors,
        "words": info.words,
        "host memory at its own address": info.same_address,
        "exclusive": info.exclusive,
        "mps": mps_runs(),
        "link": f"{told('current_link_speed')} x{told('current_link_width')} of x{told('max_link_width')}",
        "numa node": node_of_pci(info.pci),
        "iommu": Path("/sys/kernel/iommu_groups/0").exists(),
        "bindings": importlib.metadata.version("cuda-bindings"),
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
            check_fit(machine.driver.version, nvrtc_major())
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
        sys.executable, *run, "tests.gpu.environment", str(machine.index), stdout=asyncio.subprocess.PIPE
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


async def _lose(index: int) -> str:
    from transferd.tiers.cuda.bindings import open_driver

    driver, told = open_driver(), asyncio.Queue[str]()
    machine = Machine(driver, index, Path(), 1)
    async with open_rig(machine, LAYOUTS["gqa"], copy_path="gather") as rig:
        rig.tier.on_lost = told.put_nowait
        table = rig.tier.resources.kernel_table.main.cutter
        table.stride = 1 << 44  # a bug in the arithmetic
        before = time.monotonic()
        try:
            await rig.tier.copy_out(rig.out([0, 1], [0, 1]), rig.pool.memory)
        except DeviceLost as error:
            await asyncio.wait_for(told.get(), LOST_WITHIN_S)
            return f"lost, and told after {time.monotonic() - before:.2f} s: {error}"
    return "a kernel that leaves its memory was not noticed"


def main() -> None:
    told = "it ended before it could say"
    with contextlib.suppress(TransferError):
        told = asyncio.run(_said(int(sys.argv[1])))
    print(told, flush=True)


async def _said(index: int) -> str:
    said = ""
    with contextlib.suppress(TransferError):  # closing what was lost
        said = await _lose(index)
        print(said, flush=True)
    return said


CHECKS = (the_environment, a_lost_device_is_noticed)


if __name__ == "__main__":
    main()
