"""A daemon whose copies stand still halfway on a test's order, and an engine that watches the bytes of its blocks.

The engine of these tests does the worst that an engine may do: as soon as it holds a settled result, it writes other
bytes to the task's blocks. Then nothing that the daemon does may change them, nor may it store or swap out what they
hold now under the task's names.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integration.caches import Caches, attach, fill, snapshot
from tests.machine.faults.gates import MODEL, VARIABLE
from tests.machine.faults.keeper import Keeper
from tests.support.waits import stats_until
from transferd import Client, ReadStorageTask, Status, SwapInTask, SwapOutTask, WriteStorageTask
from transferd.client.launch import DaemonProcess, running
from transferd.tasks import Task

REACH_S = 60.0
SOURCE, MINE, TARGET, CHECK = [1, 2, 3, 4], [5, 6, 7, 8], [11, 12, 13, 14], [21, 22, 23, 24]
HOST, MY_HOST = [0, 1, 2, 3], [4, 5, 6, 7]
OLD_KEYS, NEW_KEYS = [f"old-{i}" for i in range(4)], [f"new-{i}" for i in range(4)]
KINDS = ["read", "write", "swap_in", "swap_out"]
GATES = {"read": "scatter", "swap_in": "scatter", "write": "gather", "swap_out": "gather"}


def tree(more: Mapping[str, dict[str, Any]] | None = None, **server: Any) -> dict[str, dict[str, Any]]:
    """A daemon's configuration. more: keys of its sections."""
    made: dict[str, dict[str, Any]] = {
        "cache": {
            "ranks": 2,
            "layers": 3,
            "kv_heads": 2,
            "head_dim": 16,
            "block_size": 8,
            "device_blocks": 32,
            "host_blocks": 32,
            "device": "tests.machine.faults.gates:GatedShm",
        },
        "host": {"staging": "256KiB"},
        "storage": {"backend": "tests.machine.faults.gates:GatedFile", "model": MODEL},
        "server": server,
    }
    for section, keys in (more or {}).items():
        made[section] = made.get(section, {}) | keys
    return made


def task_of(kind: str, task_id: str = "t", timeout: float = 30.0) -> Task:
    named: dict[str, Any] = {"task_id": task_id, "timeout": timeout}
    if kind == "read":
        return ReadStorageTask(keys=OLD_KEYS, gpu_block_ids=TARGET, **named)
    if kind == "write":
        return WriteStorageTask(keys=NEW_KEYS, gpu_block_ids=MINE, **named)
    if kind == "swap_in":
        return SwapInTask(gpu_block_ids=TARGET, cpu_block_ids=HOST, **named)
    return SwapOutTask(gpu_block_ids=MINE, cpu_block_ids=MY_HOST, **named)


@dataclass
class World:
    """A daemon, an engine with its caches, and the gates."""

    daemon: DaemonProcess
    client: Client
    caches: Caches
    keeper: Keeper
    blocks: tuple[int, ...] = ()
    scribbled: tuple[bytes, ...] = ()
    original: Sequence[bytes] = ()  # of the blocks in MINE

    async def prepare(self) -> None:
        """Stored and swapped-out blocks for tasks to load, and known bytes in those that tasks store."""
        for seed, blocks in enumerate((SOURCE, MINE, TARGET), 1):
            fill(self.caches, blocks, seed=seed)
        written = await self.client.submit(WriteStorageTask(task_id="w", keys=OLD_KEYS, gpu_block_ids=SOURCE))
        swapped = await self.client.submit(SwapOutTask(task_id="s", gpu_block_ids=SOURCE, cpu_block_ids=HOST))
        assert (written.status, swapped.status) == (Status.OK, Status.OK)
        self.original = snapshot(self.caches, MINE)

    async def hold(self, gate: str) -> None:
        """Hold what comes to this gate next; `arrived` waits for it."""
        self.keeper.arm(gate, lambda _: True)

    async def arrived(self) -> None:
        await self.keeper.reached(REACH_S)

    def scribble(self, task: Task) -> None:
        """The engine has its blocks back, and uses them at once."""
        self.blocks = tuple(task.gpu_block_ids)
        fill(self.caches, list(self.blocks), seed=99)
        self.scribbled = tuple(snapshot(self.caches, list(self.blocks)))

    async def nothing_was_touched(self, kind: str, client: Client | None = None) -> None:
        """Once the daemon has done everything that it still had to do. client: of the daemon that has the blocks."""
        client = client or self.client
        await client.wait_ready(REACH_S)
        await stats_until(client, lambda stats: not stats["running"] and not stats["queued"])
        await stats_until(client, lambda stats: not stats["staging"]["used"])
        fence = await client.submit(ReadStorageTask(task_id="fence", keys=OLD_KEYS, gpu_block_ids=CHECK))
        assert fence.status is Status.OK
        assert tuple(snapshot(self.caches, list(self.blocks))) == self.scribbled, "bytes changed after the result"
        if kind == "write":
            result = await client.submit(ReadStorageTask(task_id="c", keys=NEW_KEYS, gpu_block_ids=CHECK, prefix=False))
        elif kind == "swap_out":
            result = await client.submit(SwapInTask(task_id="c", gpu_block_ids=CHECK, cpu_block_ids=MY_HOST))
        else:
            return
        for i, (block, loaded) in enumerate(zip(CHECK, result.mask(_checked(result.task_id, kind)), strict=True)):
            if loaded:
                now = snapshot(self.caches, [block])
                assert now == self.original[i :: len(MINE)], f"block {block} holds bytes from after the result"


def _checked(task_id: str, kind: str) -> Task:
    if kind == "write":
        return ReadStorageTask(task_id=task_id, keys=NEW_KEYS, gpu_block_ids=CHECK, prefix=False)
    return SwapInTask(task_id=task_id, gpu_block_ids=CHECK, cpu_block_ids=MY_HOST)


@contextlib.asynccontextmanager
async def world(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    prefix: Sequence[str] = (),
    more: Mapping[str, dict[str, Any]] | None = None,
    **server: Any,
) -> AsyncIterator[World]:
    """A daemon with gates, prepared. It is resumed and stopped at the end."""
    keeper = Keeper(place / "gates")
    monkeypatch.setenv(VARIABLE, str(keeper.path))
    await keeper.open()
    try:
        with running(tree(more, **server), place, prefix=prefix) as daemon:
            async with Client(daemon.endpoint) as client:
                made = World(daemon, client, await attach(client), keeper)
                await made.prepare()
                try:
                    yield made
                finally:
                    keeper.let_go()
    finally:
        await keeper.close()
