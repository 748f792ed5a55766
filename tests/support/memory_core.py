"""MemoryCore: the smallest real core behind a Server, for tests and measurements of the wire.

It keeps the promises of the coordinator that clients can see: one result for each push, joined or
repeated for a task_id that is known, taken back when nobody waits. It moves nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from transferd.config import Config, ServerSection
from transferd.daemon.acts import Acts
from transferd.daemon.clients import Clients, KnownClient
from transferd.daemon.prefetches import EnginePrefetches
from transferd.daemon.requests import Requests
from transferd.daemon.server import Server
from transferd.errors import RequestError, TierError, TransferError
from transferd.observability.recorder import Recorder
from transferd.runtime.clock import SYSTEM_CLOCK, Clock
from transferd.runtime.loop_turns import OneATurn
from transferd.tasks import ErrorInfo, Status, Task, TaskResult
from transferd.tiers.base import DeviceHandle
from transferd.wire import protocol as wire
from transferd.wire.transport import ServerTransport


class MemoryCore:
    """Answers every task `ok` at once; with `hold`, when `finish` is called.

    ran: how often each task_id was really done. gone: clients that were given up. busy: refuse new tasks.
    `serve` sets `deliver` before the first task.
    """

    def __init__(self, boot_id: str = "boot-1", *, hold: bool = False) -> None:
        self.boot_id = boot_id
        self.generation = ""
        self.cache = MemoryCache(self)
        self.gate = self  # whose holds are its own
        self.ready = True
        self.hold = hold
        self.busy = False
        self.ran: Counter[str] = Counter()
        self.gone: list[bytes] = []
        self.cancelled: list[str] = []
        self.deliver: Callable[[bytes, int, TaskResult], None]
        self.report: dict[str, Any] = {"boot_id": boot_id}
        self._waiters: dict[str, list[tuple[bytes, int]]] = {}
        self._tasks: dict[str, Task] = {}
        self._results: dict[str, TaskResult] = {}
        self._resumed = asyncio.Event()

    def submit(self, client: bytes, seq: int, task: Task, *, again: bool = False) -> bool:
        """True: the result follows; False: it was delivered during this call. again: be silent about a refusal."""
        task_id = task.task_id
        if task_id in self._results:
            self.deliver(client, seq, self._results[task_id])
            return False
        if task_id in self._waiters:
            self._waiters[task_id].append((client, seq))
            return True
        if self.busy and again:
            return False
        if self.busy:
            result = TaskResult(task_id=task_id, status=Status.BUSY, retry_after=0.5, boot_id=self.boot_id)
            self.deliver(client, seq, result)
            return False
        self.ran[task_id] += 1
        self._tasks[task_id] = task
        self._waiters[task_id] = [(client, seq)]
        if self.hold:
            return True
        self.finish(task_id)
        return False

    def finish(self, task_id: str, status: Status = Status.OK) -> None:
        """Answer a task that is held."""
        task, waiters = self._tasks.pop(task_id), self._waiters.pop(task_id)
        block_ids = task.gpu_block_ids if status is Status.OK else []
        result = TaskResult(task_id=task_id, status=status, block_ids=block_ids, boot_id=self.boot_id)
        self._results[task_id] = result
        for client, seq in waiters:
            self.deliver(client, seq, result)

    @property
    def held(self) -> list[str]:
        return list(self._tasks)

    def cancel(self, task_id: str, *, anew: bool = False) -> bool:
        if task_id not in self._tasks:
            return False
        self.cancelled.append(task_id)
        self.finish(task_id, Status.CANCELLED)
        return True

    async def exists(self, keys: list[str]) -> list[bool]:
        """Those that do not start with `missing`."""
        return [not key.startswith("missing") for key in keys]

    async def pause(self, client: bytes, holder: str, proof: str = "") -> None:
        """Returns when somebody resumes."""
        await self._resumed.wait()

    def has_place(self, what: str, holder: str, proof: str) -> bool:
        return True

    def resume(self, holder: str, proof: str = "") -> None:
        self._resumed.set()

    async def drain(self, client: bytes, holder: str, proof: str = "") -> None:
        """A bug, on purpose: what the server does with an error that is not ours."""
        raise ZeroDivisionError("a bug in drain")

    def client_gone(self, client: bytes) -> None:
        self.gone.append(client)
        for task_id, waiters in list(self._waiters.items()):
            waiters[:] = [waiter for waiter in waiters if waiter[0] != client]
            if not waiters:
                self.cancelled.append(task_id)
                del self._waiters[task_id], self._tasks[task_id]
                error = ErrorInfo("cancelled", "nobody waits for it")
                self._results[task_id] = TaskResult(task_id=task_id, status=Status.CANCELLED, error=error)

    def stats(self) -> dict[str, Any]:
        return self.report

    def explain(self, task_id: str, engine: str = "", asker: str = "") -> dict[str, Any]:
        if task_id not in self.ran:
            raise RequestError(f"nothing is known of task {task_id!r}", code="unknown_task")
        return {"task_id": task_id, "lives": [], "omitted": 0}


def serve(transport: ServerTransport, core: MemoryCore, *, clock: Clock = SYSTEM_CLOCK, **section: Any) -> Server:
    """A server in front of a core that is its own cache and storage. section: of the [server] section."""
    clients = Clients(transport, core.boot_id, Recorder(capacity=1))
    core.deliver = clients.deliver
    listing: Any = core
    config = Config(server=ServerSection(**section))
    engines: Any = OneEngine(core, clients, clock, config)  # plays HostedEngine and Engines at once
    requests = Requests(engines, listing, lambda: core.stats(), core.explain)
    return Server(engines, requests)


class OneEngine:
    """The engines of a daemon that has a MemoryCore as its only one. Every client speaks for it."""

    def __init__(self, core: MemoryCore, clients: Clients, clock: Clock, config: Config) -> None:
        self.clients, self.config = clients, config
        self.coordinator = self.dispatcher = core
        self.name = "default"
        self.objects = SimpleNamespace(ids=list, names=lambda _generation, keys, _rank: keys)
        self.workers = [SimpleNamespace(context=SimpleNamespace(object_rank=0))]
        self.blocks = SimpleNamespace(index=SimpleNamespace(find=lambda _names, _use: None), exists=core.exists)
        self.owner = self.tokens = None
        self.kv_events = SimpleNamespace(has_followers=False, up_to_date=lambda: None)
        nothing = SimpleNamespace(looked_up=lambda *_: None)
        lent: dict[str, Any] = {"storage": None, "peers": None, "boot_id": core.boot_id, "clock": clock}
        self.shared = SimpleNamespace(pieces=OneATurn(), tasks=nothing, traffic=nothing, **lent)
        self.cache = core.cache
        self.block_size = 0
        self.configured = self.token = ""
        self.first_epoch = 1
        self.identity = None
        self.own = self
        self.leaving = False
        self.recorder = Recorder(capacity=1)
        self.acts = Acts(Clock().monotonic)
        self.prefetches = EnginePrefetches(config, self.shared)  # type: ignore[arg-type]

    @property
    def why_not_ready(self) -> str:
        return self.cache.why

    def join(self, client: KnownClient, said: wire.Hello) -> None:
        engine: Any = self
        client.engine, client.engine_name = engine, said.engine or "default"

    def bound(self, client: KnownClient, *, control: bool = False) -> None:
        self.join(client, wire.Hello())

    async def offer(self, client: KnownClient, rank: int, handle: DeviceHandle, epoch: int) -> None:
        await self.cache.offer(client.peer, rank, handle, epoch)

    async def restore(self, client: KnownClient, engine: OneEngine, restore: wire.RestoreCache) -> int:
        return await self.cache.restore(restore.generation, same_weights=restore.same_weights)

    async def set_generation(self, client: KnownClient, engine: OneEngine, generation: str) -> None:
        self.cache.set_generation(generation)

    def hold(self, client: KnownClient) -> None:
        """It is there anyway."""

    def leave(self, client: KnownClient, how: str = "") -> None:
        self.coordinator.client_gone(client.peer)

    async def task_settled(self, name: str, task_id: str) -> None:
        """It moves nothing."""

    def is_settled(self, name: str, task_id: str) -> bool:
        return True


class MemoryCache:
    """The cache of a MemoryCore: has no memory, and remembers what was asked of it.

    asked: (what, client, arguments). refuse: raised by every request while it is set.
    """

    def __init__(self, core: MemoryCore) -> None:
        self._core = core
        self.missing: list[int] = []
        self.why = ""
        self.epoch = 1
        self.asked: list[tuple[str, bytes, object]] = []
        self.refuse: TransferError | None = None

    def client_gone(self, client: bytes) -> None:
        """It had nothing mapped."""

    def _note(self, what: str, client: bytes, detail: object) -> None:
        self.asked.append((what, client, detail))
        if self.refuse is not None:
            raise self.refuse

    def handle(self, client: bytes, rank: int, epoch: int) -> DeviceHandle:
        self._note("attach", client, (rank, epoch) if epoch else rank)
        if rank:
            raise TierError(f"rank {rank} cannot be shared")
        return DeviceHandle("none", {})

    def set_generation(self, generation: str) -> None:
        if not generation.isprintable():
            raise RequestError("a generation is printable", code="bad_value")
        self._core.generation = generation

    def detach(self, client: bytes, rank: int) -> None:
        self._note("detach", client, rank)

    async def offer(self, client: bytes, rank: int, handle: DeviceHandle, epoch: int) -> None:
        self._note("offer", client, (rank, handle, epoch))

    async def clear(self, *, keep_host: bool = False) -> int:
        self._note("clear", b"", None)
        self.epoch += 1
        return self.epoch

    async def restore(self, generation: str | None, *, same_weights: bool = False) -> int:
        self._note("restore", b"", generation)
        return self.epoch
