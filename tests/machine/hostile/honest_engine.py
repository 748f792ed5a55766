"""An engine that does its work while others attack: it stores and loads blocks, and knows what every byte must be.

    python -m tests.machine.hostile.honest_engine SPEC        a JSON object, see `Spec`

Every block begins with the signature of its owner. After each task the engine compares all of its memory, also the
blocks that no task named. Prints `ready`, then a line `wrong: …` for each broken promise, and `done N` when its input
ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sys
from dataclasses import dataclass, field

import numpy as np

from tests.machine.hostile.accounts import become
from transferd import Client, Engine, Pages, ReadStorageTask, Status, TransferError, WriteStorageTask, shm_pages
from transferd.runtime.compat import timeout
from transferd.tasks import Task
from transferd.tiers.offered import DIRECTORY

LAYERS, BLOCKS, PAGE = 2, 16, 4096
NBYTES = LAYERS * BLOCKS * PAGE
ANSWER_S = 30.0
PAUSE_S = 0.03  # so that the adversaries have a machine, too
MOST_WRONG = 5  # promises, then it ends: the others follow from these
COMES_BACK_S = 20.0  # until the daemon has noticed the end of the one before


@dataclass(frozen=True)
class Spec:
    """name: of the engine. signature: hexadecimal. named: its memory has a name in /dev/shm, else it is a memfd."""

    endpoint: str
    name: str
    uid: int
    gid: int
    signature: str
    secret: str  # in its keys and its model, so that nobody guesses them
    named: bool
    seed: int
    groups: list[int] = field(default_factory=list)


class HonestEngine:
    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._signature = bytes.fromhex(spec.signature)
        self._dice = random.Random(spec.seed)
        self._fd = self._made()
        self._file = os.fdopen(self._fd, "r+b", closefd=False)
        self._memory = np.memmap(self._file, dtype=np.uint8, mode="r+", shape=(LAYERS, BLOCKS, PAGE))
        self._right = self._memory.copy()  # what the memory must hold
        self.tasks = 0
        self._wrong = 0

    def _made(self) -> int:
        if not self._spec.named:
            fd = os.memfd_create("honest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, NBYTES)
            return fd
        (DIRECTORY / self._name).unlink(missing_ok=True)  # of a killed predecessor
        fd = os.open(DIRECTORY / self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(fd, 0, NBYTES)
        return fd

    @property
    def _name(self) -> str:
        return f"kv-of-{self._spec.name}"

    async def run(self) -> None:
        """Work until the standard input ends."""
        stop = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), stop.set)
        async with Client(self._spec.endpoint, engine=self._spec.name, await_ready=False) as client:
            await self._enter(client)
            say("ready")
            while not stop.is_set() and self._wrong < MOST_WRONG:
                await self._round(client)
                if self._dice.random() < 0.1:
                    await self._visit()
                await asyncio.sleep(PAUSE_S)
            await client.unregister()
        if self._spec.named:
            (DIRECTORY / self._name).unlink()

    async def _enter(self, client: Client) -> None:
        layout = Pages(layers=LAYERS, page_bytes=PAGE, blocks=BLOCKS, identity="honest")
        give_up = asyncio.get_running_loop().time() + COMES_BACK_S
        while True:
            try:
                await client.register(Engine(ranks=1, model=f"model-{self._spec.secret}", layout=layout))
                break
            except TransferError as error:
                if error.reason != "engine_exists" or asyncio.get_running_loop().time() > give_up:
                    raise
                await asyncio.sleep(0.05)
        segments = [(layer * BLOCKS * PAGE, PAGE) for layer in range(LAYERS)]
        await client.offer(0, shm_pages(self._name if self._spec.named else self._fd, segments))
        await client.wait_ready(COMES_BACK_S)

    async def _visit(self) -> None:
        """A command of the same user that asks and leaves, as `transferd stats` does."""
        async with Client(self._spec.endpoint, await_ready=False) as visitor:
            await visitor.stats()

    async def _round(self, client: Client) -> None:
        """Store some blocks, load them into others; compare everything after each step."""
        count = self._dice.randint(1, 4)
        blocks = self._dice.sample(range(BLOCKS), 2 * count)
        sources, targets = blocks[:count], blocks[count:]
        keys = [f"{self._spec.secret}-{os.getpid()}-{self.tasks}-{i}" for i in range(count)]
        for key, block in zip(keys, sources, strict=True):
            self._memory[:, block] = self._right[:, block] = self._content(key)
        await self._done(client, WriteStorageTask(task_id=f"w{self.tasks}", keys=keys, gpu_block_ids=sources))
        if (there := await client.exists(keys)) != [True] * count:
            self._broken(f"of the blocks that were stored, these are there: {there}")
        for source, target in zip(sources, targets, strict=True):
            self._right[:, target] = self._right[:, source]
        await self._done(client, ReadStorageTask(task_id=f"r{self.tasks}", keys=keys, gpu_block_ids=targets))

    async def _done(self, client: Client, task: Task) -> None:
        try:
            async with timeout(ANSWER_S):
                result = await client.submit(task)
                while result.status is Status.BUSY:
                    await asyncio.sleep(result.retry_after or PAUSE_S)
                    result = await client.submit(task)
        except TimeoutError:
            self._broken(f"{task.task_id} has no result after {ANSWER_S:g} s")
            return
        self.tasks += 1
        if result.status is not Status.OK or result.block_ids != list(task.gpu_block_ids):
            self._broken(f"{task.task_id} ended as {result.status} {result.error}, blocks {result.block_ids}")
        changed = sorted(set(np.argwhere((self._memory != self._right).any(axis=2))[:, 1].tolist()))
        if changed:
            named = [block for block in changed if block in task.gpu_block_ids]
            self._broken(f"blocks {changed} hold other bytes after {task.task_id}, {named} of them are of the task")
            self._memory[...] = self._right

    def _broken(self, promise: str) -> None:
        self._wrong += 1
        say(f"wrong: {promise}")

    def _content(self, key: str) -> np.ndarray:
        start = self._signature + hashlib.sha256(key.encode()).digest()
        body = np.random.default_rng(int.from_bytes(start[-8:])).integers(0, 256, (LAYERS, PAGE), dtype=np.uint8)
        body[:, : len(start)] = np.frombuffer(start, dtype=np.uint8)
        return body


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    spec = Spec(**json.loads(sys.argv[1]))
    random.seed(spec.seed)
    np.random.default_rng(0).integers(0, 2, 1)  # whatever numpy imports late
    become(spec.uid, spec.gid, spec.groups)
    engine = HonestEngine(spec)
    try:
        asyncio.run(engine.run())
    except TransferError as error:
        say(f"wrong: {error.reason}: {error}")
    say(f"done {engine.tasks}")


if __name__ == "__main__":
    main()
