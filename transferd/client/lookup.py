"""A client's questions about storage: which blocks could be loaded now, and where blocks are. They move nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transferd.client.handover import Tokens
from transferd.tasks import TokenIds
from transferd.wire import protocol as wire


class StorageLookup:
    """The questions about storage. `_ask` sends one and waits for its answer."""

    async def _ask(self, body: wire.Control) -> Any:
        raise NotImplementedError

    async def match(self, keys: Sequence[str]) -> int:
        """Return how many leading blocks every rank can load."""
        return int(await self._ask(wire.Match(list(keys))))

    async def exists(self, keys: Sequence[str], *, use: bool = True) -> list[bool]:
        """Return for each key whether every rank can load its block, independent of the other keys.

        use: counts as a use of the blocks that are there, which then stay longer. Ask with keys from root to leaf.
        A daemon that does not know the question refuses it (RequestError, code `unknown_type`).
        """
        there: list[bool] = await self._ask(wire.Exists(list(keys), use))
        return there

    async def match_tokens(self, token_ids: Tokens, start: int = 0, salt: str = "") -> int:
        """Like `match`, for token-indexed storage: how many blocks of this sequence, from block `start` on.

        token_ids: the sequence from its first token; an incomplete last block does not count. salt: that of the
        tasks, if they have one.
        """
        return int(await self._ask(wire.Match(token_ids=TokenIds(token_ids), start=start, salt=salt)))

    async def locate(self, token_ids: Tokens, salt: str = "") -> dict[str, dict[str, int]]:
        """Return where the blocks of this sequence are, as far as the open token index knows.

        {node: {"GPU": leading blocks, "CPU": …, "STORAGE": …, "any": in any of them}}. Nodes and media that lack
        the first block are left out.
        """
        where: dict[str, dict[str, int]] = await self._ask(wire.Locate(TokenIds(token_ids), salt))
        return where
