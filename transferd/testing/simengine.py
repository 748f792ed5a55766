"""SimEngine: an inference engine in a simulation that knows what every byte must be, and checks.

It fills device blocks with content that follows from key, generation and rank, pushes tasks, and at
each result checks what the contract promises for that moment:

* nobody is at work on the task's device and host blocks any more (they are the engine's again);
* a claimed block holds exactly the bytes stored under its key, on every rank;
* blocks that a task only reads are as the engine left them;
* a written block is in storage, unless storage itself let it go;
* the result came within the task's timeout and the daemon's slack;
* it never says `internal`, which is our word for a bug.

Blocks whose task ended without a rank may still be touched by it. The engine keeps its hands off their
bytes, but may name them in further tasks: the daemon has to wait. Blocks of a task that the daemon
said nothing about are not used again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np

from transferd.client import Client
from transferd.errors import Closed, InvariantError
from transferd.tasks import (
    ReadStorageTask,
    Status,
    SwapInTask,
    SwapOutTask,
    Task,
    TaskResult,
    WriteStorageTask,
)
from transferd.testing.simblocks import Blocks
from transferd.testing.simworld import SimWorld

NOT_FROM_THE_DAEMON = ("daemon_lost", "no_answer", "closed", "send_queue_full")
LEFT_BEHIND = ("expired", "rank_died")  # codes of ranks that had not arrived when their task was answered


class SimEngine:
    """One engine with a client of its own and blocks of its own.

    outcomes, errors: results by status, and by error code.
    """

    def __init__(self, world: SimWorld, name: str, blocks: Sequence[int], chance: random.Random) -> None:
        layout = world.daemon.layout
        self.world = world
        self.name = name
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.device = Blocks.of(layout.device, [device.memory for device in world.devices], blocks)
        pools = [worker.context.host for worker in world.daemon.coordinator.workers]
        host = [np.frombuffer(pool.memory.view, dtype=np.uint8) for pool in pools if pool is not None]
        self.host = Blocks.of(layout.host, host, blocks)
        self.stored: list[str] = []  # keys that were written, or may have been
        self.swapped: dict[int, str] = {}  # host block -> label
        self.left_behind: list[int] = []  # device blocks that a rank may still be at work on
        self.patient = False  # gives every task all the time it may need
        self.cut_at = -1.0  # when this engine's connection last broke
        self._chance = chance
        self.link = name  # what the network knows our client by
        self._client: Client = world.client(name)
        self._number = 0

    # --- life ---------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        return self._client

    async def connect(self) -> None:
        await self._client.connect()

    async def vanish(self) -> None:
        """Leave, with whatever is pending, and come back as somebody else."""
        await self._client.close()
        self._number += 1
        self.link = f"{self.name}-{self._number}"
        self._client = self.world.client(self.link)
        await self._client.connect()

    async def lose_connection(self, seconds: float) -> None:
        """The network is away for a while; what was on its way may be lost."""
        link = self.link
        self.world.network.cut(link)
        self.cut_at = self.world.loop.time()
        await asyncio.sleep(seconds)
        self.cut_at = self.world.loop.time()
        self.world.network.mend(link)

    async def leave(self) -> None:
        """For good. Lets go of the memory it looked into, so that the daemon can free it."""
        await self._client.close()
        self.device.memories.clear()
        self.host.memories.clear()

    async def act(self) -> None:
        """One thing an engine does, by chance."""
        actions = (self.write, self.write, self.read, self.read, self.read, self.swap_out, self.swap_in, self.chain)
        client = self._client
        try:
            await self._chance.choice(actions)()
        except Closed:
            if client is self._client:  # else it vanished meanwhile, and the action with it
                raise

    # --- tasks --------------------------------------------------------------------------------------

    async def write(self) -> None:
        generation = self._client.generation
        blocks = self.device.take(self._chance.randint(1, 6))
        keys = [self._some_key(fresh=0.8) for _ in blocks]
        keys = list(dict.fromkeys(keys))
        blocks, spare = blocks[: len(keys)], blocks[len(keys) :]
        self.device.free += spare
        for key, block in zip(keys, blocks, strict=True):
            self.device.fill(block, f"{key}@{generation}")
        task = WriteStorageTask(task_id=self._id("write"), timeout=self._timeout(), keys=keys, gpu_block_ids=blocks)
        self.stored += keys
        result = await self._run(task, device=blocks)
        self._check_stored(task, result)
        if self._answered_whole(result):
            for key, block in zip(keys, blocks, strict=True):
                self._check(self.device.holds(block, f"{key}@{generation}"), task, "a write changed its source")
            self._give_back(device=blocks)

    async def read(self) -> None:
        blocks = self.device.take(self._chance.randint(1, 6))
        for block in blocks:
            self.device.fill(block, "junk")
        touched, self.left_behind = self.left_behind, []
        keys = [self._some_key(fresh=0.05) for _ in (*touched, *blocks)]
        task = ReadStorageTask(
            task_id=self._id("read"), timeout=self._timeout(), keys=keys, gpu_block_ids=[*touched, *blocks]
        )
        result = await self._run(task, device=blocks)
        self._check_read(task, result)
        if self._answered_whole(result):
            self._give_back(device=blocks)
            if result.ranks:  # it ran, so the rank that was left behind has left
                self._check_let_go(task, result, device=touched)
                self._give_back(device=touched)
            else:
                self.left_behind += touched
        elif result.ranks:
            self.left_behind += touched

    async def chain(self) -> None:
        """Tasks on the same blocks, pushed without waiting: the daemon has to keep their order."""
        count = self._chance.randint(1, 3)
        blocks, host = self.device.take(count), self.host.take(count)
        if len(blocks) < count or len(host) < count:
            self.device.free += blocks
            self.host.free += host
            return
        generation, timeout = self._client.generation, 30.0
        new = [self._some_key(fresh=1.0) for _ in blocks]
        old = [self._some_key(fresh=0.0) for _ in blocks]
        for key, block in zip(new, blocks, strict=True):
            self.device.fill(block, f"{key}@{generation}")
        self.stored += new
        write = WriteStorageTask(task_id=self._id("chain"), timeout=timeout, keys=new, gpu_block_ids=blocks)
        read = ReadStorageTask(task_id=self._id("chain"), timeout=timeout, keys=old, gpu_block_ids=blocks)
        out = SwapOutTask(task_id=self._id("chain"), timeout=timeout, gpu_block_ids=blocks, cpu_block_ids=host)
        back = ReadStorageTask(task_id=self._id("chain"), timeout=timeout, keys=new, gpu_block_ids=blocks)
        client, now = self._client, self.world.loop.time
        pushed = [(task, now(), await client.push(task)) for task in (write, read, out, back)]
        results = [self._account(task, await future, at) for task, at, future in pushed]
        written, found, swapped, again = results
        if not all(map(self._answered_whole, results)):
            return
        self._check_stored(write, written)
        self._check_read(back, again)
        for i in range(len(found.block_ids) if swapped.block_ids else 0):
            right = self.host.holds(host[i], f"{old[i]}@{found.generation}")
            self._check(right, out, f"wrong bytes in host block {host[i]}: the order was not kept")
        self._give_back(device=blocks, host=host)

    async def swap_out(self) -> None:
        count = self._chance.randint(1, 4)
        blocks, host = self.device.take(count), self.host.take(count)
        count = min(len(blocks), len(host))
        self.device.free += blocks[count:]
        self.host.free += host[count:]
        blocks, host = blocks[:count], host[:count]
        labels = [f"{self._id('node')}-{i}" for i in range(count)]
        for label, block in zip(labels, blocks, strict=True):
            self.device.fill(block, label)
        task = SwapOutTask(
            task_id=self._id("swap-out"), timeout=self._timeout(), gpu_block_ids=blocks, cpu_block_ids=host
        )
        result = await self._run(task, device=blocks, host=host)
        if not self._answered_whole(result):
            return
        if result.block_ids:
            for label, block, to in zip(labels, blocks, host, strict=True):
                self._check(self.device.holds(block, label), task, "a swap changed its source")
                self._check(self.host.holds(to, label), task, f"wrong bytes in host block {to}")
                self.swapped[to] = label
            self._give_back(device=blocks)
        else:
            self._give_back(device=blocks, host=host)

    async def swap_in(self) -> None:
        count = min(self._chance.randint(1, 4), len(self.swapped), len(self.device.free))
        host = self._chance.sample(sorted(self.swapped), count)
        labels = [self.swapped.pop(block) for block in host]
        blocks = self.device.take(count)
        task = SwapInTask(
            task_id=self._id("swap-in"), timeout=self._timeout(), gpu_block_ids=blocks, cpu_block_ids=host
        )
        result = await self._run(task, device=blocks, host=host)
        if result.block_ids:
            for label, block in zip(labels, blocks, strict=True):
                self._check(self.device.holds(block, label), task, f"wrong bytes in device block {block}")
        if self._answered_whole(result):
            for label, block in zip(labels, host, strict=True):
                self._check(self.host.holds(block, label), task, "a swap changed its source")
            self._give_back(device=blocks, host=host)

    # --- what every task goes through ---------------------------------------------------------------

    async def _run(self, task: Task, device: Sequence[int] = (), host: Sequence[int] = ()) -> TaskResult:
        """Push, perhaps cancel or push again, await the result, and check what holds of every result."""
        loop, chance = self.world.loop, self._chance
        client, pushed_at = self._client, loop.time()
        future = await client.push(task)
        again = client.submit(task) if chance.random() < 0.1 else None
        if chance.random() < 0.15:
            loop.call_later(chance.uniform(0, 0.5), self._cancel_later, client, task.task_id)
        result = await (future if again is None else self._one_of(task, future, again))
        self._account(task, result, pushed_at)
        if self._answered_whole(result):
            self._check_let_go(task, result, device, host)
        elif result.ranks:
            self.left_behind += device
        return result

    def _account(self, task: Task, result: TaskResult, pushed_at: float) -> TaskResult:
        self.outcomes[str(result.status)] += 1
        if result.error is not None:
            self.errors[result.error.code] += 1
        self._check_result(task, result, pushed_at)
        return result

    async def _one_of(
        self, task: Task, future: asyncio.Future[TaskResult], again: Coroutine[Any, Any, TaskResult]
    ) -> TaskResult:
        """A task pushed twice runs once: both pushes get its result, or one of them none of the daemon's."""
        answers = await asyncio.gather(future, again, return_exceptions=True)
        results = [answer for answer in answers if isinstance(answer, TaskResult)]
        ran = [result for result in results if result.ranks]
        self._check(len(ran) < 2 or ran[0] == ran[1], task, f"two answers: {ran}")
        unknown = [r for r in results if r.error is not None and r.error.code in NOT_FROM_THE_DAEMON]
        return (ran or unknown or results)[0]

    def _cancel_later(self, client: Client, task_id: str) -> None:
        async def cancel() -> None:
            try:
                await client.cancel(task_id)
            except Exception as error:  # noqa: BLE001 - the client may be closed or cut off by now
                self.world.loop.note(f"{task_id}: cancel failed, {error!r}")

        self.world.loop.create_task(cancel())

    def _check_result(self, task: Task, result: TaskResult, pushed_at: float) -> None:
        loop, error = self.world.loop, result.error
        self._check(result.task_id == task.task_id, task, f"answered as {result.task_id}")
        internal = error is not None and error.code == "internal"
        self._check(not internal, task, f"a bug: {error}")
        if task.blocks:
            whole = len(result.block_ids) == task.blocks
            self._check((result.status is Status.OK) == whole, task, f"{result}")
        if error is not None and error.code in NOT_FROM_THE_DAEMON:
            return
        limit = task.timeout + self.world.daemon.config.server.deadline_slack + 0.1  # and the way, there and back
        in_time = loop.time() - pushed_at <= limit or self.cut_at >= pushed_at
        self._check(in_time, task, f"answered after {loop.time() - pushed_at:.3f} s: {result}")

    def _check_read(self, task: ReadStorageTask, result: TaskResult) -> None:
        for key, block in zip(task.keys, result.block_ids, strict=False):
            right = self.device.holds(block, f"{key}@{result.generation}")
            self._check(right, task, f"wrong bytes of {key} in block {block}")
        self._check(result.block_ids == task.gpu_block_ids[: len(result.block_ids)], task, "not a prefix")

    def _check_stored(self, task: WriteStorageTask, result: TaskResult) -> None:
        storage, namer = self.world.storage, self.world.daemon.namer
        if storage.counts["evicted"] or storage.counts["quarantined"]:
            return
        claimed = [key for key, block in zip(task.keys, task.gpu_block_ids, strict=True) if block in result.block_ids]
        digests = [namer.digest(key) for key in claimed]
        for rank in range(len(self.world.devices)):
            for name in namer.names(result.generation, digests, rank):
                self._check(name in storage.objects, task, f"{name} was not stored")

    def _check_let_go(
        self, task: Task, result: TaskResult, device: Sequence[int] = (), host: Sequence[int] = ()
    ) -> None:
        """Nobody is at work on the blocks any more."""
        watch = self.world.watch
        for blocks, ids in ((self.device, device), (self.host, host)):
            for block in ids:
                for rank in range(len(blocks.memories)):
                    starts, sizes = blocks.ranges(block, rank)
                    try:
                        claim = watch.enter(starts, sizes, writes=True, who=f"the engine after {task.task_id}")
                    except InvariantError as conflict:
                        self._check(False, task, f"{conflict}, after {result}")
                    else:
                        watch.leave(claim)

    def _answered_whole(self, result: TaskResult) -> bool:
        """Every rank has let go: the blocks are the engine's again."""
        if result.error is not None and result.error.code in NOT_FROM_THE_DAEMON:
            return False
        return not any(r.error is not None and r.error.code in LEFT_BEHIND for r in result.ranks)

    def _give_back(self, device: Sequence[int] = (), host: Sequence[int] = ()) -> None:
        """Use the blocks for something else at once: whoever still reads them stores garbage."""
        for block in device:
            self.device.fill(block, "garbage")
        self.device.free += device
        self.host.free += host

    def _check(self, good: bool, task: Task, what: str) -> None:
        if not good:
            story = self.world.daemon.recorder.story(task.task_id)
            raise AssertionError(f"{task.task_id}: {what}\n{task}\n{story}")

    def _some_key(self, fresh: float) -> str:
        if not self.stored or self._chance.random() < fresh:
            self._number += 1
            return f"{self.name}-key-{self._number}"
        return self._chance.choice(self.stored)

    def _id(self, kind: str) -> str:
        self._number += 1
        return f"{self.name}-{kind}-{self._number}"

    def _timeout(self) -> float:
        if self.patient:
            return 30.0
        return self._chance.choice((0.05, 0.5, 5.0, 30.0))
