"""Checks with other processes: sharing, waiting for the engine's kernels, and what happens when one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.machine.gpu.copies import one_layout
from tests.machine.gpu.machine import LAYOUTS, Failed, Machine, open_rig, raising, within
from transferd.adapters.fastdeploy.memory import handle_of
from transferd.blocks.layout import build_layout
from transferd.config import CacheSection
from transferd.errors import RequestError, TierError, TransferError
from transferd.tiers.base import DeviceHandle
from transferd.tiers.cuda import ipc
from transferd.tiers.owner import check_owner, this_process


class Peer:
    """The engine's process. Commands are its methods' names (peer.py)."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, command: str, **arguments: Any) -> Any:
        """Have it do something; its answer. Raises Failed with what went wrong there."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
        return await self.answer(command)

    async def answer(self, what: str) -> Any:
        assert self.process.stdout is not None
        line = await within(self.process.stdout.readline(), f"the other process: {what}")
        if not line:
            raise Failed(f"the other process ended during {what}, exit code {await self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(f"the other process, {what}: {answer['error']}\n{answer['trace']}")
        return answer["ok"]

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def peer(
    machine: Machine, *, before: Sequence[str] = (), env: Mapping[str, str] | None = None, module: str = "peer"
) -> AsyncIterator[Peer]:
    """An engine's process, gone at the end however it ends. before: a command that runs it (unshare, setpriv).

    module: whose methods are the commands.
    """
    run = ["-m", "tests.support.cuda.abi"] if machine.fake else ["-m"]
    process = await asyncio.create_subprocess_exec(
        *before, sys.executable, *run, f"tests.machine.gpu.{module}", str(machine.index),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 26,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
    )  # fmt: skip
    made = Peer(process)
    try:
        await made.answer("starting")
        yield made
        assert process.stdin is not None
        process.stdin.close()
        await within(process.wait(), "the other process's end")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def an_engine_maps_the_daemons_cache(machine: Machine) -> str:
    """create: what one process writes the other one moves, and sees moved."""
    async with open_rig(machine, LAYOUTS["fp8 with scales"]) as rig, peer(machine) as engine:
        handle = rig.tier.handle()
        arrays = await engine.ask("attach", data=handle.data)
        await engine.ask("fill", seed=1)
        device = rig.device()
        if await engine.ask("digest") == [0] * arrays or not device.any():
            raise Failed("what the engine wrote is not what the daemon reads")
        await one_layout(rig, "a cache that an engine has mapped")
        rig.write_device(device)
        wrong = await engine.ask("verify", seed=1)
        if wrong:
            raise Failed(f"what the daemon wrote is not what the engine reads: {wrong}")
        frameworks = await engine.ask("frameworks")
        await engine.ask("attach", data=handle.data)  # once more: mapped once
        await engine.ask("detach")
    return ", ".join(f"{name}: {dtype}" for name, dtype in frameworks.items()) or "no framework here"


# A gigabyte of cache: filling it often enough keeps a GPU busy for longer than asking for that takes.
LARGE = {"layers": 8, "kv_heads": 8, "head_dim": 128, "block_size": 64, "device_blocks": 512, "host_blocks": 16}


async def a_copy_waits_for_the_engines_kernels(machine: Machine) -> str:
    """The engine records the event behind work that takes long, and pushes at once: the copy sees that work done."""
    async with open_rig(machine, LAYOUTS["mla"] if machine.fake else LARGE) as rig, peer(machine) as engine:
        if not rig.tier.handle().data["event"]:
            return "this device shares no events"
        await engine.ask("attach", data=rig.tier.handle().data)
        late, blocks = 0.0, rig.layout.device_blocks
        for value in range(1, 4 if machine.fake else 20):
            await engine.ask("late_fill", value=value, before=1 if machine.fake else 50)
            rig.host[:] = 0
            plan = rig.out(rig.some(blocks, 8), list(range(8)))
            copying = asyncio.ensure_future(rig.tier.copy_out(plan, rig.pool.memory))
            await asyncio.sleep(0)
            finished = asyncio.ensure_future(engine.ask("finish"))
            await within(copying, "a copy behind the engine's event")
            late = max(late, await finished)
            found = set(np.unique(rig.host[: 8 * int(rig.layout.host.strides[0])]).tolist()) - {0}
            if found != {value}:
                raise Failed(f"the copy has {sorted(found)} where the engine's kernels left {value}")
        if late < 0.001 and not machine.fake:
            raise Failed("the engine's kernels were done too early for this check to mean anything")
    return f"seen done, when the engine was {late * 1000:.0f} ms behind"


async def a_handle_that_claims_too_much_is_refused(machine: Machine) -> str:
    """More bytes than the allocation has, or another GPU: a RequestError in one line, nothing mapped."""
    async with peer(machine) as engine:
        data = await engine.ask("own", cache=LAYOUTS["gqa"], apart=True)
        before = machine.free()
        with raising(RequestError, saying="this rank's is", what="memory of another GPU"):
            async with open_rig(machine, LAYOUTS["gqa"], handle=DeviceHandle(ipc.KIND, data | {"device": "f" * 32})):
                pass
        claims = copy.deepcopy(data)
        claims["regions"][0]["nbytes"] += 1 << 40
        note = "refused"
        try:
            async with open_rig(machine, LAYOUTS["gqa"], handle=DeviceHandle(ipc.KIND, claims)):
                note = "this driver does not say how long mapped memory is, so a false length is not found out"
        except RequestError as error:
            if "of an allocation that has" not in str(error):
                raise Failed(f"a region that is too long is refused for another reason: {error}") from error
        if before - machine.free() > 4 << 20:
            raise Failed("a handle that was refused left memory behind")
    return note


async def the_daemon_maps_the_engines_cache(machine: Machine) -> str:
    """attach: allocations of the engine, one for each array or one for all, found by address range."""
    kinds = []
    for name in ("fp8, float32 scales, odd", "mtp", "gqa", "dsa with indexer")[: 2 if machine.fake else None]:
        for how in ("apart", "together", "torch"):
            async with peer(machine) as engine:
                if how == "torch":
                    if machine.fake or LAYOUTS[name].get("scale_dtype"):
                        continue
                    data = await engine.ask("torch_own", cache=LAYOUTS[name])
                    if data is None:
                        continue
                else:
                    data = await engine.ask("own", cache=LAYOUTS[name], apart=how == "apart")
                check_owner(data["owner"])
                async with open_rig(machine, LAYOUTS[name], handle=DeviceHandle(ipc.KIND, data)) as rig:
                    await _moves_what_the_engine_has(rig, engine, f"{name}, {how}")
                    kinds.append(how)
    return f"{kinds.count('apart')} apart, {kinds.count('together')} together, {kinds.count('torch')} from torch"


async def what_fastdeploy_publishes_is_mapped(machine: Machine) -> str:
    """A CUDA IPC handle for each tensor in named shared memory, as FastDeploy's set_data_ipc leaves it."""
    rank, name = os.getpid(), "fp8 with scales"  # a rank that no other engine on this machine has
    async with peer(machine) as engine:
        paths = [Path(path) for path in await engine.ask("publish", cache=LAYOUTS[name], rank=rank)]
        try:
            layout = build_layout(CacheSection(**LAYOUTS[name]))
            handle = handle_of(layout, rank, machine.index, machine.info.uuid, this_process())
            async with open_rig(machine, LAYOUTS[name], handle=handle) as rig:
                await _moves_what_the_engine_has(rig, engine, "published by name")
        finally:
            for path in paths:
                path.unlink()
    return f"{len(paths)} tensors"


async def _moves_what_the_engine_has(rig: Any, engine: Peer, what: str) -> None:
    """All blocks out; the engine overwrites; all blocks in again: the engine has what it had."""
    count = rig.layout.device_blocks
    everything = list(range(count))
    slots = rig.some(rig.layout.host_blocks, count)
    await engine.ask("fill", seed=7)
    await within(rig.tier.copy_out(rig.out(everything, slots), rig.pool.memory), f"{what}: copy out")
    beyond = rig.layout.mtp_layers > 0  # MTP layers have blocks that no task can name: those stay overwritten
    if not beyond:
        await engine.ask("fill", seed=8)
    await within(rig.tier.copy_in(rig.into(slots, everything), rig.pool.memory), f"{what}: copy in")
    wrong = await engine.ask("verify", seed=7)
    if wrong:
        raise Failed(f"{what}: the engine has not what it had: {wrong}")


async def an_engine_is_killed(machine: Machine) -> str:
    """kill -9 of the process that owns the memory, with copies under way: they end, and its handle is refused."""
    async with peer(machine) as engine:
        data = await engine.ask("own", cache=LAYOUTS["gqa"], apart=False)
        ends = []
        async with open_rig(machine, LAYOUTS["gqa"], handle=DeviceHandle(ipc.KIND, data)) as rig:
            copies = [
                asyncio.ensure_future(rig.tier.copy_out(rig.out(rig.some(24, 12), rig.some(40, 12)), rig.pool.memory))
                for _ in range(8)
            ]
            await engine.kill()
            for moving in copies:
                try:
                    await within(moving, "a copy of memory whose owner was killed")
                    ends.append("done")
                except TierError as error:
                    ends.append(error.reason)
        with raising(TransferError, saying="has ended", what="the handle of a process that was killed"):
            check_owner(data["owner"])
        before = machine.free()
        with contextlib.suppress(TierError):
            async with open_rig(machine, LAYOUTS["gqa"], handle=DeviceHandle(ipc.KIND, data)):
                raise Failed("memory of a process that has gone was mapped")
        if before - machine.free() > 4 << 20:
            raise Failed("a handle that was refused left memory behind")
    return f"copies under way: {', '.join(sorted(set(ends)))}"


CHECKS = (
    an_engine_maps_the_daemons_cache,
    a_copy_waits_for_the_engines_kernels,
    the_daemon_maps_the_engines_cache,
    what_fastdeploy_publishes_is_mapped,
    a_handle_that_claims_too_much_is_refused,
)
