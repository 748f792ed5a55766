"""SimEngine: an inference engine in a simulation that knows what every byte must be, and checks.

It fills device blocks with content that follows from key and rank, pushes tasks, and hands each result
to the judge (simjudge.py), who checks what the contract promises for that moment:

* nobody is at work on the task's device and host blocks any more (they are the engine's again);
* a claimed block holds exactly the bytes stored under its key, on every rank, in its generation;
* blocks that a task only reads are as the engine left them;
* a written block is in storage, unless storage itself let it go;
* the result came within the task's timeout and the daemon's slack, with one share per rank;
* it never says `internal`, which is our word for a bug.

Blocks whose task ended without a rank may still be touched by it. The engine keeps its hands off their
bytes, but may name them in further tasks: the daemon has to wait. Blocks of a task that the daemon
said nothing about are not used again.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from tests.support.simulation.blocks import Blocks
from tests.support.simulation.judge import Judge, answered_whole, from_the_daemon
from tests.support.simulation.plan import BY_HOST, SPARSE_READ
from tests.support.simulation.world import SimWorld
from transferd.client.client import Client
from transferd.client.timeline import Timeline
from transferd.errors import Closed
from transferd.tasks import ReadStorageTask, Status, SwapInTask, SwapOutTask, Task, TaskResult, WriteStorageTask

HELLO_S = 1.0
MEMORY_GONE = ("cache_gone", "not_attached")
UNSETTLED_S = 1.0  # after a connection was mended: requests are refused, sessions begun, requests made again


@dataclass
class Act:
    """One thing an engine does: its name, from which task ids and keys are made, and its own chance.

    patient: its tasks get all the time they may need, and nobody takes them back.
    """

    name: str
    chance: random.Random
    patient: bool = False

    def timeout(self) -> float:
        return 30.0 if self.patient else self.chance.choice((0.05, 0.5, 5.0, 30.0))


@dataclass
class Computing:
    """The content of some blocks on its way. after: what tasks on them have to name. ranks: each one's work."""

    after: tuple[int, int] | msgspec.UnsetType = msgspec.UNSET
    ranks: list[asyncio.Task[None]] = field(default_factory=list)


class SimEngine:
    """One engine with a client of its own and blocks of its own.

    It maps the device memory once and keeps the mapping, whatever becomes of the daemon, until `attach`; with `apart`
    by a client of its own, as another process of the engine would. With `line` it pushes many tasks before it has
    computed their blocks: each rank gets there when it does, and advances that timeline.

    outcomes, errors: results by status, and by error code. outcomes also counts what the engine did
    besides: tasks pushed `again`, and `cancel`s that had something to take back.
    """

    def __init__(
        self,
        world: SimWorld,
        name: str,
        blocks: Sequence[int],
        judge: Judge | None = None,
        *,
        apart: bool = False,
        line: int | None = None,
    ) -> None:
        layout = world.daemon.default.layout
        self.world = world
        self.name = name
        self.judge = judge or Judge(world)
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.device = Blocks.of(layout.device, [], blocks)
        self.host = Blocks.of(layout.host, [], blocks)
        self.host.lost = lambda: self._host_memory != self._daemons_memory()
        self._host_memory: object = None
        self._timeline = None if line is None else Timeline(line, clock=lambda: int(world.clock.wall() * 1e9))
        self._streams: dict[int, asyncio.Task[None]] = {}  # by rank: what its stream does last
        self.stored: list[str] = []  # keys that were written, or may have been
        self.swapped: dict[int, str] = {}  # host block -> label
        self.left_behind: list[int] = []  # device blocks that a rank may still be at work on
        self.cut_at = -1.0  # when this engine's connection last broke or was mended
        self._blocks = list(blocks)
        self.link = name  # what the network knows our client by
        self.heard: set[Client] = set()  # clients that were told of another daemon, or of a clear
        self._client: Client = self._new_client(name)
        self._mapper = self._new_client(f"{name}-mapper") if apart else None
        self._tasks: dict[str, Callable[[Act], Coroutine[Any, Any, None]]] = {
            "write": self.write,
            "read": self.read,
            SPARSE_READ: self.read_sparse,
            BY_HOST: self.by_host,
            "swap_out": self.swap_out,
            "swap_in": self.swap_in,
            "chain": self.chain,
        }

    # --- life ---------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        return self._client

    @property
    def clients(self) -> list[Client]:
        return [self._client] if self._mapper is None else [self._client, self._mapper]

    def _new_client(self, name: str) -> Client:
        client = self.world.client(name)
        client.on_new_boot = lambda: self.heard.add(client)
        return client

    async def connect(self) -> None:
        for client in self.clients:
            await client.connect()
        await self.attach()

    async def attach(self) -> None:
        """Map the memory that the daemon has now. The host pool is nobody's to map: the judge looks at it."""
        self.device.memories = await self.world.attach(self._mapper or self._client)
        pools = [worker.context.host for worker in self.world.daemon.default.coordinator.workers]
        self.host.memories = [np.frombuffer(pool.memory.view, dtype=np.uint8) for pool in pools if pool is not None]
        self._host_memory = self._daemons_memory()

    def _daemons_memory(self) -> object:
        """What names the daemon's memory: it is another one after a restart, a clear and a loss."""
        return self.world.daemon, self.world.daemon.default.cache.epoch

    def begin_anew(self) -> None:
        """The memory is another one: no block of it holds anything, and none is touched for a task of before."""
        self.device.free, self.host.free = list(self._blocks), list(self._blocks)
        self.swapped.clear()
        self.left_behind.clear()

    async def vanish(self, name: str) -> None:
        """Leave, with whatever is pending, and come back as somebody else. What is pushed meanwhile has to wait."""
        await self._client.close()
        self.link = f"{self.name}-{name}"
        self._client = self._new_client(self.link)
        try:
            await self._client.connect()
            await self.attach()
        finally:
            self.cut_at = self.world.loop.time()

    async def lose_connection(self, seconds: float) -> None:
        """The network is away for a while; what was on its way may be lost."""
        link = self.link
        self.world.network.cut(link)
        self.cut_at = self.world.loop.time()
        try:
            await asyncio.sleep(seconds)
        finally:
            self.cut_at = self.world.loop.time()
            self.world.network.mend(link)

    def _cut(self) -> float:
        """When messages were last lost on their way. One that was not taken is noticed with the next Hello."""
        mine = f"{self.link}/".encode()
        world = self.world
        told = [*world.effects.lost.items(), *world.network.refused_at.items()]
        lost = [at for peer, at in told if peer.startswith(mine)]
        return max(self.cut_at, *(at + HELLO_S for at in lost), -1.0)

    async def leave(self) -> None:
        """For good. Lets go of the memory it looked into, so that the daemon can free it."""
        for client in self.clients:
            await client.close()
        self.device.memories.clear()
        self.host.memories.clear()

    async def act(self, what: str, act: Act) -> None:
        """Do one of `_tasks`."""
        client = self._client
        try:
            await self._tasks[what](act)
        except Closed:
            if client is self._client:  # else it vanished meanwhile, and the action with it
                raise

    # --- tasks --------------------------------------------------------------------------------------

    async def write(self, act: Act) -> None:
        blocks = self.device.take(act.chance.randint(1, 6))
        keys = [self._some_key(act, i, fresh=0.8) for i in range(len(blocks))]
        keys = list(dict.fromkeys(keys))
        blocks, spare = blocks[: len(keys)], blocks[len(keys) :]
        self.device.free += spare
        timeout, computing = act.timeout(), self._compute(act, keys, blocks)
        task = WriteStorageTask(
            task_id=act.name, timeout=timeout, keys=keys, gpu_block_ids=blocks, after=computing.after
        )
        self._prepare(task)
        result = await self._run(act, task, device=blocks, computing=computing)
        self._wrote(task, result)
        if answered_whole(result):
            self.judge.untouched(task, self.device, keys, blocks, "a write changed its source")
            self._give_back(device=blocks)

    async def read(self, act: Act) -> None:
        blocks = self.device.take(act.chance.randint(1, 6))
        for block in blocks:
            self.device.fill(block, "junk")
        touched, self.left_behind = self.left_behind, []
        keys = [self._some_key(act, i, fresh=0.05) for i in range(len(touched) + len(blocks))]
        task = ReadStorageTask(task_id=act.name, timeout=act.timeout(), keys=keys, gpu_block_ids=[*touched, *blocks])
        result = await self._run(act, task, device=blocks)
        self.judge.read(task, result, self.device)
        if answered_whole(result):
            self._give_back(device=blocks)
            if result.ranks:  # it ran, so the rank that was left behind has left
                self.judge.let_go(task, result, self.device, touched)
                self._give_back(device=touched)
            else:
                self.left_behind += touched
        elif result.ranks:
            self.left_behind += touched

    async def read_sparse(self, act: Act) -> None:
        """A read of keys with holes between them, in no order."""
        blocks = self.device.take(act.chance.randint(1, 6))
        for block in blocks:
            self.device.fill(block, "junk")
        keys = [self._some_key(act, i, fresh=0.4) for i in range(len(blocks))]
        task = ReadStorageTask(task_id=act.name, timeout=act.timeout(), keys=keys, gpu_block_ids=blocks, prefix=False)
        result = await self._run(act, task, device=blocks)
        self.judge.read(task, result, self.device)
        if act.patient:
            self.judge.complete(task, result)
        if answered_whole(result):
            self._give_back(device=blocks)

    async def chain(self, act: Act) -> None:
        """Tasks on the same blocks, pushed without waiting: the daemon has to keep their order."""
        count = act.chance.randint(1, 3)
        blocks, host = self.device.take(count), self.host.take(count)
        if len(blocks) < count or len(host) < count:
            self.device.free += blocks
            self.host.free += host
            return
        # The one in the middle may be over before its turn: those behind it must wait for those before it.
        timeout, brief = 30.0, act.timeout()
        new = [self._some_key(act, i, fresh=1.0) for i in range(count)]
        old = [self._some_key(act, i, fresh=0.0) for i in range(count)]
        tasks: tuple[Task, ...] = (
            write := WriteStorageTask(task_id=f"{act.name}-1", timeout=timeout, keys=new, gpu_block_ids=blocks),
            ReadStorageTask(task_id=f"{act.name}-2", timeout=brief, keys=old, gpu_block_ids=blocks),
            out := SwapOutTask(task_id=f"{act.name}-3", timeout=timeout, gpu_block_ids=blocks, cpu_block_ids=host),
            back := ReadStorageTask(task_id=f"{act.name}-4", timeout=timeout, keys=new, gpu_block_ids=blocks),
        )
        for key, block in zip(new, blocks, strict=True):
            self.device.fill(block, key)
        self._prepare(write)
        client, world = self._client, self.world
        if not act.patient and act.chance.random() < 0.2:
            world.loop.call_later(act.chance.uniform(0, 0.1), self._cancel_later, client, f"{act.name}-2")
        results = await self._run_all(client, tasks)
        written, found, swapped, again = results
        self._wrote(write, written)
        if not all(map(answered_whole, results)):
            return
        self.judge.read(back, again, self.device)
        if swapped.block_ids:
            moved = len(found.block_ids)
            self.judge.untouched(out, self.host, old[:moved], host[:moved], "swapped before its read")
        self._give_back(device=blocks, host=host)

    async def by_host(self, act: Act) -> None:
        """Blocks go to the host pool, from there to storage, and back to other host blocks; pushed without waiting."""
        count = act.chance.randint(1, 3)
        blocks, host, other = self.device.take(count), self.host.take(count), self.host.take(count)
        if min(len(blocks), len(host), len(other)) < count:
            self.device.free += blocks
            self.host.free += [*host, *other]
            return
        keys = [self._some_key(act, i, fresh=1.0) for i in range(count)]
        for key, block in zip(keys, blocks, strict=True):
            self.device.fill(block, key)
        for block in other:
            self.host.fill(block, "junk")
        tasks: tuple[Task, ...] = (
            out := SwapOutTask(task_id=f"{act.name}-1", timeout=30.0, gpu_block_ids=blocks, cpu_block_ids=host),
            write := WriteStorageTask(task_id=f"{act.name}-2", timeout=act.timeout(), keys=keys, cpu_block_ids=host),
            read := ReadStorageTask(task_id=f"{act.name}-3", timeout=act.timeout(), keys=keys, cpu_block_ids=other),
        )
        self.judge.ledger.begin(keys)  # no other deed uses these keys before it is known what is stored under them
        client, world = self._client, self.world
        if not act.patient and act.chance.random() < 0.2:
            world.loop.call_later(act.chance.uniform(0, 0.1), self._cancel_later, client, f"{act.name}-2")
        results = await self._run_all(client, tasks)
        swapped, written, loaded = results
        if swapped.status is not Status.OK:  # if it was rejected, the write stored what the host blocks held before
            return
        self.stored += keys
        self._wrote(write, written)
        if not all(map(answered_whole, results)):
            return
        self.judge.untouched(out, self.host, keys, host, "a write changed its host blocks")
        self.judge.read(read, loaded, self.host)
        self._give_back(device=blocks, host=[*host, *other])

    async def swap_out(self, act: Act) -> None:
        count = act.chance.randint(1, 4)
        blocks, host = self.device.take(count), self.host.take(count)
        count = min(len(blocks), len(host))
        self.device.free += blocks[count:]
        self.host.free += host[count:]
        blocks, host = blocks[:count], host[:count]
        labels = [f"{act.name}-{i}" for i in range(count)]
        timeout, computing = act.timeout(), self._compute(act, labels, blocks)
        task = SwapOutTask(
            task_id=act.name, timeout=timeout, gpu_block_ids=blocks, cpu_block_ids=host, after=computing.after
        )
        result = await self._run(act, task, device=blocks, host=host, computing=computing)
        if not answered_whole(result):
            return
        if result.block_ids:
            self.judge.untouched(task, self.device, labels, blocks, "a swap changed its source")
            self.judge.untouched(task, self.host, labels, host, "wrong bytes on the host")
            self.swapped.update(zip(host, labels, strict=True))
            self._give_back(device=blocks)
        else:
            self._give_back(device=blocks, host=host)

    async def swap_in(self, act: Act) -> None:
        count = min(act.chance.randint(1, 4), len(self.swapped), len(self.device.free))
        host = act.chance.sample(sorted(self.swapped), count)
        labels = [self.swapped.pop(block) for block in host]
        blocks = self.device.take(count)
        task = SwapInTask(task_id=act.name, timeout=act.timeout(), gpu_block_ids=blocks, cpu_block_ids=host)
        result = await self._run(act, task, device=blocks, host=host)
        if result.block_ids:
            self.judge.untouched(task, self.device, labels, blocks, "wrong bytes on the device")
        if answered_whole(result):
            self.judge.untouched(task, self.host, labels, host, "a swap changed its source")
            self._give_back(device=blocks, host=host)

    # --- what every task goes through ---------------------------------------------------------------

    def _compute(self, act: Act, labels: Sequence[str], blocks: Sequence[int]) -> Computing:
        """Make the content of blocks: at once, or on each rank when it gets there."""
        chance = self.world.loop.stream(f"{act.name} computes")
        if self._timeline is None or chance.random() < 0.4:
            for label, block in zip(labels, blocks, strict=True):
                self.device.fill(block, label)
            return Computing()
        for block in blocks:
            self.device.fill(block, "not computed yet")
        computing = Computing(self._timeline.next())
        for rank in range(len(self.device.memories)):
            before = self._streams.get(rank)
            ranks_turn = self._rank_computes(computing, rank, chance.choice((0.0, 0.01, 0.3)), labels, blocks, before)
            self._streams[rank] = self.world.loop.create_task(ranks_turn)
            computing.ranks.append(self._streams[rank])
        return computing

    async def _rank_computes(
        self,
        computing: Computing,
        rank: int,
        seconds: float,
        labels: Sequence[str],
        blocks: Sequence[int],
        before: asyncio.Task[None] | None,
    ) -> None:
        memory, device = self.device.memories[rank], self.world.devices[rank]
        if before is not None:  # a stream works in order
            await asyncio.wait({before})
        await asyncio.sleep(seconds)
        if rank < len(self.device.memories) and self.device.memories[rank] is memory:  # else it was mapped anew
            for label, block in zip(labels, blocks, strict=True):
                self.device.fill_on(rank, block, label)
        assert isinstance(computing.after, tuple)
        device.advance(computing.after)

    async def _run(
        self,
        act: Act,
        task: Task,
        device: Sequence[int] = (),
        host: Sequence[int] = (),
        computing: Computing | None = None,
    ) -> TaskResult:
        """Push, perhaps cancel or push again, await the result, and check what holds of every result."""
        loop, chance = self.world.loop, act.chance
        client, pushed_at, still = self._client, loop.time(), self.world.stood_still
        future = await client.push(task)
        again = client.submit(task) if chance.random() < 0.1 else None
        self.outcomes["again"] += again is not None
        if again is not None and future.done():  # refused: its time begins with the second push
            pushed_at = loop.time()
        if not act.patient and chance.random() < 0.15:
            loop.call_later(chance.uniform(0, 0.5), self._cancel_later, client, task.task_id)
        result = await (future if again is None else self._one_of(task, future, again))
        self._account(task, result, pushed_at, still)
        if computing is not None and computing.ranks:  # its kernels run, whatever became of the task
            await asyncio.wait(computing.ranks)
        if answered_whole(result):
            self.judge.let_go(task, result, self.device, device)
            self.judge.let_go(task, result, self.host, host)
            if result.ranks and client is self._client and chance.random() < 0.1:
                await self._ask_once_more(task, result, client)
        elif result.ranks:
            self.left_behind += device
        return result

    async def _run_all(self, client: Client, tasks: Sequence[Task]) -> list[TaskResult]:
        """Push tasks one after the other; check each result when it comes, though a later push may still wait."""
        waits: list[asyncio.Task[TaskResult]] = []
        try:
            for task in tasks:
                at, still = self.world.loop.time(), self.world.stood_still
                future = await client.push(task)
                waits.append(self.world.loop.create_task(self._accounted(task, future, at, still)))
            return await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()

    async def _accounted(
        self, task: Task, future: asyncio.Future[TaskResult], pushed_at: float, stood_still: float
    ) -> TaskResult:
        return self._account(task, await future, pushed_at, stood_still)

    def _account(self, task: Task, result: TaskResult, pushed_at: float, stood_still: float) -> TaskResult:
        self.outcomes[str(result.status)] += 1
        if result.error is not None:
            self.errors[result.error.code] += 1
        since = self.world.stood_still - stood_still
        cut, now = self._cut(), self.world.loop.time()
        self.judge.result(task, result, pushed_at, since, cut=cut + UNSETTLED_S >= pushed_at, losing=cut >= now)
        return result

    async def _one_of(
        self, task: Task, future: asyncio.Future[TaskResult], again: Coroutine[Any, Any, TaskResult]
    ) -> TaskResult:
        """A task pushed twice runs once: both pushes get its result, or one of them none of the daemon's."""
        answers = await asyncio.gather(future, again, return_exceptions=True)
        results = [answer for answer in answers if isinstance(answer, TaskResult)]
        ran = [result for result in results if result.ranks]
        if len(ran) == 2:
            self.judge.same(task, *sorted(ran, key=lambda result: result.settled))
        unknown = [result for result in results if not from_the_daemon(result)]
        return (ran or unknown or results)[0]

    async def _ask_once_more(self, task: Task, result: TaskResult, client: Client) -> None:
        """A task that has run is not run again: its result is repeated, unless its memory has gone meanwhile.

        A daemon that was restarted has not heard of it. It has no memory for it either, unless the task has no blocks.
        """
        repeated = await client.submit(task)
        gone = repeated.error is not None and repeated.error.code in MEMORY_GONE
        if not from_the_daemon(repeated) or gone:
            return
        if repeated.boot_id == result.boot_id:
            self.judge.same(task, result, repeated)
        else:
            idle = repeated.status is Status.BUSY or not task.blocks
            self.judge.check(idle, task, f"ran in two daemons: {result} and {repeated}")

    def _cancel_later(self, client: Client, task_id: str) -> None:
        async def cancel() -> None:
            try:
                self.outcomes["cancel"] += await client.cancel(task_id)
            except Exception as error:  # noqa: BLE001 - the client may be closed or cut off by now
                self.world.loop.note(f"{task_id}: cancel failed, {error!r}")

        self.world.loop.create_task(cancel())

    def _prepare(self, task: WriteStorageTask) -> None:
        """Note what will be written."""
        self.stored += task.keys
        self.judge.ledger.begin(task.keys)

    def _wrote(self, task: WriteStorageTask, result: TaskResult) -> None:
        self.judge.ledger.end(task.keys, result.generation if from_the_daemon(result) else None)
        self.judge.stored(task, result)

    def _give_back(self, device: Sequence[int] = (), host: Sequence[int] = ()) -> None:
        """Use the blocks for something else at once: whoever still reads them stores garbage."""
        for block in device:
            self.device.fill(block, "garbage")
        self.device.free += device
        self.host.free += host

    def _some_key(self, act: Act, index: int, fresh: float) -> str:
        if not self.stored or act.chance.random() < fresh:
            return f"{act.name}-key-{index}"
        return act.chance.choice(self.stored)
