"""The questions that a client asks a daemon. They move and change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transferd.client.pending import as_seconds, keys_list
from transferd.errors import RequestError, TransferError
from transferd.runtime.compat import wait_for
from transferd.tasks import TokenIds
from transferd.wire import protocol as wire

if TYPE_CHECKING:
    from transferd.client.handover import Tokens

QUESTION_TIMEOUT_S = 30.0


class Questions:
    """The questions about storage, and those that even an observer may ask. `_ask` sends one and waits for its answer.

    A mixin of Client.
    """

    async def _ask(self, body: wire.Control) -> Any:
        raise NotImplementedError

    async def _answer(self, body: wire.Control, timeout: float) -> Any:
        """The answer to a question within `timeout` seconds, whatever the daemon does."""
        seconds = as_seconds(timeout)
        if seconds is None or not seconds > 0:
            raise RequestError(f"timeout must be a number of seconds above 0, not {timeout!r}", code="bad_value")
        try:
            return await wait_for(self._ask(body), seconds)
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

    async def stats(self) -> dict[str, Any]:
        """Return the daemon's report, the same as `transferd stats --format json`."""
        return dict(await self._ask(wire.Stats()))

    async def explain(self, task_id: str, engine: str = "") -> dict[str, Any]:
        """Return the story of a task from the flight recorder; transferd/observability/story.py describes its fields.

        engine: the task's engine; default this client's own. Raises RequestError with code `unknown_task` if the
        recorder does not have the task (any more).
        """
        return dict(await self._ask(wire.Explain(task_id, engine)))

    async def tasks(self, which: wire.Which = "recent", limit: int = 100, engine: str = "") -> list[dict[str, Any]]:
        """List running, slow, failed or recent tasks; transferd/daemon/listing.py describes a row.

        limit: the most rows to return, 1 to 1000.
        engine: only its tasks.
        """
        return list(await self._ask(wire.ListTasks(which, limit, engine)))

    async def clients(self, limit: int = 100, engine: str = "") -> list[dict[str, Any]]:
        """List connected clients: {client, engine, peer, uid, pid, observer, connected_s, silent_s, tasks} of each."""
        return list(await self._ask(wire.ListClients(limit, engine)))
