"""What a client may do about stored blocks: purge them, pin them, and bring them up to a faster level."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from typing import Any

from transferd.client.pending import as_seconds, keys_list
from transferd.errors import RequestError, TransferError
from transferd.runtime.compat import convert
from transferd.tasks import (
    DEFAULT_TIMEOUT_S,
    CopiesMade,
    LevelChange,
    ReadStorageTask,
    Task,
    TaskResult,
    Warmed,
)
from transferd.wire import protocol as wire
from transferd.wire.answers import Pinned, Purged

PURGE_TIMEOUT_S = 3600.0  # to remove the files of a large store


ANSWER_S = 30.0  # added to a prefetch's own timeout
HOST = "host"


class Keeping:
    """Purges, pins and prefetches. `_ask` sends one request and waits for its answer. A mixin of Client."""

    async def _ask(self, body: wire.Control, timeout: float = 0.0) -> Any:
        raise NotImplementedError

    async def submit(self, task: Task) -> TaskResult:
        raise NotImplementedError

    async def cancel(self, task_id: str) -> bool:
        raise NotImplementedError

    async def purge(
        self,
        keys: Sequence[str] | None = None,
        model: str | None = None,
        generation: str | None = None,
        engine: str | None = None,
        older_than: float | None = None,
        dry_run: bool = False,
    ) -> Purged:
        """Remove the stored objects that fit everything that is given; without any argument, all of them.

        keys: blocks of `engine` (default: this client's), in its present generation or in `generation`.
        engine: only what this engine has stored.
        older_than: only what nobody has stored or used for so many seconds.
        dry_run: remove nothing, and say what would be.

        Returns the objects and bytes that were removed, once their bytes are gone; an object is one rank's block. New
        loads miss the objects even before that; running loads finish first. Objects that are being stored, and pinned
        ones, are removed as well; what is stored after this returns stays. `complete` says whether no place has any
        left; `not_reached` names those that may, such as a disk that is away: it removes them when it returns. A level
        in `shared`, such as a bucket, keeps them for others, and this daemon does not use them any more.

        Clients of a registered engine, and of its user, may purge that engine's objects (the default without `engine`);
        the daemon's user and root may purge everything. Raises RequestError (`not_yours`, `unknown_engine`,
        `backend_cannot`), and StorageError if objects could not be removed.
        """
        age = None if older_than is None else _seconds("older_than", older_than)
        named = None if keys is None else keys_list(keys)
        asked = wire.Purge(named, model, generation, engine or "", age, dry_run, detail=True)
        return convert(await self._ask(asked, PURGE_TIMEOUT_S), Purged)

    async def pin(self, keys: Sequence[str], ttl: float) -> Pinned:
        """Keep these blocks from being evicted for `ttl` seconds. Returns how many of them every rank has.

        Blocks that are not stored are left out; pin them once they are. A further pin of a block replaces this
        engine's earlier one, so repeat it to go on. A pin ends with its time, with `unpin` or with a purge. A restart
        of the daemon leaves the `durable` ones: they are on disk. Name whole chains: a block is found only together
        with all blocks before it, and `reachable` says for how many those are pinned, too. An engine may pin
        `engines.pin_share` of the store. Raises RequestError (`share_exceeded`, which pins nothing; `backend_cannot`).
        """
        answer = await self._ask(wire.Pin(keys_list(keys), _seconds("ttl", ttl), detail=True), PURGE_TIMEOUT_S)
        return Pinned(**answer) if isinstance(answer, dict) else Pinned(answer)  # an int: of an earlier release

    async def unpin(self, keys: Sequence[str] | None = None) -> None:
        """End this engine's pins of these blocks; None: all of its pins."""
        await self._ask(wire.Unpin(None if keys is None else keys_list(keys)), PURGE_TIMEOUT_S)

    async def prefetch(
        self,
        keys: Sequence[str],
        to: str = "memory",
        *,
        cpu_block_ids: Sequence[int] | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        task_id: str | None = None,
    ) -> TaskResult:
        """Bring stored blocks up to a level of storage before they are needed. Ask only for requests that will run.

        keys: root to leaf; all of them are tried.
        to: a name of `storage.levels`.
        timeout: seconds until the deadline.
        task_id: for `cancel`, and to repeat it.

        Returns a result like that of a task, by the deadline: `block_ids` are the positions of those keys whose block
        is in the level, or in a faster one, on every rank; `count` says how many, `error` why not all. Prefetched
        blocks are not evicted before their first use, the deadline, a cancel, or the end of this client. A prefetch
        gives way to loads and stores, and fills at most a quarter of a level; a load of the same block shares its read.
        Cancelling this call cancels the prefetch.

        to="host" loads into `cpu_block_ids`, and `block_ids` are then host blocks. Such a prefetch is a
        ReadStorageTask, and takes its turn with other reads.

        Raises RequestError (`unknown_level`; `backend_cannot` for a pool or a bucket).
        """
        task_id = task_id or f"prefetch-{uuid.uuid4().hex}"
        if (to == HOST) != (cpu_block_ids is not None):
            raise RequestError('cpu_block_ids are for to="host", which needs them', code="bad_value")
        if cpu_block_ids is not None:
            ids = list(cpu_block_ids)
            return await self.submit(host_read(task_id, keys, ids, timeout))
        asked = wire.Prefetch(task_id, keys_list(keys), to, _seconds("timeout", timeout))
        try:
            return convert(await self._ask(asked, asked.timeout + ANSWER_S), TaskResult)
        except asyncio.CancelledError:
            with contextlib.suppress(TransferError):  # the daemon may be gone
                await self.cancel(task_id)
            raise

    async def warm(self, newest: int, to: str = "", model: str | None = None) -> Warmed:
        """Bring up the newest stored objects after a restart: at most `newest` bytes, and into free room only.

        to: a level; "" is the first one. model: only objects of this model. `stats()["storage"]["warming_bytes"]` says
        how much is left. Gives way to loads and stores. Raises RequestError (`unknown_level`, `backend_cannot`,
        `not_yours`), StorageError.
        """
        return Warmed(**await self._ask(wire.Warm(newest, to, model), PURGE_TIMEOUT_S))

    async def drain_level(self, level: str) -> LevelChange:
        """Take a level of storage out at run time: for the daemon's user and root.

        Stores to the level stop at once. Objects that no other level has are copied to the level below, or above, as
        far as there is room; then loads from it stop as well, and it keeps its objects. `draining_bytes` of its row in
        the report says how much is left. Raises RequestError (`unknown_level`, `not_yours`, or `bad_value` if no other
        level is in use).
        """
        return LevelChange(**await self._ask(wire.ChangeLevel(level, leaves=True), PURGE_TIMEOUT_S))

    async def use_level(self, level: str) -> LevelChange:
        """Put a level back that was taken out, with its objects. Ends a running drain. Raises like `drain_level`."""
        return LevelChange(**await self._ask(wire.ChangeLevel(level, leaves=False), PURGE_TIMEOUT_S))

    async def drain_pool(self) -> CopiesMade:
        """Before this node leaves the pool, copy objects that no other node has to nodes with room.

        For the daemon's user and root. The daemon goes on serving. `stats()["storage"]["copying_bytes"]` says how much
        is left. Raises RequestError (`not_yours`, `backend_cannot`), StorageError.
        """
        return CopiesMade(**await self._ask(wire.MakeCopies(leaves=True), PURGE_TIMEOUT_S))

    async def mend_pool(self) -> CopiesMade:
        """Copy the pool's objects that lack copies, for example after a node died. Like `drain_pool`.

        Also raises RequestError `bad_value`: with `storage.mooncake.replica_num = 1` none can be missing.
        """
        return CopiesMade(**await self._ask(wire.MakeCopies(leaves=False), PURGE_TIMEOUT_S))


def host_read(task_id: str, keys: Sequence[str], cpu_block_ids: list[int], timeout: float) -> ReadStorageTask:
    """The task that is a prefetch to host blocks."""
    return ReadStorageTask(
        task_id=task_id, keys=keys_list(keys), cpu_block_ids=cpu_block_ids, prefix=False, timeout=timeout
    )


def _seconds(name: str, value: object) -> float:
    seconds = as_seconds(value)
    if seconds is None or seconds != seconds:
        raise RequestError(f"{name} must be a number of seconds, not {value!r}", code="bad_value")
    return seconds
