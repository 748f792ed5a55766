"""What a client may ask and do about stored blocks: look for them, bring them up, pin and purge them."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transferd.client.calls import Calls
from transferd.client.pending import as_seconds, keys_list
from transferd.errors import RequestError, TransferError
from transferd.runtime.compat import convert, wait_for
from transferd.tasks import (
    DEFAULT_TIMEOUT_S,
    CopiesMade,
    LevelChange,
    ReadStorageTask,
    TaskResult,
    TokenIds,
    Warmed,
)
from transferd.wire import protocol as wire
from transferd.wire.answers import Pinned, Purged

if TYPE_CHECKING:
    from transferd.client.handover import Tokens

QUESTION_TIMEOUT_S = 30.0
PURGE_TIMEOUT_S = 3600.0  # to remove the files of a large store
ANSWER_S = 30.0  # added to a prefetch's own timeout, and to a question's, which ends by itself
HOST = "host"


class StoreCalls(Calls):
    """What is stored: which blocks are there, and which are to come up, to stay or to go; levels and pools."""

    async def _answer(self, body: wire.ControlRequest, timeout: float) -> Any:
        """The answer to a question within `timeout` seconds, whatever the daemon does."""
        seconds = as_seconds(timeout)
        if seconds is None or not seconds > 0:
            raise RequestError(f"timeout must be a number of seconds above 0, not {timeout!r}", code="bad_value")
        try:
            return await wait_for(self._ask(body, seconds + ANSWER_S), seconds)
        except TimeoutError:
            what = f"the daemon has not answered the question ({type(body).__name__.lower()}) within {seconds:g} s"
            raise TransferError(what, code="no_answer") from None

    async def match(self, keys: Sequence[str], *, timeout: float = QUESTION_TIMEOUT_S) -> int:
        """Return how many leading blocks every rank can load.

        timeout: seconds for the answer; after that this raises TransferError with code `no_answer`, as does every
        question here. A lost daemon ends it earlier (DaemonLost).
        """
        return int(await self._answer(wire.Match(keys_list(keys)), timeout))

    async def exists(self, keys: Sequence[str], *, use: bool = True, timeout: float = QUESTION_TIMEOUT_S) -> list[bool]:
        """Return for each key whether every rank can load its block, independent of the other keys.

        use: counts as a use of the blocks that are there, which then stay longer. Ask with keys from root to leaf.
        timeout: see `match`. A daemon that does not know the question refuses it (RequestError, code `unknown_type`).
        """
        there: list[bool] = await self._answer(wire.Exists(keys_list(keys), use), timeout)
        return there

    async def match_tokens(
        self, token_ids: Tokens, start: int = 0, salt: str = "", *, timeout: float = QUESTION_TIMEOUT_S
    ) -> int:
        """Like `match`, for token-indexed storage: how many blocks of this sequence, from block `start` on.

        token_ids: the sequence from its first token; an incomplete last block does not count.
        salt: that of the tasks, if they have one.
        timeout: see `match`.
        """
        question = wire.Match(token_ids=TokenIds(token_ids), start=start, salt=salt)
        return int(await self._answer(question, timeout))

    async def locate(
        self,
        token_ids: Tokens | None = None,
        salt: str = "",
        *,
        keys: Sequence[str] | None = None,
        timeout: float = QUESTION_TIMEOUT_S,
    ) -> dict[str, dict[str, int]]:
        """Return where the blocks of this sequence are: name it by its token ids, or by its keys.

        token_ids: as far as the open token index knows, {node: {"GPU": leading blocks, "CPU": …, "STORAGE": …, "any":
            in any of them}}.
        keys: {the daemon's host name: {level: leading blocks that every rank has in this level of its storage, …,
            "any": in any of them}}.
        timeout: see `match`.

        Leaves out nodes, media and levels that lack the first block. Does not count as a use of the blocks, and copies
        none up.
        """
        if (token_ids is None) == (keys is None):
            raise RequestError("locate by token_ids or by keys: give one of them", code="bad_value")
        question = wire.Locate(None if token_ids is None else TokenIds(token_ids), salt, keys_list(keys or []))
        where: dict[str, dict[str, int]] = await self._answer(question, timeout)
        return where

    async def purge(
        self,
        keys: Sequence[str] | None = None,
        model: str | None = None,
        generation: str | None = None,
        engine: str | None = None,
        older_than: float | None = None,
        dry_run: bool = False,
        shared: bool = False,
    ) -> Purged:
        """Remove the stored objects that fit everything that is given; without any argument, all of them.

        keys: blocks of `engine` (default: this client's), in its present generation or in `generation`.
        engine: only what this engine has stored.
        older_than: only what nobody has stored or used for so many seconds.
        dry_run: remove nothing, and say what would be.
        shared: remove them from a bucket or pool as well, for all nodes that use it. Not with `older_than`.

        Returns the objects and bytes that were removed, once their bytes are gone; an object is one rank's block. New
        loads miss the objects even before that; running loads finish first. Objects that are being stored, and pinned
        ones, are removed as well; what is stored after this returns stays. `complete` says whether no place has any
        left; `not_reached` names those that may, such as a disk that is away: it removes them when it returns. A level
        in `shared`, such as a bucket, keeps them for others, and this daemon does not use them any more. With the
        argument `shared` they are removed there; other nodes may store them again meanwhile.

        Clients of a registered engine, and of its user, may purge that engine's objects (the default without `engine`);
        the daemon's user and root may purge everything. Raises RequestError (`not_yours`, `unknown_engine`,
        `backend_cannot`), and StorageError if objects could not be removed.
        """
        age = None if older_than is None else _seconds("older_than", older_than)
        named = None if keys is None else keys_list(keys)
        asked = wire.Purge(named, model, generation, engine or "", age, dry_run, detail=True, shared=shared)
        return convert(await self._ask(asked, PURGE_TIMEOUT_S), Purged)

    async def pin(self, keys: Sequence[str], ttl: float) -> Pinned:
        """Keep these blocks from being evicted for `ttl` seconds. Returns how many of them every rank has.

        Blocks that are not stored are left out; pin them once they are. A further pin of a block replaces this
        engine's earlier one, so repeat it to go on. A pin ends with its time, with `unpin` or with a purge. A restart
        of the daemon leaves the `durable` ones: they are on disk. Name whole chains: a block is found only together
        with all blocks before it, and `reachable` says for how many those are pinned, too. An engine may pin
        `engines.pin_share` of the store. Raises RequestError (`share_exceeded`, which pins nothing; `backend_cannot`).
        """
        asked = wire.Pin(keys_list(keys), _seconds("ttl", ttl), detail=True)
        answer = await self._ask(asked, PURGE_TIMEOUT_S)
        return Pinned(**answer) if isinstance(answer, dict) else Pinned(answer)  # an int: of a daemon of 0.3.0

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
            read = ReadStorageTask(
                task_id=task_id,
                keys=keys_list(keys),
                cpu_block_ids=list(cpu_block_ids),
                prefix=False,
                timeout=timeout,
            )
            return await self.submit(read)
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


def _seconds(name: str, value: object) -> float:
    seconds = as_seconds(value)
    if seconds is None or seconds != seconds:
        raise RequestError(f"{name} must be a number of seconds, not {value!r}", code="bad_value")
    return seconds
