"""An engine in a process of its own, perhaps of another user: it stores, loads, pins and purges as it is asked.

    with Storing(endpoint, "llama", uid=…) as engine: engine.write(["a", "b"])

What a block holds follows from its key and its rank, so a load compares bytes without knowing who stored them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
import os
import subprocess
import sys
from types import TracebackType
from typing import Any

from tests.machine.hostile.accounts import become
from transferd import Client, Engine, Pages, ReadStorageTask, TransferError, WriteStorageTask, shm_pages
from transferd.runtime.compat import Self

PAGE, BLOCKS, RANKS = 64 * 1024, 64, 2
NBYTES = PAGE * BLOCKS * RANKS
WAIT_S = 60.0
OBJECT = PAGE + 4096  # at most: a block with its footer, in whole blocks of the disk


class Refused(Exception):
    """The daemon's answer to a request. code, message: of the error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Storing:
    """The engine, as the test sees it: `engine.write(keys)` and so on, as in `_Engine`. uid: None for our own user."""

    def __init__(self, endpoint: str, name: str = "", *, uid: int | None = None, **engine: Any) -> None:
        given = {"endpoint": endpoint, "name": name, "uid": uid, "engine": engine}
        command = [sys.executable, "-m", "tests.integration.storing_engine", json.dumps(given)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self._answer()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(WAIT_S)
        self._process.stdout.close()

    def kill(self) -> None:
        self._process.kill()

    def __getattr__(self, verb: str) -> Any:
        if verb.startswith("_"):
            raise AttributeError(verb)

        def ask(*args: Any, **kwargs: Any) -> Any:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([verb, args, kwargs]) + "\n")
            self._process.stdin.flush()
            return self._answer()

        return ask

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the engine has ended"
        answer = json.loads(line)
        if "code" in answer:
            raise Refused(answer["code"], answer["message"])
        return answer["value"]


def content(key: str, rank: int) -> bytes:
    """The bytes of a block of one rank."""
    return hashlib.shake_128(f"{key}@{rank}".encode()).digest(PAGE)


class _Engine:
    """In the process: the client, and the memory of both ranks."""

    def __init__(self, client: Client, memory: mmap.mmap) -> None:
        self._client, self._memory, self._tasks = client, memory, 0

    def _at(self, rank: int, block: int) -> slice:
        start = (rank * BLOCKS + block) * PAGE
        return slice(start, start + PAGE)

    def _task_id(self) -> str:
        self._tasks += 1
        return f"{os.getpid()}-{self._tasks}"

    async def write(self, keys: list[str]) -> dict[str, Any]:
        """Store these blocks as one chain."""
        for block, key in enumerate(keys):
            for rank in range(RANKS):
                self._memory[self._at(rank, block)] = content(key, rank)
        task = WriteStorageTask(task_id=self._task_id(), keys=keys, gpu_block_ids=list(range(len(keys))))
        result = await self._client.submit(task)
        return {
            "status": result.status,
            "stored": [keys[block] for block in result.block_ids],
            "code": result.error and result.error.code,
            "not_admitted": result.not_admitted,
        }  # fmt: skip

    async def read(self, keys: list[str]) -> list[str]:
        """The keys whose blocks were loaded; every byte of them is right, and no other block was touched."""
        self._memory[:] = bytes([0xA5]) * NBYTES
        task = ReadStorageTask(task_id=self._task_id(), keys=keys, gpu_block_ids=list(range(len(keys))), prefix=False)
        result = await self._client.submit(task)
        loaded = [keys[block] for block in result.block_ids]
        for block, key in enumerate(keys):
            for rank in range(RANKS):
                found = bytes(self._memory[self._at(rank, block)])
                if key in loaded and found != content(key, rank):
                    raise AssertionError(f"{key}@{rank} was loaded with other bytes")
        return loaded

    async def exists(self, keys: list[str]) -> list[bool]:
        return await self._client.exists(keys, use=False)

    async def purge(self, **which: Any) -> list[int]:
        purged = await self._client.purge(**which)
        assert (purged["objects"], purged["bytes"]) == (purged.objects, purged.bytes)
        return [purged.objects, purged.bytes]

    async def change_level(self, leaves: bool) -> str:
        change = await (self._client.drain_level if leaves else self._client.use_level)("memory")
        return change.state

    async def pin(self, keys: list[str], ttl: float) -> int:
        return await self._client.pin(keys, ttl)

    async def unpin(self, keys: list[str] | None = None) -> None:
        await self._client.unpin(keys)

    async def generation(self, name: str) -> None:
        await self._client.set_generation(name)

    async def stats(self) -> dict[str, Any]:
        return await self._client.stats()

    async def token(self) -> str:
        return self._client.token


async def _serve(given: dict[str, Any]) -> None:
    fd = os.memfd_create("engine", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    memory = mmap.mmap(fd, NBYTES)
    pages = Pages(layers=1, page_bytes=PAGE, blocks=BLOCKS, identity=given["engine"].pop("identity", "test"))
    described = {"model": f"model of {given['name']}"} | given["engine"]
    token = described.pop("token", "")
    async with Client(given["endpoint"], engine=given["name"], token=token, await_ready=False) as client:
        engine = _Engine(client, memory)
        if given["name"] and not token:
            await client.register(Engine(ranks=RANKS, layout=pages, **described))
            for rank in range(RANKS):
                await client.offer(rank, shm_pages(fd, [(rank * BLOCKS * PAGE, PAGE)]))
            await client.wait_ready(WAIT_S)
        print(json.dumps({"value": None}), flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            verb, args, kwargs = json.loads(line)
            try:
                answer = {"value": await getattr(engine, verb)(*args, **kwargs)}
            except TransferError as error:
                answer = {"code": error.reason, "message": str(error)}
            print(json.dumps(answer), flush=True)
    os.close(fd)


def main() -> None:
    given = json.loads(sys.argv[1])
    if given["uid"] is not None:  # after the imports: another user may not read this installation
        become(given["uid"], given["uid"])
    try:
        asyncio.run(_serve(given))
    except TransferError as error:
        print(json.dumps({"code": error.reason, "message": str(error)}), flush=True)


if __name__ == "__main__":
    main()
