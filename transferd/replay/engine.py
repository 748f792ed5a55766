"""A small engine that lives off a daemon: prefix index, device and host pools, and real tasks.

A request is a list of block ids, root to leaf. For each the engine

    1. uses what is on the device already (also what another request is just bringing there),
    2. swaps in what follows from the host pool,
    3. asks storage how far the rest goes, and reads that,
    4. "computes" what is left: writes the block's KV into the attached memory of every rank,
    5. at its end stores what it computed.

Device blocks that nobody uses go to the host pool when room is needed, least recently used first.
Requests overlap; a block belongs to a task until that task's result. Every block that a swap or a read
brought back is compared to the last byte, in target blocks that were poisoned first.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

from transferd.client import Client
from transferd.replay.kvdata import KvData
from transferd.replay.pool import BlockPool, Entry
from transferd.replay.report import Report
from transferd.replay.trace import TraceRequest
from transferd.tasks import (
    ReadStorageTask,
    Status,
    SwapInTask,
    SwapOutTask,
    Task,
    TaskResult,
    WriteStorageTask,
)

EVICT_BATCH = 8  # device blocks swapped out together: one task instead of eight


class Engine:
    """Plays requests against one daemon. Borrows the client and the attached memory behind `data`."""

    def __init__(self, client: Client, data: KvData, report: Report, device_blocks: int, host_blocks: int) -> None:
        self._client = client
        self._data = data
        self._report = report
        self._device = BlockPool(device_blocks)
        self._host = BlockPool(host_blocks)
        self._arriving: dict[int, asyncio.Future[None]] = {}  # contents on their way to the device
        self._rooms: deque[tuple[int, asyncio.Future[None]]] = deque()  # who waits for how many blocks, in order
        self._stored: set[int] = set()  # contents that every rank is known to have stored
        self._number = itertools.count()
        self._run = f"{time.time_ns():x}"  # task ids of an earlier replay are remembered for a while

    async def play(self, requests: Sequence[TraceRequest], concurrency: int, progress: Callable[[], None]) -> None:
        """Run all requests, `concurrency` at a time, in order of their start."""
        waiting = deque(requests)

        async def slot() -> None:
            while waiting:
                await self._request(waiting.popleft())
                progress()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(waiting))):
                group.create_task(slot())

    # --- one request --------------------------------------------------------------------------------

    async def _request(self, request: TraceRequest) -> None:
        ids = list(dict.fromkeys(request.hash_ids))[: self._device.count]
        self._report.requests += 1
        self._report.truncated += len(ids) < len(set(request.hash_ids))
        held = await self._use_device(ids)
        wanted = ids[len(held) :]
        self._report.hits["device"] += len(held)
        try:
            if wanted:
                blocks = await self._allocate(len(wanted))
                held += await self._bring(ids, wanted, blocks)
        finally:
            for entry in held:
                entry.users -= 1
            self._serve_rooms()

    async def _use_device(self, ids: Sequence[int]) -> list[Entry]:
        """The leading ids that are on the device, or will be when another request has brought them."""
        held: list[Entry] = []
        for content in ids:
            arriving = self._arriving.get(content)
            if arriving is not None:
                await asyncio.wait({arriving})
            entry = self._device.find(content)
            if entry is None:
                break
            entry.users += 1
            held.append(entry)
        return held

    async def _bring(self, ids: Sequence[int], wanted: list[int], blocks: list[int]) -> list[Entry]:
        """Fill `blocks` with `wanted`, each from the nearest tier that has it. Returns the entries, in use."""
        held: list[Entry] = []
        # While this request waited for room, another one may have brought some of it.
        while wanted and (wanted[0] in self._arriving or self._device.find(wanted[0]) is not None):
            more = await self._use_device(wanted[:1])
            if not more:
                continue  # it arrived and went again, or never came
            held += more
            del wanted[0]
            self._report.hits["device"] += 1
        mine = self._claim(wanted)
        self._device.give_back(blocks[len(mine) :])
        place = dict(zip(mine, blocks, strict=False))
        done = 0
        try:
            for tier in (self._from_host, self._from_storage, self._compute):
                done += await tier(mine[done:], place)
                for content in mine[:done]:
                    self._arrived(content, place, held)
        finally:
            for content in mine:
                if content in self._arriving:  # an error on the way
                    self._arriving.pop(content).set_result(None)
                    self._device.give_back([place[content]])
        await self._store(ids, [content for content in mine if content not in self._stored], place)
        return held

    def _claim(self, wanted: Sequence[int]) -> list[int]:
        """Announce what this request brings, up to the first that somebody else has or brings."""
        mine: list[int] = []
        for content in wanted:
            if content in self._arriving or self._device.find(content) is not None:
                break
            self._arriving[content] = asyncio.get_running_loop().create_future()
            mine.append(content)
        return mine

    def _arrived(self, content: int, place: dict[int, int], held: list[Entry]) -> None:
        arriving = self._arriving.pop(content, None)
        if arriving is not None:
            held.append(self._device.hold(content, place[content]))
            arriving.set_result(None)

    # --- where blocks come from: each returns how many of the leading contents it brought -------------

    async def _from_host(self, contents: Sequence[int], place: dict[int, int]) -> int:
        entries = list(itertools.takewhile(lambda e: e is not None, map(self._host.find, contents)))
        found = [entry for entry in entries if entry is not None]
        if not found:
            return 0
        for entry in found:
            entry.users += 1
        targets = [place[entry.content] for entry in found]
        self._data.poison(targets)
        result = await self._submit(
            SwapInTask(task_id=self._id("in"), gpu_block_ids=targets, cpu_block_ids=[e.block for e in found])
        )
        for entry in found:
            entry.users -= 1
        brought = found if result.status is Status.OK else []
        self._verify([(e.content, place[e.content]) for e in brought])
        self._report.hits["host"] += len(brought)
        return len(brought)

    async def _from_storage(self, contents: Sequence[int], place: dict[int, int]) -> int:
        keys = [_key(content) for content in contents]
        available = await self._client.match(keys) if keys else 0
        if not available:
            return 0
        # As FastDeploy does, name all the blocks there are: those beyond the keys stay untouched.
        targets = [place[content] for content in contents]
        self._data.poison(targets)
        result = await self._submit(
            ReadStorageTask(task_id=self._id("read"), keys=keys[:available], gpu_block_ids=targets)
        )
        brought = len(result.block_ids)
        self._verify([(content, place[content]) for content in contents[:brought]])
        self._report.hits["storage"] += brought
        self._report.blocks_read += brought
        self._stored.update(contents[:brought])
        return brought

    async def _compute(self, contents: Sequence[int], place: dict[int, int]) -> int:
        for content in contents:
            self._data.fill(place[content], content)
            await asyncio.sleep(0)  # prefill is not instant; let the loop breathe
        self._report.hits["none"] += len(contents)
        return len(contents)

    def _verify(self, arrived: Sequence[tuple[int, int]]) -> None:
        for content, block in arrived:
            mismatch = self._data.verify(block, content)
            if mismatch is not None:
                self._report.mismatch(mismatch)

    async def _store(self, ids: Sequence[int], mine: Sequence[int], place: dict[int, int]) -> None:
        """Write this request's blocks that are not known to be stored."""
        if not mine:
            return
        result = await self._submit(
            WriteStorageTask(
                task_id=self._id("write"),
                keys=[_key(content) for content in mine],
                gpu_block_ids=[place[content] for content in mine],
                start_write_block_idx=ids.index(mine[0]),
            )
        )
        self._report.blocks_written += len(result.block_ids)
        written = set(result.block_ids)
        self._stored.update(content for content in mine if place[content] in written)

    # --- room on the device -------------------------------------------------------------------------

    async def _allocate(self, count: int) -> list[int]:
        """`count` device blocks, evicting to the host pool. In order of asking, so nobody starves."""
        if self._rooms or self._device.obtainable < count:
            turn = asyncio.get_running_loop().create_future()
            self._rooms.append((count, turn))
            self._serve_rooms()
            await turn
        blocks = self._device.take_free(count)
        victims = self._device.evict(count - len(blocks))
        for start in range(0, len(victims), EVICT_BATCH):
            await self._swap_out(victims[start : start + EVICT_BATCH])
        return blocks + [victim.block for victim in victims]

    def _serve_rooms(self) -> None:
        """Let in the first who waits, once there is room; the next one looks again when it has taken it."""
        while self._rooms and self._rooms[0][1].done():
            self._rooms.popleft()
        if self._rooms and self._device.obtainable >= self._rooms[0][0]:
            self._rooms.popleft()[1].set_result(None)

    async def _swap_out(self, victims: Sequence[Entry]) -> None:
        """Keep what can be kept: to the host pool, in place of what is least recently used there."""
        moving = [victim for victim in victims if self._host.find(victim.content) is None]
        blocks = self._host.take_free(len(moving))
        blocks += [entry.block for entry in self._host.evict(len(moving) - len(blocks))]
        moving = moving[: len(blocks)]
        if not moving:
            return
        result = await self._submit(
            SwapOutTask(
                task_id=self._id("out"),
                gpu_block_ids=[victim.block for victim in moving],
                cpu_block_ids=blocks,
                swap_node_ids=tuple(victim.content for victim in moving),
            )
        )
        for victim, block in zip(moving, blocks, strict=True):
            if result.status is Status.OK and self._host.find(victim.content) is None:
                self._host.hold(victim.content, block).users -= 1
            else:
                self._host.give_back([block])

    # --- tasks --------------------------------------------------------------------------------------

    async def _submit(self, task: Task) -> TaskResult:
        """Push until it is admitted, count the answer."""
        while True:
            before = time.monotonic()
            result = await self._client.submit(task)
            if result.status is not Status.BUSY:
                break
            self._report.busy += 1
            await asyncio.sleep(result.retry_after or 0.01)
        self._report.task(task, result, time.monotonic() - before)
        return result

    def _id(self, kind: str) -> str:
        return f"replay-{self._run}-{kind}-{next(self._number)}"


def _key(content: int) -> str:
    """Trace ids are chained already: equal ids mean equal prefixes."""
    return f"trace-block-{content}"
