"""Prefetches that clients request: each has an id, a deadline and one result, as a task has, but touches no block.

A prefetch lives until its deadline, also after its answer, because it keeps the objects that it brought until then. A
cancel ends it earlier, and so does the leaving of its engine or of its last client. A repeated request joins it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from transferd.config import Config
from transferd.daemon.belonging import is_operator
from transferd.daemon.clients import KnownClient
from transferd.daemon.engine import HostedEngine, Shared
from transferd.daemon.lookup import PIECE, check_keys, keys_bytes, needed, object_names
from transferd.errors import RequestError, StorageError, TransferError
from transferd.runtime.loop_turns import OneATurn
from transferd.storage.levels.base import Bringing, Prefetcher
from transferd.storage.selection import Selection
from transferd.tasks import ErrorInfo, RankOutcome, ReadStorageTask, Stop, TaskResult
from transferd.wire import protocol as wire

MOST = 1024  # prefetches of one engine at a time
MOST_BYTES = 16 * 1024**2  # of their keys; a prefetch that is alone may have more

Key = tuple[HostedEngine, str]


@dataclass(slots=True, eq=False)
class Running:
    """One prefetch."""

    asked: wire.Prefetch
    bringing: Bringing | None  # None if there are no levels
    stop: asyncio.Future[Stop]  # done, with the reason, when it must end early
    timer: asyncio.TimerHandle  # its deadline
    nbytes: int  # memory of its keys
    result: asyncio.Task[TaskResult] | None = None
    peers: set[bytes] = field(default_factory=set)  # the clients that requested it


class EnginePrefetches:
    """See the module. Borrows the storage. Used on one loop."""

    def __init__(self, config: Config, shared: Shared) -> None:
        self._shared, self._storage = shared, shared.storage
        self._backend = config.storage.title
        self._running: dict[Key, Running] = {}

    def run(self, peer: bytes, engine: HostedEngine, asked: wire.Prefetch) -> Coroutine[Any, Any, TaskResult]:
        """Begin to bring blocks up, so that a cancel finds the prefetch. If awaited, return which blocks are there.

        Raises RequestError: `unknown_level`, `backend_cannot`, …
        """
        key = engine, asked.task_id
        one = self._running.get(key)
        if one is None:
            one = self._begin(key, asked)
        elif one.asked != asked:
            what = f"another prefetch has the id {asked.task_id[:80]!r}; use a new one"
            raise RequestError(what, code="task_id_conflict")
        one.peers.add(peer)
        return self._answer(one)

    async def _answer(self, one: Running) -> TaskResult:
        assert one.result is not None
        return await asyncio.shield(one.result)

    def cancel(self, engine: HostedEngine, task_id: str) -> bool:
        """End a prefetch, and release the objects that it keeps. Returns whether there was one."""
        return self._end((engine, task_id), Stop.CANCELLED)

    def left(self, peer: bytes) -> None:
        """End the prefetches that only this client, which is gone, has requested."""
        for key, one in list(self._running.items()):
            one.peers.discard(peer)
            if not one.peers:
                self._end(key, Stop.CANCELLED)

    def dismissed(self, engine: HostedEngine) -> None:
        """End the prefetches of an engine that leaves: nobody could cancel them any more."""
        for key in [key for key in self._running if key[0] is engine]:
            self._end(key, Stop.CANCELLED)

    async def warm(self, client: KnownClient, asked: wire.Warm) -> dict[str, str | int]:
        """Bring up the newest objects. Raises RequestError, StorageError."""
        if not (client.belongs or is_operator(client.uid)):
            what = "a client of an engine, the daemon's user and root may warm up the store"
            raise RequestError(f"only {what}", code="not_yours")
        prefetcher = self._prefetcher
        if prefetcher is None:
            what = f"the store is {self._backend} alone, so there is no level to bring blocks up to"
            raise RequestError(f"{what} (storage.levels)", code="unknown_level")
        selection = Selection(model=asked.model)
        owner = None if client.engine is None else client.engine.owner
        warmed = await prefetcher.warm(selection, asked.newest, asked.level or prefetcher.levels[0], owner)
        return msgspec.structs.asdict(warmed)

    # --- inside -------------------------------------------------------------------------------------

    @property
    def _prefetcher(self) -> Prefetcher | None:
        """The storage's prefetcher; None without levels. Raises RequestError without storage."""
        levels = needed(self._storage).levels
        return None if levels is None else levels.prefetcher

    def _begin(self, key: Key, asked: wire.Prefetch) -> Running:
        engine = key[0]
        check_keys(asked.keys)
        others = [one.nbytes for (other, _), one in self._running.items() if other is engine]
        nbytes = keys_bytes(asked.keys)
        if others and (len(others) >= MOST or sum(others) + nbytes > MOST_BYTES):
            what = f"{len(others)} prefetches of this engine, with {sum(others)} bytes of keys"
            raise TransferError(f"{what}, last until their deadlines; name shorter ones", code="too_many_requests")
        prefetcher, loop = self._prefetcher, asyncio.get_running_loop()
        if prefetcher is None and asked.level != self._backend:
            what = f"this daemon has no level {asked.level[:80]!r}; it has {self._backend} (storage.levels)"
            raise RequestError(what, code="unknown_level")
        bringing = None if prefetcher is None else prefetcher.to(asked.level, engine.owner)
        timer = loop.call_later(asked.timeout, self._end, key, Stop.EXPIRED)
        one = self._running[key] = Running(asked, bringing, loop.create_future(), timer, nbytes)
        one.result = loop.create_task(self._bring(engine, one))
        return one

    def _end(self, key: Key, why: Stop) -> bool:
        one = self._running.pop(key, None)
        if one is None:
            return False
        one.timer.cancel()
        one.stop.set_result(why)
        if one.bringing is not None:
            one.bringing.stop()
            one.bringing.release()
        return True

    async def _bring(self, engine: HostedEngine, one: Running) -> TaskResult:
        """Its result: that of a read that needs no prefix; block ids are positions in `keys`."""
        began, asked, bringing = self._shared.clock.monotonic(), one.asked, one.bringing
        generation = engine.dispatcher.generation
        blocks = await object_names(engine, asked.keys, generation)
        sizes = [part.stop - part.start for part in engine.objects.parts] * len(engine.workers)
        error: TransferError | None = None
        there = set[str]()
        if bringing is None:
            error, there = await self._stored([name for names in blocks for name in names])
        else:
            async for piece in OneATurn().each(list(enumerate(blocks)), PIECE):
                objects = [(*pair, depth) for depth, names in piece for pair in zip(names, sizes, strict=True)]
                if not one.stop.done():
                    ends: set[asyncio.Future[Any]] = {bringing.bring(objects), one.stop}
                    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            error = bringing.error
        stop = one.stop.result() if one.stop.done() else None
        seconds = self._shared.clock.monotonic() - began
        info = None if error is None else ErrorInfo(error.reason, str(error))
        outcomes = []
        for worker, (moved, nbytes) in zip(engine.workers, await _moved(engine, blocks, bringing, there), strict=True):
            why = (None, None) if len(moved) == len(blocks) else (info, stop)
            outcomes.append(RankOutcome(worker.rank, moved, nbytes, why[0], stop=why[1], storage_s=seconds))
        ids = list(range(len(asked.keys)))
        read = ReadStorageTask(task_id=asked.task_id, keys=asked.keys, gpu_block_ids=ids, prefix=False)
        merged = read.merge(outcomes)
        return msgspec.structs.replace(merged, duration=seconds, generation=generation, boot_id=self._shared.boot_id)

    async def _stored(self, names: Sequence[str]) -> tuple[StorageError | None, set[str]]:
        """The objects of these that a storage without levels has."""
        assert self._storage is not None
        try:
            there = await self._storage.exists(names)
        except StorageError as error:
            return error, set()
        return None, {name for name, one in zip(names, there, strict=True) if one}


async def _moved(
    engine: HostedEngine, blocks: Sequence[Sequence[str]], bringing: Bringing | None, there: set[str]
) -> list[tuple[list[int], int]]:
    """Of each rank, which blocks are there, and the bytes that were brought. there: those without levels."""
    each, ranks = len(engine.objects.parts), range(len(engine.workers))
    moved, nbytes = [list[int]() for _ in ranks], [0 for _ in ranks]
    async for piece in OneATurn().each(list(enumerate(blocks)), PIECE):
        if bringing is not None:
            named = [name for _, names in piece for name in names]
            there = set(itertools.compress(named, bringing.there(named)))
        for (i, names), rank in itertools.product(piece, ranks):
            mine = names[rank * each : (rank + 1) * each]  # its objects
            if there.issuperset(mine):
                moved[rank].append(i)
            nbytes[rank] += 0 if bringing is None else sum(bringing.brought.get(name, 0) for name in mine)
    return list(zip(moved, nbytes, strict=True))
