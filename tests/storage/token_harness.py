"""Token-indexed storages with real ranks around them: device memory, staging, and the transfers that workers make."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tests.support.attention_store_sdk import AttentionStoreDouble, installed
from tests.support.simulation.device import SimDevice
from tests.support.simulation.network import SimNetwork
from transferd.blocks.keys import path_keys
from transferd.config import from_tree
from transferd.config.environment import fold
from transferd.daemon.daemon import Daemon
from transferd.errors import StillRunning
from transferd.runtime.clock import SYSTEM_CLOCK
from transferd.storage.attention_store.open_index import OpenTokenStorage
from transferd.storage.attention_store.sdk import SdkTokenStorage
from transferd.storage.tokens import TokenStorage
from transferd.tasks import RankOutcome, ReadStorageTask, TokenIds, WriteStorageTask
from transferd.wire.kv_events import MEDIUM_GPU, block_hash
from transferd.workers.job import Job
from transferd.workers.rank import RankWorker
from transferd.workers.tokens import TokenTransfer

BLOCK = 4  # tokens
RANKS = 2
DEVICE_BLOCKS = 64
GENERATION = "RL-1"
STOP_S = 30.0


def tree(path: Path, **section: Any) -> dict[str, Any]:
    return {
        "server": {"endpoint": "ipc:///nowhere"},
        "metrics": {"listen": ""},
        "cache": {"ranks": RANKS, "layers": 2, "kv_heads": 2, "head_dim": 8, "block_size": BLOCK, "mtp_layers": 1}
        | {"dtype": "float16", "device_blocks": DEVICE_BLOCKS, "host_blocks": 0}
        | {"device": "tests.support.simulation.device:SimDevice"},
        "host": {"staging": "256KiB"},
        "storage": {
            "backend": "attention_store",
            "model": "models/demo",
            "generation": GENERATION,
            "file": {"path": str(path / "blocks"), "capacity": "16MiB"},
            "attention_store": section,
        },
    }


@dataclass(frozen=True)
class Kind:
    """One implementation: its section of the configuration, and the SDK build it needs, if any.

    shared: the device memory is memory that other processes may truncate, and the CPU can address it.
    """

    name: str
    section: dict[str, Any]
    cuda: bool | None = None
    shared: bool = False


KINDS = [
    Kind("open-memory", {"driver": "open", "data": "memory"}),
    Kind("open-file", {"driver": "open", "data": "file"}),
    Kind("sdk-cuda", {"driver": "sdk"}, cuda=True),
    Kind("sdk-other", {"driver": "sdk"}, cuda=False),
    Kind("sdk-shared", {"driver": "sdk"}, cuda=False, shared=True),
]


class Rank:
    """One rank of a daemon, without a task machine around it."""

    def __init__(self, worker: RankWorker) -> None:
        assert isinstance(worker.context.device, SimDevice)
        assert worker._tokens is not None
        self.context, self.device, self.handler = worker.context, worker.context.device, worker._tokens

    def segments(self, block: int) -> list[np.ndarray[Any, Any]]:
        """The bytes of one device block: a view for each layer and plane."""
        geometry = self.context.layout.device
        places = zip(geometry.offsets, geometry.strides, geometry.nbytes, strict=True)
        return [self.device.memory[at + block * step :][:size] for at, step, size in places]

    def content(self, blocks: Sequence[int]) -> list[bytes]:
        return [b"".join(segment.tobytes() for segment in self.segments(block)) for block in blocks]

    def fill(self, blocks: Sequence[int], seed: int) -> None:
        random = np.random.default_rng(seed * 1000 + self.context.rank)
        for block in blocks:
            for segment in self.segments(block):
                segment[...] = random.integers(0, 256, segment.shape, dtype=np.uint8)


class TokenWorld:
    """An open token storage with its ranks. `double`: the SDK behind it, where there is one."""

    def __init__(self, storage: TokenStorage, ranks: list[Rank], double: AttentionStoreDouble | None) -> None:
        self.storage = storage
        self.ranks = ranks
        self.double = double
        self._count = 0

    def write_job(
        self, path: Sequence[int], start: int, blocks: Sequence[int], *, keys: Sequence[str] = (), **more: Any
    ) -> Job:
        keys = list(keys) or [
            f"engine-{i}" for i in range(len(blocks))
        ]  # what the caller calls them matters to nobody here
        task = WriteStorageTask(
            task_id=self._id(),
            keys=keys,
            gpu_block_ids=list(blocks),
            token_ids=TokenIds(path),
            start_write_block_idx=start,
            **more,
        )
        return self._job(task)

    def read_job(self, path: Sequence[int], start: int, blocks: Sequence[int], **more: Any) -> Job:
        task = ReadStorageTask(
            task_id=self._id(),
            keys=[f"engine-{i}" for i in range(len(blocks))],
            gpu_block_ids=list(blocks),
            token_ids=TokenIds(path),
            start_read_block_idx=start,
            **more,
        )
        return self._job(task)

    async def write(self, path: Sequence[int], start: int, blocks: Sequence[int]) -> list[RankOutcome]:
        job = self.write_job(path, start, blocks)
        return [await self.run(rank, job) for rank in self.ranks]

    async def read(self, path: Sequence[int], start: int, blocks: Sequence[int]) -> list[RankOutcome]:
        job = self.read_job(path, start, blocks)
        return [await self.run(rank, job) for rank in self.ranks]

    async def run(self, rank: Rank, job: Job) -> RankOutcome:
        """The transfer that a worker makes of this job, whether or not its daemon only updates the index."""
        context, handler = rank.context, rank.handler
        if isinstance(job.task, WriteStorageTask):
            store = handler._writer.store
            return await self.storage.write(TokenTransfer(context, job, job.task.start_write_block_idx, store))
        return await handler.read(job)

    async def match(self, path: Sequence[int], start: int = 0) -> int:
        return await self.storage.match(TokenIds(path), start, GENERATION)

    def on_device(self, path: Sequence[int]) -> list[bool]:
        """What the index knows of this node's device memory, for each full block of the path."""
        if isinstance(self.storage, OpenTokenStorage):
            places = self.storage.index._held.items()
            held = set[int]().union(*(held for place, held in places if place[::2] == (self.storage.node, MEDIUM_GPU)))
            return [block_hash(key) in held for key in path_keys(TokenIds(path), self.storage.block_size)]
        assert self.double is not None
        session = self.double.sessions[0]
        blocks = [tuple(path[: end * BLOCK]) for end in range(1, len(path) // BLOCK + 1)]
        return [session.pod in self.double.in_hbm.get((session.pool, block), ()) for block in blocks]

    def _id(self) -> str:
        self._count += 1
        return f"task-{self._count}"

    def _job(self, task: ReadStorageTask | WriteStorageTask) -> Job:
        now = SYSTEM_CLOCK.monotonic()
        return Job(task, task.blocks, GENERATION, admitted_at=now, started_at=now, queue_s=0.0)


OpenWorld = Callable[..., Awaitable[TokenWorld]]


@contextlib.asynccontextmanager
async def token_world(
    kind: Kind,
    path: Path,
    *,
    double: AttentionStoreDouble | None = None,
    cache: Mapping[str, Any] = MappingProxyType({}),
    **section: Any,
) -> AsyncIterator[TokenWorld]:
    """The storage and the ranks of an open daemon. Raises StillRunning if a step of its stop hangs."""
    sections = tree(path, **(kind.section | section))
    sections["cache"] |= cache
    fold(sections, {})
    config = from_tree(sections)
    with sdk(kind, double) as service:
        daemon = Daemon(config, transport=SimNetwork().server())
        storage = daemon.tokens
        assert isinstance(storage, OpenTokenStorage | SdkTokenStorage)
        ranks = [Rank(worker) for worker in daemon.default.workers]
        for rank in ranks:
            rank.device.addressable = kind.shared
        try:
            await daemon.open()
            yield TokenWorld(storage, ranks, service)
        finally:
            if hanging := await daemon.stop(lambda: STOP_S):
                raise StillRunning(", ".join(hanging))


@contextlib.contextmanager
def sdk(kind: Kind, double: AttentionStoreDouble | None) -> Iterator[AttentionStoreDouble | None]:
    if kind.cuda is None:
        yield None
        return
    with installed(double or AttentionStoreDouble(cuda=kind.cuda)) as service:
        yield service
