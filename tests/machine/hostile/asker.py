"""Tries everything that a client may try, as the user it becomes, and prints what came of each column of the table.

    python -m tests.machine.hostile.asker '{"uid": …, "gid": …, "groups": […], "endpoint": …, …}'       see `Spec`

An answer is "yes", "no" (could not connect), or the codes that were refused, sorted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import sys
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from tests.machine.hostile.accounts import become
from transferd import Client, Engine, Pages, ReadStorageTask, TransferError, WriteStorageTask, shm_pages
from transferd.errors import ConnectTimeout
from transferd.runtime.compat import wait_for
from transferd.tiers import segment  # noqa: F401 - attach imports it, when this user may not read Python's files any more
from transferd.tiers.offered import DIRECTORY
from transferd.tiers.owner import as_data, this_process
from transferd.wire.curve import ClientCurve
from transferd.wire.transport import ZmqClientTransport

PAGE = 4096
LAYOUT = Pages(layers=1, page_bytes=64, blocks=2, identity="of the table")
SEGMENTS = [(0, 64)]
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Spec:
    """Who asks, and whom. victim: an engine of another user. others, roots: names of shared memory of these users.

    curve: (server key, public key, secret key) for tcp. control: whether the daemon has an engine of its own to pause.
    """

    row: str
    uid: int
    gid: int
    endpoint: str
    victim: str
    others: str
    roots: str
    page: str
    groups: list[int] = field(default_factory=list)
    curve: list[str] = field(default_factory=list)
    connects_within: float = 10.0


class Asker:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._engines = 0

    def client(self, engine: str = "") -> Client:
        spec, transport = self.spec, None
        if spec.curve:
            server, public, secret = (key.encode() for key in spec.curve)
            transport = ZmqClientTransport(spec.endpoint, curve=ClientCurve(server, public, secret))
        return Client(
            spec.endpoint,
            engine=engine,
            connect_timeout=spec.connects_within,
            await_ready=False,
            transport=transport,
        )

    @contextlib.asynccontextmanager
    async def own_engine(self) -> AsyncIterator[Client]:
        self._engines += 1
        async with self.client(f"own-{self.spec.row}-{self._engines}") as client:
            await client.register(Engine(ranks=1, model="m", layout=LAYOUT))
            yield client
            await client.unregister()

    # --- the columns --------------------------------------------------------------------------------

    async def look(self, client: Client) -> None:
        await client.stats()
        await client.clients()
        await client.tasks()
        await _unless(client.explain("nobody's"), "unknown_task")

    async def push(self, client: Client) -> None:
        await client.device_handle(0)  # a client that may not map the memory may push all the same
        _checked(await client.submit(WriteStorageTask(task_id=f"{self.spec.row} w", keys=["k"], gpu_block_ids=[0])))

    async def register(self, _: Client) -> None:
        async with self.own_engine():
            pass

    async def use(self, _: Client) -> None:
        """Everything with the engine of another user: all of it must be refused, and for one reason."""
        key = ["of the victim"]
        async with self.client(self.spec.victim) as client:
            doings: list[Callable[[], Awaitable[Any]]] = [
                lambda: client.submit(WriteStorageTask(task_id="stolen w", keys=key, gpu_block_ids=[0])),
                lambda: client.submit(ReadStorageTask(task_id="stolen r", keys=key, gpu_block_ids=[0])),
                lambda: client.cancel("of the victim"),
                lambda: client.exists(key),
                lambda: client.attach(0),
                lambda: client.offer(0, _claimed(self.spec.others)),
                lambda: client.unregister(),
            ]
            await _all(doings)

    async def control_others(self, _: Client) -> None:
        """What an operator does to an engine, to that of another user."""
        async with self.client(self.spec.victim) as client:
            await _all([client.pause, client.resume, client.drain, client.resume, lambda: client.set_generation("new")])

    async def offer_own(self, _: Client) -> None:
        name = f"td-{os.getpid()}-own"
        fd = os.open(
            DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600
        )  # the daemon, another user, may not open it
        try:
            os.posix_fallocate(fd, 0, PAGE)
            with mmap.mmap(fd, PAGE) as memory:
                memory[:64] = b"\x5a" * 64
                async with self.own_engine() as client:
                    await client.offer(0, shm_pages(name, SEGMENTS))
                    keys = [f"stored by {self.spec.row}"]
                    _checked(await client.submit(WriteStorageTask(task_id="w", keys=keys, gpu_block_ids=[0])))
                    _checked(await client.submit(ReadStorageTask(task_id="r", keys=keys, gpu_block_ids=[1])))
                    assert memory[64:128] == memory[:64] == b"\x5a" * 64
        finally:
            os.close(fd)
            os.unlink(DIRECTORY / name)

    async def _offer(self, name: str) -> None:
        async with self.own_engine() as client:
            await client.offer(0, _claimed(name))

    async def offer_others(self, _: Client) -> None:
        await self._offer(self.spec.others)

    async def offer_roots(self, _: Client) -> None:
        await self._offer(self.spec.roots)

    async def attach(self, client: Client) -> None:
        await client.attach(0)

    async def control(self, client: Client) -> None:
        """Pause and the like, of the daemon's own engine, which is as it was afterwards."""
        row = self.spec.row
        doings: list[Callable[[], Awaitable[Any]]] = [client.pause, client.resume, client.drain, client.resume]
        doings += [lambda: client.set_generation(f"of {row}"), client.clear_cache]
        await _all([*doings, lambda: client.restore_cache(f"after {row}")])

    async def page(self) -> None:
        def read() -> None:
            with urllib.request.urlopen(f"http://{self.spec.page}/metrics", timeout=30) as answer:
                assert b"transferd_" in answer.read()

        await asyncio.to_thread(read)

    async def all(self) -> dict[str, str]:
        told = {"page": await _told(self.page())}
        columns = (
            *(
                self.look,
                self.push,
                self.register,
                self.control_others,
                self.use,
                self.offer_own,
                self.offer_others,
                self.offer_roots,
            ),
            *(self.attach, self.control),
        )
        client = self.client()
        try:
            await client.connect()
        except ConnectTimeout:
            return told | dict.fromkeys(("connect", *(column.__name__ for column in columns)), "no")
        try:
            told["connect"] = "yes"
            for column in columns:
                told[column.__name__] = await _told(column(client))
        finally:
            await client.close()
        return told


def _checked(result: Any) -> None:
    if result.error is not None:
        raise TransferError(result.error.message, code=result.error.code)


def _claimed(name: str) -> dict[str, Any]:
    """A handle of memory that this process may not open itself, so `shm_pages` would not make one."""
    data = {"name": name, "nbytes": PAGE, "segments": [list(one) for one in SEGMENTS], "owner": as_data(this_process())}
    return {"kind": "shm", "data": data}


async def _all(doings: list[Callable[[], Awaitable[Any]]]) -> None:
    """Do all of it. Raises TransferError with every code that there was, and `yes` for what was done."""
    told = {await _told(doing()) for doing in doings}
    if told != {"yes"}:
        raise TransferError("", code=", ".join(sorted(told)))


async def _unless(doing: Awaitable[Any], code: str) -> None:
    try:
        await doing
    except TransferError as error:
        if error.reason != code:
            raise


async def _told(doing: Awaitable[Any]) -> str:
    try:
        result = await wait_for(doing, TIMEOUT_S)
        _checked(result) if hasattr(result, "error") else None
    except TransferError as error:
        return str(error.reason)
    return "yes"


if __name__ == "__main__":
    asked = Spec(**json.loads(sys.argv[1]))
    become(asked.uid, asked.gid, asked.groups)
    print(json.dumps(asyncio.run(Asker(asked).all())))
