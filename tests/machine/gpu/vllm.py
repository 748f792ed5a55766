"""TransferdConnector on this GPU: the workers' half in processes of its own, over the real daemon; without vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.machine.gpu.machine import DEADLINE_S, Failed, Machine, within
from tests.machine.gpu.processes import Peer, peer
from tests.machine.gpu.vllm_rank import TOKEN
from transferd.client.client import Client
from transferd.client.launch import DaemonProcess, running
from transferd.client.launch import start as start_daemon
from transferd.client.timeline import Timeline
from transferd.tasks import ReadStorageTask, Status, Task, WriteStorageTask

RANKS = 2  # both on this GPU
LAYOUTS = ("LBHNC", "BLNHC")
SMALL = (4, 12, 2, 16, 64)  # layers, blocks, heads, tokens, content
LARGE = (32, 32, 8, 16, 256)  # 64 KiB a layer and block
BEHIND_S = 0.005
BUSY_FILLS = 400  # of 64 MiB each: 10 ms on an H100


def _sections(machine: Machine) -> dict[str, Any]:
    return {
        "engines": {"devices": [_kind(machine)]},
        "host": {"staging": "64MiB"},
        "storage": {"backend": "file"},
    }


def _kind(machine: Machine) -> str:
    return "tests.support.cuda.tier:FakeCudaTier" if machine.fake else "cuda"


@asynccontextmanager
async def _ranks(machine: Machine, daemon: DaemonProcess, layout: str, told: list[str]) -> AsyncIterator[list[Peer]]:
    """Both workers of an engine, ready. told: gets what their tensors are."""
    async with contextlib.AsyncExitStack() as stack:
        ranks = [await stack.enter_async_context(peer(machine, module="vllm_rank")) for _ in range(RANKS)]
        shape = SMALL if machine.fake else LARGE
        for number, rank in enumerate(ranks):
            given = {"rank": number, "ranks": RANKS, "layout": layout, "shape": shape, "kind": _kind(machine)}
            told.append(await rank.ask("start", endpoint=daemon.endpoint, **given))
        for rank in ranks:
            try:
                wrong = await rank.ask("ready")
            except Failed as error:
                wrong = str(error)
            if wrong:
                raise Failed(f"a rank does not come in: {wrong}\n{daemon.log[-2000:]}")
        yield ranks


async def _done(client: Client, task: Task) -> None:
    result = await within(client.submit(task), type(task).__name__)
    if result.status is not Status.OK:
        raise Failed(f"{type(task).__name__} ended {result.status}: {result.error}")


async def _loaded(client: Client, ranks: list[Peer], key: str, block: int, digests: list[str]) -> None:
    await _done(client, ReadStorageTask(task_id=f"{key} {block}", keys=[key], gpu_block_ids=[block], prefix=False))
    if [await rank.ask("digest", block=block) for rank in ranks] != digests:
        raise Failed(f"block {block} is not what was saved as {key}")


async def _saves_behind_steps(machine: Machine, client: Client, ranks: list[Peer], first: int = 1) -> float:
    """Each save is pushed before any rank has launched its step; rank 1's host is behind, and its stream is busy.

    first: the number of the first step. Returns how many seconds a stream was behind at most.
    """
    timeline, late = Timeline(), 0.0
    for step in range(first, first + (2 if machine.fake else 11)):
        after, key = timeline.next(), f"step {step}"
        saving = await client.push(
            WriteStorageTask(task_id=key, keys=[key], gpu_block_ids=[3], after=after, timeout=DEADLINE_S)
        )
        for number, rank in enumerate(ranks):
            if saving.done():
                raise Failed(f"a save ended before rank {number} had launched its step: {saving.result()}")
            before = 1 if machine.fake or not number else BUSY_FILLS
            given = {"block": 3, "value": step, "before": before, "wait_s": number * BEHIND_S}
            await rank.ask("step", number=step, after=after, **given)
        late = max(late, *[await rank.ask("finish") for rank in ranks])
        result = await within(saving, "a save whose ranks have computed")
        if result.status is not Status.OK:
            raise Failed(f"a save ended {result.status}: {result.error}")
        await _done(client, ReadStorageTask(task_id=f"back {step}", keys=[key], gpu_block_ids=[7], prefix=False))
        found = [await rank.ask("values", block=7) for rank in ranks]
        if found != [[step]] * RANKS:
            raise Failed(f"step {step}: the ranks saved {found}, which is not what they computed")
    return late


async def vllm_saves_and_loads_behind_a_busy_stream(machine: Machine) -> str:
    """Two ranks register torch's tensors; every byte compared; then the engine is killed and another one loads."""
    told: list[str] = []
    directory = Path(machine.work) / "vllm"
    directory.mkdir()
    with running(_sections(machine), directory) as daemon:
        late = 0.0
        for layout in LAYOUTS[: 1 if machine.fake else None]:
            async with _ranks(machine, daemon, layout, told) as ranks:
                async with Client(daemon.endpoint, engine="vllm", token=TOKEN, connect_timeout=DEADLINE_S) as client:
                    late = max(late, await _saves_behind_steps(machine, client, ranks))
                    digests = [await rank.ask("write", block=5, seed=number) for number, rank in enumerate(ranks)]
                    await _done(client, WriteStorageTask(task_id="save", keys=[layout], gpu_block_ids=[5]))
                    await _loaded(client, ranks, layout, 2, digests)
                await asyncio.gather(*(rank.kill() for rank in ranks))
            async with _ranks(machine, daemon, layout, []) as ranks:
                async with Client(daemon.endpoint, engine="vllm", token=TOKEN, connect_timeout=DEADLINE_S) as client:
                    await _loaded(client, ranks, layout, 9, digests)
                for rank in ranks:
                    await rank.ask("leave")
    if late < 0.001 and not machine.fake:
        raise Failed(f"no stream was more than {late * 1e3:.1f} ms behind: too early for this check to mean anything")
    return f"{told[0]}; a stream was {late * 1e3:.0f} ms behind"


async def vllm_outlives_a_killed_daemon(machine: Machine) -> str:
    """kill -9 of the daemon; steps still write to the words that it owned; the next one maps the ranks, and serves."""
    directory = Path(machine.work) / "vllm-killed"
    directory.mkdir()
    first = second = start_daemon(_sections(machine), directory)
    try:
        async with _ranks(machine, first, LAYOUTS[0], []) as ranks:
            boots = [await rank.ask("boot") for rank in ranks]
            async with Client(first.endpoint, engine="vllm", token=TOKEN, connect_timeout=DEADLINE_S) as client:
                digests = [await rank.ask("write", block=5, seed=number) for number, rank in enumerate(ranks)]
                await _done(client, WriteStorageTask(task_id="save", keys=["kept"], gpu_block_ids=[5]))
            first.kill()
            timeline = Timeline()
            for step in range(1, 20):
                for rank in () if machine.fake else ranks:  # the double takes such a write for an error
                    await rank.ask("step", number=step, after=timeline.next(), block=4, value=step, before=4)
                    await rank.ask("finish")
            second = start_daemon(_sections(machine), directory)
            give_up = time.monotonic() + DEADLINE_S
            while any([await rank.ask("boot") == boot for rank, boot in zip(ranks, boots, strict=True)]):
                if time.monotonic() > give_up:
                    raise Failed(f"a rank does not come back: {second.log[-2000:]}")
                await asyncio.sleep(0.05)
            async with Client(second.endpoint, engine="vllm", token=TOKEN, connect_timeout=DEADLINE_S) as client:
                await _loaded(client, ranks, "kept", 9, digests)
                await _saves_behind_steps(machine, client, ranks, first=20)
            for rank in ranks:
                await rank.ask("leave")
    finally:
        first.kill()
        second.stop()
    return "writes to a dead daemon's words did no harm" if not machine.fake else "served by the next one"


CHECKS = (vllm_saves_and_loads_behind_a_busy_stream, vllm_outlives_a_killed_daemon)
