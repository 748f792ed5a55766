"""Replica: one life of an engine with processes of its own, which knows what it would have computed itself.

Its worker registers and offers memory; its scheduler, another process, pushes tasks. A block's bytes follow from the
replica's weights and generation and from the key, so bytes of anybody else show, whatever the status says. It writes
something else to its blocks as soon as a result is settled, so a copy that comes later shows, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.support.simulation.blocks import Blocks
from tests.support.simulation.faults import DeviceFaults, Latency
from tests.support.simulation.network import ENDPOINT
from tests.support.simulation.offered import OfferedMemory
from transferd.blocks.layout.families import build_layout
from transferd.client.client import Client
from transferd.client.engines import Engine
from transferd.config import from_tree
from transferd.errors import Closed, TransferError
from transferd.runtime.compat import timeout
from transferd.tasks import ReadStorageTask, Status, TaskResult, WriteStorageTask

if TYPE_CHECKING:
    from tests.support.simulation.identity import Story

SHAPE: dict[str, Any] = {"layers": 2, "kv_heads": 1, "head_dim": 4, "block_size": 4, "device_blocks": 12}
OFFERING = "tests.support.simulation.offered:OfferingDevice"
LAYOUT = build_layout(from_tree({"cache": SHAPE | {"device": OFFERING, "ownership": "attach"}}).geometry)
KEYS = 8
PACE = DeviceFaults(Latency(0.001, 0.1, slow=0.1, factor=30.0))
TIMEOUT_S = 10.0


@dataclass(eq=False)
class Replica:
    """One life. weights, generation: decide its blocks' bytes. expected: what each of its own blocks must hold."""

    story: Story
    name: str
    link: str
    weights: str
    ranks: int
    generation: str = ""
    memories: list[OfferedMemory] = field(default_factory=list)
    expected: dict[int, str] = field(default_factory=dict)
    token: str = ""
    clients: list[Client] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    over: bool = False  # it has left, or leaves
    answered: int = 0  # tasks that the daemon ran
    _numbers: int = 0

    def __post_init__(self) -> None:
        self.chance: random.Random = self.story.loop.stream(f"replica {self.link}")
        self.addressable = self.chance.random() < 0.5
        self._turn = asyncio.Lock()  # one task, or one change, at a time
        self.worker = self._client("worker")
        self.scheduler = self.worker  # until it has a token
        self.blocks = Blocks.of(LAYOUT.device, [], range(SHAPE["device_blocks"]))

    def _client(self, role: str, token: str = "") -> Client:
        link = f"{self.link}-{role}-{len(self.clients)}"
        client = Client(
            ENDPOINT,
            clock=self.story.clock,
            transport=self.story.network.client(link),
            name=link,
            engine=self.name,
            token=token,
            await_ready=False,
            connect_timeout=60.0,
        )
        client.on_new_boot = lambda: None  # its memory is its own: it has nothing to do
        self.clients.append(client)
        self.links.append(link)
        return client

    # --- life ---------------------------------------------------------------------------------------

    async def join(self, patience: float) -> bool:
        """Register and offer, as the worker; begin the scheduler. False: another one has the name, so it stays out."""
        await self.worker.connect()
        give_up = self.story.loop.time() + patience
        while True:
            try:
                self.token = await self.worker.register(self.engine)
                break
            except TransferError as error:
                self.story.seen[f"register {error.reason}"] += 1
                if error.reason == "layout_mismatch" or self.story.loop.time() >= give_up:
                    return False
                await asyncio.sleep(0.5)
        await self.offer()
        await self.new_scheduler()
        return True

    async def new_scheduler(self) -> None:
        """Another process of this engine, which has got the token from the worker."""
        if self.scheduler is not self.worker:
            await self.scheduler.close()
        self.scheduler = self._client("scheduler", self.token)
        await self.scheduler.connect()
        await self.scheduler.wait_ready(60)

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """While its generation or memory changes, it pushes nothing, as an engine does."""
        async with self._turn:
            yield

    @property
    def engine(self) -> Engine:
        return Engine(
            ranks=self.ranks,
            model="m",
            generation=self.generation,
            layout=SHAPE | {"ownership": "attach"},
            fingerprint={"weights": self.weights},
        )

    async def offer(self) -> None:
        """Make memory and offer it, for each rank."""
        self.make_memory()
        for rank, memory in enumerate(self.memories):
            await self.worker.offer(rank, {"kind": memory.handle.kind, "data": memory.handle.data})

    def make_memory(self) -> None:
        for memory in self.memories:
            memory.drop()
        self.memories = [
            OfferedMemory(
                LAYOUT.device.extent,
                addressable=self.addressable,
                faults=PACE,
                watch=self.story.watch,
                chance=self.story.loop.stream(f"device of {self.link} {rank} {self._numbers}"),
            )
            for rank in range(self.ranks)
        ]
        self.blocks.memories = [memory.array for memory in self.memories]
        for block in range(SHAPE["device_blocks"]):
            self._own(block)

    async def leave(self, how: str) -> None:
        """how: "word" unregisters, "bye" closes, "death" only falls silent."""
        with contextlib.suppress(TransferError, Closed):
            if how == "word" and self.token:
                await self.worker.unregister()
        if how == "death":
            for client, link in zip(self.clients, self.links, strict=True):
                if client._conversation.is_open:
                    self.story.network.cut(link)
        for client in self.clients:
            await client.close()
        for memory in self.memories:
            memory.drop()

    # --- what it knows ------------------------------------------------------------------------------

    def label(self, key: str) -> str:
        return f"{self.weights}|{self.generation}|{key}"

    def _own(self, block: int) -> None:
        """Write something into a block that is the replica's own now, and remember it."""
        self._numbers += 1
        self.expected[block] = f"own {self.link} {self._numbers}"
        self.blocks.fill(block, self.expected[block])

    def check_own(self, when: str) -> None:
        """Nobody has written to a block that no unsettled task names."""
        if any(memory.gone for memory in self.memories):
            return
        for block, label in self.expected.items():
            assert self.blocks.holds(block, label), f"{self.link}: block {block} was written to, {when}"

    # --- tasks --------------------------------------------------------------------------------------

    async def work(self, turns: int, name: str) -> None:
        for turn in range(turns):
            async with self._turn:
                if self.over:
                    return
                await self.one(f"{self.link}-{name}-{turn}")
            await asyncio.sleep(self.chance.uniform(0, 0.2))

    async def one(self, task_id: str) -> TaskResult | None:
        """A task, or a handover; afterwards its blocks are used for something else at once."""
        what = self.chance.choice(("write", "write", "read", "read", "hand over"))
        blocks = self.chance.sample(range(SHAPE["device_blocks"]), 3)
        keys = [f"{self.ranks}-{key}" for key in self.chance.sample(range(KEYS), 3)]
        for block in blocks:
            del self.expected[block]
        try:
            if what == "hand over":
                await self._hand_over(task_id, blocks)
                return None
            return await self._task(task_id, keys, blocks, reads=what == "read")
        except Closed:
            return None
        finally:
            for block in blocks:
                self._own(block)
            self.check_own(f"after {task_id}")

    async def _task(self, task_id: str, keys: Sequence[str], blocks: Sequence[int], *, reads: bool) -> TaskResult:
        task: ReadStorageTask | WriteStorageTask
        if reads:
            task = ReadStorageTask(task_id=task_id, keys=[*keys], gpu_block_ids=[*blocks], timeout=TIMEOUT_S)
        else:
            for key, block in zip(keys, blocks, strict=True):
                self.blocks.fill(block, self.label(key))
            task = WriteStorageTask(task_id=task_id, keys=[*keys], gpu_block_ids=[*blocks], timeout=TIMEOUT_S)
        result = await self.scheduler.submit(task)
        self.story.seen[str(result.status)] += 1
        if result.error is not None:
            self.story.seen[result.error.code] += 1
        if not result.settled:
            self.story.seen["unsettled"] += 1
            assert await self.scheduler.settled(task_id), "without a timeout, it waits until that is known"
        self.answered += bool(result.ranks)
        if not any(memory.gone for memory in self.memories):
            claimed = dict(zip(blocks, keys, strict=True))
            for block in result.block_ids:
                key = claimed[block]
                good = self.blocks.holds(block, self.label(key))
                assert good, f"{task_id}: block {block} does not hold what {self.link} computes for {key}: {result}"
        return result

    async def _hand_over(self, request: str, blocks: Sequence[int]) -> None:
        """Half of the time the caller gives up: then the blocks are its own, and nothing is left behind."""
        tokens = list(range(len(blocks) * SHAPE["block_size"]))
        limit = self.chance.choice((0.01, 0.2, TIMEOUT_S))
        for number, block in enumerate(blocks):
            self.blocks.fill(block, self.label(f"sequence {number}"))
        try:
            async with timeout(limit):
                await self.scheduler.write_all(request, tokens, [*blocks], timeout=TIMEOUT_S, settled=True)
                for block in blocks:
                    self.blocks.fill(block, "junk")
                await self.scheduler.read_all(request, tokens, [*blocks], timeout=TIMEOUT_S, settled=True)
        except TimeoutError:
            self.story.seen["handover given up"] += 1
            for task_id in list(self.scheduler.unsettled):  # a lost daemon: the cancellation has not waited for ever
                self.story.seen["given up, unsettled"] += 1
                assert await self.scheduler.settled(task_id)
        except TransferError as error:  # HandoverFailed, or the daemon does not have this engine now
            self.story.seen["handover failed"] += 1
            self.story.note_failed(error)
        else:
            self.story.seen["handed over"] += 1
            for number, block in enumerate(blocks):
                good = self.blocks.holds(block, self.label(f"sequence {number}"))
                assert good or any(memory.gone for memory in self.memories), f"{request}: another one's sequence"

    async def all_goes_well(self) -> None:
        """In calm weather: what it writes it reads, within seconds, without any code of its own."""
        await self.scheduler.wait_ready(30)
        for number in range(3):
            key, (block, other) = f"{self.link} calm {number}", self.chance.sample(range(SHAPE["device_blocks"]), 2)
            del self.expected[block], self.expected[other]
            self.blocks.fill(block, self.label(key))
            self.blocks.fill(other, "junk")
            written = await self.scheduler.submit(
                WriteStorageTask(task_id=f"{key} w", keys=[key], gpu_block_ids=[block])
            )
            assert written.status is Status.OK, f"{self.link} is not served again: {written}"
            read = await self.scheduler.submit(ReadStorageTask(task_id=f"{key} r", keys=[key], gpu_block_ids=[other]))
            assert read.status is Status.OK, f"{self.link}: {read}"
            assert self.blocks.holds(other, self.label(key)), f"{self.link}: other bytes of {key}: {read}"
            self._own(block)
            self._own(other)
        self.check_own("in calm weather")
