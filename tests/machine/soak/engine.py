"""A process of engines: several clients that push tasks, check what they are told, and write all of it down.

    python -m tests.machine.soak.engine SPEC        a JSON object, see `Spec`

The journal has a line before each push and one after each result, in the kernel's hands when the push is made:

    P
    T kind status code microseconds right
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.caches import Caches, attach, wipe
from tests.machine.faults.contents import holds_content, write_content
from transferd import Client, ReadStorageTask, Status, SwapInTask, SwapOutTask, TaskResult, WriteStorageTask
from transferd.tasks import Task

CONNECT_TIMEOUT_S = 60.0
BLOCKS = 8  # a client's own, on the device and in the host pool
LONGEST = 4  # blocks of a task
REMEMBERED = 48  # keys that a client reads again
FLOOD_WINDOW = 128  # tasks that a client pushes again at once, after it was told "busy"


@dataclass(frozen=True)
class Spec:
    """What this process does. name: in keys and task ids. first_block: of its clients' blocks."""

    endpoint: str
    journal: str
    name: str
    clients: int
    ranks: int
    first_block: int
    flood: int = 0  # tasks of each client, all at once; 0: a mixed load until the standard input ends


class Journal:
    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def pushed(self) -> float:
        os.write(self._fd, b"P\n")
        return time.perf_counter()

    def told(self, task: Task, result: TaskResult, began: float, right: bool) -> None:
        microseconds = int((time.perf_counter() - began) * 1e6)
        code = result.error.code if result.error else "-"
        os.write(self._fd, f"T {task.kind} {result.status} {code} {microseconds} {int(right)}\n".encode())


class Engine:
    """One client and its blocks."""

    def __init__(self, client: Client, caches: Caches, journal: Journal, name: str, first_block: int) -> None:
        self._client = client
        self._caches = caches
        self._journal = journal
        self._name = name
        self._blocks = list(range(first_block, first_block + BLOCKS))
        self._stored: deque[str] = deque(maxlen=REMEMBERED)
        self._dice = random.Random(name)
        self._number = 0

    def _task_id(self) -> str:
        self._number += 1
        return f"{self._name}-{self._number}"

    async def mixed(self, stop: asyncio.Event) -> None:
        """One task after another until told to stop."""
        doings = [self._write, self._read, self._swap, self._cancelled, self._hopeless]
        while not stop.is_set():
            (doing,) = self._dice.choices(doings, weights=[40, 40, 10, 5, 5])
            await doing()

    async def _submit(self, task: Task) -> TaskResult:
        began = self._journal.pushed()
        result = await self._client.submit(task)
        self._journal.told(task, result, began, self._right(task, result))
        if result.status is Status.BUSY:
            await asyncio.sleep(result.retry_after or 0.01)
        return result

    def _right(self, task: Task, result: TaskResult) -> bool:
        """What a read claims holds what belongs there."""
        if not isinstance(task, ReadStorageTask):
            return True
        claimed = list(zip(task.keys, task.gpu_block_ids, strict=True))[: len(result.block_ids)]
        return result.block_ids == [block for _, block in claimed] and all(
            holds_content(self._caches, block, key) for key, block in claimed
        )

    def _some(self) -> list[int]:
        return self._dice.sample(self._blocks, self._dice.randint(1, LONGEST))

    def _filled(self) -> WriteStorageTask:
        blocks = self._some()
        keys = [f"{self._name}-{self._number}-{block}" for block in blocks]
        for key, block in zip(keys, blocks, strict=True):
            write_content(self._caches, block, key)
        return WriteStorageTask(task_id=self._task_id(), keys=keys, gpu_block_ids=blocks)

    async def _write(self) -> None:
        task = self._filled()
        result = await self._submit(task)
        moved = set(result.block_ids)
        self._stored.extend(key for key, block in zip(task.keys, task.gpu_block_ids, strict=True) if block in moved)

    def _known(self) -> ReadStorageTask | None:
        blocks = self._some()
        if len(self._stored) < len(blocks):
            return None
        wipe(self._caches, blocks)
        keys = self._dice.sample(list(self._stored), len(blocks))
        return ReadStorageTask(task_id=self._task_id(), keys=keys, gpu_block_ids=blocks)

    async def _read(self) -> None:
        task = self._known()
        if task is not None:
            await self._submit(task)

    async def _swap(self) -> None:
        """Out to the host pool and back into another block."""
        source, target = self._dice.sample(self._blocks, 2)
        key = self._task_id()
        write_content(self._caches, source, key)
        out = await self._submit(
            SwapOutTask(task_id=self._task_id(), gpu_block_ids=[source], cpu_block_ids=[self._blocks[0]])
        )
        if out.status is not Status.OK:
            return
        task = SwapInTask(task_id=self._task_id(), gpu_block_ids=[target], cpu_block_ids=[self._blocks[0]])
        began = self._journal.pushed()
        back = await self._client.submit(task)
        right = back.status is not Status.OK or holds_content(self._caches, target, key)
        self._journal.told(task, back, began, right)

    async def _cancelled(self) -> None:
        task = self._filled()
        began = self._journal.pushed()
        future = asyncio.ensure_future(self._client.submit(task))
        await asyncio.sleep(0)
        await self._client.cancel(task.task_id)
        result = await future
        self._journal.told(task, result, began, self._right(task, result))

    async def _hopeless(self) -> None:
        """A deadline that cannot be kept, or hardly."""
        task = self._known()
        if task is not None:
            await self._submit(
                ReadStorageTask(task_id=task.task_id, keys=task.keys, gpu_block_ids=task.gpu_block_ids, timeout=0.002)
            )

    # --- the flood ----------------------------------------------------------------------------------

    async def flood(self, count: int, say: asyncio.Queue[str]) -> None:
        """Push `count` tasks at once; push those that were refused again until every one is done."""
        refused: deque[SwapOutTask] = deque()
        unanswered = count

        async def push(task: SwapOutTask) -> float:
            nonlocal unanswered
            began = self._journal.pushed()
            result = await self._client.submit(task)
            self._journal.told(task, result, began, right=True)
            unanswered -= 1
            if result.status is Status.BUSY:
                refused.append(task)
                return result.retry_after or 0.01
            return 0.0

        blocks = self._blocks
        tasks = [
            SwapOutTask(
                task_id=self._task_id(),
                gpu_block_ids=[blocks[i % BLOCKS]],
                cpu_block_ids=[blocks[i % BLOCKS]],
                timeout=600,
            )
            for i in range(count)
        ]
        first = [asyncio.ensure_future(push(task)) for task in tasks]
        await asyncio.sleep(0)  # the first step of each hands its request to the socket
        await self._client.ping()  # the daemon has read what was sent before this
        say.put_nowait(f"pushed {count} refused {len(refused)}")
        await asyncio.gather(*first)
        while refused:
            again = [refused.popleft() for _ in range(min(FLOOD_WINDOW, len(refused)))]
            unanswered += len(again)
            await asyncio.sleep(max(await asyncio.gather(*(push(task) for task in again))))


async def main(spec: Spec) -> None:
    journal = Journal(Path(spec.journal))
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
    say: asyncio.Queue[str] = asyncio.Queue()

    async def one(number: int) -> None:
        async with Client(spec.endpoint, connect_timeout=CONNECT_TIMEOUT_S) as client:
            caches = await attach(client, spec.ranks)
            first_block = spec.first_block + number * BLOCKS
            engine = Engine(client, caches, journal, f"{spec.name}.{number}", first_block)
            await (engine.flood(spec.flood, say) if spec.flood else engine.mixed(stop))

    lives = asyncio.gather(*(one(number) for number in range(spec.clients)))
    if spec.flood:
        lines = [await say.get() for _ in range(spec.clients)]
        refused = sum(int(line.split()[-1]) for line in lines)
        print(f"refused {refused}", flush=True)
    await lives
    print("done", flush=True)


if __name__ == "__main__":
    given: dict[str, Any] = json.loads(sys.argv[1])
    asyncio.run(main(Spec(**given)))
