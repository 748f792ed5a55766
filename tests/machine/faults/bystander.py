"""Engines in one process that have nothing to do with a fault: they register, and go on with tasks of their own.

    python -m tests.machine.faults.bystander ENDPOINT JOURNAL PAUSE NAME:NEIGHBOUR…

Each engine has two ranks of pages, in memory without a name. A round writes blocks, mostly under new keys, and reads
them back into wiped memory, swaps one out and in, and reads the first block that its neighbour stored, if it is there;
it compares all bytes. PAUSE seconds later it passes the gate "round", and begins the next one. The process ends when
its standard input does. The journal has one JSON line for each round, where `told` has each task's kind, status, code,
number of blocks, and whether all blocks that the result claims hold what belongs there:

    {"t": …, "engine": …, "told": [["write", "ok", "", 3, true], …], "seconds": …}
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import mmap
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.machine.faults.engine import CONNECT_TIMEOUT_S, Journal
from tests.machine.faults.gates import gate
from transferd import (
    Client,
    ConnectTimeout,
    Engine,
    Pages,
    ReadStorageTask,
    SwapInTask,
    SwapOutTask,
    TransferError,
    WriteStorageTask,
    shm_pages,
)
from transferd.tasks import Task

RANKS, LAYERS, PAGE, BLOCKS = 2, 2, 1024, 8
LAYOUT = Pages(layers=LAYERS, page_bytes=PAGE, blocks=BLOCKS, identity="bystander")
SEGMENTS = [(layer * BLOCKS * PAGE, PAGE) for layer in range(LAYERS)]
MODEL = "bystander"
MINE, SWAPPED, OTHERS = [1, 2, 3], 4, 5  # device blocks
TIMEOUT_S = 8.0
DIFFERENT = 500  # rounds; later ones write the same keys again, so that a small pool keeps room for others

Told = list[Any]


class Bystander:
    """One engine: its memory, and its rounds. neighbour: whose first block it reads; "" for nobody's."""

    def __init__(self, client: Client, name: str, neighbour: str) -> None:
        self._client = client
        self._name, self._neighbour = name, neighbour
        self._fds = [os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for _ in range(RANKS)]
        self._pages: list[list[npt.NDArray[np.uint8]]] = []
        self._rounds = 0

    async def come(self) -> None:
        self._client.on_new_boot = lambda: None  # its memory is its own, and the client offers it again
        await self._client.register(Engine(ranks=RANKS, model=MODEL, layout=LAYOUT, host_blocks=2))
        for rank, fd in enumerate(self._fds):
            os.ftruncate(fd, LAYERS * BLOCKS * PAGE)
            self._pages.append(LAYOUT.views(np.frombuffer(mmap.mmap(fd, 0), dtype=np.uint8), SEGMENTS)["page"])
            await self._client.offer(rank, shm_pages(fd, segments=SEGMENTS))
        await self._client.wait_ready(CONNECT_TIMEOUT_S)

    async def round(self) -> list[Told]:
        """What each task of it was told."""
        self._rounds += 1
        tag, first = f"{self._name}-{self._rounds}", f"{self._name}-1-0"
        keys = [f"{self._name}-{self._rounds % DIFFERENT}-{number}" for number in range(len(MINE))]
        contents = dict(zip(MINE, keys, strict=True))
        self._fill(contents | {SWAPPED: first})
        swap: dict[str, Any] = {"gpu_block_ids": [SWAPPED], "cpu_block_ids": [1], "timeout": TIMEOUT_S}
        told = [
            await self._ask(WriteStorageTask(task_id=f"w-{tag}", keys=keys, gpu_block_ids=MINE, timeout=TIMEOUT_S), {}),
            await self._ask(SwapOutTask(task_id=f"o-{tag}", **swap), {}),
        ]
        self._wipe()
        told += [
            await self._ask(self._read(f"r-{tag}", keys, MINE), contents),
            await self._ask(SwapInTask(task_id=f"i-{tag}", **swap), {SWAPPED: first}),
        ]
        if self._neighbour:
            theirs = f"{self._neighbour}-1-0"
            told.append(await self._ask(self._read(f"n-{tag}", [theirs], [OTHERS]), {OTHERS: theirs}))
        return told

    @staticmethod
    def _read(task_id: str, keys: list[str], blocks: list[int]) -> ReadStorageTask:
        return ReadStorageTask(task_id=task_id, keys=keys, gpu_block_ids=blocks, timeout=TIMEOUT_S)

    async def _ask(self, task: Task, contents: dict[int, str]) -> Told:
        result = await self._client.submit(task)
        right = all(self._holds(block, contents[block]) for block in result.block_ids if contents)
        code = "" if result.error is None else result.error.code
        kind = "neighbour" if OTHERS in contents else task.kind
        return [kind, result.status, code, len(result.block_ids), right]

    # --- bytes --------------------------------------------------------------------------------------

    def _fill(self, contents: dict[int, str]) -> None:
        for block, key in contents.items():
            for page, wanted in self._wanted(key):
                page[block][:] = wanted

    def _holds(self, block: int, key: str) -> bool:
        return all(page[block].tobytes() == wanted.tobytes() for page, wanted in self._wanted(key))

    def _wipe(self) -> None:
        for layers in self._pages:
            for page in layers:
                page[:] = 0

    def _wanted(self, key: str) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Each layer of each rank, and what a block of it holds under this key."""
        for rank, layers in enumerate(self._pages):
            for layer, page in enumerate(layers):
                digest = hashlib.shake_128(f"{key} {rank} {layer}".encode()).digest(PAGE)
                yield page, np.frombuffer(digest, dtype=np.uint8)


async def live(endpoint: str, journal: Journal, name: str, neighbour: str, pause: float, end: asyncio.Event) -> None:
    async with Client(endpoint, engine=name, await_ready=False, connect_timeout=CONNECT_TIMEOUT_S) as client:
        bystander = Bystander(client, name, neighbour)
        await bystander.come()
        while not end.is_set():
            await gate("round")
            began = time.monotonic()
            told = await bystander.round()
            journal.note("round", engine=name, told=told, seconds=time.monotonic() - began)
            if any(status != "ok" for _, status, *_ in told):
                with contextlib.suppress(ConnectTimeout, TransferError):
                    await client.wait_ready(TIMEOUT_S)
            await asyncio.sleep(pause)


async def main(endpoint: str, journal: Journal, pause: float, pairs: list[str]) -> None:
    end = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), end.set)  # it is closed, or the parent has died
    named = [pair.split(":") for pair in pairs]
    await asyncio.gather(*(live(endpoint, journal, name, neighbour, pause, end) for name, neighbour in named))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Journal(Path(sys.argv[2])), float(sys.argv[3]), sys.argv[4:]))
