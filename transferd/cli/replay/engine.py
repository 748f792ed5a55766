"""A small engine for the replay: it has a prefix index and device and host pools, and pushes real tasks to a daemon.

A request is a chain of contents, root to leaf. It is admitted when all its blocks fit on the device beside those of
the requests in flight (pool.Admission). From the root, it uses the contents that are on the device. It swaps in the
others from the host pool, reads them from storage, or "computes" them: it writes their KV into the attached memory of
every rank. At its end it stores the contents that are not stored yet. To make room, the engine moves idle device blocks
to the host pool, where they replace idle ones. A block belongs to a task until that task's result, and to its request
until the request ends.

The engine verifies everything. It poisons target blocks before a load, compares every byte after it, and compares
again when another request finds the block on the device, and at the very end. If a task fails, the engine counts it
and fetches the blocks from the next tier. Only two events end a replay early, because the content of blocks is then
unknown: a lost daemon, and a straggling rank that still works on a task's blocks.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from transferd.cli.replay.kvdata import VERSION, Mismatch
from transferd.cli.replay.pool import Admission, BlockPool, PooledBlock
from transferd.cli.replay.report import ReplayReport
from transferd.cli.replay.trace import TraceRequest
from transferd.errors import DaemonLost, TransferError
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.compat import BaseExceptionGroup, TaskGroup
from transferd.runtime.threads import Direction, Threads
from transferd.tasks import (
    ReadStorageTask,
    Status,
    SwapInTask,
    SwapOutTask,
    Task,
    TaskResult,
    WriteStorageTask,
)

T = TypeVar("T")

TASK_TIMEOUT_S = 60.0
BUSY_RETRY_S = 0.01  # the pause after `busy`, unless the daemon names one
DAEMON_GONE = frozenset({"daemon_lost", "no_answer", "closed"})
LEFT_BEHIND = frozenset({"expired", "rank_died"})  # codes of ranks that had not finished when their task was answered


@dataclass(frozen=True, slots=True)
class Tiers:
    """What a daemon offers: device and host blocks per rank, and whether there is a storage pool."""

    device_blocks: int
    host_blocks: int
    storage: bool

    @classmethod
    def of(cls, stats: dict[str, Any]) -> Tiers:
        """From Client.stats()."""
        storage = stats["storage"]["backend"] != "none"
        return cls(stats["layout"]["device_blocks"], stats["host"]["blocks"], storage)


class TaskServer(Protocol):
    """Answers an engine's tasks: a Client, or a prediction of a daemon (predicted.py)."""

    async def submit(self, task: Task) -> TaskResult: ...
    async def match(self, keys: Sequence[str]) -> int: ...


class BlockData(Protocol):
    """The contents of device blocks: KvData, or nothing at all in a prediction."""

    def fill(self, block: int, content: int) -> None: ...
    def poison(self, blocks: Sequence[int]) -> None: ...
    def verify(self, block: int, content: int) -> Mismatch | None: ...
    def untouched(self, block: int, content: int) -> Mismatch | None: ...


class ReplayEngine:
    """Plays requests against one daemon. Borrows client, threads, and the attached memory behind `data`."""

    def __init__(
        self,
        client: TaskServer,
        data: BlockData,
        tiers: Tiers,
        report: ReplayReport,
        threads: Threads,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._client = client
        self._data = data
        self._tiers = tiers
        self._report = report
        self._threads = threads
        self._clock = clock
        self._device = BlockPool(tiers.device_blocks)
        self._host = BlockPool(tiers.host_blocks)
        self._admission = Admission(tiers.device_blocks)
        self._arriving: dict[int, asyncio.Future[None]] = {}  # contents on their way to the device
        self._stored: set[int] = set()  # contents that every rank has stored, to the engine's knowledge
        self._storing: set[int] = set()
        self._number = itertools.count()
        self._run = clock.fresh_id()[:12]  # a daemon remembers the task ids of an earlier replay for a while

    async def play(
        self, requests: Iterable[TraceRequest], concurrency: int, progress: Callable[[], None] = lambda: None
    ) -> None:
        """Run all requests in order, `concurrency` at a time.

        Raises DaemonLost, and TransferError with code `left_behind` if a rank did not release a task's blocks.
        """
        waiting = deque(requests)

        async def slot() -> None:
            while waiting:
                await self.request(waiting.popleft())
                progress()

        try:
            async with TaskGroup() as group:
                for _ in range(min(concurrency, len(waiting))):
                    group.create_task(slot())
        except BaseExceptionGroup as errors:
            raise _cause(errors) from errors
        await self._verify([(entry.content, entry.block) for entry in self._device.entries])

    def on_device(self, content: int) -> bool:
        return self._device.find(content) is not None

    # --- one request --------------------------------------------------------------------------------

    async def request(self, request: TraceRequest) -> None:
        """Play one request to its end."""
        chain = list(dict.fromkeys(request.hash_ids))
        contents = chain[: self._device.count]
        self._report.truncated += len(contents) < len(chain)
        await self._admission.enter(len(contents))
        held: list[PooledBlock] = []
        while len(held) < len(contents):
            held += await self._use_device(contents[len(held) :])
            held += await self._bring(contents[len(held) :])
        if self._tiers.storage:
            await self._store(held)
        for entry in reversed(held):  # leaves become idle before their roots
            self._device.release(entry)
        self._admission.leave(len(contents))
        self._report.requests += 1

    async def _use_device(self, contents: Sequence[int]) -> list[PooledBlock]:
        """Hold the leading contents that are on the device, or that another request is loading."""
        held: list[PooledBlock] = []
        for content in contents:
            while (arriving := self._arriving.get(content)) is not None:
                await asyncio.wait({arriving})
            entry = self._device.find(content)
            if entry is None:
                break
            self._device.hold(entry)
            held.append(entry)
        self._report.hits["device"] += len(held)
        await self._verify([(entry.content, entry.block) for entry in held])
        return held

    async def _bring(self, contents: Sequence[int]) -> list[PooledBlock]:
        """Load and hold the leading contents that are neither on the device nor arriving, from the nearest tier."""
        mine: list[int] = []
        for content in contents:
            if content in self._arriving or self._device.find(content) is not None:
                break
            self._arriving[content] = asyncio.get_running_loop().create_future()
            mine.append(content)
        on_host = self._use_host(mine)  # before _make_room, which evicts from the host pool as well
        place = dict(zip(mine, await self._make_room(len(mine)), strict=True))
        held = self._arrived("host", mine[: await self._from_host(on_host, place)], place)
        for name, tier in (("storage", self._from_storage), ("none", self._compute)):
            missing = mine[len(held) :]
            if missing:
                held += self._arrived(name, missing[: await tier(missing, place)], place)
        return held

    def _arrived(self, tier: str, contents: Sequence[int], place: dict[int, int]) -> list[PooledBlock]:
        """These contents are on the device now: wake the requests that wait for them."""
        self._report.hits[tier] += len(contents)
        for content in contents:
            self._arriving.pop(content).set_result(None)
        return [self._device.put(content, place[content]) for content in contents]

    # --- where blocks come from: each method returns how many of the leading contents it loaded -------

    def _use_host(self, contents: Sequence[int]) -> list[PooledBlock]:
        """Hold the leading contents that the host pool has."""
        entries = itertools.takewhile(lambda entry: entry is not None, map(self._host.find, contents))
        held = [entry for entry in entries if entry is not None]
        for entry in held:
            self._host.hold(entry)
        return held

    async def _from_host(self, found: Sequence[PooledBlock], place: dict[int, int]) -> int:
        if not found:
            return 0
        targets = [place[entry.content] for entry in found]
        await self._off_loop(lambda: self._data.poison(targets))
        task = SwapInTask(
            task_id=self._id("in"),
            timeout=TASK_TIMEOUT_S,
            gpu_block_ids=targets,
            cpu_block_ids=[entry.block for entry in found],
            swap_node_ids=tuple(entry.content for entry in found),
        )
        result = await self._submit(task)
        for entry in reversed(found):
            self._host.release(entry)
        brought = len(result.block_ids)
        await self._verify([(entry.content, place[entry.content]) for entry in found[:brought]])
        return brought

    async def _from_storage(self, contents: Sequence[int], place: dict[int, int]) -> int:
        if not self._tiers.storage:
            return 0
        keys = [key_of(content) for content in contents]
        available = await self._match(keys)
        if not available:
            return 0
        # Pass all the blocks: those beyond the keys must stay untouched.
        targets = [place[content] for content in contents]
        await self._off_loop(lambda: self._data.poison(targets))
        task = ReadStorageTask(
            task_id=self._id("read"), timeout=TASK_TIMEOUT_S, keys=keys[:available], gpu_block_ids=targets
        )
        result = await self._submit(task)
        brought = contents[: len(result.block_ids)]
        await self._verify([(content, place[content]) for content in brought])
        beyond = [(content, place[content]) for content in contents[available:]]
        found = await self._off_loop(lambda: [self._data.untouched(block, content) for content, block in beyond])
        self._report.verified(0, [mismatch for mismatch in found if mismatch is not None])
        self._report.blocks_read += len(brought)
        self._stored.update(brought)
        return len(brought)

    async def _match(self, keys: list[str]) -> int:
        try:
            return await self._client.match(keys)
        except DaemonLost:
            raise
        except TransferError as error:  # storage fails: read nothing, but carry on
            self._report.error(f"match: {error}")
            return 0

    async def _compute(self, contents: Sequence[int], place: dict[int, int]) -> int:
        def prefill() -> None:
            for content in contents:
                self._data.fill(place[content], content)

        await self._off_loop(prefill)
        self._stored.difference_update(contents)  # a read missed them, so storage no longer has them
        return len(contents)

    # --- where blocks go ----------------------------------------------------------------------------

    async def _store(self, held: Sequence[PooledBlock]) -> None:
        """Write what is not stored yet: one task for each run of consecutive blocks."""
        due = [i for i, e in enumerate(held) if e.content not in self._stored and e.content not in self._storing]
        stretches = itertools.groupby(enumerate(due), key=lambda item: item[1] - item[0])
        tasks = [self._write([i for _, i in stretch], held) for _, stretch in stretches]
        await asyncio.gather(*tasks)

    async def _write(self, positions: Sequence[int], held: Sequence[PooledBlock]) -> None:
        entries = [held[i] for i in positions]
        contents = [entry.content for entry in entries]
        self._storing.update(contents)
        task = WriteStorageTask(
            task_id=self._id("write"),
            timeout=TASK_TIMEOUT_S,
            keys=[key_of(content) for content in contents],
            gpu_block_ids=[entry.block for entry in entries],
            start_write_block_idx=positions[0],
        )
        result = await self._submit(task)
        written = set(result.block_ids)
        self._storing.difference_update(contents)
        self._stored.update(entry.content for entry in entries if entry.block in written)
        self._report.blocks_written += len(written)

    async def _make_room(self, count: int) -> list[int]:
        """Take `count` device blocks. Admission has made sure that there are enough."""
        blocks, evicted = self._device.take(count)
        await self._swap_out(evicted)
        return blocks

    async def _swap_out(self, evicted: Sequence[PooledBlock]) -> None:
        """Move evicted blocks to the host pool as far as it has room, the most recently used ones first."""
        moving = [entry for entry in evicted if self._host.find(entry.content) is None]
        moving = moving[len(moving) - min(len(moving), self._host.obtainable) :]
        if not moving:
            return
        blocks, _ = self._host.take(len(moving))
        task = SwapOutTask(
            task_id=self._id("out"),
            timeout=TASK_TIMEOUT_S,
            gpu_block_ids=[entry.block for entry in moving],
            cpu_block_ids=blocks,
            swap_node_ids=tuple(entry.content for entry in moving),
        )
        result = await self._submit(task)
        for entry, block in zip(moving, blocks, strict=True):
            # The same content may have been loaded, evicted and swapped out again during this swap.
            if result.status is Status.OK and self._host.find(entry.content) is None:
                self._host.release(self._host.put(entry.content, block))
            else:
                self._host.give_back([block])

    # --- tasks and bytes ----------------------------------------------------------------------------

    async def _submit(self, task: Task) -> TaskResult:
        """Push until the task is admitted; count the answer. Raises if the content of its blocks is unknown."""
        while True:
            before = self._clock.monotonic()
            result = await self._client.submit(task)
            if result.status is not Status.BUSY:
                break
            self._report.busy += 1
            await asyncio.sleep(result.retry_after or BUSY_RETRY_S)
        self._report.task(task, result, self._clock.monotonic() - before)
        if result.error is not None and result.error.code in DAEMON_GONE:
            raise DaemonLost(f"{task.kind} {task.task_id}: {result.error.message}", code=result.error.code)
        behind = [rank.rank for rank in result.ranks if rank.error is not None and rank.error.code in LEFT_BEHIND]
        if behind:
            what = f"rank {', '.join(map(str, behind))} may still be working on {task.kind} {task.task_id}"
            raise TransferError(f"{what}, so its blocks cannot be reused", code="left_behind")
        return result

    async def _verify(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Compare every byte of (content, block) pairs."""
        if not blocks:
            return
        found = await self._off_loop(lambda: [self._data.verify(block, content) for content, block in blocks])
        self._report.verified(len(blocks), [mismatch for mismatch in found if mismatch is not None])

    def _off_loop(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Do heavy work on bytes off the loop, so that measured latencies are the daemon's."""
        return self._threads.run(Direction.IN, work)

    def _id(self, kind: str) -> str:
        return f"replay-{self._run}-{kind}-{next(self._number)}"


def key_of(content: int) -> str:
    """A trace's ids are already chained: equal ids mean equal prefixes."""
    return f"replay-v{VERSION}-block-{content}"


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to report: the first that is not a TransferError (a bug), else the first."""
    ours, others = group.split(TransferError)
    error: BaseException | None = others or ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert error is not None
    return error
