"""An engine of a node of the rack: what it writes and reads, and whether every byte of it is right."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.machine.rack.lab import CACHE
from tests.support.looking import new_stats
from transferd import Client, ReadStorageTask, Status, TaskResult, WriteStorageTask
from transferd.cli.replay.kvdata import KvData
from transferd.client.launch import DaemonProcess
from transferd.runtime.compat import timeout, wait_for

_tasks = itertools.count(1)  # of all engines: a daemon may have several, one after the other


class Engine:
    """timeout: of its tasks, in seconds. Content n is stored under a key of its own."""

    def __init__(self, process: DaemonProcess, client: Client, data: KvData) -> None:
        self.process, self.client, self.data = process, client, data
        self.timeout = 30.0
        self.took = 0.0  # seconds that the last task took, as its engine sees it

    async def write(self, contents: Sequence[int], *, first: int = 0) -> TaskResult:
        """Write these contents from the blocks that begin at `first`."""
        for block, content in enumerate(contents, first):
            self.data.fill(block, content)
        return await self._run(WriteStorageTask, contents, first)

    async def read(self, contents: Sequence[int], *, first: int = 0, prefix: bool = True) -> TaskResult:
        """Read these contents to the blocks that begin at `first`, and compare what came on every rank."""
        self.data.poison(range(first, first + len(contents)))
        result = await self._run(ReadStorageTask, contents, first, prefix=prefix)
        for block in result.block_ids:
            assert self.data.verify(block, contents[block - first]) is None
        return result

    async def reads_within(self, contents: Sequence[int], seconds: float) -> float:
        """After how many seconds all of these are read. Fails if they are not within `seconds`."""
        begun = time.monotonic()
        while (await self.read(contents)).status is not Status.OK:
            assert time.monotonic() - begun < seconds, f"not readable within {seconds} s"
            await asyncio.sleep(0.05)
        return time.monotonic() - begun

    async def matches(self, contents: Sequence[int]) -> int:
        """How many leading blocks a lookup finds."""
        return await self.client.match([key(content) for content in contents])

    async def storage(self) -> dict[str, Any]:
        """What a report says of it that was made after this call."""
        report: dict[str, Any] = (await new_stats(self.client))["storage"]
        return report

    async def until_stored(self, contents: Sequence[int]) -> None:
        """Write, again and again until the pool has taken all of it: nodes lend their memory a moment after a start."""
        async with timeout(60):
            while (await self.write(contents)).status is not Status.OK:  # noqa: ASYNC110 - the pool tells nobody
                await asyncio.sleep(0.1)

    async def _run(self, kind: Any, contents: Sequence[int], first: int, **more: Any) -> TaskResult:
        blocks = list(range(first, first + len(contents)))
        keys = [key(content) for content in contents]
        task = kind(task_id=f"t{next(_tasks)}", keys=keys, gpu_block_ids=blocks, timeout=self.timeout, **more)
        begun = time.monotonic()
        result: TaskResult = await wait_for(await self.client.push(task), self.timeout + 30)
        self.took = time.monotonic() - begun
        return result


def usual(took: Sequence[float]) -> float:
    """The median. What a fault costs, each call pays; while the machine stands still, one of them or two are late."""
    return statistics.median(took)


def key(content: int) -> str:
    return f"content-{content}"


@asynccontextmanager
async def engine(process: DaemonProcess) -> AsyncIterator[Engine]:
    """The engine of a daemon that has started."""
    async with Client(process.endpoint) as client:
        running = Engine(process, client, KvData([await client.attach(rank=rank) for rank in range(CACHE["ranks"])]))
        yield running
        running.data = None  # type: ignore[assignment] # it borrows the memory that the client unmaps
